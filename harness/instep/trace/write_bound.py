"""Upper bound of the memory that an event may write, from the trace alone. It limits the table that an engine declares.

Leaves out: the engine's own table (`Inspectable.may_change`), and comparing the two (`checks/declared_writes.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from instep_reference.contract import engine as e
from instep_reference.contract.event_facts import facts, named

from .request_table import RequestTable

BOOKS = "table"  # the pages of all requests, which every replica enters


@dataclass(frozen=True)
class Bound:
    """slots  those of the requests that the event names
    pages  those of the positions that the event writes; all pages of a request that leaves
    rows   number of rows in the batch
    request_rows  those of the requests that the event names
    of_rank  of the replicas of a data-parallel group: each may write units of its own requests, except in the books
    """

    slots: frozenset[int] = frozenset()
    pages: frozenset[int] = frozenset()
    rows: int = 0
    request_rows: frozenset[int] = frozenset()
    of_rank: "Mapping[int, Bound]" = field(default_factory=dict)

    def units(self, region: e.Region) -> frozenset[int]:
        """The units of a region that the event may write. No event may write red zones, or unit 0."""
        if region.red:
            return frozenset()
        own = None if region.rank is None else self.of_rank.get(region.rank)
        if own is not None and region.name.partition("@")[0] != BOOKS:
            return own.units(region)
        return {"slot": self.slots, "page": self.pages, "row": frozenset(range(self.rows)),
                "request": self.request_rows}[region.by]  # fmt: skip


def bound(event: e.Event, before: RequestTable, after: RequestTable, rows: int) -> Bound:
    """The bound of an event, from the request tables before and after it.

    rows: number of rows of the last forward, to which a commit refers
    """
    names = named(event)
    standings = [table.live[name] for table in (before, after) for name in names if name in table.live]
    slots = {standing.slot for standing in standings if standing.slot is not None}
    request_rows = {standing.request_row for standing in standings if standing.request_row is not None}
    pages = {page for name in names for page in _pages(event, name, before, after)}
    batch = {"": 0, "own": len(names), "last": rows}[facts(event).batch]
    return Bound(frozenset(slots) - {0}, frozenset(pages) - {0}, batch, frozenset(request_rows) - {0})


def _pages(event: e.Event, name: str, before: RequestTable, after: RequestTable) -> tuple[int, ...]:
    """The pages of one request that the event may write. Those of committed positions are not among them."""
    match facts(event).pages:
        case "all":
            return before.live[name].pages
        case "copy":
            begin, end = 0, after.live[name].length
        case "round":
            then, now = before.live[name], after.live[name]
            window = after.capacity.width(after.num_steps, max(len(then.window), len(now.window)))
            begin, end = then.length, max(now.length, then.length + window)
            if isinstance(event, e.Draft):  # the rows of all beams, whatever the window
                end = max(end, begin + after.capacity.drafted(after.num_steps, 0))
            if isinstance(event, e.Commit) and after.capacity.trim:  # it may give back all pages after the next one
                end = max(end, len(then.pages) * after.capacity.page_size)
        case "":
            return ()
    # A commit may give pages back, and may write them before it does.
    size, pages = after.capacity.page_size, max((table.live[name].pages for table in (before, after)), key=len)
    return pages[begin // size : -(-end // size)] if end > begin else ()
