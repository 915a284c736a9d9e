"""An engine on a library whose model takes a cache per call: the caches by request.

After a verify the accepted tokens run again on a copy of the cache from before it. Leaves out: any library.
"""

from copy import deepcopy
from typing import Any


class Cached:
    """The caches by request, and of each request's last window its row and the cache from before it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.caches: dict[str, Any] = {}
        self.windows: dict[str, tuple[Any, Any]] = {}
        self.saved: dict[str, Any] = {}

    def _empty(self) -> Any:
        raise NotImplementedError

    def _run(self, row: Any) -> Any:
        """The final norm of a row that is alone in its step."""
        raise NotImplementedError

    def keep(self, request: str, length: int) -> None:
        row, before = self.windows.pop(request)
        accepted = length - row.first
        if accepted < len(row.tokens):
            self.caches[request] = before
            self._run(row._replace(kind="decode", tokens=row.tokens[:accepted]))

    def drop(self, request: str) -> None:
        self.caches.pop(request, None)
        self.windows.pop(request, None)

    def save(self, request: str, name: str) -> None:
        self.saved[name] = deepcopy(self.caches.get(request, self._empty()))

    def load(self, request: str, name: str) -> None:
        self.caches[request] = deepcopy(self.saved[name])
