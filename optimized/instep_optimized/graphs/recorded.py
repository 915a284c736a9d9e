"""The emulator of CUDA graphs: op calls are kept with their tensor objects, and replayed one after the other.

Leaves out: speed, and whatever happens inside an op: a replay calls the op again, host reads of a plain op included.
What it shares with a real graph is what goes wrong with graphs: host values and branches are frozen at capture, tensors
are the ones that were seen then, and a result stands where it stood.
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
from instep_reference.contract.place import unseen

from ..ops.around import Op, around, memory_of, tensors_of
from ..ops.base import Ops

T = TypeVar("T")

GARBAGE = -7  # of whole numbers when poisoned: neither a value nor the -1 that skips
HOST_READS = {"tolist", "numpy", "__array__"}  # they read memory without an ATen call


class LooseCall(Unsupported):
    """Between two ops something was computed, made or read on the host: no graph would replay it as it was meant."""

    def __init__(self, name: str) -> None:
        super().__init__(f"a graph holds ops and views alone; between two ops there is a call of {name}")


class Emulator:
    """A `Recorder`. `poison`: nothing but inputs and pools survives from one replay, of any graph, to the next."""

    def __init__(self, *, poison: bool = False) -> None:
        self._poison = poison
        self._recordings: list[Recorded] = []

    def __call__(self, ops: Ops, body: Callable[[Ops], T]) -> tuple[Recorded, T]:
        calls: list[Call] = []
        guard = _Guard()
        with guard, _HostReads(guard):
            outputs = body(around(ops, unseen, _keeper(calls, guard)))
        recorded = Recorded(calls, self._wreck)
        self._recordings.append(recorded)
        return recorded, outputs

    def _wreck(self) -> None:
        for recorded in self._recordings if self._poison else ():
            recorded.wreck()


@dataclass(frozen=True)
class Call:
    """One op call: what it was given, and the tensors that it gave, which stay where they are."""

    op: Op
    given: dict[str, Any]
    results: tuple[torch.Tensor, ...]


class Recorded:
    """A `Recording`: the calls in order. `before` runs ahead of every replay."""

    def __init__(self, calls: list[Call], before: Callable[[], None]) -> None:
        self._calls, self._before = calls, before

    def replay(self) -> None:
        """Call by call, each result into the tensor in which later calls and views look for it."""
        self._before()
        for call in self._calls:
            for kept, fresh in zip(call.results, _results(call.op(**call.given)), strict=True):
                assert kept.shape == fresh.shape, "a shape that depends on values cannot be recorded"
                kept.copy_(fresh)

    def wreck(self) -> None:
        """Fill results with what nobody may read, views on pools and inputs excepted."""
        for call in self._calls:
            given = {memory_of(tensor) for value in call.given.values() for tensor in tensors_of(value)}
            for tensor in call.results:
                if memory_of(tensor) not in given:
                    tensor.fill_(torch.nan if tensor.is_floating_point() else GARBAGE)


def _keeper(calls: list[Call], guard: _Guard) -> Callable[[str, Op], Op]:
    """The wrapper that keeps every call of an op; inside an op nothing is watched."""

    def wrapper(name: str, op: Op) -> Op:
        @wraps(op)
        def call(**given: Any) -> Any:
            guard.inside = True
            try:
                result = op(**given)
            finally:
                guard.inside = False
            calls.append(Call(op, given, tuple(_results(result))))
            return result

        return call

    return wrapper


class _Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Between ops only views pass: they make nothing and read nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # `lift_fresh` is a view by its schema, but of a tensor that was just made from host numbers.
        if not self.inside and (not func.is_view or "lift_fresh" in str(func)):
            raise LooseCall(str(func))
        return func(*args, **(kwargs or {}))


class _HostReads(TorchFunctionMode):
    """Between ops nobody reads values on the host."""

    def __init__(self, guard: _Guard) -> None:
        super().__init__()
        self._guard = guard

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if not self._guard.inside and name in HOST_READS:
            raise LooseCall(name)
        return func(*args, **(kwargs or {}))


def _results(result: Any) -> Iterator[torch.Tensor]:
    """The tensors of an op's answer: one, a bundle, or none."""
    if isinstance(result, torch.Tensor):
        yield result
    elif result is not None:
        yield from result
