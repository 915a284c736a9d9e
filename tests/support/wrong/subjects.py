"""Subjects that are wrong on purpose, found by the harness as `support.wrong.subjects:NAME`.

They are outside the source. Leaves out: faults planted in the source (the product's own catalogue).
"""

import time
from collections.abc import Container
from dataclasses import replace
from typing import Any

import torch

from instep_optimized import OptimizedEngine, Options, load
from instep_optimized.memory_addresses import Pages
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Capacity, Committed, Path
from instep_reference.contract.errors import Unsupported

PLAIN = load("plain")


def _louder(**given: Any) -> torch.Tensor:
    return PLAIN.gated_norm(**given) * 1.01


LOUDER = replace(PLAIN, name="louder", gated_norm=_louder)  # one percent too much in every gated norm


class _AtCalls:
    """Wrong at some calls in the life of the process."""

    def __init__(self, wrong: Container[int]) -> None:
        self.wrong, self.calls = wrong, 0

    def __call__(self, **given: Any) -> torch.Tensor:
        self.calls += 1
        return PLAIN.gated_norm(**given) * (1.01 if self.calls in self.wrong else 1.0)


ONCE = replace(PLAIN, name="once", gated_norm=_AtCalls((7,)))
LATE = replace(PLAIN, name="late", gated_norm=_AtCalls(range(26, 10**9)))  # as an engine that wears out


def _attend_near(*, pages: Pages, **given: Any) -> torch.Tensor:
    return load("ledger").attend(pages=replace(pages, before=pages.before.clamp(max=511)), **given)


NEAR = replace(load("ledger"), name="near", attend=_attend_near)  # sees no position after the first 512


def _slow(**given: Any) -> torch.Tensor:
    time.sleep(0.02)
    return _louder(**given)


SLOW = replace(PLAIN, name="slow", gated_norm=_slow)  # wrong, and it takes its time


SAID = "row 3 of 2"


def maker(kind: type[OptimizedEngine] = OptimizedEngine, **members: Any) -> Any:
    """Makes such an engine, with these members in the place of its own, as somebody else's that is right otherwise."""
    spoiled = type(kind.__name__, (kind,), members)

    def make(checkpoint: Any, capacity: Any, *, layout: Any, device: str, dtype: torch.dtype, **told: Any) -> Any:
        options = Options(device=device, activation=dtype, layout=layout)
        return spoiled(checkpoint, PLAIN, options, capacity, **told)

    return make


class _Refusing(OptimizedEngine):
    def commit(self, requests: tuple[str, ...], accepted: tuple[Path, ...] | None = None) -> Committed:
        raise IndexError(SAID)


right, declared, misdeclared, refusing = maker(), maker(), maker(), maker(_Refusing)  # the last: at its first commit
declared.rounds = PLAIN.rounds  # the dtypes in which it stores its results
misdeclared.rounds = lambda activation, state: {"everything": activation}  # it names no component


def declining(*_: Any, num_steps: int, adaptive: Any, device: str, dtype: torch.dtype, layout: str) -> Any:
    """An engine of somebody else's that does not serve this combination."""
    raise Unsupported(f"declining: state layout {layout}")


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


NOT_AN_ENGINE = "nothing that could be run"
