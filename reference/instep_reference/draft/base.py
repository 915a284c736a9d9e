"""What a drafter is: it keeps up with what was committed, and proposes what may come next.

Leaves out: the drafters, one file each, and their table of contents (`__init__.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol

from ..contract.place import See
from ..model import Cache, Memory, Model, Rows


@dataclass(frozen=True)
class Proposed(Generic[Rows, Cache]):
    """What the draft side remembers of a request between rounds.

    caches     one per MTP layer, as long as the target's
    proposals  drafts known since the last extend, draft 1 first; empty while the root is unknown
    hidden     the head's y behind draft 1
    """

    caches: tuple[Cache, ...] = ()
    proposals: tuple[int, ...] = ()
    hidden: Rows | None = None


@dataclass(frozen=True)
class Asked:
    """One request's part of a draft event: so many steps, the drafts to use if given, and their tree if any."""

    num_steps: int
    picks: tuple[int, ...] | None = None
    parents: tuple[int, ...] | None = None


class Drafter(Protocol):
    """A drafter holds no state of its own; everything it remembers of a request is a `Proposed`."""

    def begin(self, model: Model[Rows, Memory, Cache]) -> Proposed[Rows, Cache]:
        """Before the first token."""
        ...

    def extend(
        self, model: Model[Rows, Memory, Cache], before: Proposed[Rows, Cache], hidden: Rows, count: int,
        following: Sequence[int], rooted: bool, start: int, num_steps: int, see: See,
    ) -> Proposed[Rows, Cache]:
        """Take in `count` rows that the target has committed at positions start, start + 1, ..

        hidden: the target's final rows; following: the tokens known after position `start`, at least `count`;
        rooted: exactly so many, and the last of them is the root (otherwise they are still the prompt's).
        `num_steps` is what is in force.
        """
        ...

    def draft(
        self, model: Model[Rows, Memory, Cache], proposed: Proposed[Rows, Cache], tokens: Sequence[int],
        asked: Asked, see: See,
    ) -> tuple[list[int], list[int]]:
        """The drafts in use and the drafter's own, in window order; `tokens` are all committed ones and the root.

        Everything computed here is scratch: `proposed` stays as it is.
        """
        ...
