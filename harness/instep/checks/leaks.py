"""T1: a request that leaves frees its memory: slot and pages are free, unowned and poison.

The check runs for the request after every finish, abort and preempt, and for everything after the last request. Leaves
out: units that were free before (`poison.py`).
"""

from collections.abc import Iterator

from instep_reference.contract.event_facts import facts, named

from ..verdict import Comparison, Skipped, Tier
from ..watch.event_context import EventContext
from ..watch.memory_changes import Looked
from ..watch.pool_addresses import stands, unit_word
from .check_interface import NOWHERE, TellsOnce, counted, said_of


class Leaks(TellsOnce):
    """Compare the former memory of a request after it has left."""

    name = "leaks"
    tier = Tier.BITWISE

    def __call__(self, context: EventContext) -> Iterator[Comparison | Skipped]:
        if context.log.poison is None:
            yield from self.once(context, "this engine does not poison released memory, so only its owner is compared")
        slots = context.expected.slots_before
        for name in named(context.event) if facts(context.event).pages == "all" else ():
            if name not in slots or not (context.shown.has("slots") and context.shown.exact):
                continue
            slot, pages = slots[name], context.expected.pages_before[name]
            freed = {"slot": (slot,), "page": pages, "request": (context.expected.request_rows_before[name],)}
            yield self._owners(context, name, slot, pages)
            for looked in context.changes.looked:
                if looked.poison is not None and looked.region.by in freed:
                    yield from self._left(context, looked, name, freed[looked.region.by])
            if not context.expected.slots_after:
                yield self._last(context)

    def _owners(self, context: EventContext, name: str, slot: int, pages: tuple[int, ...]) -> Comparison:
        said = [f'slot {slot} is owned by "{other}"' for other, its in context.subject_slots.items() if its == slot]
        for other, its in context.subject_pages.items():
            said += [f'page {page} is owned by "{other}"' for page in pages if page in its]
        return said_of(self, context, NOWHERE, 1 + len(pages), said, name)

    def _left(self, context: EventContext, looked: Looked, name: str, units: tuple[int, ...]) -> Iterator[Comparison]:
        region, positions = looked.region, looked.after.shape[1]
        if not units:
            return
        said = []
        for unit in units:
            left = int(looked.spoiled()[unit].sum()) if unit < len(looked.after) else positions
            if left:
                where = f"{counted(left, 'position')} of {region.name}" if positions > 1 else region.name
                said.append(f'data of request "{name}" is still in {where} {unit_word(region)} {unit}')
        yield said_of(self, context, stands(region).place, len(units) * positions, said, name, region.rank)

    def _last(self, context: EventContext) -> Comparison:
        """Compare all slots and pages once no request is left."""
        slots = [f'slot {slot} is owned by "{name}"' for name, slot in context.subject_slots.items()]
        pages = [f'pages {pages} are owned by "{name}"' for name, pages in context.subject_pages.items() if pages]
        return said_of(self, context, NOWHERE, 1, slots + pages)
