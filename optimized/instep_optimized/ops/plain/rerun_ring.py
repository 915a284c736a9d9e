"""The ring of a part: kept tokens are read one at a time, to run them again; rows are kept for later.

Numbers and labels share this code. An entry in which nothing was kept is never used. Leaves out: the computation with a
token.
"""

from __future__ import annotations

import torch

from instep_reference.contract.errors import Unsupported
from instep_reference.contract.place_names import Place

from ...memory_addresses import Inputs, Part, Ring, Updates

NO_UPDATES = 'the ring keeps updates, and this kernel gives none back: declare keeps="inputs" in its op set'


def owed(part: Part) -> torch.Tensor:
    """Count the tokens each request runs again [B]; 0 without a ring, if fresh, or if its `read` unit is -1."""
    ring = part.ring
    if ring is None:
        return torch.zeros_like(part.count)
    returning = (ring.units >= 0) & (part.read.units >= 0) & ~part.fresh
    return ring.pending.clamp(0, ring.size) * returning


def recalled(ring: Ring, requests: torch.Tensor, age: int | torch.Tensor) -> Updates | Inputs:
    """Load pending token number `age` (0: the oldest) of these requests; `age` is for all, or one of each."""
    units, entries = ring.units[requests], (ring.begin[requests] + age) % ring.size
    return type(ring.kept)(*(pool[units, entries % pool.shape[1]] for pool in ring.kept))


def keep(ring: Ring | None, requests: torch.Tensor, row: int, inputs: Inputs, did: Updates | None = None) -> None:
    """Keep row `row` of these requests bit by bit: its updates or its inputs, whichever the ring has pools for."""
    if ring is None:
        return
    token = inputs if isinstance(ring.kept, Inputs) else did
    if token is None:
        raise Unsupported(NO_UPDATES)
    units, first = ring.units[requests], ring.keep[requests]  # [n]
    wanted = (units >= 0) & (first >= 0)
    entries = (first[wanted] + row) % ring.size
    for pool, x in zip(ring.kept, token, strict=True):  # the pool `own` may have fewer entries than the ring
        pool[units[wanted], entries % pool.shape[1]] = x[wanted].to(pool.dtype)


def kept_updates(*, parts: tuple[Part, ...], rows: int, to: Place) -> torch.Tensor:
    """`KeptUpdates` of the seam, for every op set."""
    pool = next(ring.own for ring, _ in _rings(parts))
    shown = pool.new_zeros(rows + 1, *pool.shape[2:])  # one row more: it takes the entries of rows that are not kept
    for ring, part in _rings(parts):
        units, entries, at = _spots(ring, part, rows)
        shown[at] = ring.own[units, entries]
    return shown[:rows]


def put_updates(parts: tuple[Part, ...], updates: torch.Tensor) -> None:
    """Reverse `kept_updates`: write other updates [N, HV, V] into the entries that keep these rows.

    It waits for nothing. So it does not check which rows are kept: entries of other rows get their own values back.
    """
    for ring, part in _rings(parts):
        units, entries, at = _spots(ring, part, len(updates))
        there = ring.own[units, entries]
        given = updates[at.clamp(max=len(updates) - 1)].to(ring.own.dtype)
        ring.own[units, entries] = torch.where((at < len(updates))[..., None, None], given, there)


def keeps_updates(parts: tuple[Part, ...]) -> bool:
    """Return whether some ring of these parts keeps updates."""
    return bool(_rings(parts))


def _rings(parts: tuple[Part, ...]) -> list[tuple[Ring, Part]]:
    return [(part.ring, part) for part in parts if part.ring is not None and isinstance(part.ring.kept, Updates)]


def _spots(ring: Ring, part: Part, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return three [B, most]: unit and entry of every row, and its packed row number, or `rows` if it is not kept."""
    row = torch.arange(part.most, device=part.count.device)
    keeps = (ring.units >= 0) & (ring.keep >= 0) & (part.read.units >= 0)
    wanted = (row < part.count[:, None]) & keeps[:, None]
    entries = (ring.keep[:, None] + row) % ring.size % ring.own.shape[1]
    units = ring.units.clamp(min=0)[:, None].expand_as(entries)
    return units, entries, torch.where(wanted, part.begin[:, None] + row, rows)
