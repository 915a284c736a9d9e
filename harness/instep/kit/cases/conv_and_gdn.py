"""Cases of the ops that carry memory through tokens: the conv, and the recurrences.

Leaves out: paged attention and plain data movement (`paged_kv.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from instep_optimized.memory_addresses import Address, Part
from instep_optimized.ops.op_protocols import GdnInputs
from instep_reference.contract.recurrences import GDN, RECURRENCES, Recurrence

from .case import BF16, FP32, Call, Case, Draw, at, seeded
from .guarded_pools import Pool, guarded, permit, place, runs


@dataclass(frozen=True)
class Shape:
    """How one part of a batch lies: per request its count, read unit, freshness; packed, after `skip` free rows."""

    form: Literal["chunk", "window"]
    count: tuple[int, ...]
    read: tuple[int, ...]
    fresh: tuple[int, ...]
    store: tuple[int, ...] | None = None
    per_row: tuple[int, ...] | None = None
    column: tuple[int, ...] | None = None
    skip: int = 0


def make_part(draw: Draw, shape: Shape, base: int, pools: dict[str, Pool]) -> tuple[Part, int]:
    """A part over pools `memory` (and `snapshots` for `per_row`), its memory filled; and the next free row."""
    begin, row = [], base + shape.skip
    for count in shape.count:
        begin.append(row)
        row += count
    memory, columns = pools["memory"].view, None if shape.column is None else draw.ints(shape.column)
    part = Part(
        form=shape.form,
        begin=draw.ints(begin),
        count=draw.ints(shape.count),
        most=max(shape.count, default=0),
        read=Address(memory, draw.ints(shape.read), columns),
        fresh=draw.ints(shape.fresh).bool(),
        store=None if shape.store is None else Address(memory, draw.ints(shape.store), columns),
        per_row=None if shape.per_row is None else Address(pools["snapshots"].view, draw.ints(shape.per_row)),
    )
    for request in range(len(shape.count)):
        if runs(part, request) and not shape.fresh[request]:
            spot = memory[place(part.read, request)]
            spot.copy_(draw.normal(*spot.shape, scale=0.5).to(spot.dtype))
    permit(part, pools["memory"], pools.get("snapshots"))
    return part, row


def make_pools(
    shapes: Sequence[Shape], block: tuple[int, ...], dtype: torch.dtype, swap: bool, device: str
) -> dict[str, Pool]:
    """`memory` with units up to the largest named one (and columns if read by column), `snapshots` if needed."""
    units = 2 + max((u for s in shapes for u in (*s.read, *(s.store or ()))), default=0)
    columns = max((c for s in shapes for c in (s.column or ())), default=-1) + 1
    pools = {"memory": guarded((units, columns) if columns else (units,), block, dtype, swap=swap, device=device)}
    if any(s.per_row for s in shapes):
        rows = 1 + max(u for s in shapes for u in (s.per_row or (0,)))
        most = max(c for s in shapes for c in s.count)
        pools["snapshots"] = guarded((rows, most + 1), block, dtype, swap=swap, device=device)
    return pools


def make_parts(
    draw: Draw, shapes: Sequence[Shape], block: tuple[int, ...], dtype: torch.dtype, swap: bool
) -> tuple[tuple[Part, ...], int, dict[str, Pool]]:
    """All parts of a batch, the number of its rows with a free one at the end, and the pools."""
    pools, parts, row = make_pools(shapes, block, dtype, swap, draw.device), list[Part](), 0
    for shape in shapes:
        part, row = make_part(draw, shape, row, pools)
        parts.append(part)
    return tuple(parts), row + 1, pools


SHAPES: dict[str, tuple[Shape, ...]] = {
    "decode": (Shape("window", (1, 1, 1), (4, 1, 7), (0, 0, 0), store=(4, 1, 7)),),
    "padded": (Shape("window", (1, 0, 1, 0), (5, -1, -1, 2), (0, 0, 0, 0), store=(5, -1, -1, 2)),),
    "verify": (Shape("window", (4, 2, 0, 3), (6, 2, 3, 9), (0, 0, 0, 1), per_row=(2, 0, 3, -1)),),
    "columns": (Shape("window", (2, 3), (3, 1), (0, 0), per_row=(1, 0), column=(1, 3)),),
    "chunk": (Shape("chunk", (7, 0, 1, 3), (2, 5, 8, 4), (1, 0, 1, 0), store=(2, 5, 8, -1)),),
    "mixed": (
        Shape("chunk", (5, 2), (7, 3), (0, 1), store=(8, 3), skip=1),
        Shape("window", (3, 1), (1, 6), (0, 0), per_row=(0, 1), skip=2),
    ),
    "snapshots": (Shape("window", (4, 2, 0, 3), (6, 2, 3, 9), (0, 0, 0, 0), per_row=(2, 0, 3, 1)),),
    "prefill": (Shape("chunk", (7, 0, 1, 3), (2, 5, 8, 4), (1, 0, 1, 0), store=(2, 5, 8, 4)),),
    # More rows than a block of the conv, in the interpreter too, and then rows that no request covers.
    "blocks": (Shape("chunk", (70, 2, 0, 133), (3, 1, 2, 6), (0, 0, 0, 1), store=(3, -1, 2, 6), skip=3),),
    "empty_part": (Shape("window", (), (), (), store=()),),
    "no_parts": (),
}


@seeded
def conv_case(
    draw: Draw, shapes: tuple[Shape, ...], C: int, W: int, dtype: torch.dtype, swap: bool, op: str = "conv"
) -> Call:
    parts, N, pools = make_parts(draw, shapes, (C, W - 1), dtype, swap)
    inputs = {
        "x": draw.normal(N, C, dtype=dtype),
        "weight": draw.normal(C, W, dtype=dtype, scale=0.5),
        "parts": parts,
        "to": at("mixed"),
    }
    return Call(inputs | ({"bias": draw.normal(C, dtype=dtype)} if op == "biased_conv" else {}), pools)


class Heads(NamedTuple):
    H: int
    HV: int
    K: int
    V: int


@seeded
def gdn_case(
    draw: Draw, shapes: tuple[Shape, ...], heads: Heads, state: torch.dtype, swap: bool, dtype: torch.dtype,
    row: Recurrence = GDN,
) -> Call:
    H, HV, K, V = heads
    parts, N, pools = make_parts(draw, shapes, (HV, K, V), state, swap)
    q, k = (torch.nn.functional.normalize(draw.normal(N, H, K), dim=-1) for _ in range(2))
    gate = (getattr(heads, axis) for axis in row.gate)
    gates = draw.uniform(N, *gate, low=-1.2, high=-1e-4), draw.uniform(N, HV, low=0.05, high=0.95)
    inputs = {
        "inputs": GdnInputs(q * K**-0.5, k, draw.normal(N, HV, V), *gates),
        "parts": parts,
        "dtype": dtype,
        "to": at("core"),
    }
    return Call(inputs, pools)


HEADS = {"r1": Heads(2, 2, 16, 16), "r2": Heads(2, 4, 16, 32), "r3": Heads(1, 3, 32, 16)}

PREFILLS = ("chunk", "mixed")  # in bf16 the kernels prefill in narrow products

RECURRENT: list[Case] = [
    Case(row.name, f"{name}-{heads}-{'VK' if swap else 'KV'}-{str(state)[6:]}",
         gdn_case(100 + i, SHAPES[name], HEADS[heads], state, swap, dtype, row),
         narrow=name in PREFILLS and dtype == BF16)
    for row in RECURRENCES.values() for i, (name, heads, swap, state, dtype) in enumerate([
        ("decode", "r1", False, FP32, FP32),
        ("decode", "r2", True, FP32, BF16),
        ("decode", "r2", True, BF16, BF16),
        ("padded", "r3", True, FP32, FP32),
        ("verify", "r2", False, FP32, FP32),
        ("verify", "r2", True, FP32, BF16),
        ("verify", "r3", True, BF16, FP32),
        ("columns", "r3", True, FP32, FP32),
        ("chunk", "r2", False, FP32, FP32),
        ("chunk", "r3", True, FP32, FP32),
        ("mixed", "r2", True, FP32, FP32),
        ("chunk", "r2", True, FP32, BF16),
        ("mixed", "r3", False, BF16, BF16),
        ("empty_part", "r1", True, FP32, FP32),
        ("no_parts", "r1", True, FP32, FP32),
        ("snapshots", "r2", True, FP32, FP32),
        ("prefill", "r2", True, FP32, FP32),
    ])
]

CONV: list[Case] = [
    Case("conv", f"{name}-{'swapped' if swap else 'packed'}-{str(dtype)[6:]}",
         conv_case(200 + i, SHAPES[name], 48, W, dtype, swap), exact_memory=True)
    for i, (name, W, dtype, swap) in enumerate([
        ("decode", 4, FP32, False),
        ("decode", 4, BF16, True),
        ("padded", 4, FP32, False),
        ("verify", 4, FP32, False),
        ("verify", 3, BF16, True),
        ("columns", 4, FP32, True),
        ("chunk", 4, FP32, False),
        ("chunk", 2, BF16, True),
        ("mixed", 4, FP32, False),
        ("empty_part", 4, FP32, False),
        ("no_parts", 4, FP32, False),
        ("snapshots", 4, FP32, True),
        ("prefill", 4, FP32, True),
        ("blocks", 4, BF16, True),
        ("chunk", 1, FP32, True),
    ])
] + [
    Case(op, f"{name}-{'swapped' if swap else 'packed'}-{str(dtype)[6:]}",
         conv_case(230 + i, SHAPES[name], 48, W, dtype, swap, op), exact_memory=True)
    for op in ("biased_conv", "short_conv") for i, (name, W, dtype, swap) in enumerate([
        ("decode", 4, BF16, True),
        ("verify", 3, FP32, False),
        ("columns", 4, FP32, True),
        ("mixed", 4, BF16, False),
        ("prefill", 4, FP32, True),
        ("no_parts", 4, FP32, False),
    ])
]
