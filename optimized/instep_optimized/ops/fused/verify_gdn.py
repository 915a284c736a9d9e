"""The delta rule of a verify, with the conv, norms and gates before it: no intermediate row is stored."""

import torch

from instep_reference.contract.place_names import Place
from instep_reference.contract.recurrences import GDN, Recurrence

from ...memory_addresses import Part
from ..op_protocols import Ops
from .conv_inputs import NONE, Bounds, conv_inputs
from .window_gdn import serves as of_windows


def verify_gdn(
    ops: Ops, *, x: torch.Tensor, weight: torch.Tensor, windows: tuple[Part, ...], a: torch.Tensor, b: torch.Tensor,
    A_log: torch.Tensor, dt_bias: torch.Tensor, key_heads: int, key_dim: int, parts: tuple[Part, ...],
    dtype: torch.dtype, to: tuple[Place, ...], row: Recurrence = GDN, bounds: Bounds = NONE,
) -> torch.Tensor:  # fmt: skip
    """Run `VerifyGdn` if it `serves`; else the conv and `WindowGdn`, if that serves; else the parts.

    bounds: `beta_bound` of `MakeGdnInputs`, if it is not 1; then the parts
    """
    rule = {"a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias, "key_heads": key_heads, "key_dim": key_dim}
    if ops.verify_gdn is not None and row is GDN and not bounds and serves(windows, parts, x.dtype):
        return ops.verify_gdn(x=x, weight=weight, windows=windows, **rule, parts=parts, dtype=dtype, to=to)  # type: ignore[arg-type]
    if ops.window_gdn is not None and row is GDN and not bounds and of_windows(parts, x.dtype):
        mixed = ops.conv(x=x, weight=weight, parts=windows, to=to[0])
        return ops.window_gdn(mixed=mixed, **rule, parts=parts, dtype=dtype, to=to[1:])  # type: ignore[arg-type]
    inputs = conv_inputs(ops, x=x, weight=weight, parts=windows, **rule, to=to[:-1], bounds=bounds)  # type: ignore[arg-type]
    return ops.recurrence(row)(inputs=inputs, parts=parts, dtype=dtype, to=to[-1])


def serves(windows: tuple[Part, ...], parts: tuple[Part, ...], dtype: torch.dtype) -> bool:
    """Return whether the op supports these parts with rows in dtype."""
    return of_windows(windows, dtype) and of_windows(parts, dtype) and all(map(apart, windows))


def apart(part: Part) -> bool:
    """Return whether windows are kept after every row, outside of the memory that they are read from."""
    if part.store is not None or part.per_row is None:
        return False
    (begin, end), (first, last) = _span(part.per_row.pool), _span(part.read.pool)
    return end <= first or last <= begin


def _span(pool: torch.Tensor) -> tuple[int, int]:
    """Return the first and last address of its memory: tensors may share memory with different beginnings."""
    memory = pool.untyped_storage()
    return memory.data_ptr(), memory.data_ptr() + memory.nbytes()
