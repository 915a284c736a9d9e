"""The specification: events, and the engine that serves them. Its answers are in `answers.py`.

There is one method per event; `event.on(engine)` is the whole dispatcher. Each side fills in every field of an answer
itself, and the harness compares. Leaves out: every computation.

Words (B requests in batch order, n = `num_steps`):
  root          the last bonus token: chosen, but not yet in KV or state
  window        root, then the drafts: `num_steps + 1` tokens for a chain, the nodes of a tree otherwise
  node          an index into a window; node 0 is the root. `parents[i] < i` is node i's parent, parents[0] = -1
  length        committed tokens: their KV and state are in memory; the root is not among them
  drafts' KV    has the same length: row p pairs the target's final hidden row p with token p + 1
  prefix        the first n tokens of a request. A *tracked* prefix is kept under a name, for requests that begin with
                the same n tokens and continue differently. It holds what depends on no later token: n rows of KV, conv
                windows and states after n tokens, n - 1 - i rows of the KV of MTP layer i, and the target's final
                hidden rows of the last m tokens, with m MTP layers (1 without any). Row n - 1 - i of layer i depends
                on the token after the prefix, so the load computes it with the new request's token. It extends the
                draft head by the last m rows, because a layer reads the results of the layers before it for these rows
  kept          an entry of a save or of a tracked prefix under a name, until an evict. It is on the device, or it was
                moved to the host. It moves whole, with every part, and none of its bits change. Only events decide
                which entry moves or is evicted, so that every engine of a trace has the same ones
  transfer      two engines serve a trace that has a *receiver*: each its own requests, in its own pools. An offload
                gives an entry out, and a fetch takes it in at the engine that did not give it out, where a load
                continues from it. Names are unique over both engines. The fetch raises if a part is missing
  round         a draft, a verify, a commit of everything verified; between a verify and its commit nothing runs:
                no other draft or forward, no new step count, no idle. A request in no round is between rounds

An event must not change the logical state of a request that it does not name. Events are served in the order given.
The caller must not send illegal events (`instep.trace.event_rules` has the rules). A legal event that an engine does
not support raises `Unsupported`; one for which its pools have no room raises `OutOfCapacity`. Neither changes anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import msgspec
import torch

from .answers import MEMORY as MEMORY
from .answers import Answer as Answer
from .answers import Committed as Committed
from .answers import Drafted as Drafted
from .answers import Forwarded as Forwarded
from .answers import RequestState as RequestState
from .capacity import Capacity as Capacity
from .place_names import See
from .pool_meaning import Meaning
from .sampling import Sampling


class Event(msgspec.Struct, frozen=True, tag_field="event", tag=str.lower, forbid_unknown_fields=True):
    """One thing that happens to an engine. Requests are named by strings; tokens are ints."""

    def on(self, engine: Engine) -> Answer | None:
        raise NotImplementedError


class Admit(Event, frozen=True, omit_defaults=True):
    """`request` enters with `prompt` (at least one token); it takes the first free slot.

    sampling  how its tokens are drawn; None: argmax. It is the request's own: a load, or a resume, leaves it as it is
    receiver  of a trace with two engines: the second one serves the request
    given     only in a recording: how its tokens are chosen is not recorded, so the tokens are given and not judged
    """

    request: str
    prompt: tuple[int, ...]
    sampling: Sampling | None = None
    receiver: bool = False
    given: bool = False

    def on(self, engine: Engine) -> None:
        # An engine that does not sample may omit the third parameter.
        engine.admit(self.request, self.prompt, *() if self.sampling is None else (self.sampling,))


class Draft(Event, frozen=True, omit_defaults=True):
    """Propose `num_steps` drafts for each request (between rounds, its root known, num_steps > 0).

    Nothing is committed: the rows that a chain writes into the draft KV are scratch. So a request that is drafted and
    not verified may be drafted again with picks, which replace the drafts that it has.
    picks    the drafts to use, one tuple per request; None: the head's own argmax.
             The chain itself runs on them too: step i runs on picks[i - 1].
    parents  per request, the parent node of every draft (node 0 is the root, draft j is node j + 1): a tree, only
             with picks; or a chain of its own width, 0 to num_steps drafts, with picks or without.
             None: chains of num_steps drafts.
    If the capacity has `topk`, the head grows a tree (`contract/grown_draft_tree.py`), whatever is given: it runs on
    its own beams. Without picks the window is this tree.
    own      only in a recorded event: the event had no picks, and picks and parents record the engine's drafts. The
    event
             is served without them, so that the window is the engine's own. If a request's drafts differ from the
             recorded ones, which a tie permits, the event is served once more with picks: the trace continues with the
             recorded window, and the engine's own proposal is compared as `own`
    """

    requests: tuple[str, ...]
    picks: tuple[tuple[int, ...], ...] | None = None
    parents: tuple[tuple[int, ...], ...] | None = None
    own: bool = False

    def on(self, engine: Engine) -> Drafted:
        return engine.draft(self.requests, self.picks, self.parents)


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One request's part of a forward.

    prefill  the next `tokens` tokens of the prompt, committed at once, with their draft extend. The extend pairs the
    last
             row with the next token of the prompt, or with the root. The last chunk chooses the root.
    verify   the window: the root and the drafts of this round. Nothing is committed.
    decode   the root alone, committed at once, with its draft extend. It chooses the next root.
    tokens   of a prefill row; 1 on the others (a window is as wide as its drafts made it)
    root     the root to use after a decode row or a last prefill chunk; None: the target's own choice.
    uniforms if the request samples and the row chooses: one per node of a window, and the final one (`sampling.py`)
    track    of a prefill row that ends at a multiple of `Capacity.track_interval`: the name under which the prefix that
             it reaches is tracked; it is not yet in use. Empty: nothing is tracked
    inner    of a prefill row: a name for each multiple of `Capacity.track_interval` inside it, in order, that is after
             its first token and before its last. The prefix up to there is tracked under the name; an empty name:
             it is not. A multiple with a name is a boundary like the end of a chunk: the states go on as they are
             stored. Empty: nothing is tracked inside the row
    """

    request: str
    kind: Literal["prefill", "verify", "decode"]
    tokens: int = 1
    root: int | None = None
    uniforms: tuple[float, ...] = ()
    track: str = ""
    inner: tuple[str, ...] = ()


class Forward(Event, frozen=True):
    """The only event that runs the target: rows in batch order, kinds mixed as they come."""

    rows: tuple[Row, ...]

    def on(self, engine: Engine) -> Forwarded:
        return engine.forward(self.rows)


class Path(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The accepted path through a window: the nodes after the root, in order (a chain: 1, 2, .. k), and the bonus."""

    nodes: tuple[int, ...]
    bonus: int


class Commit(Event, frozen=True, omit_defaults=True):
    """Commit the accepted tokens of all verified requests: their state, KV and draft KV then have the accepted length.

    The state is the one after the path's last node. The new root is the bonus. The draft extend takes in the rows of
    all accepted nodes. The result is equal to decoding the accepted tokens one by one.

    accepted  one path per request; None: the engine's own acceptance, down to each child that is the choice at its
           parent.
    track  one name per request, or none at all; an empty name: nothing. If the accepted tokens reach a multiple of
           `Capacity.track_interval`, the prefix up to the last such multiple is tracked under it. The name is not in
           use; if no multiple is reached, it stays free. Or it is that of a prefix of a request of this name, on the
           device: a multiple that is reached replaces it *in place*, in its track slot, and else it stays as it is
    caps   one number per request, 0 to its number of drafts, or none at all. Acceptance stops after so many drafts, in
           a tree at so many nodes below the root; the bonus is the target's choice at the node that was reached. The
           engine's own acceptance stops there, and a path of `accepted` that is longer is cut there: its bonus is the
           one of the cut path. Only the device needs the caps: to reserve memory, the whole window counts
    """

    requests: tuple[str, ...]
    accepted: tuple[Path, ...] | None = None
    track: tuple[str, ...] = ()
    caps: tuple[int, ...] = ()

    def on(self, engine: Engine) -> Committed:
        # An engine that tracks no prefixes and has no caps may omit the last parameters.
        more = (self.track, self.caps) if self.caps else (self.track,) if self.track else ()
        return engine.commit(self.requests, self.accepted, *more)


class SetNumSteps(Event, frozen=True, tag="set_num_steps"):
    """Put `num_steps` in force: a candidate, or 0, which is always legal. Every request is between rounds."""

    num_steps: int

    def on(self, engine: Engine) -> None:
        engine.set_num_steps(self.num_steps)


class Save(Event, frozen=True):
    """Keep a copy of the request's logical state (between rounds) under `name`, which is not yet in use."""

    request: str
    name: str

    def on(self, engine: Engine) -> None:
        engine.save(self.request, self.name)


class Load(Event, frozen=True):
    """Give a request a copy of the state kept under `name`, which is on the device. The request has not run yet.

    If a save kept it, the request has the same prompt. A tracked prefix is given to requests whose prompt begins with
    it and has further tokens: the load extends the draft head by the last rows of the prefix, one for each MTP layer,
    and the tokens after them.
    The request is then in its prompt, as if it had prefilled the prefix by itself.
    """

    request: str
    name: str

    def on(self, engine: Engine) -> None:
        engine.load(self.request, self.name)


class Offload(Event, frozen=True):
    """Move the entry under `name` to host memory with every part, and free its memory on the device."""

    name: str

    def on(self, engine: Engine) -> None:
        engine.offload(self.name)


class Fetch(Event, frozen=True):
    """Bring the entry under `name` back from the host to the device, so that it can be loaded again."""

    name: str

    def on(self, engine: Engine) -> None:
        engine.fetch(self.name)


class Evict(Event, frozen=True):
    """Drop the entry under `name`, wherever it is. The name is free, and may be used for another entry.

    No request changes: a loaded copy belongs to its request.
    """

    name: str

    def on(self, engine: Engine) -> None:
        engine.evict(self.name)


class Preempt(Event, frozen=True):
    """Take the slot and the pages away (between rounds). The logical state is kept, and `state` still returns it."""

    request: str

    def on(self, engine: Engine) -> None:
        engine.preempt(self.request)


class Resume(Event, frozen=True):
    """The preempted request takes the first free slot, with the logical state that it had."""

    request: str

    def on(self, engine: Engine) -> None:
        engine.resume(self.request)


class Finish(Event, frozen=True):
    """The request is over (between rounds, its root known); slot and pages are free."""

    request: str

    def on(self, engine: Engine) -> None:
        engine.finish(self.request)


class Abort(Event, frozen=True):
    """The request is over, at any time: inside its prompt, after a draft, after a verify, or while preempted."""

    request: str

    def on(self, engine: Engine) -> None:
        engine.abort(self.request)


class Idle(Event, frozen=True):
    """A step with an empty batch: no byte may change."""

    def on(self, engine: Engine) -> None:
        engine.idle()


class Refused(Event, frozen=True):
    """Offer `of` where it is illegal; an engine with `refuses` raises `InstepError` and changes nothing."""

    of: AnyEvent

    def on(self, engine: Engine) -> None:
        getattr(engine, "offered", id)(self.of)  # not a method of the protocol: the player of the engines offers it


AnyEvent = (
    Admit | Draft | Forward | Commit | SetNumSteps | Save | Load | Offload | Fetch | Evict | Preempt | Resume | Finish
    | Abort | Idle | Refused
)


class Engine(Protocol):
    """One method per event, and two queries, `next_num_steps` and `state`, which change nothing.

    The rules of the step count are in `contract.controllers`, the order of slots and pages in `Capacity`.
    """

    def admit(self, request: str, prompt: tuple[int, ...], sampling: Sampling | None = None) -> None: ...
    def draft(
        self, requests: tuple[str, ...], picks: tuple[tuple[int, ...], ...] | None = None,
        parents: tuple[tuple[int, ...], ...] | None = None,
    ) -> Drafted: ...
    def forward(self, rows: tuple[Row, ...]) -> Forwarded: ...
    def commit(
        self, requests: tuple[str, ...], accepted: tuple[Path, ...] | None = None, track: tuple[str, ...] = (),
        caps: tuple[int, ...] = (),
    ) -> Committed: ...
    def set_num_steps(self, num_steps: int) -> None: ...
    def next_num_steps(self, batch: int, scheduled: int) -> int: ...
    def save(self, request: str, name: str) -> None: ...
    def load(self, request: str, name: str) -> None: ...
    def offload(self, name: str) -> None: ...
    def fetch(self, name: str) -> None: ...
    def evict(self, name: str) -> None: ...
    def preempt(self, request: str) -> None: ...
    def resume(self, request: str) -> None: ...
    def finish(self, request: str) -> None: ...
    def abort(self, request: str) -> None: ...
    def idle(self) -> None: ...
    def state(self, request: str) -> RequestState: ...


@dataclass(frozen=True)
class Region:
    """One pool as memory: every byte of it, addressed by the units that the strategy's table names.

    name     for tables and messages; nothing depends on it
    layer    layer index (MTP layers count from 0 in draft regions)
    by       the meaning of the first axis: "slot", "row" (batch row of a snapshot), "page" or "request" (request row:
             `Capacity.slots` has the order in which they are handed out)
    units    tensor whose first axis is that; a view on the pool itself
    gaps     red zones between the units, same first axis, or None when the pool is not guarded
    means    the contents of a unit; None: not declared, so a unit is compared as a whole
    scratch  units that belong to no request at any time and that any event may write; the result lists them
    red      the units themselves are red zones: no event may write them
    rank     the rank that has the memory; None: the engine has one rank
    """

    name: str
    layer: int
    by: Literal["slot", "row", "page", "request"]
    units: torch.Tensor
    gaps: torch.Tensor | None = None
    means: Meaning | None = None
    scratch: frozenset[int] = frozenset()
    red: bool = False
    rank: int | None = None


@runtime_checkable
class Inspectable(Protocol):
    """Inspection of an engine under test, in addition to the protocol. A call changes nothing."""

    def regions(self) -> list[Region]: ...

    def may_change(self, event: Event) -> dict[str, set[int]]:
        """Region name -> units that the event may write; every other unit must keep its bytes.

        It is read BEFORE the event runs. Regions that are absent may not change at all. No table may be wider than the
        event rules: slots of the requests that the event names; pages of the positions that it writes (all pages of a
        request that leaves); batch rows of its batch; request rows as slots; nothing if the event names no request.
        Scratch is not listed.
        """
        ...

    def slots(self) -> dict[str, int]:
        """Return request -> slot, as the engine has it. The harness predicts the slots itself and compares."""

    def pages(self) -> dict[str, list[int]]:
        """Return request -> KV pages in order, as the engine has it."""


class ShowsBudget(Protocol):
    """Inspection of the memory budget by which an engine under test sizes its pools; a call changes nothing."""

    def budget(self) -> Mapping[str, int]:
        """Return the name of every region -> the bytes that the budget has for its units, over all layers.

        Red zones and padding between the units do not count. The budget takes the largest step count that may ever be
        in force, as the pools do.
        """
        ...


class Watched(Protocol):
    """An engine whose named places can be seen: `watch(see)` installs the hook, `unseen` removes it."""
    def watch(self, see: See) -> None: ...
