"""Adapt a causal conv kernel to the op `conv`: a kernel that indexes pools of windows, or one with dense windows.

The checks are those of `pooled.py` and `dense.py`: every byte of a mirror is copied back, inputs must not change, and
the result reports a window kernel that was never called with two rows. Leaves out: the kernel; widened conv windows
(`--conv widened`).
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from instep_optimized.memory_addresses import Part
from instep_optimized.ops.op_protocols import Conv, Ops
from instep_optimized.ops.plain.causal_conv import conv as plain_conv
from instep_optimized.ops.plain.requests_of_part import Lanes, after, along, before, lanes
from instep_reference.contract.errors import Unsupported
from instep_reference.contract.place_names import Place

from ..watch.kernel_calls import adapts, called
from .dense import launches
from .pooled import Lend, allocated, lent_own, mirrored, packed_rows, stored_where_read
from .read_only_arguments import only_read
from .returned_tensors import pair_of, rows_of


@dataclass(frozen=True)
class ConvLaunch:
    """Arguments of a kernel: n sequences, packed in M rows one after the other, and pools with their windows.

    x [M, C], weight [C, W]        rows, and the taps of every channel; the kernel also applies the silu
    cu_seqlens [n + 1]             where each sequence begins in the rows; all indices are int64
    pool [units, C, W - 1]         windows, the oldest input first
    index [n]                      each sequence's unit of the pool: its window before the first row
    fresh [n] bool                 whether the sequence begins: its unit is zero
    stores                         store the window after the last row there; if False, the unit must not change
    window                         maximum number of rows of a sequence in this launch
    snapshots, rows                [rows, columns, C, W - 1], [n]: the window after row t goes to snapshots[rows[i], t]
    An argument that does not apply is None.
    """

    x: torch.Tensor
    weight: torch.Tensor
    cu_seqlens: torch.Tensor
    pool: torch.Tensor
    index: torch.Tensor
    fresh: torch.Tensor
    stores: bool
    window: int
    snapshots: Any = None
    rows: Any = None

    @property
    def even(self) -> torch.Tensor:
        """The rows as [n, C, rows], if all sequences have one length. `causal_conv1d_update` takes them so."""
        return self.x.view(len(self.index), -1, self.x.shape[1]).mT


Kernel = Callable[[ConvLaunch], torch.Tensor]  # -> [M, C]; it may change only its pools


class DenseKernel(Protocol):
    """x [M, C], n packed sequences; weight [C, W]; lengths [n]; window [n, C, W - 1] -> [M, C], windows afterwards."""

    def __call__(
        self, *, x: torch.Tensor, weight: torch.Tensor, lengths: torch.Tensor, window: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


def pooled_conv(
    base: Ops, *, name: str, window: Kernel, chunk: Kernel | None = None, even: bool = False, shifts: bool = False,
    strided: bool = False, packed: bool = False,
) -> Ops:
    """`base` with a conv over pools: `window` for decode and verify, `chunk` for prefill (None: that of `plain`).

    even     `window` takes sequences of one length: it is called once for each length (`ConvLaunch.even`)
    shifts   a verify shifts the live window, and your commit repairs it. Our commit reads the live window, so the
             adapter restores it after the call
    strided  no mirrors: the kernel gets the engine's own pools;  packed: the same, without red zones and padding
    """
    lend = lent_own("KV") if strided or packed else mirrored("KV")
    kernels = {"window": window, "chunk": chunk}

    def conv(*, x: torch.Tensor, weight: torch.Tensor, parts: tuple[Part, ...], to: Place) -> torch.Tensor:
        adapts("conv", kernels)
        out = plain_conv(x=x, weight=weight, parts=tuple(part for part in parts if kernels[part.form] is None), to=to)
        for part in parts:
            kernel, alive = kernels[part.form], torch.nonzero((part.count > 0) & (part.read.units >= 0))[:, 0]
            if kernel is None or not len(alive):
                continue
            counts, apart = part.count[alive], even and part.form == "window"
            for which in [alive[counts == count] for count in sorted(set(counts.tolist()))] if apart else [alive]:
                _pooled(kernel, x, weight, part, which, lend, shifts, out)
        return out

    return _with(base, name, conv, packed)


def dense_conv(base: Ops, *, name: str, window: DenseKernel, chunk: DenseKernel) -> Ops:
    """`base` with a conv that takes and returns one window per sequence. It is called once per row if all are kept."""
    kernels = {"window": window, "chunk": chunk}

    def conv(*, x: torch.Tensor, weight: torch.Tensor, parts: tuple[Part, ...], to: Place) -> torch.Tensor:
        adapts("conv", kernels)
        out = torch.zeros_like(x)
        for part in parts:
            who = lanes(part)
            if len(who.which):
                _dense(kernels[part.form], x, weight, part, who, out)
        return out

    return _with(base, name, conv, base.packed)


def _with(base: Ops, name: str, conv: Conv, packed: bool) -> Ops:
    products = {form: product for form, product in base.products.items() if form != "conv"}
    return replace(
        base, name=name, conv=conv, captures=False, packed=packed or base.packed, trees=False, products=products
    )


def _pooled(
    kernel: Kernel, x: torch.Tensor, weight: torch.Tensor, part: Part, which: torch.Tensor, lend: Lend, shifts: bool,
    out: torch.Tensor,
) -> None:
    if part.read.column is not None:
        raise Unsupported("a conv over pools keeps windows of W - 1 inputs: use --conv windows")
    units, fresh, where = part.read.units[which], part.fresh[which], dict[str, Any]()
    if not stored_where_read(part, which) or (part.store is None and fresh.any()):
        raise Unsupported("a pooled conv stores a window in the unit that it has read")
    ends, taken = packed_rows(part, which)
    with ExitStack() as lent:
        pool = lent.enter_context(lend(part.read.pool))
        if part.per_row is not None:
            kept = lent.enter_context(lend(allocated(part.per_row.pool)))
            where = {"snapshots": kept, "rows": part.per_row.units[which]}
        pool[units[fresh]] = 0  # as an engine clears a slot for a request that begins
        live = pool[units]
        called(f"conv.{part.form}", part.count[which].tolist())
        given = {"x": x[taken], "weight": weight, "cu_seqlens": ends, "index": units, "fresh": fresh, **where}
        with only_read({name: value for name, value in given.items() if name != "snapshots"}):
            found = kernel(ConvLaunch(**given, pool=pool, stores=part.store is not None, window=part.most))
        if shifts and part.store is None:
            pool[units] = live
    out[taken] = rows_of(kernel, found, "mixed", (len(taken), out.shape[1])).to(out.dtype)


def _dense(
    kernel: DenseKernel, x: torch.Tensor, weight: torch.Tensor, part: Part, who: Lanes, out: torch.Tensor
) -> None:
    window = before(part, who, x.dtype)
    for row, taken in launches(part, who):
        rows, lengths = who.rows[taken], taken.sum(dim=1)
        called(f"conv.{part.form}", [length for length in lengths.tolist() if length])
        given = {"x": x[rows], "weight": weight, "lengths": lengths}
        with only_read(given):
            found = kernel(**given, window=window)
        mixed, window = pair_of(kernel, found, mixed=given["x"].shape, window=window.shape)
        out[rows] = mixed.to(out.dtype)
        along(part.per_row, who, row, window[: who.alive[row]])
    after(part.store, who, window)
