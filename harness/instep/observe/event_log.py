"""What was logged about the subject while an event ran: op calls, host reads, graphs, configurations, answers.

Leaves out: how it is gathered (`calls.py`, `reads.py`, `replay/participants.py`) and what is made of it (`checks/`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from instep_reference.contract.copies import Copy
from instep_reference.contract.engine import Capacity
from instep_reference.contract.place import Place


@dataclass(frozen=True)
class Broken:
    """A clause of an op's contract that a call broke: the op, the place that its result has (if any), a sentence."""

    op: str
    place: Place | None
    clause: str


@dataclass(frozen=True)
class FailedOp:
    """The op in which an exception was raised, and the place that its result has (or its memory), as far as known."""

    op: str
    place: Place | None
    error: BaseException


@dataclass(frozen=True)
class Served:
    """Rows of one request that a call with memory served.

    form   "chunk" or "window" for convs and the delta rule, "pages" for attention
    units  its slot; for attention its pages in order
    begin, count  packed rows;  before: positions in memory before them, of attention alone
    branches      of rows that are nodes of a tree; () for a chain, whatever form it is served in. Of attention: the
                  positions from `before` on that each row sees; else the node before each row, -1 for the root
    """

    op: str
    place: Place
    form: str
    units: tuple[int, ...]
    begin: int
    count: int
    before: int = 0
    branches: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class HostRead:
    """A value of the device that the host read while the event ran: by whom, and inside which op; "": between ops."""

    reader: str
    op: str


@dataclass(frozen=True)
class GraphReplay:
    """One replay of a graph: its key ("verify", 3), bucket, rows that are not padding, and its buffers.

    inputs     name -> (what the host said, what stood in the graph's own buffer, what a padding row says)
    addresses  of every input and output buffer, in order
    buckets    all that there are
    """

    key: Any
    bucket: int
    rows: int
    inputs: Mapping[str, tuple[list[Any], list[Any], Any]]
    addresses: tuple[int, ...]
    buckets: tuple[int, ...]


@dataclass(frozen=True)
class Config:
    """A configuration around a constructor, or around the run so far: field -> (what it was, what it is), changed only.

    fields  how many were compared;  what: "the model's configuration";  while_: "the optimized engine was made"
    """

    what: str
    while_: str
    fields: int
    changed: Mapping[str, tuple[str, str]]


@dataclass(frozen=True)
class Room:
    """What a trace asks room for, and the widest window of all its candidates.

    layouts: how blocks of states lie, by slot and in snapshots; None: the engine decides that itself.
    """

    capacity: Capacity
    widest: int
    layouts: tuple[str, str] | None = None


@dataclass(frozen=True)
class Answered:
    """Tensors of an answer as the subject gave them, before anybody copied them.

    tensors  how many;  pooled: regions that one of them is a view on;  let_go: how many of the run so far are not held
    any more, so that a change would go unseen
    changed  fields of answers to events before whose bytes are no longer what they were: "bonus of event 12 commit"
    """

    tensors: int
    pooled: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    let_go: int = 0


@dataclass(frozen=True)
class Copies:
    """Copies of requests that the subject keeps by `save`, `preempt` and `offload`, after an event.

    shown    all of them;  elements: numbers that were compared
    changed  parts that are no longer what they were after the event before
    held     copies that are gone, but not their memory
    stayed   copies that an offload keeps, and that do not stand in host memory
    """

    shown: frozenset[Copy]
    elements: int
    changed: tuple[tuple[Copy, str], ...] = ()
    held: tuple[Copy, ...] = ()
    stayed: tuple[Copy, ...] = ()


@dataclass(frozen=True)
class EventLog:
    """What was logged of one event.

    ops       name of the op set; "": somebody else's engine, whose calls nobody sees
    calls     op calls that were judged;  tensors: in these, how many tensors;  captured: calls in a capture, not judged
    by        op -> the function that served it
    trapped   whether host reads were watched;  reads: what was read
    graphs    whether the subject holds its bodies in graphs;  replays: those of this event
    poison    what fresh and freed units hold; None: nothing, or nothing is known
    guarded   whether pools are declared to have red zones
    failed_op  the op that raised, if one did
    wrote     ops that only a keeper calls, in the order of their calls, each with the place of the memory it wrote
    copies    what it keeps of requests; None: it does not show that
    """

    ops: str = ""
    calls: int = 0
    tensors: int = 0
    captured: int = 0
    broken: tuple[Broken, ...] = ()
    served: tuple[Served, ...] = ()
    by: Mapping[str, str] = field(default_factory=dict)
    trapped: bool = False
    reads: tuple[HostRead, ...] = ()
    graphs: bool = False
    replays: tuple[GraphReplay, ...] = ()
    configs: tuple[Config, ...] = ()
    answered: Answered | None = None
    copies: Copies | None = None
    room: Room | None = None
    poison: float | None = None
    guarded: bool = False
    failed_op: FailedOp | None = None
    wrote: tuple[tuple[str, Place | None], ...] = ()


NOTHING = EventLog()
