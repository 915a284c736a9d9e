"""Engines to run rounds on, shorthands for rounds, and a comparison of two logical states.

Leaves out: the claims about them (`tests/reference/test_properties.py` and its neighbours).
"""

from dataclasses import fields
from pathlib import Path as File
from typing import Any

import torch

from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.engine import Engine, Path, RequestState, Row
from instep_reference.weights import Weights
from support.inputs.checkpoints import Kind, config_of, write

# fp64, relative to the largest element. Two orders of the same sums differ by about (number of products in a row of
# them) * 2**-53, here some hundreds times 1.1e-16 per layer, growing with depth: measured 1e-15 to 1e-14. The smallest
# slip that a round knows, one token more or less, is above 1e-6 (`test_a_commit_that_is_off_by_one_disagrees`).
CLOSE = 1e-12


def weights(directory: File, kind: Kind = "dense", **overrides: Any) -> Weights:
    return Weights.of(Checkpoint.open(write(directory, kind, 3, **overrides)), torch.float64)


def config(kind: Kind = "dense", **overrides: Any) -> ModelConfig:
    return ModelConfig.from_dict(config_of(kind, **overrides))


def begin(engine: Engine, prompt: tuple[int, ...], *, root: int | None = None, name: str = "a") -> None:
    """Admit a request and run its whole prompt in one chunk."""
    engine.admit(name, prompt)
    engine.forward((Row(name, "prefill", len(prompt), root),))


def play(engine: Engine, picks: tuple[int, ...] | None, path: Path | None, *, name: str = "a",
         parents: tuple[int, ...] | None = None) -> None:
    """One round, free or forced."""
    engine.draft((name,), None if picks is None else (picks,), None if parents is None else (parents,))
    engine.forward((Row(name, "verify"),))
    engine.commit((name,), None if path is None else (path,))


def decode(engine: Engine, tokens: tuple[int, ...], *, name: str = "a") -> None:
    """Decode as many steps; each token is the root that the step is made to choose."""
    for token in tokens:
        engine.forward((Row(name, "decode", 1, token),))


def disagreement(one: RequestState, other: RequestState) -> float:
    """The largest difference anywhere, relative to the largest element of its tensor; infinite if shape or dtype do."""
    worst = 0.0
    for part in fields(RequestState):
        worst = max(worst, _apart(getattr(one, part.name), getattr(other, part.name)))
    return worst


def _apart(one: Any, other: Any) -> float:
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return float("inf")
        return max((_apart(one[layer], other[layer]) for layer in one), default=0.0)
    if not isinstance(one, torch.Tensor):
        return 0.0 if one == other else float("inf")
    if not isinstance(other, torch.Tensor) or (one.shape, one.dtype) != (other.shape, other.dtype):
        return float("inf")
    if one.dtype == torch.int64:
        return 0.0 if torch.equal(one, other) else float("inf")
    if not one.numel():
        return 0.0
    worst = float((one - other).abs().max() / other.abs().max().clamp_min(1e-300))
    return worst if worst == worst else float("inf")
