"""What a round of speculation needs of a model, and nothing more. So the same rounds run over numbers and over labels.

Leaves out: the two models (tensors in `engine.py`, labels in `ledger.py`), and the rounds (`rounds.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch

from .contract.config import ModelConfig
from .contract.engine import RequestState
from .contract.place import See
from .sampling import Drawing

Rows = TypeVar("Rows")  # hidden rows of some tokens, in order
Memory = TypeVar("Memory")  # what the target's layers remember of a request
Cache = TypeVar("Cache")  # what one MTP layer remembers of a request


class Model(Protocol[Rows, Memory, Cache]):
    """Every method is a function of its arguments: memories and caches are values, never changed in place."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def device(self) -> torch.device: ...

    def nothing(self) -> Memory:
        """The memory of a request before its first token."""
        ...

    def no_cache(self) -> Cache:
        """The cache of an MTP layer before its first row."""
        ...

    def advance(self, tokens: Sequence[int], memory: Memory, start: int, see: See) -> tuple[Rows, Memory]:
        """Run the target over tokens at positions start, start + 1, .. -> the rows after the final norm, the memory."""
        ...

    def head(
        self, layer: int, tokens: Sequence[int], hidden: Rows, cache: Cache, start: int, stage: str, see: See
    ) -> tuple[Rows, Cache]:
        """Run one MTP layer over rows (hidden p, token p + 1) at positions start, .. -> the rows y, the cache."""
        ...

    def until(self, cache: Cache, count: int) -> Cache:
        """The cache as it was after its first `count` rows."""
        ...

    def pick(self, rows: Rows, stage: str, see: See) -> list[int]:
        """The argmax of the logits of each row. The draft head uses the target's lm_head."""
        ...

    def best(self, rows: Rows, count: int, stage: str, see: See) -> list[list[tuple[int, float]]]:
        """Of each row the most probable tokens and their log-probabilities, the most probable first."""
        ...

    def draw(self, rows: Rows, drawing: Drawing, stage: str, see: See) -> list[int]:
        """A token per row of a window, drawn from its logits."""
        ...

    def last(self, rows: Rows, count: int = 1) -> Rows:
        """The last row alone, or the last `count` > 0 of them, as far as there are so many."""
        ...

    def join(self, parts: Sequence[Rows]) -> Rows:
        """Rows one after another."""
        ...

    def logical(
        self, length: int, root: int | None, proposal: int | None, hidden: Rows | None,
        memory: Memory, caches: Sequence[Cache], tail: Rows | None = None,
    ) -> RequestState:
        """Copies of what is remembered of a request, in the canonical layout."""
        ...
