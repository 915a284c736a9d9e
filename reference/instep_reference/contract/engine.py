"""The specification: events, answers, the logical state of a request, and the engine that serves them.

There is one method per event; `event.on(engine)` is the whole dispatcher. Each side fills in every field of an answer
itself, and the harness compares. Leaves out: every computation.

Words (B requests in batch order, n = `num_steps`):
  root          the last bonus token: chosen, but not yet in KV or state
  window        root, then the drafts: `num_steps + 1` tokens for a chain, the nodes of a tree otherwise
  node          an index into a window; node 0 is the root. `parents[i] < i` is node i's parent, parents[0] = -1
  length        committed tokens: their KV and state are in memory; the root is not among them
  drafts' KV    has the same length: row p pairs the target's final hidden row p with token p + 1
  round         a draft, a verify, a commit of all that was verified; between a verify and its commit nothing runs:
                no other draft or forward, no new step count, no idle. A request in no round is between rounds

An event must not change the logical state of a request that it does not name. Events are served in the order given.
The caller must not send illegal events (`instep.trace.event_rules` has the rules). A legal event that an engine does
not serve raises `Unsupported`; one for which its pools have no room raises `OutOfCapacity`. Neither changes anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, Protocol, runtime_checkable

import msgspec
import torch

from .capacity import Capacity as Capacity
from .meaning import Meaning
from .place import Place, See, memory_place
from .sampling import Sampling


class Event(msgspec.Struct, frozen=True, tag_field="event", tag=str.lower, forbid_unknown_fields=True):
    """One thing that happens to an engine. Requests are named by strings; tokens are ints."""

    def on(self, engine: Engine) -> Answer | None:
        raise NotImplementedError


class Admit(Event, frozen=True, omit_defaults=True):
    """`request` enters with `prompt` (at least one token); it takes the first free slot.

    sampling  how its tokens are drawn; None: argmax. It is the request's own: a load, or a resume, leaves it as it is
    """

    request: str
    prompt: tuple[int, ...]
    sampling: Sampling | None = None

    def on(self, engine: Engine) -> None:
        # An engine that does not sample may leave the third argument out.
        engine.admit(self.request, self.prompt, *() if self.sampling is None else (self.sampling,))


class Draft(Event, frozen=True):
    """Propose `num_steps` drafts for each request (between rounds, its root known, num_steps > 0).

    Nothing is committed: the rows that a chain writes into the draft KV are scratch.
    picks    the drafts to use, one tuple per request; None: the head's own argmax.
             The chain itself runs on them too: step i runs on picks[i - 1].
    parents  per request, the parent node of every draft, for a tree (node 0 is the root, draft j is
             node j + 1); None: a chain. Only with picks.
    """

    requests: tuple[str, ...]
    picks: tuple[tuple[int, ...], ...] | None = None
    parents: tuple[tuple[int, ...], ...] | None = None

    def on(self, engine: Engine) -> Drafted:
        return engine.draft(self.requests, self.picks, self.parents)


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One request's part of a forward.

    prefill  the next `tokens` tokens of the prompt, committed at once, with their draft extend. In it the last row is
             paired with the next token of the prompt, or with the root. The last chunk chooses the root.
    verify   the window: the root and the drafts of this round. Nothing is committed.
    decode   the root alone, committed at once, with its draft extend. It chooses the next root.
    tokens   of a prefill row; 1 on the others (a window is as wide as its drafts made it)
    root     the root to use after a decode row or a last prefill chunk; None: the target's own choice.
    uniforms if the request samples and the row chooses: one per node of a window, and the final one (`sampling.py`)
    """

    request: str
    kind: Literal["prefill", "verify", "decode"]
    tokens: int = 1
    root: int | None = None
    uniforms: tuple[float, ...] = ()


class Forward(Event, frozen=True):
    """The only event that runs the target: rows in batch order, kinds mixed as they come."""

    rows: tuple[Row, ...]

    def on(self, engine: Engine) -> Forwarded:
        return engine.forward(self.rows)


class Path(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The accepted path through a window: the nodes after the root, in order (a chain: 1, 2, .. k), and the bonus."""

    nodes: tuple[int, ...]
    bonus: int


class Commit(Event, frozen=True):
    """Commit the accepted tokens of all verified requests: their state, KV and draft KV then have the accepted length.

    The state is the one after the path's last node. The new root is the bonus. The draft extend takes in the rows of
    all accepted nodes. The result is equal to decoding the accepted tokens one by one. accepted  one path per request;
    None: the engine's own acceptance, down to each child that is the choice at its parent.
    """

    requests: tuple[str, ...]
    accepted: tuple[Path, ...] | None = None

    def on(self, engine: Engine) -> Committed:
        return engine.commit(self.requests, self.accepted)


class SetNumSteps(Event, frozen=True, tag="set_num_steps"):
    """From here `num_steps` is in force: a candidate, or 0, which is always legal. Every request is between rounds."""

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
    """Give a request a copy of the state kept under `name`. It has the same prompt, and nothing of it ran yet."""

    request: str
    name: str

    def on(self, engine: Engine) -> None:
        engine.load(self.request, self.name)


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
    """`of` is offered where it is illegal; an engine that says `refuses` raises `InstepError` and changes nothing."""
    of: AnyEvent
    def on(self, engine: Engine) -> None:
        getattr(engine, "offered", id)(self.of)  # no method of the protocol: who leads the engines offers it


AnyEvent = (
    Admit | Draft | Forward | Commit | SetNumSteps | Save | Load | Preempt | Resume | Finish | Abort | Idle | Refused
)


@dataclass(frozen=True)
class Drafted:
    """drafts [B, n] int64: the tokens in use; own [B, n] int64: the head's argmax at each place.

    own is the head's argmax after the drafts in use, not after its own; -1 without a head. Trees of one batch may
    differ in size: then n is the largest, and shorter rows end in -1.
    """

    drafts: torch.Tensor
    own: torch.Tensor


@dataclass(frozen=True)
class Forwarded:
    """What the target said.

    roots  request -> the root in force after a decode row or a last prefill chunk. A look-up may wait for the device
    own    request -> int64 [rows]: the target's own choice. One per node of a verified window, one for a decode row and
           for a last prefill chunk; a request with an unfinished prompt has no entry
    """

    roots: Mapping[str, int]
    own: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Committed:
    """The result of acceptance, under the field's usual names; all int64 on the engine's device.

    num_correct_drafts [B]         accepted drafts, bonus excluded
    accept_lens [B]                num_correct_drafts + 1
    accept_index [B, width]        nodes on the accepted path, root first, -1 padded; width = the longest window
    last_correct_step_indices [B]  the node whose state is committed
    bonus [B]                      the next root
    own_num_correct_drafts [B], own_bonus [B]   the engine's own acceptance, also where the event gave paths
    """

    num_correct_drafts: torch.Tensor
    accept_lens: torch.Tensor
    accept_index: torch.Tensor
    last_correct_step_indices: torch.Tensor
    bonus: torch.Tensor
    own_num_correct_drafts: torch.Tensor
    own_bonus: torch.Tensor


Answer = Drafted | Forwarded | Committed


@dataclass(frozen=True)
class RequestState:
    """The logical state of a request, in the canonical layout; a copy, never a view. Drafts and windows are not in it.

    Between a verify and its commit everything is as before the verify, except `conv` and `state`. These two belong to
    no request then: an engine may hold anything there, and they are not compared.

    length      committed tokens, L
    root        the root token, or None while the prompt is unfinished
    proposal    draft 1 as draft extend proposes it (argmax), or None while there is no root, or no draft head in use
    proposal_hidden [D]  the head's row y from which the proposal was picked
    conv        GDN layer -> [C, W-1], oldest first (zeros before the first token)
    state       GDN layer -> [HV, K, V]
    keys, values              attention layer -> [L, kv_heads, head_dim]
    draft_keys, draft_values  MTP layer -> [L, kv_heads, head_dim]: after every event as long as the target's
    """

    length: int
    root: int | None
    proposal: int | None
    proposal_hidden: torch.Tensor | None
    conv: dict[int, torch.Tensor]
    state: dict[int, torch.Tensor]
    keys: dict[int, torch.Tensor]
    values: dict[int, torch.Tensor]
    draft_keys: dict[int, torch.Tensor] = field(default_factory=dict)
    draft_values: dict[int, torch.Tensor] = field(default_factory=dict)

    def parts(self) -> Iterator[tuple[Place, torch.Tensor]]:
        """Every tensor that belongs to a layer, with the place where an event writes it; nothing is copied.

        By field in the order above, then by layer.
        """
        for name in MEMORY:
            for layer, tensor in getattr(self, name).items():
                yield memory_place(name, layer), tensor


# What a request keeps in its layers, by field: the one list that saving, restoring, checks and reports go by.
MEMORY = tuple(each.name for each in fields(RequestState) if str(each.type).startswith("dict["))


class Engine(Protocol):
    """One method per event, and two questions, `next_num_steps` and `state`, which change nothing.

    The rules of the step count stand in `contract.adaptive`, the order of slots and pages in `Capacity`.
    """

    def admit(self, request: str, prompt: tuple[int, ...], sampling: Sampling | None = None) -> None: ...
    def draft(
        self, requests: tuple[str, ...], picks: tuple[tuple[int, ...], ...] | None = None,
        parents: tuple[tuple[int, ...], ...] | None = None,
    ) -> Drafted: ...
    def forward(self, rows: tuple[Row, ...]) -> Forwarded: ...
    def commit(self, requests: tuple[str, ...], accepted: tuple[Path, ...] | None = None) -> Committed: ...
    def set_num_steps(self, num_steps: int) -> None: ...
    def next_num_steps(self) -> int: ...
    def save(self, request: str, name: str) -> None: ...
    def load(self, request: str, name: str) -> None: ...
    def preempt(self, request: str) -> None: ...
    def resume(self, request: str) -> None: ...
    def finish(self, request: str) -> None: ...
    def abort(self, request: str) -> None: ...
    def idle(self) -> None: ...
    def state(self, request: str) -> RequestState: ...


@dataclass(frozen=True)
class Region:
    """One pool as memory: every byte of it, addressed by the units that the strategy's table names.

    name     for tables and messages; nothing follows from it
    layer    layer index (MTP layers count from 0 in draft regions)
    by       what the first axis counts: "slot", "row" (batch row of a snapshot) or "page"
    units    tensor whose first axis is that; a view on the pool itself
    gaps     red zones between the units, same first axis, or None when the pool is not guarded
    means    what stands in a unit; None: not declared, so a unit is compared as a whole
    scratch  units that belong to no request at any time and that any event may write; the result lists them
    red      the units themselves are red zones: no event may write them
    """

    name: str
    layer: int
    by: Literal["slot", "row", "page"]
    units: torch.Tensor
    gaps: torch.Tensor | None = None
    means: Meaning | None = None
    scratch: frozenset[int] = frozenset()
    red: bool = False


@runtime_checkable
class Inspectable(Protocol):
    """What an engine under test shows beside the protocol. To ask changes nothing."""

    def regions(self) -> list[Region]: ...

    def may_change(self, event: Event) -> dict[str, set[int]]:
        """Region name -> units that the event may write; every other unit must keep its bytes.

        It is read BEFORE the event runs. Regions that are absent may not change at all. No table may be wider than the
        event rules: slots of the requests that the event names; pages of the positions that it writes (all pages of a
        request that leaves); batch rows of its batch; nothing if the event names no request. Scratch is left out.
        """
        ...

    def slots(self) -> dict[str, int]:
        """request -> slot, as the engine has it. The harness predicts the slots itself and compares."""

    def pages(self) -> dict[str, list[int]]:
        """request -> KV pages in order, as the engine has it."""


class Watched(Protocol):
    """An engine whose named places can be seen: `watch(see)` installs the hook, `unseen` removes it."""
    def watch(self, see: See) -> None: ...
