"""Conditions that only a run with such a drafter meets: drafts that are handed in, or several MTP layers.

Leaves out: every other condition, and the counting (`coverage.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from instep_reference.contract import engine as e
from instep_reference.contract.event_facts import tracks

from .coverage_turn import Condition, Turn


def _ragged(turn: Turn) -> bool:
    paths = turn.event.accepted or () if isinstance(turn.event, e.Commit) else ()
    return len({len(path.nodes) for path in paths}) > 1


def _beside_decode(turn: Turn) -> bool:
    rows = turn.event.rows if isinstance(turn.event, e.Forward) else ()
    return {"verify", "decode"} <= {row.kind for row in rows}


def _guessing(turn: Turn) -> bool:
    """A chunk followed by so few prompt tokens that the last layers read past the end of the prompt."""
    rows = turn.event.rows if isinstance(turn.event, e.Forward) else ()
    return any(row.kind == "prefill" and 0 < turn.before.live[row.request].unread - row.tokens < turn.heads
               for row in rows)  # fmt: skip


def _brought_back(turn: Turn) -> bool:
    return isinstance(turn.event, e.Load | e.Resume) and turn.after.live[turn.event.request].root is not None


def _tracked_short(turn: Turn) -> bool:
    """A prefix whose last rows, one for each MTP layer, were not all made in the event that tracks it."""
    made = [(turn.before.live[name], turn.after.saved.get(under)) for name, under in tracks(turn.event).items()]
    return any(kept is not None and one.length > 0 and kept.length - one.length < turn.heads for one, kept in made)


def _hit_short(turn: Turn) -> bool:
    """A prefix followed by so few prompt tokens that the last layers read past the end of the prompt."""
    kept = turn.after.saved[turn.event.name] if isinstance(turn.event, e.Load) else None
    return kept is not None and kept.prefix and turn.after.live[turn.event.request].unread < turn.heads  # type: ignore[union-attr]


HANDED: Mapping[str, Condition] = {
    "handed in: accepted: ragged": _ragged,
    "handed in: a request without drafts next to windows": _beside_decode,
    "handed in: resumed or loaded after a root": _brought_back,
}
SEVERAL: Mapping[str, Condition] = {
    "several MTP layers: accepted: ragged": _ragged,
    "several MTP layers: fewer steps than layers": lambda t: isinstance(t.event, e.Draft) and (
        t.before.num_steps < t.heads),
    "several MTP layers: a chunk that ends just before its prompt": _guessing,
    "several MTP layers: resumed or loaded after a root": _brought_back,
    "several MTP layers: a prefix with rows of earlier events": _tracked_short,
    "several MTP layers: a prefix loaded just before the end of a prompt": _hit_short,
}


def of(heads: int) -> Mapping[str, Condition]:
    """The conditions for a run with `layers` MTP layers."""
    return SEVERAL if heads > 1 else {} if heads else HANDED
