"""The emulator of CUDA graphs: op calls are kept with their tensor objects, and replayed one after the other.

It shares with a real graph the causes of graph bugs. Host values and branches are frozen at capture. A replay uses the
tensors of the capture, and writes a result to the same memory as the capture. It also emulates the memory of graphs: a
replay overwrites the private pool, and reads garbage from an input that was freed after the capture. Leaves out: speed,
and the inside of an op: a replay calls the op again, so a host read inside a plain op happens again too.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from instep_reference.contract.errors import Unsupported
from instep_reference.contract.place_names import unseen

from ..ops.op_protocols import Ops
from ..ops.watch_op_calls import Op, around, memory_of, tensors_of
from .capture_and_replay import Break, Recording, Rooms, Segments

T = TypeVar("T")

GARBAGE = -7  # the poison of integers: neither a valid index nor the -1 that an op skips
HOST_READS = {"tolist", "numpy", "__array__"}  # they read memory without an ATen call, so `_Guard` cannot see them


class LooseCall(Unsupported):
    """A computation, a new tensor or a host read between two ops of the body. A graph would not replay it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"a graph holds ops and views alone; between two ops there is a call of {name}")


class Emulator:
    """A `Recorder`. With `poison`, every replay first overwrites the private pool of all recordings.

    The pool has the results of all recordings, and `rooms`. Then only inputs and memory outside of it survive from one
    replay to the next, as in a memory pool that all graphs share. A body that reads a result of an earlier replay reads
    poison.
    """

    def __init__(self, *, poison: bool = False) -> None:
        self._poison = poison
        self._recordings: list[Recorded] = []
        self._lent: list[torch.Tensor] = []  # results that others can write: outputs, and arguments of other recordings
        self._pool: set[int] = set()  # addresses of the memory of all results
        self._outside: dict[int, Outside] = {}
        self.rooms = Rooms()

    def __call__(self, ops: Ops, body: Callable[[Ops, Break], T]) -> tuple[Recording, T]:
        segments, eager, guards = [list[Call]()], list[Callable[[], None]](), _Between()

        def between(call: Callable[[torch.Tensor], None], like: torch.Tensor) -> torch.Tensor:
            guards.__exit__()
            try:
                room = self.rooms.of(like)
            finally:
                guards.__enter__()
            eager.append(partial(call, room))
            segments.append([])
            return room

        with guards:
            outputs = body(around(ops, unseen, _keeper(segments, guards)), between)
        recorded = [
            Recorded([*calls], self._wreck if not number else _nothing) for number, calls in enumerate(segments)
        ]
        segments.clear()  # eager calls refer to it, and so to arguments that nothing may keep alive
        self._recordings += recorded
        self._pool.update(memory_of(tensor) for one in recorded for tensor in one.results)
        self._lent += [tensor for tensor in tensors_of(outputs) if memory_of(tensor) in self._pool]
        for one in recorded:
            self._lent += one.borrowed(self._pool)
            one.hold_weakly(self._pool, self._outside)
        return (Segments(recorded, eager) if eager else recorded[0]), outputs

    def _wreck(self) -> None:
        if self._poison:
            for recorded in self._recordings:
                recorded.wreck()
            poison(self.rooms)
            poison(self._lent)


def _nothing() -> None:
    """Only the first segment of a replay overwrites the pool."""


def poison(tensors: Iterable[torch.Tensor]) -> None:
    """Overwrite tensors with values that show where they are read."""
    for tensor in tensors:
        tensor.fill_(torch.nan if tensor.is_floating_point() else GARBAGE)


@dataclass(frozen=True)
class Call:
    """One op call: its arguments, and the result tensors of the capture, into which every replay writes."""

    op: Op
    given: dict[str, Any]
    results: tuple[torch.Tensor, ...]


class Outside:
    """Memory that a recording reads and did not make, from its address alone, so that its owner may free it.

    The emulator shares the storage through tensors of its own. If nothing else does, the owner has freed it.
    """

    def __init__(self) -> None:
        self._shared: list[torch.Tensor] = []

    def at(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return another tensor on the same memory, which keeps neither `tensor` nor what it is a view of."""
        where = tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        self._shared.append(torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(*where))
        return self._shared[-1]

    def lost(self) -> bool:
        """Return whether the owner has freed it; the memory then holds what others write there."""
        # The storage that is asked counts itself.
        if torch._C._storage_Use_Count(self._shared[0].untyped_storage()._cdata) - 1 > len(self._shared):
            return False
        poison(self._shared)
        return True


class Recorded:
    """A `Recording`: the op calls in order. `before` is called at the start of every replay.

    results: what they made;  outside: the memory that they share with others
    freed: how much of that was freed before the last replay;  clean: whether all results are poison
    """

    def __init__(self, calls: list[Call], before: Callable[[], None]) -> None:
        self._calls, self._before = calls, before
        self.results = [tensor for call in calls for tensor in _own_results(call)]
        self.outside: list[Outside] = []
        self.freed, self.clean = 0, False

    def replay(self) -> None:
        """Call every op again. Each result goes into the tensor of the capture, where later calls and views read it."""
        self._before()
        self.clean = False
        self.freed = sum([outside.lost() for outside in self.outside])
        for call in self._calls:
            for kept, fresh in zip(call.results, _results(call.op(**call.given)), strict=True):
                assert kept.shape == fresh.shape, "a shape that depends on values cannot be recorded"
                kept.copy_(fresh)

    def wreck(self) -> None:
        """Overwrite all results with poison, except results that are views on an argument (a pool or an input).

        Until its next replay a recording is overwritten once, because only results that are lent have other writers.
        """
        if not self.clean:
            poison(self.results)
            self.clean = True

    def borrowed(self, pool: Collection[int]) -> list[torch.Tensor]:
        """Return the arguments that are results of other recordings. pool: addresses of the results of all"""
        own = {memory_of(tensor) for tensor in self.results}
        given = (tensor for call in self._calls for tensor in tensors_of(list(call.given.values())))
        return [tensor for tensor in given if memory_of(tensor) in pool and memory_of(tensor) not in own]

    def hold_weakly(self, pool: set[int], outside: dict[int, Outside]) -> None:
        """Replace all arguments outside of the pool by other tensors on their memory.

        pool: addresses of the results of all recordings;  outside: memory of all recordings by address
        """
        views = {memory_of(tensor) for call in self._calls for tensor in call.results} - pool

        def share(tensor: torch.Tensor) -> torch.Tensor:
            address = memory_of(tensor)
            if not tensor.numel() or address in pool or address in views:
                return tensor
            return outside.setdefault(address, Outside()).at(tensor)

        self._calls = [replace(call, given=_mapped(call.given, share)) for call in self._calls]
        used = {memory_of(tensor) for call in self._calls for tensor in tensors_of(list(call.given.values()))}
        self.outside = [one for address, one in outside.items() if address in used]


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the value with all its tensors changed: itself, or those in a tuple, a list, a dict, or a dataclass."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        inner = [_mapped(one, change) for one in value]
        return type(value)(*inner) if hasattr(value, "_fields") else type(value)(inner)
    if isinstance(value, dict):
        return {name: _mapped(one, change) for name, one in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: _mapped(getattr(value, one.name), change) for one in fields(value)})
    return value


def _own_results(call: Call) -> Iterator[torch.Tensor]:
    """Find the results in separate memory. A view on a pool or an input must survive a wreck."""
    given = {memory_of(tensor) for value in call.given.values() for tensor in tensors_of(value)}
    return (tensor for tensor in call.results if memory_of(tensor) not in given)


def _keeper(segments: list[list[Call]], between: "_Between") -> Callable[[str, Op], Op]:
    """Wrap ops so that every call is kept in the last segment. Inside the op nothing is guarded."""

    def wrapper(name: str, op: Op) -> Op:
        @wraps(op)
        def call(**given: Any) -> Any:
            between.__exit__()
            try:
                result = op(**given)
            finally:
                between.__enter__()
            # The tensor objects themselves are kept: a replay must use the memory of the capture, not new tensors.
            segments[-1].append(Call(op, given, tuple(_results(result))))
            return result

        return call

    return wrapper


class _Between:
    """Guards for a body between its ops. An op leaves them, because an active mode would slow every call inside it."""

    def __init__(self) -> None:
        self._modes = _Guard(), _HostReads()  # type: ignore[no-untyped-call]

    def __enter__(self) -> "_Between":
        for mode in self._modes:
            mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *failed: Any) -> None:
        for mode in self._modes:
            mode.__exit__(*(failed or (None, None, None)))  # type: ignore[no-untyped-call]


class _Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets only views pass between ops: a view makes no memory and reads none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # In inference mode a composite call arrives as one call: `reshape` as a view, though it may copy.
        with self:
            made_of_others = func.decompose(*args, **(kwargs or {}))
        if made_of_others is not NotImplemented:
            return made_of_others
        # `lift_fresh` is a view by its schema, but of a tensor that was just made from host numbers.
        if not func.is_view or "lift_fresh" in str(func):
            raise LooseCall(str(func))
        return func(*args, **(kwargs or {}))


class _HostReads(TorchFunctionMode):
    """Refuses host reads of values between ops."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in HOST_READS:
            raise LooseCall(name)
        return func(*args, **(kwargs or {}))


def _results(result: Any) -> Iterator[torch.Tensor]:
    """Find the tensors of an op's answer: one, a bundle, or none."""
    if isinstance(result, torch.Tensor):
        yield result
    elif result is not None:
        yield from result
