"""A cache of recomputed layers, for runs with the same bits and the same draws.

Runs of a trace that diverge late (a fault, the runs of the ladder) compute the same before: the subject's rows have the
same bits, and the draws have the same number. The key contains everything that a layer's runs depend on; a cached
result also advances the draws as the computation would. Leaves out: recomputations of less than a layer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from instep_reference.contract.place import Place

from ..lru_cache import LAYERS
from .folding import Runs
from .layer_work import LayerWork
from .recomputation import Runner

Both = tuple[Runs, Runs | None]


class Remembering:
    """A `Runner` for layers with a cache."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.of = hashlib.sha256(type(runner).__name__.encode())
        # One width of the weights is enough for the key, as it is no narrower than the stored one.
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
    """Add a value to a key: tensors by their bits, other values by their text."""
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
