"""KV pages: the page of each position of a request, for target and draft layers alike.

One page id is the same page number in every KV pool. Page 0 is reserved. A request's list grows when an event may write
new positions. It keeps all its pages until the request is released, or until a commit (`Capacity.trim`). Leaves out:
the memory of a page (`pool.py`).
"""

from collections.abc import Iterable, Iterator
from itertools import islice

from instep_reference.contract.errors import OutOfCapacity

from .slots import check_order


class PageTable:
    """Hands out the first free page in the order that the capacity gives."""

    def __init__(self, order: tuple[int, ...], page_size: int, most: int | None = None) -> None:
        """most: maximum number of positions of one request; None: as many as all pages hold."""
        check_order("capacity.pages", order)
        self._order, self.size, self._most = order, page_size, most
        self._owned: dict[str, list[int]] = {}

    def grown(self, wants: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
        """Turn (request, positions) into the page list that each request would have. Nothing is handed out yet.

        Requests are served in the given order: the first one takes the first free pages.
        """
        wants = list(wants)
        for request, positions in wants:
            if self._most is not None and positions > self._most:
                raise OutOfCapacity(f"{request!r} needs {positions} positions; one request may have {self._most}")
        # -(-a // b) rounds up: the pages that the positions need, less those that the request owns.
        missing = {request: max(0, -(-positions // self.size) - len(self.of(request))) for request, positions in wants}
        wanted = sum(missing.values())
        free = list(islice(self._free(), wanted)) if wanted else []  # most rounds want none and skip the search
        if wanted > len(free):
            raise OutOfCapacity(f"KV pages: {wanted} more needed, {len(free)} free")
        lists: dict[str, list[int]] = {}
        for request, count in missing.items():
            lists[request] = self.of(request) + free[:count]  # a new list: the owned one does not change here
            free = free[count:]
        return lists

    def grow(self, wants: Iterable[tuple[str, int]]) -> list[tuple[str, int, int]]:
        """Make room for that many positions of each request, or raise and change nothing.

        -> (request, its n-th page, page) for every page that is new.
        """
        new = []
        for request, pages in self.grown(wants).items():
            had = len(self.of(request))
            new += [(request, number, page) for number, page in enumerate(pages[had:], start=had)]
            if pages:
                self._owned[request] = pages
        return new

    def release(self, request: str) -> list[int]:
        """Take back all pages of a request -> their ids."""
        return self._owned.pop(request, [])

    def trim(self, request: str, positions: int) -> list[tuple[int, int]]:
        """Take back the pages after these positions -> (n, page) for every n-th page of the request that is gone."""
        owned, kept = self._owned[request], -(-positions // self.size)
        self._owned[request] = owned[:kept]
        return [*enumerate(owned[kept:], start=kept)]

    def of(self, request: str) -> list[int]:
        return list(self._owned.get(request, ()))

    def owned(self) -> dict[str, list[int]]:
        return {request: list(pages) for request, pages in self._owned.items()}

    def locations(self, request: str, begin: int, count: int) -> list[int]:
        """Flat locations page * page_size + offset of the positions begin .. begin + count - 1."""
        pages = self._owned.get(request, [])
        return [pages[at // self.size] * self.size + at % self.size for at in range(begin, begin + count)]

    def covering(self, pages: list[int], begin: int, count: int) -> set[int]:
        """Return the pages of a list that contain the positions begin .. begin + count - 1."""
        return {pages[at // self.size] for at in range(begin, begin + count)}

    def _free(self) -> Iterator[int]:
        taken = {page for pages in self._owned.values() for page in pages}
        return (page for page in self._order if page not in taken)
