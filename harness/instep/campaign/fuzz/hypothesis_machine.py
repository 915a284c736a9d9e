"""The state machine: Hypothesis rules over the events, each enabled when `trace/event_rules.py` allows it.

A rule draws an event. If the event rules refuse it (for example, no page is free), an engine that refuses is offered
it, and nothing may change. Some rules are a whole round, so that runs get far.

The same seed draws the same runs in every process. Hypothesis mixes into its integers the constants of all local
modules that are imported by then. So a run would depend on whether instep is installed or a checkout, and in a test on
the tests before it. Leaves out: the content of events (`draw_events.py`), and the number of runs (`campaign.py`).
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, Protocol, get_args

from hypothesis import strategies as st
from hypothesis.errors import HypothesisException
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from msgspec.structs import replace as with_fields

from instep_reference.contract import engine as e
from instep_reference.contract.engine import Refused
from instep_reference.contract.errors import BadInput
from instep_reference.contract.event_facts import FACTS, kind_of

from ...trace.event_rules import EventRules
from ...trace.event_scheduler import transferring
from . import draw_events
from .draw_events import DESCRIBED, MOVES, Draw
from .drawn_run import Example
from .event_turns import Past, Turn
from .request_histories import Histories, Pair

COMPETE = 3  # drawn events, of which one is served
BETWEEN = 7  # one in BETWEEN + 1 parts of a round is followed by another event


class Host(Protocol):
    """Builds examples and serves events on them. To end the campaign, both raise an error that Hypothesis does not
    catch."""

    @property
    def edges(self) -> tuple[int, ...]: ...

    @property
    def known(self) -> Mapping[Pair, int]:
        """How often earlier runs met pairs of facts. It never changes while Hypothesis may draw a run again."""
        ...

    def begin(self, choose: draw_events.Draw) -> Example: ...

    def serve(self, example: Example, event: Any) -> None: ...

    def refused(self, event: Any) -> None: ...

    def failed(self, error: Exception) -> NoReturn: ...


def legal(*kinds: str) -> Callable[[Any], Any]:
    """Enable a rule when one of these kinds of event or row may come next."""
    return precondition(lambda self: self.example is not None and bool({*kinds} & self.event_rules.legal().keys()))


class Machine(RuleBasedStateMachine):
    """Starts with two requests or more. Then any legal event may follow."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self.host = host
        self.example: Example | None = None
        self._histories, self._past = Histories(), Past()

    @property
    def event_rules(self) -> EventRules:
        """The rules of the engine for which events are drawn."""
        assert self.example is not None  # `begin` comes first
        return self.example.rules

    @initialize(data=st.data(), count=st.integers(2, draw_events.SLOTS[1]), run=st.booleans())
    def begin(self, data: Any, count: int, run: bool) -> None:
        self.example = self.host.begin(data.draw)
        for _ in range(count):
            self._do(draw_events.admit, data)
        if run:
            self._do(draw_events.forward, data)

    @legal("admit")
    @rule(data=st.data())
    def enter(self, data: Any) -> None:
        """Admit a request. Half of them then load a saved state, or run their prompt at once next to the others."""
        if self._do(draw_events.admit, data) and data.draw(st.booleans()):
            if self._may("load"):
                self._do(draw_events.UPKEEP["load"], data)
            elif self._may("prefill"):  # not while a window waits for its commit
                self._do(draw_events.forward, data)

    @legal("prefill", "verify", "decode")
    @rule(data=st.data())
    def forward(self, data: Any) -> None:
        self._do(draw_events.forward, data)

    @legal("draft")
    @rule(data=st.data())
    def draft(self, data: Any) -> None:
        self._do(draw_events.draft, data)

    @legal("commit")
    @rule(data=st.data())
    def commit(self, data: Any) -> None:
        self._do(draw_events.commit, data)

    @legal("draft", "verify", "commit")
    @rule(data=st.data())
    def round(self, data: Any) -> None:
        """The rest of a round: draft, verify next to other rows, commit. Other events may come between them."""
        drawers = (("draft", draw_events.draft), ("verify", draw_events.forward), ("commit", draw_events.commit))
        for kind, drawer in drawers:
            if self._may(kind):
                self._do(drawer, data)
                if data.draw(st.integers(0, BETWEEN)) == BETWEEN:
                    self.upkeep(data)

    @legal("set_num_steps")
    @rule(data=st.data())
    def switch(self, data: Any) -> None:
        """A new step count, and then a round or a plain step with it."""
        self._do(draw_events.set_num_steps, data)
        if self._may("draft"):
            self.round(data)
        elif self._may("decode"):
            self._do(draw_events.forward, data)

    @legal(*draw_events.UPKEEP)
    @rule(data=st.data())
    def upkeep(self, data: Any) -> None:
        """One of the events other than forwards and rounds (`draw.UPKEEP`)."""
        if kinds := [kind for kind in draw_events.UPKEEP if self._may(kind)]:

            def one(draw: Draw, rules: EventRules, edges: Sequence[int]) -> e.Event:
                return draw_events.UPKEEP[draw(st.sampled_from(kinds))](draw, rules, edges)

            self._do(one, data)

    @precondition(lambda self: self.example is not None and self.example.refuses)
    @rule(data=st.data())
    def refuse(self, data: Any) -> None:
        """An illegal event, which must change nothing. A drawn event that is legal is skipped."""
        assert self.example is not None
        event = self._drawn(illegal, data)
        try:
            self.event_rules.check(event, choices=False)
        except BadInput:
            self._serve(Refused(event))

    def _may(self, kind: str) -> bool:
        return self.example is not None and draw_events.may(self.event_rules, kind)

    def _do(self, drawer: draw_events.Drawer, data: Any) -> bool:
        """Draw an event and serve it, unless the event rules refuse it -> whether it was served."""
        assert self.example is not None  # `begin` comes first
        event = self._drawn(drawer, data)
        try:
            self.event_rules.check(event)
        except BadInput:
            self.host.refused(event)
            if self.example.refuses:  # mostly there is no room for it, which an engine must find out in time
                self._serve(Refused(event))
            return False
        self._serve(event)
        return True

    def _serve(self, event: e.AnyEvent) -> None:
        assert self.example is not None
        rules = self.example.rules.serving(event)
        before = rules.table.as_it_stands()
        self.host.serve(self.example, event)
        turn = Turn(before, event, rules.table, self._past)
        self._histories.note(turn)

    def _drawn(self, drawer: draw_events.Drawer, data: Any) -> Any:
        """Draw an event. If earlier runs met some pairs of facts, it is the one of several that meets the
        rarest."""
        assert self.example is not None
        try:
            count = COMPETE if self.host.known and drawer is not illegal else 1
            drawn = [self._one(drawer, data) for _ in range(count)]
            return max(drawn, key=self._rarity) if count > 1 else drawn[0]
        except HypothesisException:  # its own way to end an example
            raise
        except Exception as error:  # a fault of the drawer itself: no finding, and nothing to shrink
            self.host.failed(error)

    def _one(self, drawer: draw_events.Drawer, data: Any) -> e.AnyEvent:
        event: Any = drawer(data.draw, self.event_rules, self.host.edges)
        return with_fields(event, receiver=True) if self.event_rules.receives and isinstance(event, e.Admit) else event

    def _rarity(self, event: e.AnyEvent) -> float:
        """The value of an event for the coverage of histories; -1: it is illegal."""
        rules = copy.deepcopy(self.event_rules)
        before = rules.table.as_it_stands()
        try:
            rules.apply(event)
        except BadInput:
            return -1.0
        return self._histories.rarity(Turn(before, event, rules.table, self._past), self.host.known)


class TransferMachine(Machine):
    """Draws events for two engines in turns, and moves requests between them."""

    second = False

    @property
    def event_rules(self) -> EventRules:
        assert self.example is not None
        other = self.example.rules.other
        return other if self.second and other is not None else self.example.rules

    @precondition(lambda self: self.example is not None)
    @rule()
    def turn(self) -> None:
        """Draw events for the other engine."""
        self.second = not self.second

    @legal("save")
    @rule(data=st.data())
    def transfer(self, data: Any) -> None:
        """Move a request to the other engine, where it continues, and go there. The copy mostly keeps its name."""
        assert self.example is not None
        standing = self.event_rules.table.live[data.draw(st.sampled_from(self.event_rules.legal()["save"]))]
        receives, under = self.event_rules.receives, draw_events.free_name(self.event_rules, "kept {}")
        gives, takes = transferring(standing, under, receiver=not receives)
        for event in (*gives, *takes[: len(takes) - data.draw(st.booleans())]):
            try:
                self.example.rules.check(event)
            except BadInput:  # no slot, or no page
                self.host.refused(event)
                return
            self._serve(event)
        self.second = not self.second


# ---- an event that may be illegal: a name twice, an unknown name, a wrong phase, or a number too many. Parts of it are
# often correct, so that an engine that checks late has already done something. The event rules decide whether it is.

NOBODY = "nobody"


def illegal(draw: Draw, rules: EventRules, edges: Sequence[int]) -> e.AnyEvent:
    """Draw an event of a drawn kind. The event rules may find it legal."""
    moves = MOVED if rules.table.capacity.track_interval is not None else ()
    event: e.AnyEvent = draw(st.sampled_from((*KINDS, *moves)))(draw, rules)
    return event


def _name(draw: Draw, rules: EventRules) -> str:
    return draw(st.sampled_from([*rules.table.live, NOBODY]))


def _names(draw: Draw, rules: EventRules, *first: str) -> tuple[str, ...]:
    """Draw some names that the event may use, and then any: a repeated one, one of another phase, or an unknown one."""
    more = [_name(draw, rules) for _ in range(draw(st.integers(0 if first else 1, 2)))]
    return (*first, *more)


def _token(draw: Draw, rules: EventRules) -> int:
    return draw(st.sampled_from([0, rules.vocab - 1, rules.vocab, -1]))


def _admit(draw: Draw, rules: EventRules) -> e.AnyEvent:
    tokens = tuple(_token(draw, rules) for _ in range(draw(st.integers(0, 2))))
    return e.Admit(_name(draw, rules), tokens)


def _draft(draw: Draw, rules: EventRules) -> e.AnyEvent:
    names = _names(draw, rules, *rules.legal().get("draft", ()))
    size = rules.table.num_steps + draw(st.integers(0, 1))
    return e.Draft(names, tuple((_token(draw, rules),) * size for _ in names[draw(st.integers(0, 1)) :]))


def _forward(draw: Draw, rules: EventRules) -> e.AnyEvent:
    legal = rules.legal()
    first = [name for kind in ("prefill", "verify", "decode") for name in legal.get(kind, ())]
    return e.Forward(tuple(_row(draw, rules, legal, name) for name in _names(draw, rules, *first)))


def _row(draw: Draw, rules: EventRules, legal: dict[str, tuple[str, ...]], name: str) -> e.Row:
    fitting = [kind for kind in ("prefill", "verify", "decode") if name in legal.get(kind, ())]
    kind: Any = draw(st.sampled_from(fitting or ["prefill", "verify", "decode"]))
    unread = rules.table.live[name].unread if name in rules.table.live else 1
    tokens = draw(st.sampled_from([1, unread, unread + 1, 0])) if kind == "prefill" else 1
    track = draw(st.sampled_from(["", "", *rules.table.saved, NOBODY]))
    row = e.Row(name, kind, tokens, draw(st.sampled_from([None, _token(draw, rules)])), track=track)
    inner = draw(st.sampled_from([(), (NOBODY,), (NOBODY, ""), tuple(rules.table.saved)])) if track else ()
    return with_fields(row, inner=inner)


def _commit(draw: Draw, rules: EventRules) -> e.AnyEvent:
    names = _names(draw, rules, *rules.legal().get("commit", ()))[draw(st.integers(0, 1)) :]
    nodes = tuple(range(1, draw(st.integers(1, rules.table.num_steps + 2))))
    kept = [(under,) * len(names) for under in rules.table.saved][:2]  # another request's, or more than once
    track = draw(st.sampled_from([(), (), (NOBODY,), (NOBODY,) * len(names), *kept]))
    paths = tuple(e.Path(nodes, _token(draw, rules)) for _ in names or (NOBODY,))
    caps = draw(st.sampled_from([(), (1,), (9,) * len(names)])) if rules.table.capacity.trim else ()
    return e.Commit(names or (NOBODY,), paths, track, caps)


def _kept(draw: Draw, rules: EventRules) -> str:
    return draw(st.sampled_from([*rules.table.saved, NOBODY]))


def _described(kind: type[e.Event], draw: Draw, rules: EventRules) -> e.Event:
    fields = {"request": _name, "name": _nobody if FACTS[kind].copy == "drop" else _kept}
    return kind(*(fields[field](draw, rules) for field in kind.__struct_fields__))


def _nobody(draw: Draw, rules: EventRules) -> str:
    return NOBODY


Drawn = Callable[[Draw, EventRules], Any]
KINDS: tuple[Drawn, ...] = (
    _admit, _draft, _forward, _commit,
    lambda draw, rules: e.SetNumSteps(draw(st.integers(-1, max(rules.candidates) + 1))),
    *(partial(_described, kind) for kind in get_args(e.AnyEvent) if kind in DESCRIBED and kind_of(kind) not in MOVES),
)
MOVED: tuple[Drawn, ...] = tuple(partial(_described, kind) for kind in DESCRIBED if kind_of(kind) in MOVES)


PROVIDERS: Any = providers  # what is changed here is no public name of Hypothesis


@contextmanager
def by_seed_alone() -> Iterator[None]:
    """Within the block Hypothesis draws without the constants of modules. Its own list of odd numbers stays."""
    before = PROVIDERS._get_local_constants
    PROVIDERS._get_local_constants = Constants
    PROVIDERS.CONSTANTS_CACHE.cache.clear()  # it holds the constants themselves
    try:
        yield
    finally:
        PROVIDERS._get_local_constants = before
        PROVIDERS.CONSTANTS_CACHE.cache.clear()
