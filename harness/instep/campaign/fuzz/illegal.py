"""Draw an event that may be illegal: a name twice, an unknown name, a wrong phase, or a number too many.

Parts of it are often correct, so that an engine that checks late has already done something. Leaves out: whether the
event is illegal (the event rules decide).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

from hypothesis import strategies as st

from instep_reference.contract import engine as e
from instep_reference.contract.event_facts import FACTS, kind_of

from ...trace.event_rules import EventRules
from .draw_events import DESCRIBED, MOVES, Draw

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
    return e.Row(name, kind, tokens, draw(st.sampled_from([None, _token(draw, rules)])), track=track)


def _commit(draw: Draw, rules: EventRules) -> e.AnyEvent:
    names = _names(draw, rules, *rules.legal().get("commit", ()))[draw(st.integers(0, 1)) :]
    nodes = tuple(range(1, draw(st.integers(1, rules.table.num_steps + 2))))
    track = draw(st.sampled_from([(), (), (NOBODY,), (NOBODY,) * len(names)]))
    return e.Commit(names or (NOBODY,), tuple(e.Path(nodes, _token(draw, rules)) for _ in names or (NOBODY,)), track)


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
