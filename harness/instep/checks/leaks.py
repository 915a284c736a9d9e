"""T1: whoever leaves takes nothing along and leaves nothing behind: slot and pages are free, unowned and poison.

Leaves out: units that were free before (`poison.py`). Asked after every finish, abort and preempt for that request,
and after the last request for everything.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep_reference.contract.engine import Abort, Finish, Preempt

from ..observe.memory import Looked
from ..observe.moment import Moment
from ..observe.pools import stands
from ..verdict import Comparison, Skipped, Tier
from .base import NOWHERE, counted, said_of


class Leaks:
    """What a request had, after it has gone."""

    name = "leaks"
    tier = Tier.BITWISE

    def __init__(self) -> None:
        self.pages: dict[str, tuple[int, ...]] = {}
        self.said = False

    def __call__(self, moment: Moment) -> Iterator[Comparison | Skipped]:
        if moment.noted.poison is None and not self.said:
            yield Skipped(self.name, moment.index, "this engine does not poison what is given back: who owns it is "
                          "compared, not what stands there")  # fmt: skip
        self.said = True
        if isinstance(moment.event, Finish | Abort | Preempt) and moment.event.request in moment.expected.slots_before:
            name = moment.event.request
            slot, pages = moment.expected.slots_before[name], self.pages.get(name, ())
            yield self._owners(moment, name, slot, pages)
            for looked in moment.changes.looked:
                if looked.poison is not None and looked.region.by != "row":
                    yield from self._left(moment, looked, name, (slot,) if looked.region.by == "slot" else pages)
            if not moment.expected.slots_after:
                yield self._last(moment)
        self.pages = dict(moment.expected.pages_after)

    def _owners(self, moment: Moment, name: str, slot: int, pages: tuple[int, ...]) -> Comparison:
        said = [f'slot {slot} is owned by "{other}"' for other, its in moment.subject_slots.items() if its == slot]
        for other, its in moment.subject_pages.items():
            said += [f'page {page} is owned by "{other}"' for page in pages if page in its]
        return said_of(self, moment, NOWHERE, 1 + len(pages), said, name)

    def _left(self, moment: Moment, looked: Looked, name: str, units: tuple[int, ...]) -> Iterator[Comparison]:
        region, positions = looked.region, looked.after.shape[1]
        if not units:
            return
        said = []
        for unit in units:
            left = int(looked.spoiled()[unit].sum()) if unit < len(looked.after) else positions
            if left:
                where = f"{counted(left, 'position')} of {region.name}" if positions > 1 else region.name
                said.append(f'{where} {region.by} {unit} still hold what request "{name}" left there')
        yield said_of(self, moment, stands(region).place, len(units) * positions, said, name)

    def _last(self, moment: Moment) -> Comparison:
        """The trace has nobody any more."""
        slots = [f'slot {slot} is owned by "{name}"' for name, slot in moment.subject_slots.items()]
        pages = [f'pages {pages} are owned by "{name}"' for name, pages in moment.subject_pages.items() if pages]
        return said_of(self, moment, NOWHERE, 1, slots + pages)
