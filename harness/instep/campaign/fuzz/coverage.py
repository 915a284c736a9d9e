"""How often conditions that trigger faults were met, over the events of all runs: one line per condition below.

If a condition was never met, the campaign cannot have found the faults that need it. Leaves out: code coverage.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from instep_reference.contract import engine as e
from instep_reference.contract.event_facts import (
    FACTS,
    ROW_FACTS,
    Phase,
    facts,
    kind_of,
    named,
    tracks,
)

from ...trace.request_table import RequestTable, Standing
from ...verdict import Verdict
from .event_turns import Past, Turn, accepted_of, at_prefix_end, batch_of, branches, paths_of, remember, rows_of
from .request_histories import Histories

Condition = Callable[[Turn], bool]


class Coverage:
    """Counts events, pairs of events and conditions. `begin` starts a run, `note` counts one of its events.

    without  condition that no run of these settings can meet -> the setting, as "without --overlap"
    """

    def __init__(self) -> None:
        self.met: Counter[str] = Counter()
        self.pairs: Counter[tuple[str, str]] = Counter()
        self.events: Counter[str] = Counter()
        self.histories = Histories()
        self._trees = self._prefixes = False  # whether any run had windows that may be trees; tracked prefixes
        self._further: dict[str, object] = {}  # of drafters, graphs of prompts, two engines, and stages
        self.without: dict[str, str] = {}
        self.begin()

    def begin(
        self, *, overlap: bool = False, heads: int = 1, buckets: Sequence[int] = (), block: bool = False,
        transfers: bool = False, stages: int = 1, micro_batches: int = 1, dp: int = 1,
    ) -> None:
        self._past, self._last, self._overlap, self._heads, self._block = Past(), "start", overlap, heads, block
        self._buckets = tuple(buckets)
        self.histories.begin()
        self._moves = TRANSFERS if transfers else {}
        self._further |= {**_of_drafters(heads, block), **(PROMPT_GRAPHS if buckets else {}), **self._moves}
        self._further |= dict.fromkeys((
            *[RELAYED] * (stages > 1), *[PARTED] * (micro_batches > 1), *[SHARED] * (dp > 1)))

    def note(
        self, before: RequestTable, event: e.AnyEvent, after: RequestTable, verdict: Verdict | None = None
    ) -> None:
        """Count an event. verdict: of this event, with what only the engine shows: relays, micro-batches, replicas"""
        if verdict is not None:
            self.met += Counter({RELAYED: verdict.relayed, PARTED: verdict.overlapped, SHARED: verdict.shared})
        turn = Turn(before, event, after, self._past, self._overlap, self._heads, self._buckets)
        conditions = {**CONDITIONS, **TREES, **PREFIXES, **_of_drafters(self._heads, self._block)}
        kind = kind_of(event)
        conditions |= {**(PROMPT_GRAPHS if self._buckets else {}), **self._moves}
        self._trees = self._trees or after.capacity.trees
        self._prefixes = self._prefixes or after.capacity.track_interval is not None
        self.met.update(name for name, holds in conditions.items() if holds(turn))
        self.events[kind] += 1
        self.pairs[self._last, kind] += 1
        self._last = kind
        self.histories.note(turn)
        remember(turn)

    def counts(self) -> dict[str, int]:
        """Condition that is possible -> how many events met it."""
        return {name: self.met[name] for name in self._names() if name not in self.without}

    @property
    def impossible(self) -> dict[str, str]:
        """The conditions of these runs that are impossible, as in `without`."""
        return {name: self.without[name] for name in self._names() if name in self.without}

    def _names(self) -> tuple[str, ...]:
        return *CONDITIONS, *(TREES if self._trees else ()), *(PREFIXES if self._prefixes else ()), *self._further

    def offers(self, refuses: bool) -> None:
        """Note whether an engine of these runs is offered illegal events."""
        if not refuses:
            self.without = dict.fromkeys(REFUSALS, "with an engine that refuses nothing") | self.without


def _at(kind: Any, holds: Callable[[Turn, Any], bool] = lambda turn, event: True) -> Condition:
    """An event of this kind for which the condition holds."""
    return lambda turn: isinstance(turn.event, kind) and holds(turn, turn.event)


def _of(kind: type[e.Event], *phases: Phase) -> Condition:
    """An event of one request that is in one of the phases."""
    return _at(kind, lambda turn, event: turn.before.live[event.request].phase in phases)


def _cut(turn: Turn) -> list[tuple[bool, int]]:
    """For a commit with caps: whether the path of each request is longer than its cap, and the cap."""
    if not isinstance(turn.event, e.Commit) or turn.event.accepted is None:
        return []
    return [(len(path.nodes) > cap, cap) for path, cap in zip(turn.event.accepted, turn.event.caps, strict=False)]


def _gives_pages_back(turn: Turn, event: e.Commit) -> bool:
    return any(len(turn.after.live[name].pages) < len(turn.before.live[name].pages) for name in event.requests)


def _decode_beside_verify(turn: Turn) -> bool:
    return bool(rows_of(turn, "decode")) and bool(rows_of(turn, "verify"))


def _chunk(count: int) -> Condition:
    return lambda turn: any(row.tokens == count for row in rows_of(turn, "prefill"))


def _window_long(turn: Turn) -> bool:
    """A last chunk as long as a verify window would be."""
    return any(row.tokens == turn.before.num_steps + 1 and row.root is not None for row in rows_of(turn, "prefill"))


def _ragged(turn: Turn) -> bool:
    return len({count for count, _ in accepted_of(turn)}) > 1


def _chains(turn: Turn) -> list[tuple[int, ...]]:
    """The windows without branches that a forward verifies."""
    return [one.window for one in _windows(turn) if not branches(one)]


def _none(turn: Turn) -> bool:
    return bool(found := accepted_of(turn)) and all(count == 0 for count, _ in found)


def _all(turn: Turn) -> bool:
    return bool(found := accepted_of(turn)) and all(count == offered > 0 for count, offered in found)


def _out_of_order(turn: Turn) -> bool:
    """Rows of a batch that are not in the order of their slots."""
    slots = [turn.before.live[row.request].slot or 0 for row in rows_of(turn, "prefill", "verify", "decode")]
    return slots != sorted(slots)


def _elsewhere(turn: Turn, event: e.Resume) -> bool:
    """In another slot than the one that was lost."""
    return turn.after.live[event.request].slot != turn.past.lost.get(event.request)


def _pages_out(table: RequestTable) -> bool:
    return sum(len(standing.pages) for standing in table.live.values()) == len(table.capacity.pages)


def _every_share(turn: Turn) -> bool:
    """All, none and some of the drafts, in one batch."""
    return {(count > 0) + (count == offered) for count, offered in accepted_of(turn) if offered} == {0, 1, 2}


def _other_tokens(turn: Turn) -> bool:
    """Requests of one batch that accepted other tokens at the same node."""
    return len({standing.window[nodes[0]] for standing, nodes in paths_of(turn) if nodes}) > 1


def _away(least: int) -> Condition:
    """In a batch again, after others were committed without it and while its accepted drafts were pending."""
    return lambda turn: any(turn.past.missed.get(name, 0) >= least for name in batch_of(turn))


def _below_pending(turn: Turn, event: e.SetNumSteps) -> bool:
    """A step count below what some request accepted last, and has not run on from."""
    return any(
        count > event.num_steps for name, count in turn.past.accepted.items() if name in turn.before.live
    )


def _ends(turn: Turn) -> list[int]:
    """The offsets into a page at which prompt chunks end that are not the last."""
    return [
        (turn.before.live[row.request].length + row.tokens) % turn.before.capacity.page_size
        for row in rows_of(turn, "prefill") if row.tokens < turn.before.live[row.request].unread
    ]


def _begins_a_page(turn: Turn) -> bool:
    rows, size = rows_of(turn, "verify"), turn.before.capacity.page_size
    return any(turn.before.live[row.request].length % size == 0 for row in rows)


def _past_position(least: int) -> Condition:
    return lambda turn: any(turn.before.live[name].length >= least for name in batch_of(turn))


def _sizes(holds: Callable[[int, int, int], bool]) -> Condition:
    """The accepted counts of this commit and the two before it."""
    return _at(e.Commit, lambda turn, event: holds(*turn.past.batch, len(event.requests)))


def _refused(holds: Callable[[Turn, e.AnyEvent], bool]) -> Condition:
    return _at(e.Refused, lambda turn, event: holds(turn, event.of))


def _no_page(turn: Turn, event: e.AnyEvent) -> bool:
    """A forward of rows that are all legal but for the room."""
    if not isinstance(event, e.Forward) or any(row.request not in turn.before.live for row in event.rows):
        return False
    width = {row.request: len(turn.before.live[row.request].window) or row.tokens for row in event.rows}
    return turn.before.pages_missing(turn.before.positions(width)) > 0


def _in_part(turn: Turn, event: e.AnyEvent) -> bool:
    """Several requests, of which the first may be named."""
    names, phases = named(event), facts(event).phases
    if isinstance(event, e.Forward):
        phases = ROW_FACTS[event.rows[0].kind].phases
    standing = turn.before.live.get(names[0]) if len(names) > 1 else None
    return standing is not None and standing.phase in phases


CONDITIONS: dict[str, Condition] = {
    "several requests in one forward": _at(e.Forward, lambda t, event: len(event.rows) > 1),
    "a window that is drawn": lambda t: any(row.uniforms for row in rows_of(t, "verify")),
    "drawn beside greedy": lambda t: {bool(row.uniforms) for row in rows_of(t, "verify", "decode")} == {True, False},
    "a sampled request resumed": _at(e.Resume, lambda t, event: t.after.live[event.request].draws),
    "prefill beside verify": lambda t: bool(rows_of(t, "prefill")) and bool(rows_of(t, "verify")),
    "decode beside verify": _decode_beside_verify,
    "batch order is not slot order": _out_of_order,
    "a chunk of 1": _chunk(1),
    "a chunk of 2": _chunk(2),
    "a chunk of 3": _chunk(3),
    "a chunk of 63, 64 or 65": lambda t: any(_chunk(count)(t) for count in (63, 64, 65)),
    "a last chunk as long as a window": _window_long,
    "windows of several widths": lambda t: len(set(map(len, _chains(t)))) > 1,
    "a window of the root alone": lambda t: 1 in map(len, _chains(t)),
    "a cap ends a path": lambda t: any(cut for cut, _ in _cut(t)),
    "a cap of 0": lambda t: any(cap == 0 for _, cap in _cut(t)),
    "a cap above the accepted drafts": lambda t: any(not cut for cut, _ in _cut(t)),
    "pages given back by a commit": _at(e.Commit, _gives_pages_back),
    "accepted: ragged": _ragged,
    "accepted: none": _none,
    "accepted: all": _all,
    "a plain step after several accepted": lambda t: any(t.past.accepted.get(r.request) for r in rows_of(t, "decode")),
    "steps up": _at(e.SetNumSteps, lambda t, event: 0 < t.before.num_steps < event.num_steps),
    "steps down": _at(e.SetNumSteps, lambda t, event: t.before.num_steps > event.num_steps > 0),
    "steps to 0": _at(e.SetNumSteps, lambda t, event: t.before.num_steps > event.num_steps == 0),
    "steps back from 0": _at(e.SetNumSteps, lambda t, event: t.before.num_steps == 0 < event.num_steps),
    "a verify after a switch": lambda t: t.past.switched and bool(rows_of(t, "verify")),
    "drafts after plain steps at 0": _at(e.Draft, lambda t, event: bool(t.past.behind & {*event.requests})),
    "resumed in another slot": _at(e.Resume, _elsewhere),
    "aborted in its prompt": _of(e.Abort, Phase.WAITING, Phase.PREFILLING),
    "aborted after a draft": _of(e.Abort, Phase.DRAFTED),
    "aborted after a verify": _of(e.Abort, Phase.VERIFIED),
    **{said.covers: _at(event) for event, said in FACTS.items() if said.covers},
    "a slot used again": _at(e.Admit, lambda t, event: t.after.live[event.request].slot in t.past.owned),
    "every slot used again": lambda t: len(t.past.again) == len(t.after.capacity.slots),
    "every page used again": lambda t: len(t.past.paged_again) == len(t.after.capacity.pages),
    "every slot taken": lambda t: t.after.free_slot() is None,
    "every page taken": lambda t: _pages_out(t.after),
    "slots in no order": lambda t: list(t.after.capacity.slots) != sorted(t.after.capacity.slots),
    "all, none and some accepted in one batch": _every_share,
    "other tokens accepted in one batch": _other_tokens,
    "absent from a round, tokens pending": _away(1),
    "absent from several rounds, tokens pending": _away(2),
    "steps below what is pending": _at(e.SetNumSteps, _below_pending),
    "a smaller batch": _sizes(lambda older, last, now: now < last),
    "a smaller batch, then a larger": _sizes(lambda older, last, now: last < min(older, now)),
    "saved in its prompt": _of(e.Save, Phase.PREFILLING),
    "saved behind a root": _of(e.Save, Phase.READY),
    "loaded twice": _at(e.Load, lambda t, event: t.past.loads[event.name] > 0),
    "loaded into another slot": _at(
        e.Load, lambda t, event: t.past.kept[event.name][0] != t.before.live[event.request].slot),
    "loaded under another step count": _at(e.Load, lambda t, event: t.past.kept[event.name][1] != t.before.num_steps),
    "preempted before its prompt": _of(e.Preempt, Phase.WAITING),
    "preempted in its prompt": _of(e.Preempt, Phase.PREFILLING),
    "preempted behind a root": _of(e.Preempt, Phase.READY),
    "preempted when no page is free": _at(e.Preempt, lambda t, event: _pages_out(t.before)),
    "aborted before its prompt": _of(e.Abort, Phase.WAITING),
    "aborted between rounds": _of(e.Abort, Phase.READY),
    "aborted while preempted": _of(e.Abort, Phase.PREEMPTED),
    "finished while rounds overlap": _at(e.Finish, lambda t, event: t.overlap),
    "a chunk that ends in a page": lambda t: any(_ends(t)),
    "a chunk that ends with a page": lambda t: 0 in _ends(t),
    "a window that begins a page": _begins_a_page,
    "a position past 512": _past_position(512),
    "a position past 4,096": _past_position(4096),
    "refused: a name, a phase or a number": _at(e.Refused),
    "refused: after a request that may be named": _refused(_in_part),
    "refused: no slot is free": _refused(lambda t, event: isinstance(event, e.Admit) and t.before.free_slot() is None),
    "refused: no page is free": _refused(_no_page),
    "pages in no order": lambda t: list(t.after.capacity.pages) != sorted(t.after.capacity.pages),
}


# ---- conditions that only windows that are trees meet: counted where a room has `num_draft_tokens`


def _windows(turn: Turn) -> list[Standing]:
    """The windows that a forward verifies."""
    return [turn.before.live[row.request] for row in rows_of(turn, "verify")]


def _shapes_differ(turn: Turn) -> bool:
    return len({standing.parents for standing in _windows(turn) if branches(standing)}) > 1


def _beside_chain(turn: Turn) -> bool:
    return {branches(standing) for standing in _windows(turn)} == {True, False}


def _beside_prompt(turn: Turn) -> bool:
    return bool(rows_of(turn, "prefill")) and any(map(branches, _windows(turn)))


def _of_a_tree(holds: Callable[[tuple[int, ...], int], bool]) -> Condition:
    """For a commit: whether the condition holds for the accepted drafts and the number of nodes of some tree."""
    return lambda turn: any(
        branches(standing) and holds(nodes, len(standing.parents)) for standing, nodes in paths_of(turn))


def _grown(holds: Callable[[e.Draft, int], bool]) -> Condition:
    """For a draft that grows trees: whether the condition holds for the event and the drafts of a grown tree."""

    def drafted(turn: Turn, event: e.Draft) -> bool:
        drafts = turn.before.capacity.grown(turn.before.num_steps)
        return drafts > 0 and holds(event, drafts)

    return _at(e.Draft, drafted)


TREES: dict[str, Condition] = {
    "trees of different shapes in one batch": _shapes_differ,
    "a tree next to a chain": _beside_chain,
    "a tree next to a prompt": _beside_prompt,
    "an accepted path that is not 1, 2, ...": _of_a_tree(lambda nodes, _: nodes != tuple(range(1, len(nodes) + 1))),
    "nothing of a tree accepted": _of_a_tree(lambda nodes, _: not nodes),
    "trees grown for several requests": _grown(lambda event, _: len(event.requests) > 1),
    "another window than the grown tree": _grown(lambda event, drafts: any(
        len(one) != drafts for one in event.picks or ())),
    "the last node of a tree accepted": _of_a_tree(lambda nodes, count: nodes[-1:] == (count - 1,)),
}


# ---- conditions that only tracked prefixes meet: counted where a room has a `track_interval`


def _tracked(holds: Callable[[Turn, str, int], bool], kind: type[e.Event]) -> Condition:
    """For an event of this kind: whether the condition holds for some request and the tokens of its prefix."""

    def condition(turn: Turn) -> bool:
        made = [(name, turn.after.saved.get(under)) for under, name in tracks(turn.event).items()]
        return isinstance(turn.event, kind) and any(
            kept is not None and holds(turn, name, kept.length) for name, kept in made)

    return condition


def _hit(holds: Callable[[Turn, Standing], bool]) -> Condition:
    """For a loaded prefix: whether the condition holds for it."""

    def condition(turn: Turn, event: e.Load) -> bool:
        kept = turn.after.saved[event.name]
        return kept.prefix and holds(turn, kept)

    return _at(e.Load, condition)


def _moved(kind: type[e.Event], holds: Callable[[Turn, Standing], bool] = lambda turn, kept: True) -> Condition:
    """For an event that moves or evicts a prefix: whether the condition holds for the prefix before it."""

    def condition(turn: Turn, event: Any) -> bool:
        kept = turn.before.saved.get(event.name) or turn.after.saved[event.name]  # it may come from another engine
        return kept.prefix and holds(turn, kept)

    return _at(kind, condition)


def _again(turn: Turn) -> bool:
    return any(under in turn.past.evicted and under in turn.after.saved for under in tracks(turn.event))


PREFIXES: dict[str, Condition] = {
    "a prefix tracked at the end of a chunk": _tracked(at_prefix_end, e.Forward),
    "a prefix tracked inside an accepted path": _tracked(lambda *at: not at_prefix_end(*at), e.Commit),
    "a prefix tracked at the end of an accepted path": _tracked(at_prefix_end, e.Commit),
    "a prefix tracked inside a chunk": _tracked(lambda *at: not at_prefix_end(*at), e.Forward),
    "prefixes tracked inside the chunks of several requests": lambda turn: sum(
        any(row.inner) for row in rows_of(turn, "prefill")) > 1,
    "a prefix loaded that was tracked inside a chunk": _hit(lambda t, _: getattr(t.event, "name", "") in t.past.inside),
    "a commit that reaches no multiple": lambda turn: any(one not in turn.after.saved for one in tracks(turn.event)),
    "a prefix replaced in place": lambda turn: any(
        turn.before.saved.get(one) not in (None, turn.after.saved.get(one)) for one in tracks(turn.event)),
    "a track slot taken and given back": lambda turn: turn.after.capacity.tracked is not None and any(
        under not in turn.after.saved and turn.before.boundary(name, len(turn.before.live[name].window)) is not None
        for under, name in tracks(turn.event).items()),
    "prefixes of several requests tracked at once": lambda turn: len({*tracks(turn.event).values()}) > 1,
    "a prefix of a request that continued from a prefix": _tracked(lambda t, name, _: name in t.past.hits, e.Event),
    "a prefix loaded": _hit(lambda turn, kept: True),
    "a prefix loaded while its donor is live": _hit(lambda turn, kept: kept.request in turn.before.live),
    "a prefix loaded after its donor is over": _hit(lambda turn, kept: kept.request not in turn.before.live),
    "a prefix with accepted tokens loaded": _hit(
        lambda turn, kept: turn.past.accepted_in >= {getattr(turn.event, "name", "")}),
    "a prefix goes to the host": _moved(e.Offload),
    "a prefix goes to the host while its donor is in a round": _moved(
        e.Offload, lambda turn, kept: bool(turn.before.live[kept.request].window) if kept.request in turn.before.live
        else False),
    "a prefix comes back": _moved(e.Fetch),
    "a prefix loaded after it came back": _hit(lambda turn, kept: getattr(turn.event, "name", "") in turn.past.fetched),
    "a prefix evicted from the device": _moved(e.Evict, lambda turn, kept: not kept.aside),
    "a prefix evicted from the host": _moved(e.Evict, lambda turn, kept: kept.aside),
    "a prefix evicted while its donor is live": _moved(e.Evict, lambda turn, kept: kept.request in turn.before.live),
    "a prefix evicted while a request that loaded it is live": _moved(
        e.Evict, lambda turn, kept: bool(turn.past.hits & turn.before.live.keys())),
    "a prefix under a name that was evicted": _again,
    "the device has no room for one prefix more": lambda turn: (
        turn.after.capacity.tracked is not None and not turn.after.room_for(1)),
}


# ---- conditions that only some drafters meet: drafts that are passed in, or several MTP layers


def _guessing(turn: Turn) -> bool:
    """A chunk followed by so few prompt tokens that the last layers read past the end of the prompt."""
    return any(0 < turn.before.live[row.request].unread - row.tokens < turn.heads for row in rows_of(turn, "prefill"))


def _brought_back(turn: Turn, event: e.Load | e.Resume) -> bool:
    return turn.after.live[event.request].root is not None


def _tracked_short(turn: Turn) -> bool:
    """A prefix whose last rows, one for each MTP layer, were not all made in the event that tracks it."""
    made = [(turn.before.live[name], turn.after.saved.get(under)) for under, name in tracks(turn.event).items()]
    return any(kept is not None and one.length > 0 and kept.length - one.length < turn.heads for one, kept in made)


def _hit_short(turn: Turn, kept: Standing) -> bool:
    """A prefix followed by so few prompt tokens that the last layers read past the end of the prompt."""
    assert isinstance(turn.event, e.Load)
    return turn.after.live[turn.event.request].unread < turn.heads


HANDED: Mapping[str, Condition] = {
    "handed in: accepted: ragged": _ragged,
    "handed in: a request without drafts next to windows": _decode_beside_verify,
    "handed in: resumed or loaded after a root": _at(e.Load | e.Resume, _brought_back),
}
SEVERAL: Mapping[str, Condition] = {
    "several MTP layers: accepted: ragged": _ragged,
    "several MTP layers: fewer steps than layers": _at(e.Draft, lambda t, event: t.before.num_steps < t.heads),
    "several MTP layers: a chunk that ends just before its prompt": _guessing,
    "several MTP layers: resumed or loaded after a root": _at(e.Load | e.Resume, _brought_back),
    "several MTP layers: a prefix with rows of earlier events": _tracked_short,
    "several MTP layers: a prefix loaded just before the end of a prompt": _hit(_hit_short),
}


BLOCKS: Mapping[str, Condition] = {
    "block drafter: accepted: ragged": _ragged,
    "block drafter: blocks of several widths": lambda t: len({*map(len, _chains(t))}) > 1,
    "block drafter: a block of the root alone": lambda t: 1 in map(len, _chains(t)),
    "block drafter: resumed or loaded after a root": _at(e.Load | e.Resume, _brought_back),
    "block drafter: drafted after the step count changed": _at(e.Draft, lambda t, event: t.past.switched),
    "block drafter: widths on the device alone": lambda t: t.after.capacity.device_widths and len(_chains(t)) > 1,
}


def _of_drafters(heads: int, block: bool) -> Mapping[str, Condition]:
    """The conditions for a run with this number of MTP layers, or with a block drafter."""
    return BLOCKS if block else SEVERAL if heads > 1 else {} if heads else HANDED


# ---- conditions of graphs of prompts: counted where such graphs are captured


def _in_graph(holds: Callable[[Turn, int], bool]) -> Condition:
    """For a forward with a prompt that fits in a graph: whether the condition holds for its packed rows."""

    def condition(turn: Turn) -> bool:
        rows = _prompt_rows(turn)
        return 0 < rows <= max(turn.buckets) and holds(turn, rows)

    return condition


def _prompt_rows(turn: Turn) -> int:
    """The packed rows of a forward with a prompt; 0 for every other event."""
    if not rows_of(turn, "prefill"):
        return 0
    return (sum(row.tokens for row in rows_of(turn, "prefill", "decode"))
            + sum(len(standing.window) for standing in _windows(turn)))  # fmt: skip


PROMPT_GRAPHS: Mapping[str, Condition] = {
    "a prompt in a graph": _in_graph(lambda turn, rows: True),
    "a prompt in a graph without padding": _in_graph(lambda turn, rows: rows in turn.buckets),
    "a prompt in a graph other than the narrowest": _in_graph(lambda turn, rows: rows > min(turn.buckets)),
    "a prompt in a graph next to a window": _in_graph(lambda turn, rows: bool(rows_of(turn, "verify"))),
    "a prompt in a graph next to a decode": _in_graph(lambda turn, rows: bool(rows_of(turn, "decode"))),
    "a later chunk in a graph": _in_graph(lambda turn, rows: any(
        turn.before.live[row.request].length for row in rows_of(turn, "prefill"))),
    "a prompt with more rows than the widest graph": lambda turn: _prompt_rows(turn) > max(turn.buckets),
}


# ---- conditions of two engines: counted where a run has a receiver


def _sends(holds: Callable[[Turn, Standing], bool]) -> Condition:
    """For a copy that goes to the other engine: whether the condition holds for it."""
    return _at(e.Offload, lambda turn, event: holds(turn, turn.before.saved[event.name]))


TRANSFERS: Mapping[str, Condition] = {
    "sent within its prompt": _sends(lambda t, kept: not kept.prefix and kept.root is None),
    "sent with its root": _sends(lambda t, kept: kept.root is not None),
    "a prefix sent": _sends(lambda t, kept: kept.prefix),
    "sent under a name of before": _at(e.Offload, lambda t, event: event.name in t.past.sent),
    "loaded after it was sent": _at(e.Load, lambda t, event: event.name in t.past.fetched),
    "a verify after a transfer": lambda t: any(row.request in t.past.sent for row in rows_of(t, "verify")),
    "a second transfer of a request": _at(e.Save, lambda t, event: event.request in t.past.sent),
}


# ---- conditions that some settings cannot meet

OVERLAPS = ("finished while rounds overlap",)
REFUSALS = tuple(name for name in CONDITIONS if name.startswith("refused: "))
LONG_REQUESTS = ("a position past 512", "a position past 4,096")
UP_AND_DOWN = ("steps up", "steps down")
TO_ZERO = ("steps to 0", "steps back from 0", "drafts after plain steps at 0")
SWITCHES = (*UP_AND_DOWN, *TO_ZERO, "a verify after a switch", "loaded under another step count",
            "steps below what is pending")  # fmt: skip
GROWN = ("trees grown for several requests", "another window than the grown tree")
HITS = ("several MTP layers: a prefix with rows of earlier events",
        "several MTP layers: a prefix loaded just before the end of a prompt")  # fmt: skip
WIDTHS = ("block drafter: widths on the device alone",)
WIDER_GRAPHS = ("a prompt in a graph other than the narrowest",)
BEYOND_GRAPHS = ("a prompt with more rows than the widest graph",)


def listed(name: str, impossible: Mapping[str, str]) -> list[str]:
    """A line for each setting that makes conditions impossible. name: of the op set"""
    return [f"{name}: impossible {why}: {', '.join(one for one, its in impossible.items() if its == why)}"
            for why in dict.fromkeys(impossible.values())]


# ---- conditions without which an option was not tested

RELAYED, PARTED = "a commit relayed to the other stages", "several micro-batches in flight"
SHARED = "rows of several replicas"
NEEDED: Mapping[str, tuple[str, str]] = {  # option -> the condition, and what is reported if no event met it
    "stages": (RELAYED, "no commit was relayed to the other stages"),
    "micro_batches": (PARTED, "no event had several micro-batches"),
    "dp": (SHARED, "no event had rows of several replicas"),
    "transfers": ("loaded after it was sent", "no request was loaded by the engine to which it was sent"),
    "prompt_graphs": ("a prompt in a graph", "no forward with a prompt ran in a graph"),
}


def untested(options: Mapping[str, Any], met: Mapping[str, int]) -> list[str]:
    """Report the options that a campaign was given and did not test. met: as `Coverage.met`"""
    return [says for option, (condition, says) in NEEDED.items()
            if (options.get(option) is True or options.get(option) not in (None, False, 1)) and not met.get(condition)]
