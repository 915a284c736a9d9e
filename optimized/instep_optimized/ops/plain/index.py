"""Whole numbers that a round needs on the device: where rows stand, forced or own, and lengths that grow.

Nothing here waits for the host. The `ledger` op set uses these ops too. Leaves out: acceptance (`pick.py`).
"""

from __future__ import annotations

import torch

from ..placing import RowPlacement


def place_rows(
    *, slots: torch.Tensor, begin: torch.Tensor, count: torch.Tensor, rows: int, length: torch.Tensor,
    table: torch.Tensor, page_size: int, shift: int,
) -> RowPlacement:
    """`PlaceRows` of the seam: every row finds the request that covers it, then its position, then its page.

    Shapes:  slots, begin, count (B)   length (slots)   table (slots, width)  ->  positions, locations (rows)
    """
    busy, slot = slots >= 0, slots.clamp(min=0)
    count = torch.where(busy, count, 0)
    before = torch.where(busy, length[slot] + shift, 0)
    last = torch.where(count > 0, begin + count - 1, -1)
    if not len(slots):  # no request: `_owners` needs at least one
        none = slots.new_zeros(rows)
        return RowPlacement(none, none - 1, before, count, last)
    covered, owner, inside = _owners(begin, count, rows)
    positions = torch.where(covered, before[owner] + inside, 0)
    # A position may lie behind the last page of the table, or on an entry of -1: such a row has no location.
    page = positions // page_size
    mapped = covered & (page >= 0) & (page < table.shape[1])
    number = table[slot[owner], page.clamp(0, table.shape[1] - 1)]
    spot = number * page_size + positions % page_size
    return RowPlacement(positions, torch.where(mapped & (number >= 0), spot, -1), before, count, last)


def choose(*, own: torch.Tensor, forced: torch.Tensor) -> torch.Tensor:
    """The forced choice where there is one (it is not negative), else the engine's own."""
    return torch.where(forced >= 0, forced, own)


def advance(*, length: torch.Tensor, slots: torch.Tensor, by: torch.Tensor) -> None:
    """Lengths grow in place. A slot of -1 adds 0 to slot 0, so the bytes of slot 0 stay as they are."""
    length.index_add_(0, slots.clamp(min=0), torch.where(slots >= 0, by, 0))


def shift(*, tokens: torch.Tensor, begin: torch.Tensor, count: torch.Tensor, behind: torch.Tensor) -> torch.Tensor:
    """Every row takes the token of the row after it; the last row of a request takes the token behind the request.

    Shapes:  tokens (N)   begin, count, behind (B)  ->  (N)
    """
    if not len(begin):
        return torch.zeros_like(tokens)
    covered, owner, inside = _owners(begin, count, len(tokens))
    last = inside == count[owner] - 1
    return torch.where(covered, torch.where(last, behind[owner], tokens.roll(-1)), 0)


def _owners(
    begin: torch.Tensor, count: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For every row: whether a request covers it, which request, and its number among that request's rows. B >= 1."""
    past = torch.arange(rows, device=begin.device) - begin[:, None]  # [B, rows]
    covers = (past >= 0) & (past < count[:, None])
    owner = covers.long().argmax(dim=0)
    return covers.any(dim=0), owner, past.gather(0, owner[None])[0]
