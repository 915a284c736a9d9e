"""One event and everything known about it: the input of a check.

Leaves out: how it is gathered (`run/lockstep.py`) and how it is judged (`checks/`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from instep_reference.contract.engine import Event, Region, RequestState
from instep_reference.contract.event_facts import kind_of
from instep_reference.contract.kept_copies import Copy
from instep_reference.contract.place_names import AFTER_LAYERS, Place
from instep_reference.contract.sampling import Sampling

from ..player import Side
from .event_log import NOTHING, EventLog
from .memory_changes import Changes
from .rank_facts import GroupFacts, RankFacts, StageFacts
from .visible_places import WHOLE, Shown

# Rows of a place are packed in batch order. Which requests have rows at a stage, and how many:
#   trunk    forward: every row of the event;  logits and pick: all nodes of a verify row, one row for a
#            decode and for a last prefill chunk, none for an unfinished prompt
#   extend   forward: prefill and decode rows;  commit: accept_lens rows per request;  logits and pick: one
#            row per request whose root is known. extend.i: the same, of MTP layer i; if a prompt continues, but
#            not far enough for the next layer, that layer has a row too
#   chain.i  draft: one row per request; if the drafter grows trees, one per beam, and logits alone at chain.0
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


@dataclass(frozen=True)
class Expected:
    """Facts that follow from the trace alone (`trace/event_rules.py`): predicted, never read from an engine."""

    slots_before: Mapping[str, int]
    slots_after: Mapping[str, int]
    pages_before: Mapping[str, tuple[int, ...]]
    pages_after: Mapping[str, tuple[int, ...]]
    lengths_after: Mapping[str, int]
    roots_after: Mapping[str, int | None]
    windows: Mapping[str, tuple[int, ...]]  # verify rows in flight: root, drafts
    num_steps: int
    flying: frozenset[str]  # verified and not committed: their conv windows and states are undefined
    prompts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    parents: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of each node of a window, -1 for the root
    copies: frozenset[Copy] = frozenset()  # saved, preempted and offloaded copies of requests after the event
    sampling: Mapping[str, Sampling] = field(default_factory=dict)  # of the requests that sample
    prefixes: Mapping[str, int] = field(default_factory=dict)  # tracked so far: name -> number of tokens
    track_interval: int | None = None
    track_slots: Mapping[str, int] | None = None  # of the prefixes on the device; None: the room does not limit them
    steps_to_track: Mapping[str, int] = field(default_factory=dict)  # by the last commit: request -> node of its window
    device_widths: bool = False  # whether the device alone knows the widths of windows
    topk: int | None = None  # where the drafter grows trees, the children of a node;  grown: the drafts of such a tree
    grown: int = 0
    request_rows_before: Mapping[str, int] = field(default_factory=dict)  # request -> its request row
    request_rows_after: Mapping[str, int] = field(default_factory=dict)
    coming: tuple[int, int] = (0, 0)  # requests with a slot: those whose root is known, and all

    def pages_in_use(self, request: str) -> tuple[int, ...]:
        """The pages of a request during the event: an event that gives pages back may use them before."""
        lists = (pages.get(request, ()) for pages in (self.pages_before, self.pages_after))
        return max(lists, key=len) if request in self.pages_after else ()

    def tree(self, request: str) -> tuple[int, ...] | None:
        """The parent of each node of a request's window in flight; None: it does not branch."""
        return branching(self.parents.get(request, ()))


def branching(parents: tuple[int, ...]) -> tuple[int, ...] | None:
    """The parents of a window's nodes; None if each node follows the node before."""
    return None if parents == tuple(range(-1, len(parents) - 1)) else parents


@dataclass(frozen=True)
class LastForward:
    """The rows of the last forward, whether or not they were committed. Its verified windows are the round in flight.

    spans             request -> its rows of the target
    subject, truth    the two sides there: answers, rows of the target, and the states of these requests before
    windows, parents  as in `Expected`;  tokens: of the rows of each request
    uniforms          request -> those of its row, if it draws
    """

    spans: Mapping[str, RowSpan]
    subject: Side
    truth: Side
    windows: Mapping[str, tuple[int, ...]]
    parents: Mapping[str, tuple[int, ...]]
    uniforms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class KeptCopy:
    """The subject's copy made by a save or a preempt: the logical state, and the proposals of its MTP layers.

    sent   of a copy that another engine made: the state as that engine had it
    ranks  of the engine that made it, if it has several
    """

    state: RequestState
    proposed: tuple[int, ...]
    sent: RequestState | None = None
    ranks: RankFacts | None = None


@dataclass(frozen=True)
class Earlier:
    """Facts from earlier events, as the subject had them (`facts_for_later_events.py` updates them).

    forward    the last forward; None before the first
    proposed   request -> the pick of each MTP layer after its root
    preempted  request -> its copy; saved: name -> the copy or prefix under that name
    dropped    name -> the copies that were dropped under it, the last one first
    """

    forward: LastForward | None = None
    proposed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    preempted: Mapping[str, KeptCopy] = field(default_factory=dict)
    saved: Mapping[str, KeptCopy] = field(default_factory=dict)
    dropped: Mapping[str, tuple[KeptCopy, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class EventContext:
    """The input of a check.

    subject    the engine under test
    truth      the reference in fp64, or the ledger of labels if the subject moves labels
    rounded    the reference in the declared width with its rounding points; None for labels
    regions    the subject's pools after the event
    updates    whether its rings keep updates (`rows_by_request.py`)
    earlier    facts from the events before
    shown      the parts of the subject that are visible at this event
    """

    index: int
    event: Event
    expected: Expected
    subject: Side
    truth: Side
    rounded: Side | None
    changes: Changes  # bytes of the subject's pools that changed without permission
    subject_slots: Mapping[str, int]
    subject_pages: Mapping[str, list[int]]
    regions: Sequence[Region] = ()
    log: EventLog = NOTHING  # op calls, host reads, graphs: everything that is no tensor
    updates: bool = False
    earlier: Earlier = field(default_factory=Earlier)
    shown: Shown = WHOLE
    ranks: RankFacts | None = None  # None: the subject has one rank
    stages: StageFacts | None = None  # None: the subject has one pipeline stage
    group: GroupFacts | None = None  # None: the subject is no data-parallel group

    @property
    def kind(self) -> str:
        """The event's kind as in the trace ("commit")."""
        return kind_of(self.event)
