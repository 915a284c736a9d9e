"""A case of one op, and how to run it on an op set. A case has inputs, and the elements that the op may write.

Leaves out: the cases (their table is in `__init__.py`), and the right answers (`kit/expected_results.py`).

The cases rely on these parts of the contracts:
  - a request whose count is 0 or whose `read` unit is -1 does nothing: zero rows, nothing written, even if fresh;
  - a `store` or `per_row` unit of -1 skips that write alone; a fresh request's memory is NaN and must not be read;
  - `per_row` keeps the memory after every row; rounding to the pool's dtype there does not round the running state;
  - a query row that sees no page (table of -1) gives zeros.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Concatenate, NamedTuple, ParamSpec

import torch

from instep_optimized.ops.result_kinds import only_writes
from instep_optimized.ops.watch_op_calls import memory_of
from instep_reference.contract.place_names import Place

from ...watch.batched_host_copies import with_others
from .guarded_pools import Pool

Inputs = dict[str, Any]


class Call(NamedTuple):
    """Keyword arguments of one op call, and the pools that they view, by name."""

    inputs: Inputs
    pools: dict[str, Pool]


Build = Callable[[str], Call]


@dataclass(frozen=True)
class Case:
    """`build(device)` gives the same bits on every call. `exact`: results and memory must agree bit by bit; `narrow`:
    products have bf16 operands, so fp32 memory is as accurate as bf16."""

    op: str
    name: str
    build: Build
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
    if only_writes(case.op):
        return Outcome({}, call.pools, before)
    named = {"result": answer} if isinstance(answer, torch.Tensor) else dict(zip(answer._fields, answer, strict=True))
    return Outcome(named, call.pools, before)


def packed(call: Call) -> Call:
    """The same call on pools without gaps between units, for kernels that take no strides."""
    pools, views = dict[str, Pool](), dict[int, torch.Tensor]()
    for name, pool in call.pools.items():
        raw = pool.view.clone(memory_format=torch.contiguous_format)
        if pool.view.dim() > 2 and pool.view.stride(-1) != 1:  # stored with the last two axes exchanged
            raw = pool.view.mT.contiguous().mT
        flat = raw.as_strided((raw.numel(),), (1,))
        numbers = torch.arange(raw.numel(), device=raw.device).as_strided(raw.shape, raw.stride())
        writable = torch.zeros(raw.numel(), dtype=torch.bool, device=raw.device)
        writable[numbers.flatten()] = pool.writable[pool.numbers.flatten()]
        pools[name], views[id(pool.view)] = Pool(flat, raw, numbers, writable), raw

    return Call(with_others(call.inputs, lambda x: views.get(id(x), x)), pools)


def moved(call: Call, device: str) -> Call:
    """The same bits on a device, with the same strides and offsets. Views of one memory stay views of one memory."""
    memories = dict[tuple[int, torch.dtype], torch.Tensor]()

    def put(x: torch.Tensor) -> torch.Tensor:
        key = memory_of(x), x.dtype
        if key not in memories:
            memories[key] = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).to(device)
        return memories[key].as_strided(x.shape, x.stride(), x.storage_offset())

    return call if device == "cpu" else Call(with_others(call.inputs, put), with_others(call.pools, put))


def strays(outcome: Outcome) -> dict[str, int]:
    """Count per pool the elements that changed (bitwise) although the op may not write them."""
    counts = {}
    for name, pool in outcome.pools.items():
        width = pool.raw.element_size()
        was, now = (x.view(torch.uint8).view(-1, width) for x in (outcome.before[name], pool.raw))
        counts[name] = int(((was != now).any(dim=1) & ~pool.writable).sum())
    return counts


class Draw:
    """Random inputs from a seed, on a device."""

    def __init__(self, seed: int, device: str) -> None:
        self.source, self.device = torch.Generator().manual_seed(seed), device

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=self.source) * scale).to(dtype).to(self.device)

    def uniform(self, *shape: int, low: float, high: float) -> torch.Tensor:
        return (torch.rand(shape, generator=self.source) * (high - low) + low).to(self.device)

    def ints(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self.device)


P = ParamSpec("P")


def seeded(make: Callable[Concatenate[Draw, P], Call]) -> Callable[Concatenate[int, P], Build]:
    """Let the function be called with a seed and all arguments but the draw: the result builds the call on a device."""
    def case(seed: int, /, *given: P.args, **named: P.kwargs) -> Build:
        return lambda device: make(Draw(seed, device), *given, **named)

    return case


def drawn_from(seed: int) -> Callable[[Callable[Concatenate[Draw, P], Call]], Callable[P, Build]]:
    """The same for a seed that is fixed."""
    return lambda make: partial(seeded(make), seed)


def at(component: str) -> Place:
    """A place for results. Which one has no effect on the numbers."""
    return Place("trunk", 0, component)


FP32, BF16 = torch.float32, torch.bfloat16
