"""Ops that only copy bits: KV rows into their pages, units of memory from pool to pool, entries within a pool.

The `ledger` op set uses these ops too. Leaves out: arithmetic.
"""

import torch

from ...memory_addresses import Address
from .scaled_tiles import put


def store_rows(
    *, rows: torch.Tensor, pool: torch.Tensor, locations: torch.Tensor, scales: torch.Tensor | None = None
) -> None:
    """Store row n at position `locations[n]`, counted over pages of the pool's own size; -1 skips."""
    size, wanted = pool.shape[1], locations >= 0
    spots = locations[wanted]
    put(Address(pool, spots, scales=scales), (spots // size, spots % size), rows[wanted])


def move(*, source: Address, target: Address) -> None:
    """Copy units from source to target, request by request; all reads come before all writes."""
    wanted = (source.units >= 0) & (target.units >= 0)
    here, there = _spots(source, wanted), _spots(target, wanted)
    target.pool[there] = source.pool[here]
    if target.scales is not None and source.scales is not None:
        target.scales[there] = source.scales[here]


def move_rows(*, pool: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy entries of a pool, one column of the plan after the other: requests share no entry."""
    size = pool.shape[1]
    for at, to in zip(source.T, target.T, strict=True):
        wanted = (at >= 0) & (to >= 0)
        at, to = at[wanted], to[wanted]
        pool[to // size, to % size] = pool[at // size, at % size]


def _spots(address: Address, wanted: torch.Tensor) -> tuple[torch.Tensor, ...]:
    units = address.units[wanted]
    return (units,) if address.column is None else (units, address.column[wanted])
