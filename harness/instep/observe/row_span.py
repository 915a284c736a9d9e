"""One request's rows of a stage. Leaves out: which rows a stage has (`rows.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from instep_reference.contract.place import AFTER_LAYERS, Place

LOGIT_COMPONENTS = ("logits", "pick")  # components with rows only where an answer is asked for


@dataclass(frozen=True)
class RowSpan:
    """One request's rows of a stage: `count` from `begin`, the first of them at position `start`.

    logit_begin, logit_rows: where its rows begin among those whose logits are asked for, and how many they are.
    nodes: of a commit, the window's nodes behind the rows, root first; of a draft that grows trees, which of the head's
    rows it is, 1 for the first beam of the first step (every one has a span of its own).
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
        """Where its rows of a place begin, and how many they are."""
        if place.component in LOGIT_COMPONENTS and place.layer == AFTER_LAYERS:
            return self.logit_begin, self.logit_rows
        return self.begin, self.count
