"""Play one model's decoding on another: the same requests, chunks, step counts and accepted counts, all forced.

In this way a small trained model supplies realistic accepted counts for a large model with random weights, which is
then timed. The run is first checked (`run/large_model.py`). At every finish the timed engine must hold the same bits
as the checked one. Leaves out: any choice.
"""

import hashlib
import statistics
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

import msgspec
import torch

from instep.diagnose import explain_outcome
from instep.generate.decode import Decoded, Speed
from instep.player import Observer, Player, Side
from instep.run.engine_without_comparison import engine
from instep.run.large_model import outcome
from instep.run.replay import Outcome
from instep.setting import Setting
from instep.trace.file import Trace
from instep.trace.header import Model
from instep.verdict import Comparison, Tier
from instep.watch.event_context import EventContext
from instep.watch.player_observers import LastStates
from instep_reference.contract import engine as e
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.errors import BadInput


@dataclass(frozen=True)
class Extent:
    """The checked part of an arm: events up to and including `until`, T2d in these GDN layers; None: all."""

    until: int | None = None
    layers: Collection[int] | None = None

    @classmethod
    def full_batches(cls, decoded: Decoded, layers: Collection[int] | None = None) -> "Extent":
        """Up to the first finish: until then a batch fills its graph's bucket.

        A smaller batch is padded in the graph but not in the observed run. With other rows in the batch a product has
        other bits, unless the op set is invariant.
        """
        return cls(next(n for n, event in enumerate(decoded.events) if isinstance(event, e.Finish)) - 1, layers)


WHOLE = Extent()


@dataclass(frozen=True)
class Lap:
    """One timed run: the seconds of every event, and the digests of the requests' states (`Witness`)."""

    seconds: tuple[float, ...]
    digests: Mapping[str, str]


@dataclass(frozen=True)
class Played:
    """An arm on the large model: the result of the check, the digests of the checked run, and the timed laps."""

    decoded: Decoded
    extent: Extent
    checked: Outcome
    digests: Mapping[str, str]
    laps: tuple[Lap, ...]

    @property
    def right(self) -> bool:
        """Whether the check covered its extent and agreed, every lap held the checked bits, and all laps end alike."""
        last = len(self.decoded.events) - 1 if self.extent.until is None else self.extent.until
        verdict, first = self.checked.verdict, self.laps[0].digests
        looked = verdict.exit == 0 and verdict.events == min(last + 1, len(self.decoded.events)) and bool(self.digests)
        return looked and first.items() >= self.digests.items() and all(lap.digests == first for lap in self.laps)

    def speed(self) -> Speed:
        """The figures of the lap with the median total time."""
        lap = sorted(self.laps, key=lambda lap: sum(lap.seconds))[len(self.laps) // 2]
        return Speed.of(replace(self.decoded, seconds=lap.seconds))

    def latency_s(self) -> float:
        """Mean seconds of a request from admission to finish; the median of the laps."""
        return statistics.median(_latency(self.decoded.events, lap.seconds) for lap in self.laps)


def play(
    arms: Mapping[str, Decoded], checkpoint: Checkpoint, setting: Setting, *, laps: int = 3,
    extents: Mapping[str, Extent] | None = None,
) -> dict[str, Played]:
    """Check every arm one after another; then time all in turn, lap by lap, after one uncounted lap.

    extents: the checked part of each arm; by default all of it
    """
    far = extents or dict.fromkeys(arms, WHOLE)
    traces = {name: trace_of(decoded, checkpoint, name) for name, decoded in arms.items()}
    checked = {name: _checked(trace, checkpoint, setting, far[name]) for name, trace in traces.items()}
    engines = {name: _engine(trace, checkpoint, setting) for name, trace in traces.items()}
    walked: dict[str, list[Lap]] = {name: [] for name in arms}
    for _ in range(laps + 1):
        for name, trace in traces.items():
            walked[name].append(_lap(engines[name], trace, setting.device, far[name].until))
    return {
        name: Played(decoded, far[name], *checked[name], tuple(walked[name][1:])) for name, decoded in arms.items()
    }


def trace_of(decoded: Decoded, checkpoint: Checkpoint, name: str) -> Trace:
    """The same events for a model of another size, whose vocabulary must contain the tokens."""
    config, header = checkpoint.config, decoded.ask.header
    if config.vocab < header.checkpoint.vocab or config.mtp_layers != header.checkpoint.mtp_layers:
        found = f"{config.vocab} tokens, {config.mtp_layers} MTP layers"
        expected = f"at least {header.checkpoint.vocab} tokens, and {header.checkpoint.mtp_layers} MTP layers"
        raise BadInput("checkpoint", found=found, expected=expected)
    model = Model("in memory", checkpoint.digest, checkpoint.digest, config.vocab, config.mtp_layers)
    renamed = msgspec.structs.replace(header, name=name, checkpoint=model)
    return Trace(Path(f"{name}.jsonl"), renamed, decoded.events, {}, "")


def digest(state: e.RequestState) -> str:
    """sha256 of the complete logical state of a request."""
    total = hashlib.sha256(f"{state.length} {state.root} {state.proposal}".encode())
    for part in (getattr(state, each.name) for each in fields(state)):
        tensors = part.values() if isinstance(part, dict) else [part] if isinstance(part, torch.Tensor) else []
        for tensor in tensors:
            total.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


class Witness:
    """Not a comparison: records digests of every request before its finish, and of all live ones at event `at`."""

    name = "witness"
    tier = Tier.BITWISE

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.found: dict[str, str] = {}

    def __call__(self, context: EventContext) -> Iterator[Comparison]:
        if isinstance(context.event, e.Finish):
            self.finished(context.event.request, context.subject.before[context.event.request])
        if context.index == self.at:
            self.living(context.subject.after)
        yield from ()

    def finished(self, name: str, state: e.RequestState) -> None:
        self.found[f"{name}, finished"] = digest(state)

    def living(self, states: Mapping[str, e.RequestState]) -> None:
        self.found |= {f"{name}, event {self.at}": digest(state) for name, state in states.items()}


def _checked(
    trace: Trace, checkpoint: Checkpoint, setting: Setting, extent: Extent
) -> tuple[Outcome, Mapping[str, str]]:
    witness = Witness(extent.until)
    found = outcome(trace, checkpoint, setting, until=extent.until, layers=extent.layers, also=[witness],
                    admissions=False)  # fmt: skip
    return explain_outcome(found), witness.found


def _engine(trace: Trace, checkpoint: Checkpoint, setting: Setting) -> e.Engine:
    return engine(checkpoint, setting, trace.header.room(), **trace.header.steps(trace.path.name))


def _lap(served: e.Engine, trace: Trace, device: str, at: int | None) -> Lap:
    """Run the rounds as a server does: each ends when its tokens are on the host. States are read with the clock
    stopped.
    """
    served.set_num_steps(trace.header.num_steps)  # the lap before ended at another one
    witness, watch, last = Witness(at), _Stopwatch(device), LastStates(served, digest)
    player, live = Player("timed", served, [last, watch]), dict[str, None]()
    for index, event in enumerate(trace.events):
        player.serve(event)
        if isinstance(event, e.Admit):
            live[event.request] = None
        elif isinstance(event, e.Finish):
            live.pop(event.request)
        if index == at:
            witness.living({name: served.state(name) for name in live})
            watch.wait()
    finished = {f"{name}, finished": found for name, found in last.found.items()}
    return Lap(tuple(watch.seconds), witness.found | finished)


class _Stopwatch(Observer):
    """Measures the seconds of every event; waiting for a state that is read before a finish is not counted."""

    def __init__(self, device: str) -> None:
        self._cuda, self._begun = device.startswith("cuda"), 0.0
        self.seconds: list[float] = []

    def before(self, event: e.Event) -> None:
        if isinstance(event, e.Finish):
            self.wait()
        self._begun = time.perf_counter()

    def after(self, event: e.Event, side: Side) -> Side:
        answer = side.answer
        if isinstance(answer, e.Committed):
            answer.accept_lens.tolist(), answer.bonus.tolist()
        if isinstance(event, e.Commit) or (
            isinstance(event, e.Forward) and all(row.kind != "verify" for row in event.rows)
        ):
            self.wait()
        self.seconds.append(time.perf_counter() - self._begun)
        return side

    def wait(self) -> None:
        """Wait until the device is idle."""
        if self._cuda:
            torch.cuda.synchronize()


def _latency(events: tuple[e.AnyEvent, ...], seconds: tuple[float, ...]) -> float:
    clock, begun, spent = 0.0, dict[str, float](), list[float]()
    for event, took in zip(events, seconds, strict=True):
        if isinstance(event, e.Admit):
            begun[event.request] = clock
        clock += took
        if isinstance(event, e.Finish):
            spent.append(clock - begun[event.request])
    return statistics.fmean(spent)
