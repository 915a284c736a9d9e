"""One request's rows of a stage. Leaves out: which rows a stage has (`rows.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from instep_reference.contract.place import AFTER_LAYERS, Place

LOGIT_COMPONENTS = ("logits", "pick")  # components with rows only where logits are needed


@dataclass(frozen=True)
class RowSpan:
    """One request's rows of a stage: `count` from `begin`, the first of them at position `start`.

    logit_begin, logit_rows: the start and number of its rows among those with logits
    nodes: for a commit, the window's nodes of the rows, root first; for a draft that grows trees, the index of the
    head's row, 1 for the first beam of the first step (every one has a separate span)
    """

    request: str
    kind: Literal["prefill", "verify", "decode", "commit", "draft"]
    begin: int
    count: int
    start: int
    logit_begin: int
    logit_rows: int
    nodes: tuple[int, ...] = ()

    def at(self, place: Place) -> tuple[int, int]:
        """The start and number of its rows at a place."""
        if place.component in LOGIT_COMPONENTS and place.layer == AFTER_LAYERS:
            return self.logit_begin, self.logit_rows
        return self.begin, self.count
