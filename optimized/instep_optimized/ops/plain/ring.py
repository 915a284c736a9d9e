"""The ring of a part: which kept tokens are run again, read one at a time, and rows kept for later.

Leaves out: what is made of a token; numbers and labels share this. Places where nothing was kept are never read.
"""

from __future__ import annotations

import torch

from instep_reference.contract.errors import Unsupported
from instep_reference.contract.place import Place

from ...layout import Inputs, Part, Ring, Updates

NO_UPDATES = 'the ring keeps updates, and this kernel gives none back: declare keeps="inputs" in its op set'


def owed(part: Part) -> torch.Tensor:
    """[B] how many tokens each request runs again: none without a ring, if fresh, or if its `read` unit is -1."""
    ring = part.ring
    if ring is None:
        return torch.zeros_like(part.count)
    returning = (ring.units >= 0) & (part.read.units >= 0) & ~part.fresh
    return ring.pending.clamp(0, ring.size) * returning


def recalled(ring: Ring, requests: torch.Tensor, age: int | torch.Tensor) -> Updates | Inputs:
    """The `age`-th pending token of these requests (numbers in the part); `age` is one for all, or one of each."""
    units, entries = ring.units[requests], (ring.begin[requests] + age) % ring.size
    return type(ring.kept)(*(pool[units, entries % pool.shape[1]] for pool in ring.kept))


def keep(ring: Ring | None, requests: torch.Tensor, row: int, inputs: Inputs, did: Updates | None = None) -> None:
    """Keep row `row` of these requests, bit by bit: what it did to the states, or consumed, as the ring asks."""
    if ring is None:
        return
    token = inputs if isinstance(ring.kept, Inputs) else did
    if token is None:
        raise Unsupported(NO_UPDATES)
    units, first = ring.units[requests], ring.keep[requests]
    wanted = (units >= 0) & (first >= 0)
    entries = (first[wanted] + row) % ring.size
    for pool, x in zip(ring.kept, token, strict=True):
        pool[units[wanted], entries % pool.shape[1]] = x[wanted].to(pool.dtype)


def kept_updates(*, parts: tuple[Part, ...], rows: int, to: Place) -> torch.Tensor:
    """`KeptUpdates` of the seam, for every op set."""
    pool = next(ring.own for ring, _ in _rings(parts))
    shown = pool.new_zeros(rows + 1, *pool.shape[2:])  # the row behind the last takes what nobody keeps
    for ring, part in _rings(parts):
        units, entries, at = _spots(ring, part, rows)
        shown[at] = ring.own[units, entries]
    return shown[:rows]


def put_updates(parts: tuple[Part, ...], updates: torch.Tensor) -> None:
    """The reverse: other updates [N, HV, V] become those that the rings keep of these rows. Waits for nothing: where
    nothing is kept, what stands there is written once more."""
    for ring, part in _rings(parts):
        units, entries, at = _spots(ring, part, len(updates))
        there = ring.own[units, entries]
        given = updates[at.clamp(max=len(updates) - 1)].to(ring.own.dtype)
        ring.own[units, entries] = torch.where((at < len(updates))[..., None, None], given, there)


def keeps_updates(parts: tuple[Part, ...]) -> bool:
    """Whether some ring of these parts keeps updates."""
    return bool(_rings(parts))


def _rings(parts: tuple[Part, ...]) -> list[tuple[Ring, Part]]:
    return [(part.ring, part) for part in parts if part.ring is not None and isinstance(part.ring.kept, Updates)]


def _spots(ring: Ring, part: Part, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[B, most] each: unit and entry of every row, and its packed number; `rows` where it is not kept."""
    row = torch.arange(part.most, device=part.count.device)
    keeps = (ring.units >= 0) & (ring.keep >= 0) & (part.read.units >= 0)
    wanted = (row < part.count[:, None]) & keeps[:, None]
    entries = (ring.keep[:, None] + row) % ring.size % ring.own.shape[1]
    units = ring.units.clamp(min=0)[:, None].expand_as(entries)
    return units, entries, torch.where(wanted, part.begin[:, None] + row, rows)
