"""A cache with least-recently-used eviction, limited by the bytes of the tensors in its values.

Leaves out: what is cached and how keys are made (`run/reference_cache.py`, `oracle/recomputation.py`).
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from instep_optimized.ops.watch_op_calls import tensors_of

T = TypeVar("T")

BESIDE = 1 << 10  # bytes of a tensor object in addition to its data; most tensors have less data than that


class Shelf(Generic[T]):
    """The most recently used values whose tensors fit into `most` bytes.

    size: bytes of all cached tensors. Memory that several values share counts once, until the last of them is dropped.
    """

    def __init__(self, most: int) -> None:
        self.most, self.size = most, 0
        self._kept: OrderedDict[bytes, tuple[T, Mapping[int, int]]] = OrderedDict()  # the most recently used is last
        self._holders: Counter[int] = Counter()  # memory -> values that hold it

    def get(self, key: bytes) -> T | None:
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key][0]

    def put(self, key: bytes, value: T, before: Collection[bytes] = ()) -> None:
        """Add a value and evict the least recently used ones. If one of `before` would be evicted, do not add it."""
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


EVENTS: Shelf[Any] = Shelf(512 << 20)  # events of reference runs
WEIGHTS: Shelf[Any] = Shelf(256 << 20)  # reference weights, by model and width
LAYERS: Shelf[Any] = Shelf(256 << 20)  # recomputed layers: a run has many, and shares few with the next run


@contextmanager
def closed(*shelves: Shelf[Any]) -> Iterator[None]:
    """Stop adding to these caches, for code that computes nothing twice. Cached values can still be read."""
    before = [shelf.most for shelf in shelves]
    for shelf in shelves:
        shelf.most = 0
    try:
        yield
    finally:
        for shelf, most in zip(shelves, before, strict=True):
            shelf.most = most


def forget() -> None:
    """Empty all caches. Call this after changing the reference, or how a layer is computed."""
    EVENTS.clear()
    WEIGHTS.clear()
    LAYERS.clear()


def memory(value: object) -> dict[int, int]:
    """Map the address of each tensor's memory in a value to its bytes."""
    found = dict[int, int]()
    for tensor in tensors_of(value):
        storage = tensor.untyped_storage()
        found |= {storage.data_ptr(): storage.nbytes(), id(tensor): BESIDE}
    return found

