"""Two engines that must not differ by a byte, and the recorders with which one of them runs in graphs.

Leaves out: the reference (`engine_and_reference.py`), and how a graph is recorded.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Self, TypeVar

import torch

from instep_optimized import OptimizedEngine
from instep_optimized.graphs import Emulator, Recorder
from instep_optimized.graphs.capture_and_replay import Break
from instep_optimized.ops.op_protocols import Ops
from instep_reference.contract.engine import Abort, Admit, Answer, Event, Finish

T = TypeVar("T")


@dataclass
class Again:
    """A fake recording: the body runs again on the same inputs, and its answers go to the same places."""

    body: Callable[[], Any]
    outputs: Any

    def replay(self) -> None:
        fresh = self.body()
        for kept, new in zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (self.outputs, fresh)), strict=True):
            kept.copy_(new)


def eagerly(ops: Ops, body: Callable[[Ops, Break], T]) -> tuple[Again, T]:
    """A `Recorder` of nothing: every call is eager, on the same padded bucket."""

    def nothing(eager: Callable[[torch.Tensor], None], like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(like.shape, dtype=like.dtype, device=like.device)

    def at_once(eager: Callable[[torch.Tensor], None], like: torch.Tensor) -> torch.Tensor:
        room = torch.full(like.shape, 7, dtype=like.dtype, device=like.device)
        eager(room)
        return room

    outputs = body(ops, nothing)
    return Again(lambda: body(ops, at_once), outputs), outputs


class Twins:
    """Two engines that must not differ by a byte: answers, states, and every unit of every pool."""

    def __init__(self, one: OptimizedEngine, other: OptimizedEngine) -> None:
        self.engines, self.compared, self.live = (one, other), 0, set[str]()

    def __call__(self, event: Event) -> Answer | None:
        answers = [event.on(subject) for subject in self.engines]
        self._same(*answers)
        if isinstance(event, Admit):
            self.live.add(event.request)
        elif isinstance(event, Finish | Abort):
            self.live.discard(event.request)
        for name in self.live:
            self._same(*(subject.state(name) for subject in self.engines))
        for one, other in zip(*(subject.regions() for subject in self.engines), strict=True):
            self._same(one.units, other.units)
            self._same(one.gaps, other.gaps)
        return answers[0]

    def serve(self, events: Iterable[Event]) -> Self:
        """Serve and compare events in turn."""
        for event in events:
            self(event)
        return self

    def _same(self, one: Any, other: Any) -> None:
        if isinstance(one, torch.Tensor):
            bits = [x.clone(memory_format=torch.contiguous_format).view(torch.uint8) for x in (one, other)]
            assert torch.equal(*bits)
            self.compared += one.numel()
        elif isinstance(one, Mapping):
            assert one.keys() == other.keys()
            for key in one:
                self._same(one[key], other[key])
        elif is_dataclass(one):
            for field in fields(one):
                self._same(getattr(one, field.name), getattr(other, field.name))
        else:
            assert one == other


def emulated(device: str) -> Recorder | None:
    """On a CPU the emulator, which poisons everything that a replay must write again."""
    return Emulator(poison=True) if device == "cpu" else None
