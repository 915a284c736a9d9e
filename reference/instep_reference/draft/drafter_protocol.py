"""The drafter protocol: a drafter takes in the committed tokens, and proposes the next ones.

Leaves out: the drafters, one file each, and their table of contents (`__init__.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, runtime_checkable

from ..contract.place_names import See
from ..model_interface import Cache, Memory, Model, Rows


@dataclass(frozen=True)
class Proposed(Generic[Rows, Cache]):
    """The draft side's memory of a request between rounds.

    caches     one per MTP layer, or per layer of a block drafter, with as many rows as the target has committed
    proposals  the drafts that the last extend made, draft 1 first; empty while the root is unknown
    hidden     the head's row y from which draft 1 was picked
    """

    caches: tuple[Cache, ...] = ()
    proposals: tuple[int, ...] = ()
    hidden: Rows | None = None


@dataclass(frozen=True)
class Asked:
    """One request's part of a draft event: step count, drafts to use (None: its own), their parents (None: a chain)."""

    num_steps: int
    picks: tuple[int, ...] | None = None
    parents: tuple[int, ...] | None = None


class Drafter(Protocol):
    """A drafter is stateless: its memory of a request is a `Proposed`."""

    def begin(self, model: Model[Rows, Memory, Cache]) -> Proposed[Rows, Cache]:
        """Return the memory before the first token."""
        ...

    def extend(
        self, model: Model[Rows, Memory, Cache], before: Proposed[Rows, Cache], hidden: Rows, count: int,
        following: Sequence[int], rooted: bool, start: int, num_steps: int, see: See,
    ) -> Proposed[Rows, Cache]:
        """Take in `count` rows that the target has committed at positions start, start + 1, ..

        hidden     the target's rows of these tokens
        following  the known tokens after position `start`, at least `count` of them
        rooted     whether the root is known: then there are exactly `count`, and the last one is the root. If it is
        not,
                   all of them are tokens of the prompt
        num_steps  the step count in force
        """
        ...

    def draft(
        self, model: Model[Rows, Memory, Cache], proposed: Proposed[Rows, Cache], tokens: Sequence[int],
        asked: Asked, see: See,
    ) -> tuple[list[int], list[int]]:
        """Draft -> the drafts in use, and the drafter's own; both in window order.

        tokens: all committed ones and the root. Everything that is computed here is scratch: `proposed` does not
        change.
        """
        ...


@runtime_checkable
class GrowsTrees(Protocol):
    """A drafter that can grow trees (`contract/grown_draft_tree.py`)."""

    def grow(
        self, model: Model[Rows, Memory, Cache], proposed: Proposed[Rows, Cache], tokens: Sequence[int],
        num_steps: int, topk: int, drafts: int, see: See,
    ) -> tuple[list[int], list[int]]:
        """Grow a tree -> tokens and parents of its drafts. The arguments are those of `draft`; all is scratch."""
        ...
