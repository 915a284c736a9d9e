"""Unseen: whatever the harness does to look at an engine changes no bit of an answer, a state or a pool.

Leaves out: what is seen. One engine stands in a replay's own seat, with every probe on it; the other is left to itself.
"""

from __future__ import annotations

from instep_reference.contract.engine import Answer, AnyEvent

from ..rig.sides import Sides, seat
from ..trace.bounds import Bound
from ..verdict import Tier
from .base import Case, Relation, Results
from .retold import as_traced
from .twins import Arm, Twins


def hold(case: Case) -> Results:
    told, sides = as_traced(case.trace), seat(case.plan)
    seen = Arm("watched", sides.shown.engine, told, watched=False, serve=lambda event: _looked_at(sides, event))
    bare = Arm("unwatched", case.engine(told.header), told, watched=False)
    yield from Twins("unseen", seen, bare, pools=True).run()


def _looked_at(sides: Sides, event: AnyEvent) -> Answer | None:
    """As in a replay (`rig/lockstep.py`): bytes before, the event with its places and states, bytes after."""
    sides.watch.before(event, Bound())  # what it may write is judged by a replay
    side = sides.subject.step(event, ())
    for name in sides.shown.slots():
        sides.subject.look(name)
    sides.watch.after()
    return side.answer


RELATION = Relation("unseen", "watched or not, an engine does the same", (Tier.BITWISE,), hold)
