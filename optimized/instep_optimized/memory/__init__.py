"""Everything with an address: pools made from the budget's demands, slots and KV pages.

Leaves out: the writes of an event (`commit/`) and the copies that are kept aside (`saved_states.py`).
"""

from collections.abc import Sequence

import torch

from instep_reference.contract.engine import Capacity, Region
from instep_reference.contract.sampling import Sampling

from ..memory_addresses import Chance
from .component_cells import cells
from .pages import PageTable
from .pool import Demand, Pool
from .slot_table import SlotTable
from .slots import Slots, request_rows
from .tiled_units import SCALES, Units

CLEARS = cells(block=Pool.scrub, rows=Pool.scrub, last=Pool.scrub)


class Memory:
    """The pools by name, and the owners of their units."""

    def __init__(
        self, wanted: tuple[Demand, ...], capacity: Capacity, *, guarded: bool, poison: float | None,
        device: torch.device, first: int = 0,
    ) -> None:
        """first: as in `Chance`"""
        self.device, self._first = device, first
        self.pools = {d.name: Pool(d, guarded=guarded, poison=poison, device=device) for d in wanted}
        self.slots, self.request_rows = Slots(capacity.slots), request_rows(len(capacity.slots))
        self.pages = PageTable(capacity.pages, capacity.page_size, capacity.max_positions)
        self.slot_table = SlotTable.of(self.pools, capacity.request_positions)
        # `fresh` for launches in which no row is the first of its request. A graph may hold it, because it never
        # changes.
        self.none_fresh = torch.zeros(len(capacity.slots), dtype=torch.bool, device=device)

    def __getitem__(self, name: str) -> Pool:
        return self.pools[name]

    def units(self, name: str, layer: int) -> Units:
        """Return a layer's units of a pool, with their scales, if it is stored in tiles."""
        pool, scales = self.pools[name], self.pools.get(name + SCALES)
        seed = None if pool.demand.tiles is None else pool.demand.tiles.seed
        chance = None if seed is None else Chance(seed, layer, self._first)
        return Units(pool.units(layer), None if scales is None else scales.units(layer), chance)

    def layers(self, name: str) -> tuple[int, ...]:
        """Return the layers that a pool has memory for; none if there is no such pool."""
        return self.pools[name].demand.layers if name in self.pools else ()

    def claim(self, request: str, positions: int = 0, sampling: Sampling | None = None) -> None:
        """Take a slot with a request row, and pages for that many positions. If any is missing, change nothing."""
        self.slots.first()  # raises if no slot is free; after this only the pages can be missing
        self.pages.grow([(request, positions)])
        self.request_rows.take(request)
        self.slot_table.enter(self.slots.take(request), positions, self.pages.of(request), sampling)

    def request_row_at(self, slot: int) -> int:
        """Return the request row of the request that owns a slot."""
        return next(self.request_rows.of(name) for name, own in self.slots.owned().items() if own == slot)

    def grow(self, wants: Sequence[tuple[str, int]]) -> None:
        """Make room for that many positions of each request and enter the pages, or raise and change nothing."""
        self.slot_table.map([
            (self.slots.of(request), number, page) for request, number, page in self.pages.grow(wants)
        ])

    def trim(self, positions: Sequence[tuple[str, int]]) -> None:
        """Give back the pages after these positions of each request, and poison them."""
        gone = [(self.slots.of(request), *place) for request, most in positions
                for place in self.pages.trim(request, most)]  # fmt: skip
        self.slot_table.map([(slot, number, -1) for slot, number, _ in gone])
        for pool in self.pools.values():
            pool.scrub([page for *_, page in gone] if pool.demand.by == "page" else [])

    def release(self, request: str) -> None:
        """Free slot, request row and pages, and poison them, so that a later read of their contents shows."""
        slot, pages = self.slots.give(request), self.pages.release(request)
        row = self.request_rows.give(request)
        for pool in self.pools.values():
            # Snapshot rows belong to a batch, not to a request: none is freed here.
            freed = {"slot": [slot], "request": [row], "page": pages, "row": []}[pool.demand.by]
            if clear := CLEARS.get(pool.demand.component, None if pool.demand.component else Pool.scrub):
                clear(pool, freed)

    def regions(self) -> list[Region]:
        """List every byte of every pool. The two ends of a pool are separate regions, which no event may write."""
        return [region for pool in self.pools.values() for region in pool.regions]
