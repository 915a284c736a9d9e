"""Slots and request rows: the request that owns each unit of the state pools.

Leaves out: the memory of a slot (`pool.py`). Slot 0 and request row 0 are reserved and never handed out.
"""

from instep_reference.contract.errors import BadInput, OutOfCapacity


class Slots:
    """Hands out the first free unit in the given order: the slots of the capacity, or request rows."""

    def __init__(self, order: tuple[int, ...]) -> None:
        check_order("capacity.slots", order)
        self._order, self.count = order, len(order)
        self._owned: dict[str, int] = {}

    def first(self) -> int:
        """Return the slot that the next request would take."""
        taken = set(self._owned.values())
        for slot in self._order:
            if slot not in taken:
                return slot
        raise OutOfCapacity(f"no free slot: all {len(self._order)} are owned")

    def take(self, request: str) -> int:
        self._owned[request] = slot = self.first()
        return slot

    def give(self, request: str) -> int:
        """Take back the slot of a request -> its number."""
        return self._owned.pop(request)

    def of(self, request: str) -> int:
        return self._owned[request]

    def owned(self) -> dict[str, int]:
        return dict(self._owned)


def request_rows(slots: int) -> Slots:
    """Hand out the request rows of that many slots: even numbers first, as `Capacity.slots` describes."""
    return Slots((*range(2, slots + 1, 2), *range(1, slots + 1, 2)))


def check_order(field: str, order: tuple[int, ...]) -> None:
    """Refuse unit 0, which is reserved, and units that are listed twice, because they would get two owners."""
    if not order or min(order) < 1 or len(set(order)) < len(order):
        raise BadInput(field, found=order, expected="distinct numbers of at least 1, one or more")
