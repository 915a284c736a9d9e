"""The emulator of CUDA graphs: op calls are kept with their tensor objects, and replayed one after the other.

It shares with a real graph the causes of graph bugs. Host values and branches are frozen at capture. A replay uses the
tensors of the capture, and writes a result to the same memory as the capture. Leaves out: speed, and the inside of an
op: a replay calls the op again, so a host read inside a plain op happens again too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from instep_reference.contract.errors import Unsupported
from instep_reference.contract.place_names import unseen

from ..ops.op_protocols import Ops
from ..ops.watch_op_calls import Op, around, memory_of, tensors_of

T = TypeVar("T")

GARBAGE = -7  # the poison of integers: neither a valid index nor the -1 that an op skips
HOST_READS = {"tolist", "numpy", "__array__"}  # they read memory without an ATen call, so `_Guard` cannot see them


class LooseCall(Unsupported):
    """A computation, a new tensor or a host read between two ops of the body. A graph would not replay it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"a graph holds ops and views alone; between two ops there is a call of {name}")


class Emulator:
    """A `Recorder`. With `poison`, every replay first overwrites the results of all recordings.

    Then only inputs and pools survive from one replay to the next, as in a memory pool that all graphs share. A body
    that reads a result of an earlier replay reads poison.
    """

    def __init__(self, *, poison: bool = False) -> None:
        self._poison = poison
        self._recordings: list[Recorded] = []

    def __call__(self, ops: Ops, body: Callable[[Ops], T]) -> tuple[Recorded, T]:
        calls: list[Call] = []
        with (between := _Between()):
            outputs = body(around(ops, unseen, _keeper(calls, between)))
        recorded = Recorded(calls, self._wreck)
        self._recordings.append(recorded)
        return recorded, outputs

    def _wreck(self) -> None:
        for recorded in self._recordings if self._poison else ():
            recorded.wreck()


@dataclass(frozen=True)
class Call:
    """One op call: its arguments, and the result tensors of the capture, into which every replay writes."""

    op: Op
    given: dict[str, Any]
    results: tuple[torch.Tensor, ...]


class Recorded:
    """A `Recording`: the op calls in order. `before` is called at the start of every replay."""

    def __init__(self, calls: list[Call], before: Callable[[], None]) -> None:
        self._calls, self._before = calls, before
        self._results = [tensor for call in calls for tensor in _own_results(call)]

    def replay(self) -> None:
        """Call every op again. Each result goes into the tensor of the capture, where later calls and views read it."""
        self._before()
        for call in self._calls:
            for kept, fresh in zip(call.results, _results(call.op(**call.given)), strict=True):
                assert kept.shape == fresh.shape, "a shape that depends on values cannot be recorded"
                kept.copy_(fresh)

    def wreck(self) -> None:
        """Overwrite all results with poison, except results that are views on an argument (a pool or an input)."""
        for tensor in self._results:
            tensor.fill_(torch.nan if tensor.is_floating_point() else GARBAGE)


def _own_results(call: Call) -> Iterator[torch.Tensor]:
    """Find the results in separate memory. A view on a pool or an input must survive a wreck."""
    given = {memory_of(tensor) for value in call.given.values() for tensor in tensors_of(value)}
    return (tensor for tensor in call.results if memory_of(tensor) not in given)


def _keeper(calls: list[Call], between: _Between) -> Callable[[str, Op], Op]:
    """Wrap ops so that every call is kept. Inside the op nothing is guarded."""

    def wrapper(name: str, op: Op) -> Op:
        @wraps(op)
        def call(**given: Any) -> Any:
            between.__exit__()
            try:
                result = op(**given)
            finally:
                between.__enter__()
            # The tensor objects themselves are kept: a replay must use the memory of the capture, not new tensors.
            calls.append(Call(op, given, tuple(_results(result))))
            return result

        return call

    return wrapper


class _Between:
    """Guards for a body between its ops. An op leaves them, because an active mode would slow every call inside it."""

    def __init__(self) -> None:
        self._modes = _Guard(), _HostReads()  # type: ignore[no-untyped-call]

    def __enter__(self) -> _Between:
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
