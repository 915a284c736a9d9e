"""The engine of one pipeline stage: micro-batches in flight, and choices of the last stage that are relayed to it.

The last stage has the drafter, verifies and accepts. Every other stage serves the same events on its own layers. It
drafts what was relayed, and commits when the relay arrives, with the batch that the forward had. A graph of a stage
has no transfer: rows arrive before its replay, and leave after it. Leaves out: the schedule (`__init__.py`), and the
events themselves (`engine.py`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeVar

import torch

from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Capacity
from instep_reference.contract.place_names import See, unseen

from ..commit.base import AcceptedWindows
from ..commit.verified_windows import gather_path
from ..draft.drafter_protocol import column
from ..engine import OptimizedEngine
from ..forwards import Inner, Planned, RunTarget
from ..graphs.capture_all_at_start import recorder_for
from ..ops.integer_op_protocols import Acceptance
from ..ops.op_protocols import Ops
from ..ops.unpadded_view import watched
from ..options import Options
from ..ranks.processes import Processes
from ..request_record import Request
from ..round_for_step_count import BESIDE, CAPPED, KINDS, Asked, Body, Inputs, Round, kind_of
from ..transfer.to_device import ints
from ..transfer.to_host import HostCopy
from . import Accepted, Ran, Relay, Stage, Work, cut, schedule
from .ops_of_stage import FINAL, of_stage, over_stages, own_places

T = TypeVar("T")
Names = tuple[str, ...]
Relayed = tuple[tuple[int, ...], ...]
COMMITS, FORWARDS = ("commit", CAPPED), (*KINDS, BESIDE)
HEAD = 2  # columns of a relay before its values


@dataclass(frozen=True)
class InFlight:
    """A micro-batch of windows that a forward has verified: its requests, and their rows of scratch memory."""

    requests: tuple[str, ...]
    rows: tuple[int, ...]


class RelayedRound(Round):
    """A round on a stage that another stage commits for: what was accepted is an input."""

    @property
    def bodies(self) -> dict[str, Body]:
        found = super().bodies
        for kind in found.keys() & set(COMMITS):
            found[kind] = found[kind]._replace(run=self.commit_relayed, choices=3 + self.width)
        return found

    def commit_relayed(self, ops: Ops, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        """Make the accepted node's memory the request's own, in the layers of this stage -> the accepted counts.

        forced: of every request `Accepted`, without its cap
        """
        table = self.model.memory.slot_table
        lens, last, bonus = (column(ops, inputs.forced, number) for number in range(3))
        path = inputs.forced[:, 3:]
        before = ops.select(x=table.length, index=inputs.slots)
        self.strategy.commit(ops, AcceptedWindows(
            inputs.rows, inputs.slots, last, lens, before, None if table.parents is None else path,
        ))
        if table.parents is not None:
            gather_path(ops, self.model.memory, inputs.slots, path, before, inputs.begin)
        self._note(ops, bonus, inputs.slots, 0)
        ops.advance(length=table.length, slots=inputs.slots, by=lens)
        return (lens,)


class StageEngine(OptimizedEngine):
    """One stage of an engine. checkpoint, ops: of the whole model.

    ran  the steps that it has made, for a check of the schedule
    """

    def __init__(
        self, checkpoint: Checkpoint, ops: Ops, options: Options, capacity: Capacity, *, stage: Stage, **steps: Any
    ) -> None:
        checkpoint, self._passed = of_stage(checkpoint, ops, options, capacity, stage)
        self._eager, base = (over_stages(ops, stage, self._passed, in_graphs=held) for held in (False, True))
        self.stage, self.ran = stage, list[Ran]()
        self.recorder = recorder_for(
            ops, torch.device(options.device), threads=isinstance(stage.comm, Processes)) if options.graphs else None
        self._flights: dict[int, InFlight] = {}  # by number
        self._flown = 0
        if not stage.last:
            self.of_round, self.drafts_elsewhere = RelayedRound, True
        super().__init__(checkpoint, base, replace(options, scratch="request"), capacity, **steps)
        self._ops = self._eager

    def watch(self, see: See) -> None:
        see = see if see is unseen else own_places(self.stage, see)
        super().watch(see)
        self._ops = watched(self._eager, see)

    # Micro-batches

    def _serve(self, asked: Asked) -> Any:
        """Run a body on every micro-batch, in the ticks of the schedule."""
        kind, requests = asked.kind, asked.requests
        serve = self._with_rows if kind in FORWARDS else super()._serve
        commits, drafts, numbers = kind in COMMITS, kind.endswith("draft"), range(len(requests))
        parts = self._in_flight_together(requests) if commits else cut(numbers, self.stage.micro_batches)
        kinds = asked.kinds or [kind] * len(requests)
        windows, decodes = ([n for n in numbers if kinds[n] == one] for one in KINDS)

        def run(at: int) -> tuple[Any, Names, Relayed]:
            mine, received = parts[at], list[Relay]()
            part = asked.part(mine, self._round.width)
            if commits:
                return self._committed(part, serve)
            self._fly([requests[n] for n in mine if n in windows])
            if drafts and not self.stage.last:
                received = self._receive(len(mine), self._round.width - 1)
                part = part._replace(forced=[relay.values for relay in received])
            found = serve(part)
            if self.stage.last and drafts:
                self._send(at, range(len(mine)), self._window(part.requests)[:, 1 : self._round.width])
            if self.stage.last:
                self._send_roots(at, [requests[n] for n in mine if n in decodes])
            return found, _names(part.requests), _plain(received)

        def relay(at: int) -> tuple[Names, Relayed]:
            return self._receive_roots([requests[n] for n in parts[at] if n in decodes])

        return _joined(self._through("choice" if commits or drafts else "forward", len(parts), run, relay))

    def _with_rows(self, asked: Asked) -> Any:
        """Run a body of the target. Graphs have no transfers, so these surround a replay, with its padding rows."""
        stage, serve = self.stage, super()._serve
        if self._graphs is None:
            return serve(asked)
        body = self._round.bodies[kind_of(asked.kind, bool(asked.uniforms))]
        rows = self._passed.rows(self._graphs.bucket(len(asked.requests)) * body.width, self._memory.device)
        if not stage.first:
            self._passed.received.of(rows).copy_(stage.comm.recv(rows, stage.number - 1, FINAL))
        found = serve(asked)
        if not stage.last:
            stage.comm.send(self._passed.left.of(rows), stage.number + 1, FINAL)
        return found

    def _run_chunks(
        self, plan: Sequence[Planned], replay: RunTarget | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[Inner]]:
        parts, serve = cut(plan, self.stage.micro_batches), super()._run_chunks

        def run(at: int) -> tuple[Any, Names, Relayed]:
            self._fly([p.request for p in parts[at] if p.span.kind == "verify"])
            *found, _ = serve(parts[at], replay)
            if self.stage.last:
                self._send_roots(at, [p.request for p in parts[at] if p.rooted])
            return tuple(found), _names(p.request for p in parts[at]), ()

        def relay(at: int) -> tuple[Names, Relayed]:
            return self._receive_roots([p.request for p in parts[at] if p.rooted])

        own, roots, final = _joined(self._through("forward", len(parts), run, relay))
        return own, roots, final, []  # prefixes are refused

    def _through(
        self, work: Work, count: int, run: Callable[[int], tuple[T, Names, Relayed]],
        relay: Callable[[int], tuple[Names, Relayed]],
    ) -> list[T]:
        """Make this stage's steps of the schedule, each in its tick -> the results of the micro-batches."""
        steps, found = schedule(work, self.stage.count, count), list[T]()
        if work == "forward":
            self._forget()
        for tick in range(1 + steps[-1].tick):
            self.stage.clock(tick)
            for step in steps:
                if (step.tick, step.stage) != (tick, self.stage.number):
                    continue
                if step.action == "run":
                    result, names, relayed = run(step.micro_batch)
                    found.append(result)
                else:
                    names, relayed = relay(step.micro_batch)
                self.ran.append(Ran(step, names, relayed))
        return found

    # Windows in flight

    def _fly(self, requests: Sequence[Request]) -> None:
        """Keep the windows of one micro-batch, under a number that counts micro-batches with windows over the run."""
        if not requests:
            return
        self._flown += 1
        self._flights[self._flown] = InFlight(
            _names(requests), tuple(self._memory.request_rows.of(one.name) for one in requests))
        for place, request in enumerate(requests):
            request.flight = self._flown, place

    def _in_flight_together(self, requests: Sequence[Request]) -> list[Sequence[int]]:
        """Cut the batch of a commit where the micro-batch of the forward changes."""
        runs = groupby(range(len(requests)), lambda n: requests[n].flight[0])
        return [list(run) for _, run in runs]

    def _forget(self) -> None:
        """Forget micro-batches of which no request waits for its commit."""
        waiting = {one.flight[0] for one in self._requests.values() if one.row is not None}
        self._flights = {number: flight for number, flight in self._flights.items() if number in waiting}

    def _committed(self, asked: Asked, serve: Callable[[Asked], Any]) -> tuple[Any, Names, Relayed]:
        """Commit one micro-batch: the last stage accepts, and relays that to the others."""
        members = asked.requests
        if self.stage.last:
            found = serve(asked)
            acceptance = Acceptance(*found[:-1])
            caps = ints([one[2] if len(one) > 2 else -1 for one in asked.forced], self._memory.device)
            values = (acceptance.accept_lens, acceptance.last_correct_step_indices, acceptance.bonus, caps)
            self._send(members[0].flight[0], [one.flight[1] for one in members],
                       torch.cat([torch.stack(values, 1), acceptance.accept_index], 1))  # fmt: skip
            return found, _names(members), ()
        received = self._receive(len(members), len(Accepted._fields) - 1 + self._round.width)
        accepted = [Accepted.of(one.values) for one in received]
        verified = [self._requests[self._flights[one.number].requests[one.place]] for one in received]
        scratch = [self._flights[one.number].rows[one.place] for one in received]
        given = [[one.accept_len, one.last, one.bonus, *one.path] for one in accepted]
        serve(asked._replace(requests=verified, forced=given, rows=scratch))
        return _answer(accepted, self._memory.device), _names(verified), _plain(received)

    # Relays

    def _send(self, number: int, places: Sequence[int], values: torch.Tensor) -> None:
        """Send a relay from the last stage to the first one."""
        head = ints([x for place in places for x in (number, place)], values.device).view(-1, HEAD)
        self.stage.comm.send(torch.cat([head, values], 1), 0)

    def _receive(self, rows: int, width: int) -> list[Relay]:
        """Receive a relay of this many rows and values, and send it on to the next stage, except to the last one."""
        comm, at = self.stage.comm, self.stage.number
        like = torch.empty(rows, HEAD + width, dtype=torch.int64, device=self._memory.device)
        found = comm.recv(like, (at - 1) % self.stage.count)
        if at + 1 < self.stage.count - 1:
            comm.send(found, at + 1)
        flat = HostCopy(found.flatten()).list()
        lines = (flat[begin : begin + HEAD + width] for begin in range(0, len(flat), HEAD + width))
        return [Relay(line[0], line[1], tuple(line[HEAD:])) for line in lines]

    def _send_roots(self, number: int, rooted: Sequence[Request]) -> None:
        if rooted:
            self._send(number, range(len(rooted)), self._window(rooted)[:, :1])

    def _receive_roots(self, rooted: Sequence[Request]) -> tuple[Names, Relayed]:
        """Receive the roots after a micro-batch, and write them into the windows."""
        if not rooted:
            return (), ()
        received = self._receive(len(rooted), 1)
        members = [rooted[one.place] for one in received]
        self._ops.store_rows(rows=ints([one.values[0] for one in received], self._memory.device),
                             pool=self._memory.slot_table.window[:, :1], locations=self._slots_of(members))  # fmt: skip
        return _names(members), _plain(received)

    def _window(self, requests: Sequence[Request]) -> torch.Tensor:
        """The windows of requests as the slot table has them."""
        return self._ops.select(x=self._memory.slot_table.window, index=self._slots_of(requests))

    def _slots_of(self, requests: Sequence[Request]) -> torch.Tensor:
        return ints([self._memory.slots.of(one.name) for one in requests], self._memory.device)


def _answer(accepted: Sequence[Accepted], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Build the results of `Round.commit` from a relay."""
    lens, last, bonus, _ = ints([x for one in accepted for x in one[:4]], device).view(-1, 4).unbind(1)
    path = ints([x for one in accepted for x in one.path], device).view(len(accepted), -1)
    return *Acceptance(lens - 1, lens.clone(), path, last, bonus, lens - 1, bonus, torch.zeros_like(path)), lens.clone()


def _names(requests: Iterable[Request]) -> Names:
    return tuple(one.name for one in requests)


def _plain(received: Sequence[Relay]) -> Relayed:
    return tuple((one.number, one.place, *one.values) for one in received)


def _joined(found: Sequence[Any]) -> Any:
    """Join the results of the micro-batches: a tensor, or a tuple of them."""
    first = found[0]
    if len(found) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat(list(found))
    parts = [torch.cat(list(each)) for each in zip(*found, strict=True)]
    return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
