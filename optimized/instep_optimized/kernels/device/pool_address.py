"""An address as kernel arguments: pool, units, columns, and every stride read from the tensor.

Leaves out: the op that reads or writes it.
"""

from __future__ import annotations

from typing import Any

from ...memory_addresses import Address


def flat(address: Address | None, inner: int, otherwise: Address) -> tuple[Any, ...]:
    """Expand to (pool, units, column, unit step, column step, one step per inner axis) for a kernel.

    If the address is absent, `otherwise` is passed in its place, so that the kernel compiles to the same code. A
    separate flag (`given`) then keeps the kernel from touching it. If the column is absent, the units are passed in its
    place with a column step of 0.
    """
    address = address or otherwise
    pool, steps = address.pool, address.pool.stride()
    positions = pool.dim() - inner == 2  # [units, positions, ...] and not [units, ...]
    column = address.units if address.column is None else address.column
    return pool, address.units, column, steps[0], steps[1] if positions else 0, *steps[pool.dim() - inner :]


def given(address: Address | None) -> int:
    """Return 1 if there is an address, else 0. It is a run-time argument, so both cases run the same compiled code."""
    return int(address is not None)
