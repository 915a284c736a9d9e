"""The ring of a part: kept tokens are read one at a time, to run them again; rows are kept for later.

Its integer work is here, too: which tokens run again, where rows are kept, how many tokens the state then contains.
Nothing here waits for the host. Numbers and labels share this code. An entry in which nothing was kept is never used.
Leaves out: the computation with a token.
"""

import torch

from instep_reference.contract.errors import Unsupported
from instep_reference.contract.place_names import Place

from ...memory_addresses import Inputs, Part, Ring, SplitUpdates, Updates
from ..integer_op_protocols import RingPlan

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
    kept = type(ring.kept)(*(pool[units, entries % pool.shape[1]] for pool in ring.kept))
    return joined(kept) if isinstance(kept, SplitUpdates) else kept


def in_two_parts(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Split numbers into a high part, to nearest, and a low part, the rest to nearest."""
    high = x.to(dtype)
    return high, (x - high.to(x)).to(dtype)


def joined(kept: SplitUpdates) -> Updates:
    """Add the parts again: exact in the dtype of the decay, which is that of the recurrence."""
    wide = kept.decay.dtype
    return Updates(kept.k.to(wide) + kept.k_low.to(wide), kept.decay, kept.update.to(wide) + kept.update_low.to(wide))


def keep(ring: Ring | None, requests: torch.Tensor, row: int, inputs: Inputs, did: Updates | None = None) -> None:
    """Keep row `row` of these requests: its updates or its inputs, whichever the ring has pools for.

    All are kept bit by bit, except that the low parts of a split ring are rounded.
    """
    if ring is None:
        return
    token: Updates | Inputs | SplitUpdates | None = inputs if isinstance(ring.kept, Inputs) else did
    if token is None:
        raise Unsupported(NO_UPDATES)
    if isinstance(ring.kept, SplitUpdates) and isinstance(token, Updates):
        (k, k_low), (update, update_low) = (in_two_parts(x, ring.own.dtype) for x in (token.k, token.update))
        token = SplitUpdates(k, token.decay, update, k_low, update_low)
    units, first = ring.units[requests], ring.keep[requests]  # [n]
    wanted = (units >= 0) & (first >= 0)
    entries = (first[wanted] + row) % ring.size
    for pool, x in zip(ring.kept, token, strict=True):  # the pool `own` may have fewer entries than the ring
        pool[units[wanted], entries % pool.shape[1]] = x[wanted].to(pool.dtype)


def kept_updates(*, parts: tuple[Part, ...], rows: int, to: Place) -> torch.Tensor:
    """`KeptUpdates` of the seam, for every op set."""
    pool, decay = next((ring.own, ring.kept[1]) for ring, _ in _rings(parts))
    shown = decay.new_zeros(rows + 1, *pool.shape[2:])  # one row more: it takes the entries of rows that are not kept
    for ring, part in _rings(parts):
        units, entries, at = _spots(ring, part, rows)
        shown[at] = ring.own[units, entries].to(shown.dtype)
        if isinstance(ring.kept, SplitUpdates):
            shown[at] += ring.kept.update_low[units, entries].to(shown.dtype)
    return shown[:rows]


def put_updates(parts: tuple[Part, ...], updates: torch.Tensor) -> None:
    """Reverse `kept_updates`: write other updates [N, HV, V] into the entries that keep these rows.

    It waits for nothing. So it does not check which rows are kept: entries of other rows get their own values back.
    """
    for ring, part in _rings(parts):
        units, entries, at = _spots(ring, part, len(updates))
        given, kept = updates[at.clamp(max=len(updates) - 1)], (at < len(updates))[..., None, None]
        pools = {ring.own: given}
        if isinstance(ring.kept, SplitUpdates):
            high, low = in_two_parts(given, ring.own.dtype)
            pools = {ring.own: high, ring.kept.update_low: low}
        for pool, x in pools.items():
            pool[units, entries] = torch.where(kept, x.to(pool.dtype), pool[units, entries])


def keeps_updates(parts: tuple[Part, ...]) -> bool:
    """Return whether some ring of these parts keeps updates."""
    return bool(_rings(parts))


def _rings(parts: tuple[Part, ...]) -> list[tuple[Ring, Part]]:
    return [(part.ring, part) for part in parts if part.ring is not None and not isinstance(part.ring.kept, Inputs)]


def _spots(ring: Ring, part: Part, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return three [B, most]: unit and entry of every row, and its packed row number, or `rows` if it is not kept."""
    row = torch.arange(part.most, device=part.count.device)
    keeps = (ring.units >= 0) & (ring.keep >= 0) & (part.read.units >= 0)
    wanted = (row < part.count[:, None]) & keeps[:, None]
    entries = (ring.keep[:, None] + row) % ring.size % ring.own.shape[1]
    units = ring.units.clamp(min=0)[:, None].expand_as(entries)
    return units, entries, torch.where(wanted, part.begin[:, None] + row, rows)


def plan_ring(
    *, slots: torch.Tensor, before: torch.Tensor, count: torch.Tensor, settled: torch.Tensor, size: int, most: int,
    spare: int | None,
) -> RingPlan:
    """`PlanRing` of the seam. A wrong mark cannot reach outside the ring: the pending count is clamped to its room.

    Shapes:  slots, before, count (B)   settled (slots)  ->  (B) each
    """
    busy, slot = slots >= 0, slots.clamp(min=0)
    pending = torch.where(busy, before - settled[slot], 0).clamp(0, size - most)
    begin = torch.where(busy, (before - pending) % size, 0)
    nowhere = torch.full_like(slots, -1)
    if spare is None:
        return RingPlan(begin, pending, nowhere, nowhere.clone(), torch.where(busy, before + count, 0))
    stored = busy & (pending > spare)
    after = torch.where(stored, before, before - pending)
    return RingPlan(
        begin, pending, torch.where(busy, before % size, -1), torch.where(stored, slots, -1),
        torch.where(busy, after, 0),
    )
