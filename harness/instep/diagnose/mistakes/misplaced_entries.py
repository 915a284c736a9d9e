"""Entries that were written to another place of the right pool.

Leaves out: the content that is in their place (`wrong_memory.py`, `permuted_windows_and_shifted_caches.py`).
"""

from collections.abc import Iterator, Mapping

from instep_reference.contract.engine import Region

from ...checks.check_interface import counted
from ...watch.memory_changes import bits
from .finding_case import Case, Explanation

COUNTED_IN = (32, 16)  # bits of an index that wraps around
MOST = 64  # missing rows that are searched at most


def elsewhere(case: Case) -> Iterator[Explanation]:
    """Search each missing KV entry in the whole pool."""
    place, request = case.finding.place, case.finding.request or ""
    if case.granted is not None or place.component not in ("keys", "values") or not len(case.right):
        return
    region = next((region for region in case.context.regions if region.by == "page" and _is_of(region, case)), None)
    pages = case.context.expected.pages_after.get(request, ())
    if region is None or region.units.shape[2:] != case.right.shape[1:] or region.units.dtype != case.right.dtype:
        return
    size, right, found = region.units.shape[1], bits(case.right.cpu()), bits(case.found.cpu())
    missing = (right != found).flatten(1).any(1).nonzero().flatten().tolist()
    if len(missing) > MOST or len(pages) * size < len(right):
        return
    twins = {page * size + of: at * size + of for name, owned in case.context.expected.pages_after.items()
             if name != request for at, page in enumerate(owned) for of in range(size)}  # fmt: skip
    pool, moved = bits(region.units.flatten(0, 1).cpu()).flatten(1), list[tuple[int, int]]()
    for position in missing:
        stands = (pool == right[position].flatten()).all(1).nonzero().flatten().tolist()
        stands = [at for at in stands if twins.get(at) != position]  # not an equal entry that belongs there
        if len(stands) != 1:
            return  # it is nowhere, or in several places
        moved.append((pages[position // size] * size + position % size, stands[0]))
    if moved and all(due == stands for due, stands in moved):
        yield Explanation("is right in the pool, and wrong in what the engine shows of it", case.found)
    elif moved and all(due != stands for due, stands in moved):
        own = {page * size + of: at * size + of for at, page in enumerate(pages) for of in range(size)}
        yield Explanation(_sentence(moved, size, region, own), case.found)


def _is_of(region: Region, case: Case) -> bool:
    place, means = case.finding.place, region.means
    return means is not None and (means.component, region.layer, means.draft) == (
        place.component, place.layer, place.stage != "trunk")  # fmt: skip


def _sentence(moved: list[tuple[int, int]], size: int, region: Region, own: Mapping[int, int]) -> str:
    """The right and the found places, as one rule if there is one.

    own: place in the pool -> position of the request, because its pages may be in any order
    """
    (due, found), apart = moved[0], {due - found for due, found in moved}
    by_position = {own[due] - own[found] if found in own else None for due, found in moved}
    where = (f"page {found // size}, position {found % size} of {region.name}, "
             f"not to page {due // size}, position {due % size}")  # fmt: skip
    if len(by_position) == 1 and (steps := by_position.pop()) is not None:
        return f"was written {counted(abs(steps), 'position')} too {'early' if steps > 0 else 'late'}, to {where}"
    if len(apart) > 1:
        return f"was written to {where}"
    off, whole = apart.pop(), len(region.units) * size
    wraps = [f", as if indices had {width} bits{says}" for width in COUNTED_IN
             for says, by in (("", off), (" and negative ones counted from the end of the pool", off + whole))
             if by % (1 << width) == 0]  # fmt: skip
    too = f"{counted(abs(off), 'position')} too {'early' if off > 0 else 'late'}"
    return f"was written {too}, to {where}{wraps[0] if wraps else ''}"
