"""Prompts through an optimized engine that chooses everything by itself, every event timed; and the speed.

Leaves out: the schedule (`trace/event_scheduler.py`, the only one), and correctness (`text_check.py`).
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from instep_reference.contract import engine as e
from instep_reference.contract.adaptive_controller_file import AdaptiveFile
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.controllers import Controlled
from instep_reference.contract.engine import AnyEvent, Commit, Finish, Forward, RequestState
from instep_reference.contract.errors import BadInput
from instep_reference.contract.event_facts import committed_paths
from instep_reference.contract.sampling import Sampling
from instep_reference.sampling import Drawing

from ..run.build_compared_engines import candidates
from ..run.engine_without_comparison import engine, header_of
from ..setting import Setting
from ..trace.event_rules import EventRules
from ..trace.event_scheduler import Step, drive
from ..trace.header import Header, Model, Part, Recording, Room
from ..trace.policy import Arrival, Policy
from ..trace.request_table import RequestTable, Standing
from ..watch.batched_host_copies import on_host
from ..watch.player_observers import LastStates

PAGE_SIZE = 16
CHUNK = 64  # tokens of a prompt that run in one step, next to the windows of others


@dataclass(frozen=True)
class Ask:
    """The request: what to decode, and how.

    prompts   by name, as tokens; `batch` of them at a time, the others as slots become free
    tokens    maximum tokens of a request; stop: the token that ends it earlier
    num_steps drafts per round, the initial number if `adaptive` (a file of SGLang 0.5.12) or `controller` changes it
    kept      requests whose last state is kept for the check
    sampling  how every request chooses; None: argmax.  seed: of the uniforms
    """

    checkpoint: Checkpoint
    setting: Setting
    prompts: Mapping[str, tuple[int, ...]]
    num_steps: int
    adaptive: dict[str, Any] | None = None
    tokens: int = 64
    batch: int = 8
    chunk: int = CHUNK
    stop: int | None = None
    model: Model | None = None
    kept: frozenset[str] = frozenset()
    sampling: Sampling | None = None
    seed: int = 0
    controller: Controlled | None = None

    @cached_property
    def policy(self) -> Policy:
        """Everybody comes at once; room for `batch` of them at their longest."""
        longest = max(map(len, self.prompts.values()), default=0)
        if not longest or self.tokens < 1 or self.batch < 1 or self.chunk < 1:
            found = f"{len(self.prompts)} prompts, {self.tokens} tokens, batches of {self.batch}"
            raise BadInput("generate", found=found, expected="at least one of each")
        widest = max(self._candidates()) + 1
        most = longest + self.tokens + 2 * widest
        pages = self.batch * -(-most // PAGE_SIZE)
        room = Room(
            tuple(range(1, self.batch + 1)), tuple(range(1, pages + 1)), PAGE_SIZE,
            self.batch * max(widest, self.chunk), most,
        )
        arrivals = tuple(
            Arrival(name, name, chunks=(self.chunk,), max_new=self.tokens, sampling=self.sampling)
            for name in self.prompts)
        return Policy(
            "generate", "A free-running engine generates the tokens of the model.", room, arrivals, self.num_steps,
            adaptive=self.adaptive, controller=self.controller,
            follow=self.adaptive is not None or self.controller is not None, rotate=False, stop=self.stop,
            seed=self.seed, rounds=len(self.prompts) * (longest + self.tokens + 1),
        )

    @cached_property
    def header(self) -> Header:
        return header_of(
            self.policy, self.checkpoint, model=self.model, replay=(Part(self.setting.ops),),
            recording=Recording(self.setting.mode, self.setting.dtype), field="generate",
        )[0]

    def _candidates(self) -> tuple[int, ...]:
        file = None if self.adaptive is None else AdaptiveFile.of(self.adaptive)
        return candidates(self.num_steps, file, self.controller)[0]


@dataclass(frozen=True)
class Decoded:
    """The result: complete events, the seconds of each, and the kept states, each from before its finish."""

    ask: Ask
    events: tuple[AnyEvent, ...]
    seconds: tuple[float, ...]
    states: Mapping[str, RequestState]

    @cached_property
    def ended(self) -> Mapping[str, Standing]:
        """Request -> how the trace leaves it, in order of the prompts."""
        rules = EventRules(self.ask.header)
        for event in self.events:
            rules.apply(event)
        ended = {standing.request: standing for standing in rules.table.ended}
        return {name: ended[name] for name in self.ask.prompts}

    def said(self, request: str) -> tuple[int, ...]:
        """Its tokens, without what a last window brought beyond the limit."""
        return self.ended[request].said[: self.ask.tokens]


def decode(ask: Ask) -> Decoded:
    """Run every prompt to its end. On a GPU a first run on a separate engine compiles the kernels."""
    if ask.setting.device.startswith("cuda"):
        _decode(ask)
    return _decode(ask)


def _decode(ask: Ask) -> Decoded:
    header = ask.header
    served = engine(ask.checkpoint, ask.setting, header.room(), **header.steps("adaptive"))
    last = LastStates(served, on_host, ask.kept)
    steps = drive(ask.policy, ask.prompts, header, served, [last], ask.setting.proposer())
    timed = list(_timed(steps, ask.setting.device))
    return Decoded(ask, tuple(step.event for step, _ in timed), tuple(seconds for _, seconds in timed), last.found)


def _timed(steps: Iterator[Step], device: str) -> Iterator[tuple[Step, float]]:
    """Each event with the seconds until its answer was there; a finish, in which states are kept, has none."""
    begun = time.perf_counter()
    for step in steps:
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        spent = time.perf_counter() - begun
        yield step, 0.0 if isinstance(step.event, Finish) else spent
        begun = time.perf_counter()


# ---- tokens per second, accepted lengths and step counts; without the verdict of `text_check.py` none is shown

@dataclass(frozen=True)
class Round:
    """One step of the batch: draft, forward, commit; or a forward of plain decoding.

    tokens    what the requests got from it, within their limits, and accepted: drafts per verified window
    prompts   whether rows of a prompt ran in it
    """

    num_steps: int
    seconds: float
    tokens: int
    accepted: tuple[int, ...]
    prompts: bool
    requests: int


@dataclass(frozen=True)
class Speed:
    """decoding   tokens per second of the rounds without a prompt in them; None where there is no such round
    overall    all tokens by all seconds
    accepted   mean of accepted drafts a window, 0 without any; steps: num_steps -> rounds
    latency_ms mean seconds of a round without a prompt, in milliseconds
    """

    decoding: float | None
    overall: float
    tokens: int
    seconds: float
    accepted: float
    steps: Mapping[int, int]
    latency_ms: float | None

    @classmethod
    def of(cls, decoded: Decoded) -> "Speed":
        played = list(rounds(decoded))
        plain = [one for one in played if not one.prompts]
        seconds, quiet = sum(decoded.seconds), sum(one.seconds for one in plain)
        tokens = sum(one.tokens for one in played)
        drafts = [count for one in played for count in one.accepted]
        return cls(
            decoding=sum(one.tokens for one in plain) / quiet if plain else None, overall=tokens / seconds,
            tokens=tokens, seconds=seconds, accepted=sum(drafts) / len(drafts) if drafts else 0.0,
            steps=dict(sorted(Counter(one.num_steps for one in played if one.accepted or not one.prompts).items())),
            latency_ms=quiet / len(plain) * 1e3 if plain else None,
        )


def rounds(decoded: Decoded) -> Iterator[Round]:
    """The rounds in order. A forward ends one, unless it verified: then its commit does."""
    limit, num_steps, seconds, said = decoded.ask.tokens, decoded.ask.num_steps, 0.0, Counter[str]()
    forward = e.Forward(())
    for event, spent in zip(decoded.events, decoded.seconds, strict=True):
        seconds += spent
        if isinstance(event, e.SetNumSteps):
            num_steps = event.num_steps
        ended = isinstance(event, e.Commit)
        if isinstance(event, e.Forward):
            forward, ended = event, all(row.kind != "verify" for row in event.rows)
        if not ended:
            continue
        new = {row.request: 1 for row in forward.rows if row.root is not None}
        paths = zip(event.requests, committed_paths(event), strict=True) if isinstance(event, e.Commit) else ()
        accepted = {name: len(path.nodes) for name, path in paths}
        new |= {name: count + 1 for name, count in accepted.items()}
        given = {name: min(count, limit - said[name]) for name, count in new.items()}
        said.update(given)
        yield Round(
            num_steps, seconds, sum(given.values()), tuple(accepted.values()),
            any(row.kind == "prefill" for row in forward.rows), len(forward.rows),
        )
        seconds = 0.0


Drawn = tuple[Drawing, int]  # the window, and the node whose row chose the token


def drawings(header: Header, events: Iterable[AnyEvent]) -> Mapping[str, Sequence[Drawn]]:
    """Map each request to a drawing for each of its tokens, in order; a request that takes the argmax has none."""
    rules, windows, found = EventRules(header), dict[str, Drawing](), defaultdict[str, list[Drawn]](list)
    for event in events:
        for name, drawn in drawn_at(event, rules.table, windows):
            found[name].append(drawn)
        rules.apply(event)
    return found


def drawn_at(event: AnyEvent, before: RequestTable, windows: dict[str, Drawing]) -> Iterator[tuple[str, Drawn]]:
    """The request and the drawing of each token of an event. windows: those in flight, which are updated."""
    for row in event.rows if isinstance(event, Forward) else ():
        standing = before.live[row.request]
        if not row.uniforms or standing.sampling is None:
            continue
        if row.kind == "verify":
            windows[row.request] = Drawing(standing.sampling, standing.window, standing.parents, row.uniforms)
        else:
            yield row.request, (Drawing.alone(standing.sampling, row.uniforms), 0)
    if isinstance(event, Commit) and event.accepted is not None:
        for name, path in zip(event.requests, committed_paths(event), strict=True):
            window = windows.pop(name, None)
            yield from ((name, (window, node)) for node in (0, *path.nodes) if window is not None)
