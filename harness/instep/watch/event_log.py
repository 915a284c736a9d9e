"""The log of the subject during an event: op calls, host reads, graphs, configurations, answers.

Leaves out: how it is gathered (`op_calls.py`, `host_reads.py`, `run/build_compared_engines.py`) and how it is judged
(`checks/`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from instep_reference.contract.engine import Capacity
from instep_reference.contract.kept_copies import Copy
from instep_reference.contract.place_names import Place


@dataclass(frozen=True)
class Broken:
    """A clause of an op's contract that a call broke: the op, the place of its result (if any), a sentence."""

    op: str
    place: Place | None
    clause: str


@dataclass(frozen=True)
class FailedOp:
    """The op that raised an exception, and the place of its result or its memory, as far as known."""

    op: str
    place: Place | None
    error: BaseException


@dataclass(frozen=True)
class Served:
    """Rows of one request that a call with memory served.

    form   "chunk" or "window" for convs and the delta rule, "pages" for attention
    units  its slot; for attention its pages in order
    begin, count  packed rows
    before        for attention alone: positions in memory before the rows
    branches      for rows that are nodes of a tree; () for a chain. For attention: the positions from `before` on that
                  each row sees; else the node before each row, -1 for the root
    part          if batches are cut into micro-batches: a number that grows with them
    """

    op: str
    place: Place
    form: str
    units: tuple[int, ...]
    begin: int
    count: int
    before: int = 0
    branches: tuple[tuple[int, ...], ...] = ()
    part: int = 0


@dataclass(frozen=True)
class HostRead:
    """A value of the device that the host read during the event: the reader, and the op in which it read; "": between
    ops.
    """

    reader: str
    op: str


@dataclass(frozen=True)
class GraphReplay:
    """One replay of a graph: its key ("verify", 3), bucket, rows that are not padding, and its buffers.

    inputs     name -> (the host's value, the value in the graph's buffer, the value for padding rows)
    addresses  of every input and output buffer, in order
    buckets    all existing buckets
    ran        parts of a graph with eager calls between its segments, in the order in which they ran: ("segment", 0)
    freed      inputs that the engine freed after the capture, as far as the graph is emulated
    stage      the pipeline stage or replica whose graph it is
    """

    key: Any
    bucket: int
    rows: int
    inputs: Mapping[str, tuple[list[Any], list[Any], Any]]
    addresses: tuple[int, ...]
    buckets: tuple[int, ...]
    ran: tuple[tuple[str, int], ...] = ()
    freed: int = 0
    stage: int = 0


@dataclass(frozen=True)
class Config:
    """A configuration before and after a constructor, or the run so far: field -> (old, new) for changed fields.

    fields  number of compared fields
    what    "the model's configuration"
    while_  "the optimized engine was made"
    """

    what: str
    while_: str
    fields: int
    changed: Mapping[str, tuple[str, str]]


@dataclass(frozen=True)
class Room:
    """The capacity that a trace requires, and the widest window of all its candidates.

    layouts: layout of states in slots and in snapshots; None: the engine decides that itself
    first:   the widest window of the first step count
    """

    capacity: Capacity
    widest: int
    first: int
    layouts: tuple[str, str] | None = None


@dataclass(frozen=True)
class Answered:
    """Tensors of an answer as the subject gave them, before any copy.

    tensors  how many
    pooled   regions of which one of them is a view
    let_go   number of answers of the run that are no longer held, so that a change would not be seen
    changed  fields of earlier answers whose bytes have changed: "bonus of event 12 commit"
    """

    tensors: int
    pooled: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    let_go: int = 0


@dataclass(frozen=True)
class Copies:
    """Copies of requests that the subject keeps by `save`, `preempt` and `offload`, after an event.

    shown    all of them
    elements numbers that were compared
    changed  parts that differ from their contents after the event before
    held     copies that are gone, but whose memory is not
    stayed   copies of an offload that are not in host memory
    track_slots  prefix -> its track slot; None: the subject does not show them
    """

    shown: frozenset[Copy]
    elements: int
    changed: tuple[tuple[Copy, str], ...] = ()
    held: tuple[Copy, ...] = ()
    stayed: tuple[Copy, ...] = ()
    track_slots: Mapping[str, int] | None = None


@dataclass(frozen=True)
class EventLog:
    """The log of one event.

    ops       name of the op set; "": an external engine, whose calls are not visible
    calls     judged op calls; tensors: their number of tensors; captured: calls in a capture, which are not judged
    by        op -> the function that ran
    trapped   whether host reads were watched; reads: the host reads
    graphs    whether the subject captures its bodies in graphs; replays: those of this event
    prompt_buckets  numbers of packed rows for which it captures forwards with prompts; empty: these run eagerly
    in_graphs  parts of kept copies that are in memory which the next replay of a graph overwrites
    poison    the fill value of fresh and freed units; None: none, or unknown
    guarded   whether pools are declared to have red zones
    failed_op  the op that raised, if one did
    wrote     ops that only a keeper calls, in order, each with the place of the memory that it wrote
    copies    copies of requests; None: it does not show them
    budget    region -> bytes that the subject's memory budget has for its units; None: it does not show a budget
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
    prompt_buckets: tuple[int, ...] = ()
    in_graphs: tuple[str, ...] = ()
    configs: tuple[Config, ...] = ()
    answered: Answered | None = None
    copies: Copies | None = None
    budget: Mapping[str, int] | None = None
    room: Room | None = None
    poison: float | None = None
    guarded: bool = False
    failed_op: FailedOp | None = None
    wrote: tuple[tuple[str, Place | None], ...] = ()


NOTHING = EventLog()
