"""What belongs in one place of a pool and stands, whole, in another place of the same pool.

Leaves out: what stands in its place instead (`memory.py`, `windows.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from instep_reference.contract.engine import Region

from ..checks.base import counted
from ..observe.memory import bits
from .case import Case, Explanation

COUNTED_IN = (32, 16)  # bits of a number that wraps
MOST = 64  # rows that are looked for


def elsewhere(case: Case) -> Iterator[Explanation]:
    """KV entries, position by position: where each of those that are missing was written."""
    place, request = case.finding.place, case.finding.request or ""
    if case.granted is not None or place.component not in ("keys", "values") or not len(case.right):
        return
    region = next((region for region in case.context.regions() if region.by == "page" and _is_of(region, case)), None)
    pages = case.context.expected.pages_after.get(request, ())
    if region is None or region.units.shape[2:] != case.right.shape[1:] or region.units.dtype != case.right.dtype:
        return
    size, right, found = region.units.shape[1], bits(case.right.cpu()), bits(case.found.cpu())
    missing = (right != found).flatten(1).any(1).nonzero()[:, 0].tolist()
    if len(missing) > MOST or len(pages) * size < len(right):
        return
    twins = {page * size + of: at * size + of for name, owned in case.context.expected.pages_after.items()
             if name != request for at, page in enumerate(owned) for of in range(size)}  # fmt: skip
    pool, moved = bits(region.units.flatten(0, 1).cpu()).flatten(1), list[tuple[int, int]]()
    for position in missing:
        stands = (pool == right[position].flatten()).all(1).nonzero()[:, 0].tolist()
        stands = [at for at in stands if twins.get(at) != position]  # rightly there: another's entry with the same bits
        if len(stands) != 1:
            return  # nowhere, or nobody can say which of them it is
        moved.append((pages[position // size] * size + position % size, stands[0]))
    if moved:
        yield Explanation(_sentence(moved, size, region), case.found)


def _is_of(region: Region, case: Case) -> bool:
    place, means = case.finding.place, region.means
    return means is not None and (means.component, region.layer, means.draft) == (
        place.component, place.layer, place.stage != "trunk")  # fmt: skip


def _sentence(moved: list[tuple[int, int]], size: int, region: Region) -> str:
    """Due and found, by one rule where there is one."""
    (due, found), apart = moved[0], {due - found for due, found in moved}
    where = (f"page {found // size}, position {found % size} of {region.name}, "
             f"not to page {due // size}, position {due % size}")  # fmt: skip
    if len(apart) > 1:
        return f"was written to {where}"
    off, whole = apart.pop(), len(region.units) * size
    wraps = [f", as places that are counted in {width} bits{says}" for width in COUNTED_IN
             for says, by in (("", off), (", where a negative one counts from the pool's end", off + whole))
             if by % (1 << width) == 0]  # fmt: skip
    too = f"{counted(abs(off), 'position')} too {'early' if off > 0 else 'late'}"
    return f"was written {too}, to {where}{wraps[0] if wraps else ''}"
