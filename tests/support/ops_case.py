"""What a shared op case is, how it is run on an op set, and how two op sets are compared on it.

Leaves out: the cases (`ops_cases.py` is their table) and what the right answer is (the formulas stand in
`tests/optimized/test_ops_plain*.py`). A case states inputs and which elements may be written.

What the cases take from the contracts, said once:
  - a request whose count is 0 or whose `read` unit is -1 does nothing: zero rows, nothing written, even if fresh;
  - a `store` or `per_row` unit of -1 skips that write alone; a fresh request's memory is NaN and must not be read;
  - `per_row` keeps the memory after every row; rounding to the pool's dtype there does not round the running state;
  - a query row that sees no page (table of -1) gives zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from instep_reference.contract.place import Place

from .ops_pools import Pool, same_bits

Inputs = dict[str, Any]


class Call(NamedTuple):
    """Keyword arguments of one op call, and the pools behind them by name."""

    inputs: Inputs
    pools: dict[str, Pool]


@dataclass(frozen=True)
class Case:
    """`build(device)` gives the same bits on every call. `exact`: results and memory must agree bit by bit; `narrow`:
    products are of bf16 operands, so fp32 memory agrees as bf16 does."""

    op: str
    name: str
    build: Callable[[str], Call]
    exact: bool = False
    exact_memory: bool = False
    narrow: bool = False

    def __str__(self) -> str:
        return f"{self.op}-{self.name}"


@dataclass(frozen=True)
class Outcome:
    """Results by name, and every pool's allocation before and after."""

    results: dict[str, torch.Tensor]
    pools: dict[str, Pool]
    before: dict[str, torch.Tensor] = field(default_factory=dict)


def serve(ops: Any, case: Case, device: str = "cpu") -> Outcome:
    """Run one case on an op set."""
    call = case.build(device)
    before = {name: pool.raw.clone() for name, pool in call.pools.items()}
    answer = getattr(ops, case.op)(**call.inputs)
    if answer is None:
        results = {}
    elif isinstance(answer, torch.Tensor):
        results = {"result": answer}
    else:
        results = dict(zip(answer._fields, answer, strict=True))
    return Outcome(results, call.pools, before)


def strays(outcome: Outcome) -> dict[str, int]:
    """Per pool, how many elements changed that the op may not write (bitwise)."""
    counts = {}
    for name, pool in outcome.pools.items():
        width = pool.raw.element_size()
        was, now = (x.view(torch.uint8).view(-1, width) for x in (outcome.before[name], pool.raw))
        counts[name] = int(((was != now).any(dim=1) & ~pool.writable).sum())
    return counts


def agree(case: Case, ours: Outcome, theirs: Outcome) -> list[str]:
    """What disagrees between two op sets on one case; an empty list: nothing."""
    bad = [f"{case}: {n} stray elements in {name}" for name, n in strays(theirs).items() if n]
    for name, wanted in ours.results.items():
        if not _close(wanted, theirs.results[name], case.exact):
            bad.append(f"{case}: result {name}")
    for name, pool in ours.pools.items():
        at = pool.writable
        if not _close(pool.raw[at], theirs.pools[name].raw[at], case.exact or case.exact_memory, case.narrow):
            bad.append(f"{case}: memory {name}")
    return bad


def _close(x: torch.Tensor, y: torch.Tensor, exact: bool, narrow: bool = False) -> bool:
    """fp32 within 2e-5, and bf16 within 2^-6 of the largest element (an interpreter may truncate).

    narrow: fp32 as bf16.
    """
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    x, y = x.cpu(), y.cpu()
    if exact or not x.dtype.is_floating_point or not x.numel():
        return same_bits(x, y)
    room = {torch.bfloat16: 2.0**-6, torch.float64: 1e-12}.get(x.dtype, 2.0**-6 if narrow else 2e-5)
    worst = (x.double() - y.double()).abs().max()
    return bool(worst <= room * x.double().abs().max().clamp(min=1e-3))


class Draw:
    """Seeded inputs on a device."""

    def __init__(self, seed: int, device: str) -> None:
        self.source, self.device = torch.Generator().manual_seed(seed), device

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=self.source) * scale).to(dtype).to(self.device)

    def uniform(self, *shape: int, low: float, high: float) -> torch.Tensor:
        return (torch.rand(shape, generator=self.source) * (high - low) + low).to(self.device)

    def ints(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self.device)


def at(component: str) -> Place:
    """A place for results; which one does not matter to numbers."""
    return Place("trunk", 0, component)


FP32, BF16 = torch.float32, torch.bfloat16
