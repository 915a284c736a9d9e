"""Adapt a kernel that indexes pools of states itself: it works on the engine's pools, or on mirrors of them.

A mirror is a packed copy of a pool with all allocated columns. Every byte of it is copied back into the engine's pool,
so instep sees every write of the kernel. Leaves out: the kernel; strategies that rerun tokens (`dense.py`).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch.nn.functional import pad

from instep_optimized.memory_addresses import Part, StateLayout
from instep_optimized.ops.op_protocols import GdnInputs, Ops, Recur
from instep_optimized.ops.plain import gdn as plain_ops
from instep_optimized.ops.watch_op_calls import memory_of
from instep_reference.contract.errors import BadInput, Unsupported
from instep_reference.contract.place_names import Place
from instep_reference.contract.recurrences import GDN, RECURRENCES, Recurrence

from ..watch.kernel_calls import adapts, called
from .read_only_arguments import only_read
from .returned_tensors import rows_of


@dataclass(frozen=True)
class Launch:
    """Arguments of a kernel: n sequences, packed in M rows one after the other, and pools with their states.

    q, k [M, H, K], v [M, HV, V]   for a raw kernel, the output of the conv; else normalised, and q times K ** -0.5
    log_decay, beta [M, HV]        not for a raw kernel;  a, b [M, HV], A_log, dt_bias [HV]: only for a raw one
                                   (`kda`: log_decay, a [M, HV, K], dt_bias [HV, K]; `mamba2` has no b)
    bound                          `kda`: the bound of a safe gate, in nats
    cu_seqlens [n + 1]             first row of each sequence, and M; all indices are int64
    pool [units, HV, V, K]         states, with the axes in the requested order ("KV": [units, HV, K, V])
    index [n]                      each sequence's unit of the pool: its state before the first row
    stores                         store the state after the last row there; if False, the unit must not change
    window                         maximum number of rows of a sequence in this launch: a verify's current window
    snapshots, rows                [rows, columns, ..], [n]: the state after row t goes to snapshots[rows[i], t]
    blocks, column                 [n, columns], [n]: the state after row t goes to unit blocks[i, t] of the pool, and
                                   index[i] = blocks[i, column[i]] contains the state before the rows
    An argument that does not apply is None. `columns` is the allocated number, and may exceed the current window.
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
    bound: float | None = None


Kernel = Callable[[Launch], torch.Tensor]  # -> core [M, HV, V]; it may change only its pools
Rows = Callable[[torch.Tensor], dict[str, Any]]  # the fields of a launch with these packed rows
GUARD = 8192.0  # fills the guards of a mirror: finite, exact in every dtype, and too large for a state
GATED, RAW = ("log_decay", "beta"), ("a", "b", "A_log", "dt_bias")
GIVEN = "arguments"  # attribute of q: what the op before a raw kernel was given


def pooled(
    base: Ops, *, name: str, window: Kernel | None = None, chunk: Kernel | None = None, raw: bool = False,
    strided: bool = False, packed: bool = False, order: StateLayout = "VK", op: str = GDN.name,
) -> Ops:
    """`base` with kernels over pools: `window` for decode and verify, `chunk` for prefill (None: that of `plain`).

    raw      the kernel normalises q and k and computes the gates itself. Its intermediate results are not visible, so
             instep computes the expected read-out from the kernel's inputs. With another op than `gdn` it shows
             q, k, v and the gates that `base` computes from the same arguments
    strided  no mirrors: the kernel gets the engine's own pools, whose units have gaps between them
    packed   the same without gaps: the engine allocates its pools without red zones and padding
    order    layout of the kernel's states: "VK" is [HV, V, K] with K contiguous, as in SGLang and vLLM
    op       the recurrence that the kernels compute. A raw kernel is of one whose rows pass through a conv
    """
    known = [name for name, row in RECURRENCES.items() if row.conv or not raw]
    if op not in known:
        raise BadInput("pooled: op", found=repr(op), expected=f"one of {', '.join(known)}")
    if order not in get_args(StateLayout):
        raise BadInput("pooled: order", found=repr(order), expected=" or ".join(get_args(StateLayout)))
    lend = lent_own(order) if strided or packed else mirrored(order)
    kernels = {"window": window, "chunk": chunk}
    plain: Recur = getattr(plain_ops, op)

    def recur(*, inputs: GdnInputs, parts: tuple[Part, ...], dtype: torch.dtype, to: Place) -> torch.Tensor:
        def rows(taken: torch.Tensor) -> dict[str, Any]:
            return {**GdnInputs(*(x[taken] for x in inputs))._asdict(), **dict.fromkeys(RAW)}

        return serve(rows, inputs.v, parts, dtype, lambda left: plain(
            inputs=inputs, parts=left, dtype=dtype, to=to))  # fmt: skip

    def recur_raw(*, inputs: GdnInputs, parts: tuple[Part, ...], dtype: torch.dtype, to: Place) -> torch.Tensor:
        given = getattr(inputs.q, GIVEN, None)
        if given is None:
            why = f"a raw kernel needs the arguments of its set's own op before {op}, which a replay has"
            raise Unsupported(f"{why}: use `instep replay`, and swap no other op")
        return serve(_raw_rows(RECURRENCES[op], **given), inputs.v, parts, dtype, lambda left: plain(
            inputs=inputs, parts=left, dtype=dtype, to=to))  # fmt: skip

    def fused(
        *, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor,
        key_heads: int, key_dim: int, parts: tuple[Part, ...], dtype: torch.dtype, to: Place,
    ) -> torch.Tensor:
        given: dict[str, Any] = {"mixed": mixed, "a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias,
                                 "key_heads": key_heads, "key_dim": key_dim}  # fmt: skip
        like = mixed[:, 2 * key_heads * key_dim :].reshape(len(mixed), len(A_log), -1)
        return serve(_raw_rows(GDN, **given), like, parts, dtype, lambda left: plain(
            inputs=plain_ops.gdn_inputs(**given, to=(to,) * 5), parts=left, dtype=dtype, to=to))  # fmt: skip

    def serve(
        rows: Rows, like: torch.Tensor, parts: tuple[Part, ...], dtype: torch.dtype,
        by_plain: Callable[[tuple[Part, ...]], torch.Tensor],
    ) -> torch.Tensor:
        adapts(op, kernels)
        left = tuple(part for part in parts if kernels[part.form] is None)
        core = by_plain(left) if left else torch.zeros_like(like, dtype=dtype)
        for part in parts:
            if (kernel := kernels[part.form]) is not None:
                _run(op, kernel, rows, part, lend, core)
        return core

    served: dict[str, Any] = {op: recur, "fused_gdn": None}
    if raw and op == GDN.name:
        served = {"fused_gdn": fused}
    elif raw:
        before = "selective_inputs" if RECURRENCES[op].inputs == "selective" else "gdn_inputs"
        served |= {op: recur_raw, before: _with_arguments(getattr(base, before))}
    products = {form: product for form, product in base.products.items() if form not in RECURRENCES[op].forms}
    return replace(
        base, name=name, keeps="inputs", captures=False, tiled=False, packed=packed or base.packed, trees=False,
        products=products, **served,
    )


def _with_arguments(inputs: Callable[..., GdnInputs]) -> Callable[..., GdnInputs]:
    """Wrap the op before a recurrence: its q also carries the arguments of the call, for a raw kernel."""

    def run(*, to: Any, **given: Any) -> GdnInputs:
        found = inputs(**given, to=to)
        setattr(found.q, GIVEN, given)
        return found

    return run


def _raw_rows(
    row: Recurrence, *, mixed: torch.Tensor, a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor,
    key_heads: int, key_dim: int, b: torch.Tensor | None = None, decay_bound: float | None = None,
) -> Rows:
    keys, heads = key_heads * key_dim, len(A_log)
    widths = [mixed.shape[1] - 2 * keys if name == "v" else keys for name in row.conv]
    split = dict(zip(row.conv, torch.split(mixed, widths, dim=1), strict=True))

    def rows(taken: torch.Tensor) -> dict[str, Any]:
        parts = {name: x[taken].reshape(len(taken), heads if name == "v" else key_heads, -1)
                 for name, x in split.items()}  # fmt: skip
        gates = {"a": a[taken], "b": None if b is None else b[taken], "A_log": A_log, "dt_bias": dt_bias}
        return {**parts, **gates, **dict.fromkeys(GATED), "bound": decay_bound}

    return rows


Lend = Callable[[torch.Tensor], AbstractContextManager[torch.Tensor]]  # a pool -> the pool of the kernel, for one call


def _run(op: str, kernel: Kernel, rows: Rows, part: Part, lend: Lend, core: torch.Tensor) -> None:
    if part.ring is not None or part.settled is not None:
        raise Unsupported("pooled kernels cannot rerun kept tokens; use --strategy snapshot or columns")
    which = torch.nonzero((part.count > 0) & (part.read.units >= 0))[:, 0]
    if not len(which):
        return
    units, column, fresh = part.read.units[which], part.read.column, part.fresh[which]
    ends, taken = packed_rows(part, which)
    if not stored_where_read(part, which) or (part.store is None and fresh.any()):
        raise Unsupported("a pooled kernel stores a state in the unit that it has read")
    with ExitStack() as lent:
        pool, index, where = lent.enter_context(lend(part.read.pool)), units, dict[str, Any]()
        if column is not None:  # each column of a slot is a unit
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
        called(f"{op}.{part.form}", part.count[which].tolist())
        given = {**rows(taken), "cu_seqlens": ends, "index": index, **where}
        with only_read({name: value for name, value in given.items() if name != "snapshots"}):
            found = kernel(Launch(**given, pool=pool, stores=part.store is not None, window=part.most))
        core[taken] = rows_of(kernel, found, "core", (len(taken), *core.shape[1:])).to(core.dtype)


def packed_rows(part: Part, which: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack the rows of these requests one after the other -> [n + 1] first row of each, [M] rows in the launch."""
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
        raise Unsupported("columns of strided pools are not evenly spaced: use packed=True")
    return pool.flatten(0, 1)


def allocated(snapshots: torch.Tensor) -> torch.Tensor:
    """All allocated columns of a pool of which only the columns of the current window were passed."""
    units, _, *block = snapshots.shape
    unit, column, *inner = snapshots.stride()
    return snapshots.as_strided((units, unit // column, *block), (unit, column, *inner))


def mirrored(order: StateLayout) -> Lend:
    @contextmanager
    def mirror(pool: torch.Tensor) -> Iterator[torch.Tensor]:
        pool = _ordered(pool, order)
        lines = pool.new_full((len(pool) + 2, *pool.shape[1:]), GUARD)  # and a guard unit at each end
        lines[1:-1] = pool
        yield lines[1:-1]
        pool.copy_(lines[1:-1])
        for line, where in ((lines[0], "before the first"), (lines[-1], "after the last")):
            if not (line == GUARD).all():  # also finds a NaN
                raise IndexError(f"the kernel wrote {where} of the {len(pool)} units of a pool")

    return mirror


def lent_own(order: StateLayout) -> Lend:
    @contextmanager
    def own(pool: torch.Tensor) -> Iterator[torch.Tensor]:
        pool = _ordered(pool, order)
        if pool.stride(-1) != 1:
            raise Unsupported(f"the kernel's states have the layout {order}: use --layout {order}, or mirrors")
        yield pool

    return own


def _ordered(pool: torch.Tensor, order: StateLayout) -> torch.Tensor:
    """View a pool of states [.., HV, K, V] in the order of the kernel's axes."""
    return pool.mT if order == "VK" else pool
