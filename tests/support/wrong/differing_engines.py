"""Engines driven through verbs with faults that only two runs of them show.

Found by the harness as `support.wrong.differing_engines:NAME`. Leaves out: faults that one run shows (`engines.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from instep_reference.gdn import GdnMemory
from support.wrong.engines import Right, Watching


def _scaled(found: Any, factor: float) -> Any:
    return {key: {name: x * factor for name, x in mine.items()} for key, mine in found.items()}


class InABatch(Right):
    """Its rows depend on how many requests there are in the step."""

    def step(self, rows: Sequence[Any]) -> Any:
        return _scaled(super().step(rows), 1 + (len(rows) - 1) / 100)


class LooksAhead(Right):
    """The rows of a window depend on its last token."""

    def run(self, row: Any) -> torch.Tensor:
        return super().run(row) * (1 + row.tokens[-1] * 1e-6 * (row.kind == "verify"))


class ChunksAlone(Right):
    """A chunk begins with an empty conv window."""

    def run(self, row: Any) -> torch.Tensor:
        if row.kind == "prefill" and row.first:
            self.memory[row.request] = tuple(
                replace(one, window=torch.zeros_like(one.window)) if isinstance(one, GdnMemory) else one
                for one in self.memory[row.request]
            )
        return super().run(row)


class Disturbed(Watching):
    """Observing its layers changes them."""

    def watch(self, see: Any) -> None:
        super().watch(lambda place, tensor: (see(place, tensor), tensor.mul_(1.001))[1])


class BySpeculation(Right):
    """It answers otherwise where it may draft."""

    def step(self, rows: Sequence[Any]) -> Any:
        return _scaled(super().step(rows), 1 + bool(self.num_steps) / 1000)


class BySlots(Right):
    """Declares the trace's order of slots, and the state after a window depends on the number of the slot."""

    declares = {"order": True}  # noqa: RUF012

    def slots(self) -> dict[str, int]:
        return {name: self.room.slots[number] for number, name in enumerate(self.memory)}

    def step(self, rows: Sequence[Any]) -> Any:
        return _scaled(super().step(rows), 1 + self.room.slots[0] / 1000)


class KeptWhenRead(Right):
    """A window is cut to its kept tokens only when the state is read."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.owed: dict[str, int] = {}

    def keep(self, request: str, length: int) -> None:
        self.owed[request] = length

    def state(self, request: str) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        if request in self.owed:
            super().keep(request, self.owed.pop(request))
        return super().state(request)

    def run(self, row: Any) -> torch.Tensor:
        self.owed.pop(row.request, None)
        return super().run(row)


def made(kind: type[Right]) -> Any:
    def make(model: Path, room: Any, *, num_steps: int, widest: int, device: str, dtype: torch.dtype) -> Any:
        engine: Any = kind(model, dtype)
        engine.room, engine.num_steps = room, num_steps
        return engine

    return make


in_a_batch, looks_ahead, chunks_alone, disturbed, by_speculation, by_slots, kept_when_read = map(
    made, (InABatch, LooksAhead, ChunksAlone, Disturbed, BySpeculation, BySlots, KeptWhenRead)
)
