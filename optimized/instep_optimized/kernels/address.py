"""An address as kernel arguments: pool, units, columns, and every stride read from the tensor.

Leaves out: which op reads or writes it.
"""

from __future__ import annotations

from typing import Any

from ..layout import Address


def flat(address: Address | None, inner: int, otherwise: Address) -> tuple[Any, ...]:
    """(pool, units, column, unit step, column step, one step per inner axis) for a kernel.

    An absent address is stood in for by `otherwise`, so that the kernel compiles to the same code; a flag beside
    it (`given`) says not to touch it. An absent column is stood in for by the units with a column step of 0.
    """
    address = address or otherwise
    pool, steps = address.pool, address.pool.stride()
    positions = pool.dim() - inner == 2
    column = address.units if address.column is None else address.column
    return pool, address.units, column, steps[0], steps[1] if positions else 0, *steps[pool.dim() - inner :]


def given(address: Address | None) -> int:
    """1 if there is an address, as a run-time argument: no kernel is compiled differently for it."""
    return int(address is not None)
