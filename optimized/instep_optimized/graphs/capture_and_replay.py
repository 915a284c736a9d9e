"""Captures and replays graphs by (key, bucket): each has separate inputs, and its outputs are copied out.

A body is `body(ops, inputs) -> tensors` (one, or a tuple or NamedTuple of them). It only calls ops and takes views. Its
inputs are the graph's own tensors [bucket, ...]. They are written from the host before every replay, padding rows
included, in one transfer that runs alongside the launches (`StaticInputs`). Host numbers that a body uses are frozen. A
body is recorded with idle inputs, and recording runs it for real: so with idle inputs it must change no byte of any
pool. A result has a fixed number of rows per request, in the order of the requests. A body may have *breaks*: calls
that run eagerly between two segments of its graph. Leaves out: recording a body (`emulator.py`, `cuda.py`) and its
computation.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from instep_reference.contract.errors import BadInput, OutOfCapacity
from instep_reference.contract.place_names import Place, See, unseen

from ..ops.op_protocols import Ops
from ..ops.watch_op_calls import around
from ..transfer.to_device import StaticInputs

LATEST = 4  # replays that are kept: an event has at most one, and a superfluous one must be seen
T = TypeVar("T")
A = TypeVar("A")
I = TypeVar("I", bound=tuple[Any, ...])  # noqa: E741  a NamedTuple of tensors


class Recording(Protocol):
    """A recorded body; `replay` runs it again on the tensors of the capture, and waits for nothing."""

    def replay(self) -> None: ...


# (eager, like) -> a tensor like that one, into which `eager(tensor)` writes at every replay, between two segments.
# Under capture and in warm-up runs `eager` is not called, and the tensor is zeros.
Break = Callable[[Callable[[torch.Tensor], None], torch.Tensor], torch.Tensor]


class Recorder(Protocol):
    """Runs a body once under capture, after warm-up runs -> its recording, and its outputs, which stay in place."""

    def __call__(self, ops: Ops, body: Callable[[Ops, Break], T]) -> tuple[Recording, T]: ...


Part = tuple[str, int]  # one part of a replay: ("segment" or "eager", its number among those)


class Segments:
    """A recording with breaks: segment 0, eager call 0, segment 1, and so on, on one stream.

    ran: the parts of the last replay, in the order in which they ran
    """

    def __init__(self, segments: Sequence[Recording], eager: Sequence[Callable[[], None]]) -> None:
        assert len(segments) == len(eager) + 1, "an eager call is between two segments"
        self.ran: list[Part] = []
        self._segments = [self._noted("segment", n, one.replay) for n, one in enumerate(segments)]
        self._eager = [self._noted("eager", n, call) for n, call in enumerate(eager)]
        self._recordings = segments

    def replay(self) -> None:
        self.ran.clear()
        for number, segment in enumerate(self._segments):
            segment()
            if number < len(self._eager):
                self._eager[number]()

    @property
    def freed(self) -> int:
        """Number of inputs that were freed after the capture, as far as its recordings know."""
        return sum(freed_inputs(one) for one in self._recordings)

    def _noted(self, what: str, number: int, run: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            self.ran.append((what, number))
            run()

        return call


def freed_inputs(recording: Recording) -> int:
    """Number of tensors that only a recording holds, and reads; 0 if it does not know."""
    return int(getattr(recording, "freed", 0))


class Rooms:
    """Memory for the results of eager calls between segments: one tensor per row shape, shared by all graphs.

    Any replay overwrites it, like the rest of the memory of graphs. So nothing that outlives a replay belongs there.
    """

    def __init__(self) -> None:
        self._made: list[torch.Tensor] = []

    def of(self, like: torch.Tensor) -> torch.Tensor:
        """Return a view with as many rows. All that were made stay, because captured graphs have their addresses."""
        for one in self._made:
            if one.shape[1:] == like.shape[1:] and one.dtype == like.dtype and len(one) >= len(like):
                return one[: len(like)]
        self._made.append(torch.zeros(like.shape, dtype=like.dtype, device=like.device))
        return self._made[-1][:]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._made)


def buckets(most: int) -> tuple[int, ...]:
    """Batch sizes for which graphs are captured: 1, 2, 4, 8, .. and `most` itself."""
    return (*(1 << power for power in range((most - 1).bit_length())), most)


@dataclass(frozen=True)
class Captured:
    """One graph: its inputs, its outputs, and the named results that are shown to `see` after every replay.

    static: the inputs, as they come from the host;  inputs: their tensors, in the tuple that the body receives
    """

    recording: Recording
    static: StaticInputs
    inputs: tuple[torch.Tensor, ...]
    outputs: Any
    seen: list[tuple[Place, torch.Tensor]]


@dataclass(frozen=True)
class Replayed:
    """One replay, for a watcher of the engine.

    given, idle: the arguments of `run`;  ran: the parts of a recording with breaks, in their order
    freed: inputs that were freed after the capture
    """

    key: Hashable
    bucket: int
    rows: int
    given: tuple[torch.Tensor, ...]
    idle: tuple[Any, ...]
    captured: Captured
    ran: tuple[Part, ...] = ()
    freed: int = 0


class Runner:
    """Graphs by (key, bucket). The key must name everything that a body depends on, except its inputs.

    That is at least the kind and the step count, because two launches with equally many tokens may be different graphs.
    A watched run has a separate graph, because that graph also keeps the named results.
    """

    def __init__(
        self, record: Recorder, buckets: Sequence[int], device: torch.device | str = "cpu", *, breaks: bool = False
    ) -> None:
        """breaks: the bodies have breaks, so each of them takes a `Break` as its third argument"""
        self.record, self.buckets, self._device = record, tuple(sorted(set(buckets))), torch.device(device)
        self._breaks = breaks
        self.latest: deque[Replayed] = deque(maxlen=LATEST)  # in their order
        self._captured: dict[tuple[Hashable, int, bool], Captured] = {}

    def run(
        self, key: Hashable, ops: Ops, body: Callable[..., T], inputs: I, idle: I, see: See = unseen,
        join: Callable[[Sequence[torch.Tensor]], A] | None = None, most: int = 0,
    ) -> T | A:
        """Replay with these rows -> the outputs, without padding rows, as copies.

        inputs: B rows each, on the host;  idle: for each input its value in a padding row.
        join: makes one tensor from several outputs, instead of copies. It may not be a view on them.
        most: the bucket is for at least so many rows, as another replica of a group has them
        With B = 0 nothing is replayed. Once (key, bucket) is captured, a run waits for nothing.
        """
        rows = _rows(inputs)
        bucket = self.bucket(max(rows, most))
        captured = self._of(key, bucket, ops, body, inputs, idle, see is not unseen)
        if rows:
            # Padding rows are written too: the last replay may have had more requests.
            _copy([
                _fill(own, given, value, f"{key} {name}")
                for name, own, given, value in zip(_names(inputs), captured.static.staging, inputs, idle, strict=True)
            ])
            captured.static.upload()
        try:
            if rows:
                captured.recording.replay()
                ran = tuple(getattr(captured.recording, "ran", ()))
                self.latest.append(Replayed(
                    key, bucket, rows, inputs, idle, captured, ran, freed_inputs(captured.recording)))
                for place, tensor in captured.seen:
                    see(place, _cut(tensor, bucket, rows))
            # Copies, because the next replay writes into the same outputs.
            return _copied(captured.outputs, bucket, rows, join)  # type: ignore[no-any-return]
        finally:  # only here: an output may be a view on an input; also if `see` raises, because the replay runs
            captured.static.mark_read()

    def prepare(
        self, key: Hashable, ops: Ops, body: Callable[..., T], inputs: I, idle: I, see: See = unseen
    ) -> None:
        """Capture every bucket of a key ahead of time. Only dtypes and row shapes of `inputs` matter."""
        for bucket in reversed(self.buckets):  # the widest first: the others then fit into its memory
            self._of(key, bucket, ops, body, inputs, idle, see is not unseen)

    def memory(self) -> Iterator[torch.Tensor]:
        """Yield the memory that the next replay may overwrite, as far as it is known outside of the recordings."""
        for captured in self._captured.values():
            yield from _listed(captured.outputs)
        yield from getattr(self.record, "rooms", ())

    def bucket(self, rows: int) -> int:
        """Return the batch size of the graph for these requests."""
        for bucket in self.buckets:
            if bucket >= rows:
                return bucket
        raise OutOfCapacity(f"a batch of {rows} requests; the widest graph is for {self.buckets[-1]}")

    def _of(
        self, key: Hashable, bucket: int, ops: Ops, body: Callable[..., T], inputs: I, idle: I, watched: bool
    ) -> Captured:
        if (key, bucket, watched) not in self._captured:
            static = StaticInputs([
                torch.full((bucket, *given.shape[1:]), value, dtype=given.dtype)
                for given, value in zip(inputs, idle, strict=True)
            ], self._device)  # fmt: skip
            self._captured[key, bucket, watched] = self._capture(ops, body, inputs, static, watched)
        return self._captured[key, bucket, watched]

    def _capture(
        self, ops: Ops, body: Callable[..., T], inputs: I, static: StaticInputs, watched: bool
    ) -> Captured:
        own: I = _like(inputs, static.tensors)
        seen: list[tuple[Place, torch.Tensor]] = []

        def note(place: Place, tensor: torch.Tensor) -> torch.Tensor:
            seen.append((place, tensor))
            return tensor

        def watch(recording: Ops, between: Break) -> T:
            seen.clear()  # a warm-up run has noted tensors that are not the graph's
            return body(around(recording, note if watched else unseen), own, *(between,) * self._breaks)

        recording, outputs = self.record(ops, watch)
        static.mark_read()  # a recorder runs the body on the inputs
        return Captured(recording, static, own, outputs, seen)


def _names(inputs: tuple[Any, ...]) -> tuple[str, ...]:
    return getattr(inputs, "_fields", tuple(str(number) for number in range(len(inputs))))


def _like(bundle: Any, values: Sequence[Any]) -> Any:
    """Return the same kind of tuple with other values."""
    return type(bundle)(*values) if hasattr(bundle, "_fields") else tuple(values)


def _rows(inputs: tuple[Any, ...]) -> int:
    counts = {name: len(given) for name, given in zip(_names(inputs), inputs, strict=True)}
    if len(set(counts.values())) != 1:
        raise BadInput("inputs of a graph", found=f"rows {counts}", expected="as many rows in each")
    return next(iter(counts.values()))


def _fill(own: torch.Tensor, given: torch.Tensor, value: Any, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the idle value after the given rows of `own`, on the host -> what is left to copy: the goal, the rows."""
    if given.shape[1:] != own.shape[1:] or (given.dtype, given.device) != (own.dtype, own.device):
        found = f"rows of {tuple(given.shape[1:])}, {given.dtype} on {given.device}"
        expected = f"{tuple(own.shape[1:])}, {own.dtype} on the host, as it was recorded"
        raise BadInput(name, found=found, expected=expected)
    own[len(given) :].fill_(value)
    return own[: len(given)], given


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each second tensor into the first; on a GPU in one launch, without waiting."""
    targets, sources = ([pair[n] for pair in pairs if pair[n].numel()] for n in (0, 1))
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)


def _cut(tensor: torch.Tensor, bucket: int, rows: int) -> torch.Tensor:
    """Return the rows of the first `rows` requests, without padding. A packed tensor has several rows per request."""
    assert tensor.shape[0] % bucket == 0, f"{tensor.shape[0]} rows for {bucket} requests"
    return tensor[: rows * (tensor.shape[0] // bucket)]


def _listed(outputs: Any) -> tuple[torch.Tensor, ...]:
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


def _copied(
    outputs: Any, bucket: int, rows: int, join: Callable[[Sequence[torch.Tensor]], Any] | None = None
) -> Any:
    kept = [_cut(output, bucket, rows) for output in _listed(outputs)]
    if join is not None:
        return join(kept)
    found = [torch.empty_like(one) for one in kept]
    _copy(list(zip(found, kept, strict=True)))
    return found[0] if isinstance(outputs, torch.Tensor) else _like(outputs, found)
