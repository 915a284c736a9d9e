"""A layer that is computed again on the same bits with the same draws is computed once, and then read.

Runs of a trace that part late (a fault, the runs that locate a cause) compute the same before they part: the subject's
rows are the same bits, and the draws stand at the same number. Everything that a layer's runs depend on is part of the
key; a read leaves the draws where the computation would have left them. Leaves out: pieces that are no whole layer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from instep_reference.contract.place import Place

from ..shelf import LAYERS
from .folding import Runs
from .layer_work import LayerWork
from .recomputation import Runner

Both = tuple[Runs, Runs | None]


class Remembering:
    """`Runner` for layers, by way of what is kept."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.of = hashlib.sha256(type(runner).__name__.encode())
        # Of the weights one width is enough: none is narrower there than it is stored.
        _add(self.of, (runner.rounded, runner.rounds, runner.products))

    def __call__(
        self, work: LayerWork, rows: int, base: torch.Tensor | None, own: Mapping[Place, torch.Tensor]
    ) -> Both:
        key = self.of.copy()
        _add(key, (work, rows, base, own, self.runner.generator.get_state()))
        found: tuple[Both, torch.Tensor] | None = LAYERS.get(key.digest())
        if found is not None:
            self.runner.generator.set_state(found[1])
            return found[0]
        both = self.runner(work, rows, base, own)
        LAYERS.put(key.digest(), (both, self.runner.generator.get_state()))
        return both


def _add(key: Any, value: Any) -> None:
    """All of a value: tensors by their bits, whatever else by how it is printed."""
    if isinstance(value, torch.Tensor):
        key.update(repr((value.dtype, tuple(value.shape))).encode())
        key.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    elif is_dataclass(value):
        key.update(type(value).__name__.encode())
        _add(key, [getattr(value, field.name) for field in fields(value)])
    elif isinstance(value, Mapping):
        _add(key, [*value.keys(), *value.values()])
    elif isinstance(value, (tuple, list)):
        key.update(f"{len(value)} of".encode())
        for inner in value:
            _add(key, inner)
    else:
        said = repr(value)
        assert " at 0x" not in said, f"{said} is identified only by its address, which another object may have later"
        key.update(f"{said}, ".encode())
