"""The model interface of a round of speculation. So the same rounds run over numbers and over labels.

Leaves out: the two models (tensors in `engine.py`, labels in `label_ledger.py`), and the rounds
(`speculative_rounds.py`).
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch

from .contract.config import ModelConfig
from .contract.engine import Path, RequestState
from .contract.place_names import See
from .sampling import Drawing

Rows = TypeVar("Rows")  # hidden rows of some tokens, in order: after the final norm, and those a block drafter reads
Memory = TypeVar("Memory")  # the memory of the target's layers about a request
Cache = TypeVar("Cache")  # the memory of one MTP layer about a request, or of a layer of a block drafter


class Model(Protocol[Rows, Memory, Cache]):
    """Every method is a function of its arguments: memories and caches are values, never changed in place."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def device(self) -> torch.device: ...

    def nothing(self) -> Memory:
        """Return the memory of a request before its first token."""
        ...

    def no_cache(self) -> Cache:
        """Return the cache of an MTP layer before its first row."""
        ...

    def advance(self, tokens: Sequence[int], memory: Memory, start: int, see: See) -> tuple[Rows, Memory]:
        """Run the target over tokens at positions start, start + 1, .. -> the rows after the final norm, the memory."""
        ...

    def head(
        self, layer: int, tokens: Sequence[int], hidden: Rows, cache: Cache, start: int, stage: str, see: See
    ) -> tuple[Rows, Cache]:
        """Run one MTP layer over rows (hidden p, token p + 1) at positions start, .. -> the rows y, the cache."""
        ...

    def block_caches(self) -> tuple[Cache, ...]:
        """Return the caches of a block drafter before the first token, one per layer; none without one."""
        ...

    def context(self, rows: Rows, caches: Sequence[Cache], start: int, see: See) -> tuple[Cache, ...]:
        """Take committed tokens at positions start, .. into the caches of the block drafter. rows: of `advance`."""
        ...

    def block(self, tokens: Sequence[int], caches: Sequence[Cache], start: int, see: See) -> Rows:
        """Run the block drafter over a block at positions start, .. -> its rows y. The caches do not change."""
        ...

    def until(self, cache: Cache, count: int) -> Cache:
        """Return the cache as it was after its first `count` rows."""
        ...

    def pick(self, rows: Rows, stage: str, see: See) -> list[int]:
        """Return the argmax of the logits of each row. The draft head uses the target's lm_head."""
        ...

    def best(self, rows: Rows, count: int, stage: str, see: See) -> list[list[tuple[int, float]]]:
        """Return the most probable tokens of each row and their log-probabilities, the most probable first."""
        ...

    def draw(self, rows: Rows, drawing: Drawing, stage: str, see: See) -> list[int]:
        """Draw a token per row of a window from its logits."""
        ...

    def accept_block(self, rows: Rows, drawing: Drawing, cap: int) -> Path:
        """Accept the drafts of a block by sampling, at most `cap`. rows: of its verify."""
        ...

    def last(self, rows: Rows, count: int = 1) -> Rows:
        """Return the last row alone, or the last `count` > 0 rows, or all if there are fewer."""
        ...

    def join(self, parts: Sequence[Rows]) -> Rows:
        """Concatenate rows."""
        ...

    def logical(
        self, length: int, root: int | None, proposal: int | None, hidden: Rows | None,
        memory: Memory, caches: Sequence[Cache], tail: Rows | None = None,
    ) -> RequestState:
        """Copy the memory of a request into the canonical layout."""
        ...
