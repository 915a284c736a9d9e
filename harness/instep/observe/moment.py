"""One event and everything known around it: what a check looks at.

Leaves out: how it was gathered (`rig/lockstep.py`) and what is made of it (`checks/`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from instep_reference.contract.engine import Answer, Event, Region, RequestState
from instep_reference.contract.place import Place

from .memory import Changes
from .noted import NOTHING, Noted

# Rows of a place are packed in batch order. Which requests have rows at a stage, and how many:
#   trunk    forward: every row of the event;  logits and pick: all nodes of a verify row, one row for a
#            decode and for a last prefill chunk, none for an unfinished prompt
#   extend   forward: prefill and decode rows;  commit: accept_lens rows per request;  logits and pick: one
#            row per request whose root is known. extend.i: the same, of MTP layer i; where a prompt goes on, but not
#            far enough for the next layer, a row for that one too
#   chain.i  draft: one row per request
Places = Mapping[Place, torch.Tensor]


@dataclass(frozen=True)
class Side:
    """One side's view of the moment. `before` and `after`: request -> logical state of every live request."""

    name: str
    answer: Answer | None
    places: Places
    before: Mapping[str, RequestState]
    after: Mapping[str, RequestState]
    wish: int  # next_num_steps()


@dataclass(frozen=True)
class Expected:
    """What the trace alone says (`trace/legal.py`): predicted, never asked of an engine."""

    slots_before: Mapping[str, int]
    slots_after: Mapping[str, int]
    pages_after: Mapping[str, tuple[int, ...]]
    lengths_after: Mapping[str, int]
    roots_after: Mapping[str, int | None]
    windows: Mapping[str, tuple[int, ...]]  # verify rows in flight: root, drafts
    num_steps: int
    flying: frozenset[str]  # verified and not committed: their conv windows and states belong to nobody
    prompts: Mapping[str, int] = field(default_factory=dict)  # how long they are


@dataclass(frozen=True)
class Moment:
    """subject: the engine under test. truth: the reference in fp64, or the ledger of labels when the subject
    moves labels. rounded: the reference in the declared width with its rounding points; None for labels.
    redrawn: the rounded run up to here once more, as another draw (see `rig/sides.py`), by its number; costly.
    regions: the subject's pools as they stand now. updates: whether its rings keep updates (`updates.py`)."""

    index: int
    event: Event
    expected: Expected
    subject: Side
    truth: Side
    rounded: Side | None
    changes: Changes  # which bytes of the subject's pools changed where they must not
    subject_slots: Mapping[str, int]
    subject_pages: Mapping[str, list[int]]
    redrawn: Callable[[int], Side] | None = None
    regions: Callable[[], Sequence[Region]] = tuple
    noted: Noted = NOTHING  # op calls, host reads, graphs: what no tensor says
    updates: bool = False

    @property
    def kind(self) -> str:
        """The event's kind as the trace spells it ("commit")."""
        return str(type(self.event).__struct_config__.tag)
