"""What is computed once and then read: values by key, as many as their tensors leave room for.

Leaves out: what is kept, and what its key must say (`replay/reuse.py`, `observe/same_piece.py`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from instep_optimized.ops.around import tensors_of

T = TypeVar("T")

BESIDE = 1 << 10  # bytes that a tensor takes beside its numbers; most tensors are smaller than that


class Shelf(Generic[T]):
    """The values used last whose tensors fit into `most` bytes.

    size: bytes of all tensors that they hold. Memory that several of them hold counts once, until the last one goes.
    """

    def __init__(self, most: int) -> None:
        self.most, self.size = most, 0
        self._kept: OrderedDict[bytes, tuple[T, Mapping[int, int]]] = OrderedDict()  # the last used one stands last
        self._holders: Counter[int] = Counter()  # memory -> values that hold it

    def get(self, key: bytes) -> T | None:
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key][0]

    def put(self, key: bytes, value: T, before: Collection[bytes] = ()) -> None:
        """What was not used for longest makes room, but nothing of `before`: where that is oldest, nothing is kept."""
        if not self.most:
            return
        held = memory(value)
        if sum(held.values()) > self.most:
            return
        while self.size + self._more(held) > self.most:
            oldest = next(iter(self._kept), None)
            if oldest is None or oldest in before:
                return
            self._drop(self._kept.pop(oldest)[1])
        self._kept[key] = value, held
        self.size += self._more(held)
        self._holders.update(held.keys())

    def clear(self) -> None:
        self._kept.clear()
        self._holders.clear()
        self.size = 0

    def _more(self, held: Mapping[int, int]) -> int:
        return sum(size for at, size in held.items() if at not in self._holders)

    def _drop(self, held: Mapping[int, int]) -> None:
        self._holders.subtract(held.keys())
        for at, size in held.items():
            if not self._holders[at]:
                del self._holders[at]
                self.size -= size


EVENTS: Shelf[Any] = Shelf(512 << 20)  # of runs of the reference
WEIGHTS: Shelf[Any] = Shelf(256 << 20)  # of the reference, by model and width
LAYERS: Shelf[Any] = Shelf(256 << 20)  # that were computed again: one run has many, and a next one few of the same


@contextmanager
def closed(*shelves: Shelf[Any]) -> Iterator[None]:
    """Nothing is put there: for whoever computes nothing twice. What is there can be taken."""
    before = [shelf.most for shelf in shelves]
    for shelf in shelves:
        shelf.most = 0
    try:
        yield
    finally:
        for shelf, most in zip(shelves, before, strict=True):
            shelf.most = most


def forget() -> None:
    """For whoever changes the reference itself, or how a layer is computed."""
    EVENTS.clear()
    WEIGHTS.clear()
    LAYERS.clear()


def memory(value: object) -> dict[int, int]:
    """All memory of the tensors inside a value: address -> bytes."""
    found = dict[int, int]()
    for tensor in tensors_of(value):
        storage = tensor.untyped_storage()
        found |= {storage.data_ptr(): storage.nbytes(), id(tensor): BESIDE}
    return found

