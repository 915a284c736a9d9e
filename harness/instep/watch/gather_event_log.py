"""Gather one `EventLog` per event about the subject.

A participant wraps the subject's arithmetic in it: a `with` around the event and nothing else, so later reads of the
harness are not logged. Leaves out: the parts of the log (`op_calls.py`, `host_reads.py`, `event_log.py`) and the
checks.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from itertools import chain, count
from typing import Any, Protocol

import msgspec
import torch

from instep_optimized.graphs import Runner
from instep_optimized.graphs.capture_and_replay import Replayed
from instep_optimized.ops.op_protocols import Ops
from instep_optimized.ops.watch_op_calls import Op, memory_of
from instep_reference.contract.declared_rounding import Storage
from instep_reference.contract.engine import Event, Region
from instep_reference.contract.kept_copies import Copy

from .event_log import Answered, Config, Copies, EventLog, GraphReplay, Room
from .frozen_memory import Answers, KeptCopies
from .host_reads import Reads
from .kernel_calls import Exercised
from .op_calls import Calls
from .pool_addresses import Pools


class Shown(Protocol):
    """The parts of the subject that are read here; copies and budget: None if it does not show them."""

    def regions(self) -> list[Region]: ...

    def budget(self) -> Mapping[str, int] | None: ...

    def copies(self) -> Mapping[Copy, Mapping[str, torch.Tensor]] | None: ...

    def track_slots(self) -> Mapping[str, int] | None: ...


SO_FAR = "events ran"


class Instrumentation:
    """Created before the subject; `of` passes the subject, and its declarations.

    configs: by name, the frozen values that are passed when an engine is built
    """

    def __init__(
        self, ops: Ops | None, declared: Mapping[str, Storage], device: str, room: Room,
        configs: Mapping[str, object], reads: Reads | None = None,
    ) -> None:
        """reads: the log of host reads of another rank of the same engine, which also logs those of this one"""
        self._ops, self._room = ops, room
        self._follows, self.reads = reads is not None, reads or Reads(torch.device(device))
        self._calls = Calls(ops is not None and ops.captures, declared, self.reads)
        self._configs, self._were = configs, {name: flat(value) for name, value in configs.items()}
        self._made: list[Config] = []
        self._subject: Shown | None = None
        self._runners: tuple[Runner, ...] = ()
        self._known: list[Replayed] = []  # replays of earlier events
        self._so_far: list[GraphReplay] = []  # of this event, before a tick
        self._in_graphs: tuple[str, ...] = ()
        self._poison: float | None = None
        self._guarded = False
        self._events, self._answers, self._copies = count(), Answers(), KeptCopies()
        self._answered: Answered | None = None
        self._kept: Copies | None = None
        self._budget: Mapping[str, int] | None = None
        self._asked = False  # whether its budget was read, which never changes

    def of(
        self, subject: Shown, *, poison: float | None = None, guarded: bool = False,
        runners: Sequence[Runner] = (),
    ) -> None:
        """runners: of the graphs of rounds, then of forwards with prompts, if there are any"""
        self._subject, self._poison, self._guarded, self._runners = subject, poison, guarded, tuple(runners)
        self._known = [replayed for runner in self._runners for replayed in runner.latest]

    @property
    def exercised(self) -> dict[str, Exercised]:
        """By form of an op, the real calls of external kernels."""
        return self._calls.tally.result()

    def wrapper(self, name: str, op: Op) -> Op:
        """The wrapper for `around`."""
        return self._calls.wrapper(name, op)

    @contextmanager
    def making(self, who: str) -> Iterator[None]:
        """Wrap a constructor, whose arguments must not change."""
        before = {name: flat(value) for name, value in self._configs.items()}
        yield
        self._made += [_config(name, f"{who} was made", before[name], value) for name, value in self._configs.items()]

    def __enter__(self) -> None:
        if self._subject is not None:
            if not self._asked:
                self._budget, self._asked = self._subject.budget(), True
            self._calls.begin(self._subject.regions())
        self._answered = self._kept = None
        self._in_graphs = ()
        if not self._follows:
            self.reads.__enter__()

    def __exit__(self, *failed: object) -> None:
        if not self._follows:
            self.reads.__exit__(*failed)
        self._calls.end()

    def answered(self, event: Event, answer: object) -> None:
        """Record the answer as the subject gave it, and changes of earlier answers and of the copies of requests."""
        with self.reads.paused():
            told = f"event {next(self._events)} {event.__struct_config__.tag}"
            pools = Pools(self._subject.regions() if self._subject is not None else ())
            tensors = list(tensors_in("", answer))
            regions = [region for name, tensor in tensors if tensor.numel() for region in (pools.of(tensor),) if region]
            self._answers.add([(f"{name} of {told}", tensor) for name, tensor in tensors])
            pooled = tuple(region.name for region in regions)
            self._answered = Answered(len(tensors), pooled, (), self._answers.let_go)
            copies = None if self._subject is None else self._subject.copies()
            slots = None if self._subject is None else self._subject.track_slots()
            self._kept = None if copies is None else replace(self._copies.look(copies), track_slots=slots)
            self._in_graphs = tuple(self._kept_in_graphs(copies or {}))

    def tick(self, number: int) -> None:
        """Begin another tick of a pipeline's schedule: a graph that was replayed may be replayed again."""
        with self.reads.paused():
            self._so_far += self._replays()
        self._calls.part = number

    def take(self, *, last: bool = False) -> EventLog:
        """The log of the event that just ran. last: no other event follows, so every answer is compared once more."""
        changed = self._answers.changed(all_of_them=last)
        answered = None if self._answered is None else replace(self._answered, changed=changed)
        so_far = [_config(name, SO_FAR, self._were[name], value) for name, value in self._configs.items()]
        made, self._made = self._made, []
        replayed, self._so_far = self._so_far, []
        return EventLog(
            ops="" if self._ops is None else self._ops.name, **self._calls.take(),
            trapped=self._subject is not None, reads=tuple(self.reads.found),
            graphs=bool(self._runners), replays=(*replayed, *self._replays()), in_graphs=self._in_graphs,
            prompt_buckets=tuple(chain.from_iterable(runner.buckets for runner in self._runners[1:])),
            configs=(*made, *so_far), answered=answered, copies=self._kept, budget=self._budget, room=self._room,
            poison=self._poison, guarded=self._guarded,
        )

    def _replays(self) -> tuple[GraphReplay, ...]:
        """The replays since the last call, in the order of each runner."""
        before, self._known = self._known, [replayed for runner in self._runners for replayed in runner.latest]
        return tuple(
            _read(one, runner.buckets) for runner in self._runners for one in runner.latest
            if all(one is not other for other in before))

    def copy_left(self, name: str) -> None:
        """Note that another engine has taken a kept copy."""
        self._copies.left(name)

    def _kept_in_graphs(self, copies: Mapping[Copy, Mapping[str, torch.Tensor]]) -> Iterator[str]:
        """The parts of copies that are in private memory of graphs."""
        memory = {memory_of(tensor) for runner in self._runners for tensor in runner.memory() if tensor.numel()}
        for (_, name), parts in copies.items():
            yield from (f'{part} of the copy "{name}"' for part, tensor in parts.items()
                        if tensor.numel() and memory_of(tensor) in memory)  # fmt: skip


class RankedInstrumentation:
    """The logs of all ranks of an engine as one.

    The rows that calls served, replays and writes are those of rank 0; host reads are those of the rank with the most.
    """

    def __init__(self, logs: Sequence[Instrumentation], ranks: Sequence[int]) -> None:
        self.logs, self.ranks = tuple(logs), tuple(ranks)
        self.taken: tuple[EventLog, ...] = ()  # of each rank, as `take` last had them

    @property
    def exercised(self) -> dict[str, Exercised]:
        return self.logs[0].exercised

    def __enter__(self) -> None:
        for log in self.logs:
            log.__enter__()

    def __exit__(self, *failed: object) -> None:
        for log in reversed(self.logs):
            log.__exit__(*failed)

    def answered(self, event: Event, answer: object) -> None:
        for rank, log in enumerate(self.logs):
            log.answered(event, None if rank else answer)

    def copy_left(self, name: str) -> None:
        for log in self.logs:
            log.copy_left(name)

    def take(self, *, last: bool = False) -> EventLog:
        self.taken = logs = tuple(log.take(last=last) for log in self.logs)
        told = [replace(one, clause=f"{one.clause} (rank {rank})")
                for rank, log in zip(self.ranks, logs, strict=True) for one in log.broken]  # fmt: skip
        budget = {of_rank(name, rank): size for rank, log in zip(self.ranks, logs, strict=True)
                  for name, size in (log.budget or {}).items()}  # fmt: skip
        return replace(
            logs[0], calls=sum(log.calls for log in logs), tensors=sum(log.tensors for log in logs),
            captured=sum(log.captured for log in logs), broken=tuple(told), budget=budget or None,
            reads=tuple(self.logs[0].reads.of_one_thread()),
            failed_op=next((log.failed_op for log in logs if log.failed_op is not None), None),
            copies=_joined([log.copies for log in logs], self.ranks),
        )


class StagedInstrumentation(RankedInstrumentation):
    """The logs of all pipeline stages as one: each stage has calls and replays of its own, and the last one answers."""

    def answered(self, event: Event, answer: object) -> None:
        for stage, log in enumerate(self.logs):
            log.answered(event, answer if stage + 1 == len(self.logs) else None)

    def take(self, *, last: bool = False) -> EventLog:
        joined, logs = super().take(last=last), self.taken
        return replace(
            joined, served=tuple(chain.from_iterable(log.served for log in logs)),
            wrote=tuple(chain.from_iterable(log.wrote for log in logs)),
            in_graphs=tuple(chain.from_iterable(log.in_graphs for log in logs)),
            replays=tuple(replace(one, stage=stage) for stage, log in zip(self.ranks, logs, strict=True)
                          for one in log.replays),
            by={name: op for log in logs for name, op in log.by.items()}, answered=logs[-1].answered,
        )


class ReplicatedInstrumentation(RankedInstrumentation):
    """The logs of all replicas of a data-parallel group as one: each replica serves rows of its own requests."""

    def take(self, *, last: bool = False) -> EventLog:
        joined, logs = super().take(last=last), self.taken
        return replace(
            joined, wrote=tuple(chain.from_iterable(log.wrote for log in logs)),
            served=tuple(replace(one, part=rank) for rank, log in enumerate(logs) for one in log.served),
            in_graphs=tuple(chain.from_iterable(log.in_graphs for log in logs)),
            replays=tuple(replace(one, stage=rank) for rank, log in enumerate(logs) for one in log.replays),
        )


def of_rank(name: str, rank: int) -> str:
    """The name of a region, or of a part of a copy, of one rank."""
    return f"{name}@{rank}"


def _joined(copies: Sequence[Copies | None], ranks: Sequence[int]) -> Copies | None:
    """The copies of all ranks as one: a copy is shown if every rank shows it."""
    every = [one for one in copies if one is not None]
    if len(every) < len(copies):
        return None
    return Copies(
        frozenset.intersection(*(one.shown for one in every)), sum(one.elements for one in every),
        tuple((copy, of_rank(part, rank)) for rank, one in zip(ranks, every, strict=True)
              for copy, part in one.changed),
        tuple(dict.fromkeys(copy for one in every for copy in one.held)),
        tuple(dict.fromkeys(copy for one in every for copy in one.stayed)), every[0].track_slots,
    )


def flat(value: object) -> dict[str, str]:
    """Map each field to its value."""
    if is_dataclass(value):
        names = [field.name for field in fields(value)]
    elif isinstance(value, msgspec.Struct):
        names = list(value.__struct_fields__)
    else:
        return {"": repr(value)}
    return {name: repr(getattr(value, name)) for name in names}


def tensors_in(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an answer by field."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_in(field.name, getattr(value, field.name))
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from tensors_in(f"{name} of {key!r}", inner)


def _config(name: str, while_: str, was: Mapping[str, str], value: object) -> Config:
    now = flat(value)
    changed = {field: (was.get(field, "nothing"), now[field]) for field in now if was.get(field) != now[field]}
    return Config(name, while_, len(now), changed)


def _read(one: Replayed, buckets: tuple[int, ...]) -> GraphReplay:
    own, outputs = one.captured.inputs, one.captured.outputs
    names = getattr(own, "_fields", range(len(own)))
    inputs = {
        str(name): (given.tolist(), buffer.tolist(), idle)
        for name, given, buffer, idle in zip(names, one.given, own, one.idle, strict=True)
    }
    kept = (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)
    addresses = tuple(tensor.data_ptr() for tensor in (*own, *kept))
    return GraphReplay(one.key, one.bucket, one.rows, inputs, addresses, buckets, one.ran, one.freed)
