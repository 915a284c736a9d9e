"""Unseen: whatever the harness does to look at an engine changes no bit of an answer, a state or a pool.

Leaves out: what is seen. One engine stands in a replay's own seat, with every probe on it; the other is left to itself.
"""

from __future__ import annotations

from ..observe.onlookers import Watching
from ..player import Player
from ..rig.sides import seat
from ..verdict import Tier
from .base import Case, Relation, Results
from .retold import as_traced
from .twins import Arm, Twins


def hold(case: Case) -> Results:
    told, sides = as_traced(case.trace), seat(case.plan)
    looked_at = Player("watched", sides.shown, [Watching(sides.watch), *sides.subject.observers])
    seen = Arm("watched", sides.shown, told, watched=False, player=looked_at)
    bare = Arm("unwatched", case.engine(told.header), told, watched=False)
    yield from Twins("unseen", seen, bare, pools=True).run()


RELATION = Relation("unseen", "watched or not, an engine does the same", (Tier.BITWISE,), hold)
