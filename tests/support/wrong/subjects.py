"""Subjects that are wrong on purpose, found by the harness as `support.wrong.subjects:NAME`.

They are outside the source. Leaves out: faults planted in the source (the product's own catalogue).
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from instep_optimized import OptimizedEngine, Options, load
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Capacity, Committed, Path
from instep_reference.contract.errors import Unsupported

PLAIN = load("plain")


def _louder(**given: Any) -> torch.Tensor:
    return PLAIN.gated_norm(**given) * 1.01


LOUDER = replace(PLAIN, name="louder", gated_norm=_louder)  # one percent too much in every gated norm


class _Once:
    """Wrong at one call in the life of the process, and never again."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, **given: Any) -> torch.Tensor:
        self.calls += 1
        return PLAIN.gated_norm(**given) * (1.01 if self.calls == 7 else 1.0)


ONCE = replace(PLAIN, name="once", gated_norm=_Once())


def _slow(**given: Any) -> torch.Tensor:
    time.sleep(0.02)
    return _louder(**given)


SLOW = replace(PLAIN, name="slow", gated_norm=_slow)  # wrong, and it takes its time


SAID = "row 3 of 2"


class _Refusing(OptimizedEngine):
    def commit(self, requests: tuple[str, ...], accepted: tuple[Path, ...] | None = None) -> Committed:
        raise IndexError(SAID)


def refusing(
    checkpoint: Checkpoint, capacity: Capacity, *, layout: str, device: str, dtype: torch.dtype, **told: Any
) -> Any:
    """An engine of somebody else's that falls over at its first commit."""
    return _Refusing(checkpoint, PLAIN, Options(device=device, activation=dtype), capacity, **told)


def declining(*_: Any, num_steps: int, adaptive: Any, device: str, dtype: torch.dtype, layout: str) -> Any:
    """An engine of somebody else's that does not serve this combination."""
    raise Unsupported(f"declining: state layout {layout}")


def right(
    checkpoint: Checkpoint, capacity: Capacity, *, layout: str, device: str, dtype: torch.dtype, **told: Any
) -> OptimizedEngine:
    """An engine of somebody else's that is right."""
    return OptimizedEngine(checkpoint, PLAIN, Options(device=device, activation=dtype), capacity, **told)


class WithoutNumbers(OptimizedEngine):
    """An engine of the contract's older form: `next_num_steps` has no arguments."""

    asked = 0

    def next_num_steps(self) -> int:  # type: ignore[override]
        WithoutNumbers.asked += 1
        return super().next_num_steps(0, 0)


def without_numbers(
    checkpoint: Checkpoint, capacity: Capacity, *, num_steps: int, adaptive: Any, layout: str, device: str,
    dtype: torch.dtype,
) -> Any:
    """Make such an engine; `controlled` and `lag` are not among the arguments either."""
    options = Options(device=device, activation=dtype)
    return WithoutNumbers(checkpoint, PLAIN, options, capacity, num_steps=num_steps, adaptive=adaptive)


def declared(
    checkpoint: Checkpoint, capacity: Capacity, *, layout: str, device: str, dtype: torch.dtype, **told: Any
) -> Any:
    """The same engine, whose maker declares the dtypes in which it stores its results."""
    return right(checkpoint, capacity, layout=layout, device=device, dtype=dtype, **told)


declared.rounds = PLAIN.rounds


def misdeclared(checkpoint: Checkpoint, capacity: Capacity, **told: Any) -> Any:
    """The same, with a declaration that names no component."""
    return right(checkpoint, capacity, **told)


misdeclared.rounds = lambda activation, state: {"everything": activation}

NOT_AN_ENGINE = "nothing that could be run"


class _Late:
    """Wrong from a call on, as an engine is that wears out."""

    def __init__(self, begin: int) -> None:
        self.begin, self.calls = begin, 0

    def __call__(self, **given: Any) -> torch.Tensor:
        self.calls += 1
        return PLAIN.gated_norm(**given) * (1.01 if self.calls > self.begin else 1.0)


LATE = replace(PLAIN, name="late", gated_norm=_Late(25))
