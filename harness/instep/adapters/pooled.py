"""Puts a kernel that indexes pools of states itself behind the op: it is lent the engine's pools, or mirrors of them.

A mirror is packed at the widths that are allocated. Every byte of it goes back into the engine's pool, so whatever the
kernel wrote, and wherever, is seen there. Leaves out: the kernel; strategies that run tokens again (`dense.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch.nn.functional import pad

from instep_optimized.layout import Part, StateLayout
from instep_optimized.ops.around import memory_of
from instep_optimized.ops.base import GdnInputs, Ops
from instep_optimized.ops.plain.gdn import gdn as plain_gdn
from instep_optimized.ops.plain.gdn import gdn_inputs as plain_inputs
from instep_reference.contract.errors import BadInput, Unsupported
from instep_reference.contract.place import Place

from ..observe.exercised import adapts, called
from .read_only import only_read
from .returned import rows_of


@dataclass(frozen=True)
class Launch:
    """What a kernel gets: n sequences, packed in M rows one after the other, and pools with their states.

    q, k [M, H, K], v [M, HV, V]   of a raw kernel: as the conv gives them; else normalised, q times K ** -0.5
    log_decay, beta [M, HV]        not of a raw kernel;  a, b [M, HV], A_log, dt_bias [HV]: only of a raw one
    cu_seqlens [n + 1]             where each sequence begins in the rows; all indices are int64
    pool [units, HV, V, K]         states, as the order of axes that was asked for ("KV": [units, HV, K, V])
    index [n]                      each sequence's unit of the pool: its state before the first row
    stores                         whether the state after the last row goes there, too; else the unit must not change
    window                         the most rows that a sequence has in this launch: the window in force of a verify
    snapshots, rows                [rows, columns, ..], [n]: the state after row t goes to snapshots[rows[i], t]
    blocks, column                 [n, columns], [n]: the state after row t goes to unit blocks[i, t] of the pool; the
                                   state before stands in column `column`, so index[i] = blocks[i, column[i]]
    What does not apply is None. `columns` is what is allocated: it may be more than the window in force.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: Any
    beta: Any
    a: Any
    b: Any
    A_log: Any
    dt_bias: Any
    cu_seqlens: torch.Tensor
    pool: torch.Tensor
    index: torch.Tensor
    stores: bool
    window: int
    snapshots: Any = None
    rows: Any = None
    blocks: Any = None
    column: Any = None


Kernel = Callable[[Launch], torch.Tensor]  # -> core [M, HV, V]; it may change its pools, and nothing else
Rows = Callable[[torch.Tensor], dict[str, Any]]  # the fields of a launch that hold these packed rows
GUARD = 8192.0  # what stands around a mirror: finite, the same in every dtype, and too large for a state
GATED, RAW = ("log_decay", "beta"), ("a", "b", "A_log", "dt_bias")


def pooled(
    base: Ops, *, name: str, window: Kernel | None = None, chunk: Kernel | None = None, raw: bool = False,
    strided: bool = False, packed: bool = False, order: StateLayout = "VK",
) -> Ops:
    """`base` with kernels over pools: `window` for decode and verify, `chunk` for prefill; None leaves it to plain.

    raw      the kernel norms q and k and computes the gates itself. What stays inside it cannot be shown: the read-out
             is then judged from what goes into the kernel
    strided  no mirrors: the kernel gets the engine's own pools, whose units do not lie side by side
    packed   the same, but pools lie side by side, because the engine leaves out red zones and padding
    order    how the kernel's states lie: "VK" is [HV, V, K] with K contiguous, as in SGLang and vLLM
    """
    if order not in get_args(StateLayout):
        raise BadInput("pooled: order", found=repr(order), expected=" or ".join(get_args(StateLayout)))
    lend = lent_own(order) if strided or packed else mirrored(order)
    kernels = {"window": window, "chunk": chunk}

    def gdn(*, inputs: GdnInputs, parts: tuple[Part, ...], dtype: torch.dtype, to: Place) -> torch.Tensor:
        def rows(taken: torch.Tensor) -> dict[str, Any]:
            return {**GdnInputs(*(x[taken] for x in inputs))._asdict(), **dict.fromkeys(RAW)}

        return serve(rows, inputs.v, parts, dtype, lambda left: plain_gdn(
            inputs=inputs, parts=left, dtype=dtype, to=to))  # fmt: skip

    def fused(
        *, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor,
        key_heads: int, key_dim: int, parts: tuple[Part, ...], dtype: torch.dtype, to: Place,
    ) -> torch.Tensor:
        keys, heads, count = key_heads * key_dim, len(A_log), len(mixed)
        q, k = (x.reshape(count, key_heads, key_dim) for x in (mixed[:, :keys], mixed[:, keys : 2 * keys]))
        v = mixed[:, 2 * keys :].reshape(count, heads, -1)

        def rows(taken: torch.Tensor) -> dict[str, Any]:
            gates = {"a": a[taken], "b": b[taken], "A_log": A_log, "dt_bias": dt_bias}
            return {"q": q[taken], "k": k[taken], "v": v[taken], **gates, **dict.fromkeys(GATED)}

        return serve(rows, v, parts, dtype, lambda left: plain_gdn(inputs=plain_inputs(
            mixed=mixed, a=a, b=b, A_log=A_log, dt_bias=dt_bias, key_heads=key_heads, key_dim=key_dim, to=(to,) * 5,
        ), parts=left, dtype=dtype, to=to))  # fmt: skip

    def serve(
        rows: Rows, like: torch.Tensor, parts: tuple[Part, ...], dtype: torch.dtype,
        plain: Callable[[tuple[Part, ...]], torch.Tensor],
    ) -> torch.Tensor:
        adapts("gdn", kernels)
        left = tuple(part for part in parts if kernels[part.form] is None)
        core = plain(left) if left else torch.zeros_like(like, dtype=dtype)
        for part in parts:
            if (kernel := kernels[part.form]) is not None:
                _run(kernel, rows, part, lend, core)
        return core

    served: dict[str, Any] = {"fused_gdn": fused} if raw else {"gdn": gdn, "fused_gdn": None}
    products = {form: product for form, product in base.products.items() if not form.startswith("gdn.")}
    return replace(
        base, name=name, keeps="inputs", captures=False, tiled=False, packed=packed or base.packed, trees=False,
        products=products, **served,
    )


Lend = Callable[[torch.Tensor], AbstractContextManager[torch.Tensor]]  # a pool -> around a call: what the kernel gets


def _run(kernel: Kernel, rows: Rows, part: Part, lend: Lend, core: torch.Tensor) -> None:
    if part.ring is not None or part.settled is not None:
        raise Unsupported("a kernel over pools runs no kept token again; strategies snapshot and columns need none")
    which = torch.nonzero((part.count > 0) & (part.read.units >= 0))[:, 0]
    if not len(which):
        return
    units, column, fresh = part.read.units[which], part.read.column, part.fresh[which]
    ends, taken = packed_rows(part, which)
    if not stored_where_read(part, which) or (part.store is None and fresh.any()):
        raise Unsupported("a kernel over pools stores a state where it has read it")
    with ExitStack() as lent:
        pool, index, where = lent.enter_context(lend(part.read.pool)), units, dict[str, Any]()
        if column is not None:  # a column of a slot is a unit of its own
            columns, pool = pool.shape[1], _flat(pool)
            blocks = units[:, None] * columns + torch.arange(columns, device=units.device)
            index = blocks.gather(1, column[which, None])[:, 0]
            where = {"blocks": blocks, "column": column[which]}
        if part.per_row is None:
            where = {}
        elif memory_of(part.per_row.pool) != memory_of(part.read.pool):
            snapshots = lent.enter_context(lend(allocated(part.per_row.pool)))
            where = {"snapshots": snapshots, "rows": part.per_row.units[which]}
        pool[index[fresh]] = 0  # as an engine clears a slot for a request that begins
        called(f"gdn.{part.form}", part.count[which].tolist())
        given = {**rows(taken), "cu_seqlens": ends, "index": index, **where}
        with only_read({name: value for name, value in given.items() if name != "snapshots"}):
            found = kernel(Launch(**given, pool=pool, stores=part.store is not None, window=part.most))
        core[taken] = rows_of(kernel, found, "core", (len(taken), *core.shape[1:])).to(core.dtype)


def packed_rows(part: Part, which: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of these requests: [n + 1] where each begins when they are packed one after the other, [M] their rows."""
    lengths = part.count[which]
    ends = pad(lengths.cumsum(0), (1, 0))
    rows = torch.arange(int(ends[-1]), device=ends.device) + (part.begin[which] - ends[:-1]).repeat_interleave(lengths)
    return ends, rows


def stored_where_read(part: Part, which: torch.Tensor) -> bool:
    if part.store is None:
        return True
    pairs = (part.store.units, part.read.units), (part.store.column, part.read.column)
    return all(one is other or (one is not None and other is not None and torch.equal(one[which], other[which]))
               for one, other in pairs)  # fmt: skip


def _flat(pool: torch.Tensor) -> torch.Tensor:
    """[slots, columns, ..] as [slots * columns, ..]."""
    if pool.stride(0) != pool.shape[1] * pool.stride(1):
        raise Unsupported("columns of strided pools do not lie at one distance from each other: packed=True")
    return pool.flatten(0, 1)


def allocated(snapshots: torch.Tensor) -> torch.Tensor:
    """All columns that lie between one unit and the next, where only those of the window in force were given."""
    units, _, *block = snapshots.shape
    unit, column, *inner = snapshots.stride()
    return snapshots.as_strided((units, unit // column, *block), (unit, column, *inner))


def mirrored(order: StateLayout) -> Lend:
    @contextmanager
    def mirror(pool: torch.Tensor) -> Iterator[torch.Tensor]:
        pool = _ordered(pool, order)
        lines = pool.new_full((len(pool) + 2, *pool.shape[1:]), GUARD)  # a unit more at each end: nobody's
        lines[1:-1] = pool
        yield lines[1:-1]
        pool.copy_(lines[1:-1])
        for line, where in ((lines[0], "before the first"), (lines[-1], "behind the last")):
            if not (line == GUARD).all():  # a NaN that was written there is no guard either
                raise IndexError(f"the kernel wrote {where} of the {len(pool)} units of a pool")

    return mirror


def lent_own(order: StateLayout) -> Lend:
    @contextmanager
    def own(pool: torch.Tensor) -> Iterator[torch.Tensor]:
        pool = _ordered(pool, order)
        if pool.stride(-1) != 1:
            raise Unsupported(f"the kernel's states lie as {order}: --layout {order}, or let it have mirrors")
        yield pool

    return own


def _ordered(pool: torch.Tensor, order: StateLayout) -> torch.Tensor:
    """A pool of states seen as [.., HV, K, V] in the order of the kernel's axes."""
    return pool.mT if order == "VK" else pool
