"""Conditions that only tracked prefixes meet. They are counted where a room has a `track_interval`.

Leaves out: every other condition, and the counting (`coverage.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from instep_reference.contract import engine as e
from instep_reference.contract.event_facts import tracks

from ..trace.request_table import Standing

if TYPE_CHECKING:
    from .coverage import Turn


def _tracked(holds: Callable[[Turn, str, int], bool], kind: type[e.Event]) -> Callable[[Turn], bool]:
    """Of an event of this kind: whether it holds for some request and the tokens of its prefix."""

    def condition(turn: Turn) -> bool:
        made = [(name, turn.after.saved.get(under)) for name, under in tracks(turn.event).items()]
        return isinstance(turn.event, kind) and any(
            kept is not None and holds(turn, name, kept.length) for name, kept in made)

    return condition


def _hit(holds: Callable[[Turn, Standing], bool]) -> Callable[[Turn], bool]:
    def condition(turn: Turn) -> bool:
        kept = turn.after.saved[turn.event.name] if isinstance(turn.event, e.Load) else None
        return kept is not None and kept.prefix and holds(turn, kept)

    return condition


def _ends(turn: Turn, name: str, count: int) -> bool:
    return turn.after.live[name].length == count


def _not_reached(turn: Turn) -> bool:
    return any(under not in turn.after.saved for under in tracks(turn.event).values())


PREFIXES: dict[str, Callable[[Turn], bool]] = {
    "a prefix tracked at the end of a chunk": _tracked(_ends, e.Forward),
    "a prefix tracked inside an accepted path": _tracked(lambda *at: not _ends(*at), e.Commit),
    "a prefix tracked at the end of an accepted path": _tracked(_ends, e.Commit),
    "a commit that reaches no multiple": _not_reached,
    "prefixes of several requests tracked at once": lambda turn: len(tracks(turn.event)) > 1,
    "a prefix of a request that went on from a prefix": _tracked(lambda t, name, _: name in t.past.hits, e.Event),
    "a prefix loaded": _hit(lambda turn, kept: True),
    "a prefix loaded beside its donor": _hit(lambda turn, kept: kept.request in turn.before.live),
    "a prefix loaded after its donor is over": _hit(lambda turn, kept: kept.request not in turn.before.live),
    "a prefix with accepted tokens loaded": _hit(
        lambda turn, kept: turn.past.accepted_in >= {getattr(turn.event, "name", "")}),
}
