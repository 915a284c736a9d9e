"""Conditions that only tracked prefixes meet. They are counted where a room has a `track_interval`.

Leaves out: every other condition, and the counting (`coverage.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from instep_reference.contract import engine as e
from instep_reference.contract.event_facts import tracks

from ...trace.request_table import Standing
from .coverage_turn import Condition, Turn


def _tracked(holds: Callable[[Turn, str, int], bool], kind: type[e.Event]) -> Condition:
    """For an event of this kind: whether the condition holds for some request and the tokens of its prefix."""

    def condition(turn: Turn) -> bool:
        made = [(name, turn.after.saved.get(under)) for name, under in tracks(turn.event).items()]
        return isinstance(turn.event, kind) and any(
            kept is not None and holds(turn, name, kept.length) for name, kept in made)

    return condition


def _hit(holds: Callable[[Turn, Standing], bool]) -> Condition:
    def condition(turn: Turn) -> bool:
        kept = turn.after.saved[turn.event.name] if isinstance(turn.event, e.Load) else None
        return kept is not None and kept.prefix and holds(turn, kept)

    return condition


def _ends(turn: Turn, name: str, count: int) -> bool:
    return turn.after.live[name].length == count


def _not_reached(turn: Turn) -> bool:
    return any(under not in turn.after.saved for under in tracks(turn.event).values())


def _of(
    kind: type[e.Event], holds: Callable[[Turn, Standing], bool] = lambda turn, kept: True
) -> Condition:
    """For an event that moves or evicts a prefix: whether the condition holds for the prefix before it."""

    def condition(turn: Turn) -> bool:
        kept = turn.before.saved[turn.event.name] if isinstance(turn.event, e.Offload | e.Fetch | e.Evict) else None
        return kept is not None and isinstance(turn.event, kind) and kept.prefix and holds(turn, kept)

    return condition


def _again(turn: Turn) -> bool:
    return any(under in turn.past.evicted and under in turn.after.saved for under in tracks(turn.event).values())


PREFIXES: dict[str, Condition] = {
    "a prefix tracked at the end of a chunk": _tracked(_ends, e.Forward),
    "a prefix tracked inside an accepted path": _tracked(lambda *at: not _ends(*at), e.Commit),
    "a prefix tracked at the end of an accepted path": _tracked(_ends, e.Commit),
    "a commit that reaches no multiple": _not_reached,
    "prefixes of several requests tracked at once": lambda turn: len(tracks(turn.event)) > 1,
    "a prefix of a request that continued from a prefix": _tracked(lambda t, name, _: name in t.past.hits, e.Event),
    "a prefix loaded": _hit(lambda turn, kept: True),
    "a prefix loaded while its donor is live": _hit(lambda turn, kept: kept.request in turn.before.live),
    "a prefix loaded after its donor is over": _hit(lambda turn, kept: kept.request not in turn.before.live),
    "a prefix with accepted tokens loaded": _hit(
        lambda turn, kept: turn.past.accepted_in >= {getattr(turn.event, "name", "")}),
    "a prefix goes to the host": _of(e.Offload),
    "a prefix goes to the host while its donor is in a round": _of(
        e.Offload, lambda turn, kept: bool(turn.before.live[kept.request].window) if kept.request in turn.before.live
        else False),
    "a prefix comes back": _of(e.Fetch),
    "a prefix loaded after it came back": _hit(lambda turn, kept: getattr(turn.event, "name", "") in turn.past.fetched),
    "a prefix evicted from the device": _of(e.Evict, lambda turn, kept: not kept.aside),
    "a prefix evicted from the host": _of(e.Evict, lambda turn, kept: kept.aside),
    "a prefix evicted while its donor is live": _of(e.Evict, lambda turn, kept: kept.request in turn.before.live),
    "a prefix evicted while a request that loaded it is live": _of(
        e.Evict, lambda turn, kept: bool(turn.past.hits & turn.before.live.keys())),
    "a prefix under a name that was evicted": _again,
    "the device has no room for one prefix more": lambda turn: (
        turn.after.capacity.tracked is not None and not turn.after.room_for(1)),
}
