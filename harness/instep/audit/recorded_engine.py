"""Levels 2 and 3: replay a recording as an engine driven through verbs that answers with the recorded tensors.

So logits, final rows and states reach the same event contexts and checks as those of a live engine
(`instep.subject.engines`). A kind of tensor that a recording declares must be there at every event, with the right
shape. Leaves out: the checks, and models that do not fit into memory, for which only tokens and counts are judged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from instep_optimized.memory.budget import conv_window, state_block
from instep_reference.contract import engine as e
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.errors import BadInput
from instep_reference.contract.event_facts import committed_paths, facts, named
from instep_reference.contract.place_names import Place

from ..checks.check_interface import held
from ..checks.earlier_rounds import KEPT
from ..checks.ranks import with_ranks
from ..checks.wrong_state_inputs import EVERY_COUNT_UP_TO
from ..oracle.oracle import IN_A_RING
from ..run.lockstep import Part, Result, between_rounds
from ..run.replay import Outcome, Replay
from ..setting import Setting
from ..subject.engines.verbs import ByVerbs, Tokens
from ..tier_allowances import UNDECIDED_CAP
from ..trace.file import Trace
from ..verdict import UNDECIDABLE, Comparison, Skipped, Tier, Verdict
from ..watch.event_context import EventContext
from ..watch.rank_facts import RankFacts
from .layerwise_reference import Advance, Precision, silent
from .rank_recordings import named as named_by_rank
from .recording import META, Recorded, wrote
from .round_of_finding import remark
from .token_origins import CUT, last_commits

ROWS = ("logits", "final")  # results of a step, by request
FEEDS = {"logits": "logits", "final": "final", "states": "state"}  # kind of recorded tensor -> its name among verbs
MEMORY = ("conv", "state")


class TimeIsUp(Exception):
    """Raised by a progress function when the time limit of an audit ends."""


@dataclass(frozen=True)
class Replayed(Setting):
    """The setting of a recording, whose engine is given as an object and not by name."""

    served: ByVerbs | None = None

    def subject(self) -> Any:
        return self.served


def replayed(
    recorded: Recorded, trace: Trace, model: Path, config: ModelConfig, precision: Precision, shows: Sequence[str],
    progress: Advance = silent, *, events: range | None = None, one_step: bool = False, first: bool = False,
) -> Outcome:
    """Replay the recording.

    shows     the kinds of tensors that are judged;  events: the judged events, None: all
    one_step  start each state from the recorded one before it, not from position 0
    first     stop at the first event with a finding; without one_step always, as later states follow from it
    """
    judged = range(len(trace.events)) if events is None else events
    begin = first_served(trace, judged.start)

    def make(directory: Path, room: object, **told: object) -> Player:
        return Player(recorded, precision, shows, config.recurrent, begin)

    dtype = str(precision.activation).removeprefix("torch.")
    setting = Replayed(engine=recorded.engine, dtype=dtype, served=ByVerbs(recorded.engine, make))
    found = Replay(trace, setting, checkpoint=model).run(
        progress=lambda index, event: progress("events", index + 1 - judged.start, len(judged)), until=judged.stop - 1,
        tiers=frozenset(Tier) - {Tier.BITWISE}, past_lost=True,
        settle=partial(_settled, recorded, last_commits(trace.events)),
        part=Part(begin, between_rounds(trace, judged.start), judged.start, one_step, one_step and not first,
                  (KeyboardInterrupt, TimeIsUp)),
    )
    verdict = found.verdict
    allow_undecided_events(verdict)
    verdict.compared = [replace(one, slot=None if one.agrees else recorded.slot(one.event, one.request))
                        for one in verdict.compared]  # fmt: skip
    remarks = [remark(recorded, verdict.findings)] if verdict.findings else []
    return replace(found, again=(), remarks=tuple(filter(None, remarks)))  # only the audit itself reproduces it


def allow_undecided_events(verdict: Verdict) -> None:
    """Skip events of which too little could be decided, unless that holds of the whole recording.

    The text of a recording is the user's. After a text that repeats itself, one token more or less is
    almost the same state.
    """
    single = {one.event: one for one in verdict.compared if one.check == UNDECIDABLE}
    every = [*single.values(), *(one for one in verdict.compared
                                 if one.tier is Tier.DIRECTED and one.event not in single)]  # fmt: skip
    pairs = sum(one.elements if one.check == UNDECIDABLE else one.pairs for one in every)
    if sum(one.undecided for one in every) <= UNDECIDED_CAP * pairs:
        verdict.compared = [one for one in verdict.compared if one.check != UNDECIDABLE]
        verdict.skipped += [Skipped(one.check, one.event, one.diagnosis, f"{one.place}") for one in single.values()]


def first_served(trace: Trace, judged: int) -> int:
    """The event at which a run that judges from event `judged` on begins.

    The rounds before that event name wrong states: the last `KEPT` of them, and more if the rings of an engine may hold
    tokens of more rounds.
    """
    begin, rounds, tokens = judged, 0, dict[str, int]()
    while begin and (rounds < KEPT or min(tokens.values(), default=0) < IN_A_RING) and rounds < IN_A_RING:
        begin -= 1
        event = trace.events[begin]
        rounds += bool(wrote(event))
        if isinstance(event, e.Commit):
            for name, path in zip(event.requests, committed_paths(event), strict=False):
                tokens[name] = tokens.get(name, 0) + 1 + len(path.nodes)
        elif isinstance(event, e.Forward):
            for row in event.rows:  # a prompt fills a ring, or empties it
                if row.kind != "verify":
                    tokens[row.request] = tokens.get(row.request, 0) + (1 if row.kind == "decode" else IN_A_RING)
    return between_rounds(trace, begin)


def _settled(
    recorded: Recorded, ends: Mapping[int, frozenset[str]], context: EventContext, results: Sequence[Result]
) -> list[Result]:
    """Skip what a cut window accounts for: all memory of a request that ends here is that of one other count of tokens.

    Memory of different counts, of another request, or with unknown content stays a finding.
    """
    event, excused = context.event, set[tuple[str, Place]]()
    if recorded.ranks is not None:
        facts = RankFacts(recorded.ranks.size, lambda place: None, recorded.ranks.shards)
        results = with_ranks(replace(context, ranks=facts), results)
        results = [named_by_rank(recorded, context, one) if isinstance(one, Comparison) and not one.agrees else one
                   for one in results]  # fmt: skip
    for name, path in zip(event.requests, committed_paths(event), strict=True) if isinstance(event, e.Commit) else ():
        memory = [one for one in results if isinstance(one, Comparison) and one.request == name
                  and one.place.component in MEMORY and name in ends.get(context.index, ())]  # fmt: skip
        known = {held("state", count, len(path.nodes) + 1, "accepted").key for count in range(EVERY_COUNT_UP_TO + 1)}
        counts = [(one.place, known & {content.key for content in one.explained.equal}) for one in memory
                  if not one.agrees and one.explained is not None]  # fmt: skip
        counts = [(place, those) for place, those in counts if those]
        right = any(one.agrees and one.tier is Tier.DIRECTED for one in memory)
        if counts and not right and set.intersection(*(those for _, those in counts)):
            excused |= {(name, place) for place, _ in counts}
    return [
        Skipped(one.check, one.event, CUT, f"{one.place} of {one.request}")
        if isinstance(one, Comparison) and not one.agrees and (one.request, one.place) in excused else one
        for one in results
    ]


class Player:
    """The verbs, called in the order of the events. now: the current event; begin: the first one that is served."""

    def __init__(
        self, recorded: Recorded, precision: Precision, shows: Sequence[str], gdn: Sequence[int], begin: int = 0
    ) -> None:
        self.recorded, self.shows, self.gdn = recorded, tuple(shows), gdn
        self.now = begin - 1
        self.committing: set[str] = set()
        self.written = last_written(recorded.events[:begin])
        self._held: dict[str, tuple[int, dict[int, tuple[torch.Tensor, torch.Tensor]]]] = {}
        self._shown: tuple[int, Mapping[str, torch.Tensor]] = -1, {}  # the last event that was read
        self.state_layers = recorded.layers
        said = precision.declared
        self.declares = {
            "rounds": said.rounds, "products": said.products,
            "shows": [FEEDS[key] for key in shows],
        }
        if "states" in shows:
            self.state = self._state

    def step(self, rows: Sequence[Tokens]) -> Mapping[str, Mapping[str, torch.Tensor]]:
        self._next(e.Forward, rows[0].request)
        self.committing.clear()  # a request that left during a commit gets no further call
        shown = self._tensors(self.now)
        found: dict[str, dict[str, torch.Tensor]] = {}
        for key in (key for key in ROWS if key in self.shows):
            found[key] = {row.request: shown[f"{key}.{row.request}"] for row in rows if f"{key}.{row.request}" in shown}
        self.written |= {row.request: self.now for row in rows if row.kind != "verify"}
        return found

    def keep(self, request: str, length: int) -> None:
        if request not in self.committing:
            self._next(e.Commit, request)
            event = self.recorded.events[self.now]
            assert isinstance(event, e.Commit)
            self.committing = set(event.requests)
        self.written[request] = self.now
        self.committing.remove(request)

    def drop(self, request: str) -> None:
        self.written.pop(request, None)
        self._held.pop(request, None)

    def _next(self, kind: type[e.Event], request: str) -> None:
        """Go to the next event of this kind that names the request. Events that were not served are skipped."""
        events = self.recorded.events
        self.now = next(
            index for index in range(self.now + 1, len(events))
            if isinstance(events[index], kind) and request in named(events[index])
        )

    def _tensors(self, event: int) -> Mapping[str, torch.Tensor]:
        if self._shown[0] != event:
            self._shown = event, self.recorded.tensors(event)
        return self._shown[1]

    def has_state(self, request: str) -> bool:
        """Whether the states that its last event left are in the recording."""
        event = self.written.get(request)
        return event is not None and has_states(self._tensors(event), request)

    def _canonical(self, state: torch.Tensor) -> torch.Tensor:
        return state.transpose(-1, -2) if self.recorded.layout == "VK" else state

    def _state(self, request: str) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        event = self.written[request]
        if self._held.get(request, (-1, {}))[0] != event:
            shown = self._tensors(event)
            self._held[request] = event, {
                layer: (shown[f"conv.{request}.{layer}"], self._canonical(shown[f"state.{request}.{layer}"]))
                for layer in self.gdn if self.state_layers is None or layer in self.state_layers
            }
        return self._held[request][1]


def last_written(events: Sequence[e.AnyEvent]) -> dict[str, int]:
    """The event that last wrote the states of each live request."""
    found: dict[str, int] = {}
    for index, event in enumerate(events):
        found |= dict.fromkeys(wrote(event), index)
        if isinstance(event, e.Finish | e.Abort):
            found.pop(event.request, None)
    return found


def without_copies(recorded: Recorded) -> None:
    """Refuse events whose rows and states cannot be replayed from a recording."""
    if any(facts(event).copy for event in recorded.events):
        raise BadInput("events.jsonl", found="a save, load, preempt or resume, and tensors", expected="none of them",
                       hint="record an abort, and an admit whose prompt is the text so far")


def complete(recorded: Recorded, config: ModelConfig, shows: Sequence[str], judged: range) -> None:
    """Refuse a recording in which a declared tensor is missing or has another shape: of these events, and the states
    before them.
    """
    unknown = [layer for layer in recorded.layers or () if layer not in config.recurrent]
    if unknown:
        raise BadInput(f"{META}: attached.layers", found=unknown, expected=f"some of {config.recurrent}")
    heads, keys, values = state_block(config)
    state = (heads, keys, values) if recorded.layout == "KV" else (heads, values, keys)
    shapes = {"conv": conv_window(config), "state": state}
    widths = {"logits": config.vocab, "final": config.hidden}
    windows: dict[str, int] = {}
    wanted_events = {*judged, *last_written(recorded.events[: judged.start]).values()}
    for index, event in enumerate(recorded.events[: judged.stop]):
        if isinstance(event, e.Draft):
            windows |= {name: len(picks) + 1 for name, picks in zip(event.requests, event.picks or (), strict=False)}
        if index not in wanted_events or not isinstance(event, e.Forward | e.Commit):
            continue
        rows = event.rows if isinstance(event, e.Forward) and index in judged else ()
        wanted: dict[str, list[tuple[int, ...]]] = {}
        for row in rows:
            count = windows[row.request] if row.kind == "verify" else row.tokens
            for key in ROWS:
                if key in shows and (key == "final" or row.kind != "prefill" or row.root is not None):
                    either = {count, 1} if row.kind == "prefill" else {count}
                    wanted[f"{key}.{row.request}"] = [(many, widths[key]) for many in either]
        if "states" in shows:
            layers, requests = config.recurrent, wrote(event)
            if recorded.layers is not None:
                shown = recorded.tensors(index)
                layers, requests = recorded.layers, [name for name in requests if has_states(shown, name)]
            wanted |= {f"{name}.{request}.{layer}": [shape] for request in requests
                       for layer in layers for name, shape in shapes.items()}  # fmt: skip
        _there(recorded, index, wanted)


def has_states(shown: Mapping[str, torch.Tensor], request: str) -> bool:
    """Whether any state of a request is among the tensors of an event."""
    return any(name.startswith((f"state.{request}.", f"conv.{request}.")) for name in shown)


def _there(recorded: Recorded, index: int, wanted: Mapping[str, Sequence[tuple[int, ...]]]) -> None:
    shown = recorded.tensors(index) if wanted else {}
    for name, shapes in wanted.items():
        found = None if name not in shown else tuple(shown[name].shape)
        if found not in shapes:
            raise BadInput(f"event {index}: {name}", found="nothing" if found is None else f"shape {list(found)}",
                           expected=" or ".join(f"shape {list(shape)}" for shape in shapes),
                           hint=f"`shows` in {META} declares it")
