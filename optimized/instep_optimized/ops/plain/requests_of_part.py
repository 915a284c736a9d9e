"""Walking the requests of a part: those that run, their rows, and their memory before, along and after.

Every read of a pool is a copy; every write goes through the pool's own strides. A request does not run at all if it has
neither rows nor tokens to run again, or if its `read` unit is -1. Leaves out: the computation of a row.
"""

from typing import NamedTuple

import torch

from ...memory_addresses import Address, Part
from .rerun_ring import owed
from .scaled_tiles import get, put


class Lanes(NamedTuple):
    """The n requests of a part that run, the longest first, so that the requests that have a row t are the first ones.

    which   [n] the number of each in the part
    length  [n] rows of each
    rows    [n, most] packed row numbers; after a request's rows its last row is repeated, or row 0 if it has none
    inside  [n, most] bool, whether a row is the request's own
    alive   per token, on the host, how many requests have a row there
    again   [n] kept tokens that run before the first row
    tokens  [n] tokens that the memory contains before the first row, if the engine passes their number
    """

    which: torch.Tensor
    length: torch.Tensor
    rows: torch.Tensor
    inside: torch.Tensor
    alive: list[int]
    again: torch.Tensor
    tokens: torch.Tensor | None


def lanes(part: Part) -> Lanes:
    """Choose and sort the requests of a part that run."""
    # Longest first, so that the requests with a row t are a prefix: a slice, not an index, selects their states.
    order = torch.argsort(part.count, descending=True, stable=True)  # [B]
    again = owed(part)
    # Idle requests, and those with nothing to do, are dropped here and need no mask later.
    which = order[(((part.count > 0) | (again > 0)) & (part.read.units >= 0))[order]]
    length = part.count[which]
    token = torch.arange(part.most, device=length.device)
    last = (part.begin[which] + length - 1).where(length > 0, 0)
    # After its end a request repeats its last row: a valid index, and `scatter` drops the result.
    rows = torch.minimum(part.begin[which, None] + token, last[:, None])
    inside = token < length[:, None]
    tokens = None if part.before is None else part.before[which]
    return Lanes(which, length, rows, inside, inside.sum(dim=0).tolist(), again[which], tokens)


def ancestry(part: Part, who: Lanes) -> torch.Tensor | None:
    """Find the row that each row continues [n, most]; -1: the memory before the window. None: the part is no tree.

    Rows after a request's end continue nothing: their entries in `parents` may be anything.
    """
    return None if part.parents is None else part.parents[who.rows].masked_fill(~who.inside, -1)


def before(part: Part, who: Lanes, dtype: torch.dtype) -> torch.Tensor:
    """Return the memory [n, *block] before the first row, in `dtype`: zeros for a fresh request, without a read."""
    pool, known = part.read.pool, ~part.fresh[who.which]
    block = pool.shape[1:] if part.read.column is None else pool.shape[2:]
    # A fresh request keeps the zeros: its unit may hold poison or another request's memory.
    memory = torch.zeros((len(who.which), *block), dtype=dtype, device=pool.device)
    memory[known] = get(part.read, _spots(part.read, who.which[known])).to(dtype)
    return memory


def after(address: Address | None, who: Lanes, memory: torch.Tensor, rows: int | None = None) -> None:
    """Write memory [n, *block] to the requests' units; a unit of -1 is skipped; with None nothing is written.

    rows: how many rows it contains; None: all of a request
    """
    if address is None:
        return
    wanted = address.units[who.which] >= 0
    tokens = None if who.tokens is None else (who.tokens + (who.length if rows is None else rows))[wanted]
    put(address, _spots(address, who.which[wanted]), memory[wanted], tokens)


def along(
    address: Address | None, who: Lanes, token: int, memory: torch.Tensor, rows: torch.Tensor | int | None = None
) -> None:
    """Write [alive, *block], the memory after row `token`, to column `token` of the first `alive` requests' units.

    rows: how many rows it contains; None: all up to `token`. In a tree that is `Trail.depth`
    """
    if address is None:
        return
    units = address.units[who.which[: memory.shape[0]]]
    wanted = units >= 0
    tokens = None if who.tokens is None else who.tokens[: len(units)] + (token + 1 if rows is None else rows)
    put(address, (units[wanted], token), memory[wanted], None if tokens is None else tokens[wanted])


def scatter(out: torch.Tensor, who: Lanes, values: torch.Tensor) -> None:
    """Write values [n, most, ...] to the packed rows of `out`; repeated rows are dropped."""
    out[who.rows[who.inside]] = values[who.inside].to(out.dtype)


def _spots(address: Address, requests: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the leading indices of these requests' units."""
    units = address.units[requests]
    return (units,) if address.column is None else (units, address.column[requests])
