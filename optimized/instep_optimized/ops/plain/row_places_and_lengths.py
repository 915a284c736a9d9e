"""Integer work of a round on the device: places of rows, forced or own choices, and lengths that grow.

Nothing here waits for the host. The `ledger` op set uses these ops too. Leaves out: acceptance
(`argmax_and_acceptance.py`).
"""

import torch

from ..integer_op_protocols import PathPlan, RowPlacement, TreePlan


def place_rows(
    *, slots: torch.Tensor, begin: torch.Tensor, count: torch.Tensor, rows: int, length: torch.Tensor,
    table: torch.Tensor, page_size: int, shift: int, depth: torch.Tensor | None = None, lead: int = 0,
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
    places = torch.where(covered, before[owner] + inside, 0)
    locations = torch.where(covered, _locations(table, slot[owner], places, page_size), -1)
    if depth is None:
        return RowPlacement(places, locations, before, count, last)
    # A node has a separate place, but siblings have one position: that of their depth.
    before = torch.where(busy, length[slot] - lead, 0)
    return RowPlacement(torch.where(covered, before[owner] + depth, 0), locations, before, count, last)


def plan_tree(*, parents: torch.Tensor, slots: torch.Tensor, count: torch.Tensor) -> TreePlan:
    """`PlanTree` of the seam: node by node, because a parent comes before its children.

    Shapes:  parents (B, T)   slots, count (B)  ->  (B, T) each
    """
    requests, width = parents.shape
    node = torch.arange(width, device=parents.device)
    there = (node < count[:, None]) & (slots >= 0)[:, None]
    before = torch.where(there & (node > 0), parents, -1)
    ancestors, depth = torch.zeros_like(parents), torch.zeros_like(parents)
    for number in range(width):
        parent, has = before[:, number, None].clamp(min=0), before[:, number] >= 0
        ancestors[:, number] = torch.where(has, ancestors.gather(1, parent)[:, 0], 0) + (1 << number)
        depth[:, number] = torch.where(has, depth.gather(1, parent)[:, 0] + 1, 0)
    children = torch.zeros(requests, width + 1, dtype=torch.int64, device=parents.device)
    children.scatter_(1, before + 1, 1)  # column 0 takes the parent of the roots, which do not have one
    inner = torch.where(children[:, 1:] > 0, slots[:, None], -1)
    return TreePlan(torch.where(there, ancestors, 0), depth, inner, before)


def plan_path(
    *, accept_index: torch.Tensor, slots: torch.Tensor, before: torch.Tensor, size: int,
    table: torch.Tensor | None = None,
) -> PathPlan:
    """`PlanPath` of the seam. A token that is already in its place does not move; in a chain none moves.

    Shapes:  accept_index (B, T)   slots, before (B)   table (slots, width)  ->  (B, T) each
    """
    order = torch.arange(accept_index.shape[1], device=slots.device)
    slot = slots.clamp(min=0)[:, None].expand_as(accept_index)

    def at(node: torch.Tensor) -> torch.Tensor:
        place = before[:, None] + node
        return slot * size + place % size if table is None else _locations(table, slot, place, size)

    moves = (slots >= 0)[:, None] & (accept_index > order)
    return PathPlan(*(torch.where(moves, at(node), -1) for node in (accept_index, order.expand_as(accept_index))))


def _locations(table: torch.Tensor, slot: torch.Tensor, place: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return page * page_size + offset of every place; -1 after the last page of the table, and on an entry of -1."""
    page = place // page_size
    number = table[slot, page.clamp(0, table.shape[1] - 1)]
    mapped = (page >= 0) & (page < table.shape[1]) & (number >= 0)
    return torch.where(mapped, number * page_size + place % page_size, -1)


def choose(*, own: torch.Tensor, forced: torch.Tensor) -> torch.Tensor:
    """Return the forced choice if there is one (it is not negative), else the engine's own."""
    return torch.where(forced >= 0, forced, own)


def advance(*, length: torch.Tensor, slots: torch.Tensor, by: torch.Tensor) -> None:
    """Add to lengths in place. A slot of -1 adds 0 to slot 0, so the bytes of slot 0 stay as they are."""
    length.index_add_(0, slots.clamp(min=0), torch.where(slots >= 0, by, 0))


def shift(*, tokens: torch.Tensor, begin: torch.Tensor, count: torch.Tensor, behind: torch.Tensor) -> torch.Tensor:
    """Let every row take the token of the next row; the last row of a request takes the token after the request.

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
    """Find for every row whether a request covers it, which one, and its number among that one's rows. B >= 1."""
    past = torch.arange(rows, device=begin.device) - begin[:, None]  # [B, rows]
    covers = (past >= 0) & (past < count[:, None])
    owner = covers.long().argmax(dim=0)
    return covers.any(dim=0), owner, past.gather(0, owner[None])[0]
