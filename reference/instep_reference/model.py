"""What a round of speculation needs of a model, and nothing more: the same rounds run over numbers and over labels.

Leaves out: both models (`engine.py` has the one of tensors, `ledger.py` the one of labels) and the rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch

from .contract.config import ModelConfig
from .contract.engine import RequestState
from .contract.place import See

Rows = TypeVar("Rows")  # hidden rows of some tokens, in order
Memory = TypeVar("Memory")  # what the target's layers remember of a request
Cache = TypeVar("Cache")  # what one MTP layer remembers of it


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
        """Run the target over tokens at positions start, start + 1, ..; rows are those after the final norm."""
        ...

    def head(
        self, layer: int, tokens: Sequence[int], hidden: Rows, cache: Cache, start: int, stage: str, see: See
    ) -> tuple[Rows, Cache]:
        """Run one MTP layer over rows (hidden p, token p + 1) at positions start, ..; rows are the head's y."""
        ...

    def pick(self, rows: Rows, stage: str, see: See) -> list[int]:
        """The argmax of the logits of each row; the draft head shares the target's."""
        ...

    def last(self, rows: Rows) -> Rows:
        """The last row alone."""
        ...

    def join(self, parts: Sequence[Rows]) -> Rows:
        """Rows one after another."""
        ...

    def logical(
        self, length: int, root: int | None, proposal: int | None, hidden: Rows | None,
        memory: Memory, caches: Sequence[Cache],
    ) -> RequestState:
        """The canonical layout of what is remembered, copied."""
        ...
