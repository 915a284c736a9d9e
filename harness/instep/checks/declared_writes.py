"""T0: the engine's table of allowed writes is no wider than the event rules, and no request owns scratch memory.

Leaves out: the bytes (`unchanged_bytes.py`), which may change only where the table and the event rules both allow a
write.
"""

from collections.abc import Iterator

from ..verdict import Comparison, Skipped, Tier
from ..watch.event_context import EventContext
from ..watch.event_log import Room
from ..watch.memory_changes import Wider
from ..watch.pool_addresses import stands, unit_word
from .check_interface import TellsOnce, listed, said_of

RULES = {
    "slot": "of the requests that it names", "page": "with the positions that it writes",
    "row": "of its batch", "request": "of the requests that it names",
}  # fmt: skip


class Bounds(TellsOnce):
    """Compare every region's entry in the table, and every unit that is declared as scratch memory."""

    name = "bounds"
    tier = Tier.IDENTITY

    def __call__(self, context: EventContext) -> Iterator[Comparison | Skipped]:
        changes = context.changes
        if not changes.regions:
            yield from self.once(context, "this engine shows no memory to compare its table with")
            return
        for wider in changes.wider:
            yield said_of(self, context, stands(wider.region).place, len(wider.units), [_sentence(context.kind, wider)],
                          rank=wider.region.rank)  # fmt: skip
        if not changes.wider:
            yield said_of(self, context, stands(changes.regions[0]).place, len(changes.regions), [])
        for region in changes.regions:
            owned = _handed_out(context.log.room, region.by) & region.scratch if context.log.room else set()
            whole = region.by == "row" and len(region.scratch) == len(region.units)
            if region.scratch:
                said = [f"{region.name} declares {listed(unit_word(region), owned)} as scratch, which the trace gives "
                        f"to requests"] if owned and not whole else []  # fmt: skip
                yield said_of(self, context, stands(region).place, len(region.scratch), said)


def _sentence(kind: str, wider: Wider) -> str:
    region, word = wider.region, unit_word(wider.region)
    allowed = f"{listed(word, wider.allowed)}, {RULES[region.by]}" if wider.allowed else "nothing there"
    return (f"the engine's table lets this {kind} write {region.name} {listed(word, wider.units)}; the event rules "
            f"allow {allowed}")  # fmt: skip


def _handed_out(room: Room, by: str) -> set[int]:
    """Units that some request owns at some time. Rows are used from the first on, one per request."""
    slots, pages = room.capacity.slots, room.capacity.pages
    rows = range(len(slots))
    return {"slot": set(slots), "page": set(pages), "row": set(rows), "request": {1 + row for row in rows}}[by]
