"""A graph's replay is the eager run of its body, byte by byte, on the same padded bucket.

Leaves out: forwards of several kinds, which no graph holds. On a CPU the emulator records, and poisons between replays.
"""

from __future__ import annotations

from ..verdict import Tier
from .base import Case, Relation, Results
from .inside import eager_graphs
from .retold import as_traced
from .twins import Arm, Twins


def hold(case: Case) -> Results:
    told = as_traced(case.trace)
    replayed = case.engine(told.header, graphs=True)
    eager = eager_graphs(case.engine(told.header, graphs=False))
    yield from Twins("graph_is_eager", Arm("eager", eager, told), Arm("replayed", replayed, told), pools=True).run()


def lacks(case: Case) -> str | None:
    return "an engine of somebody else holds its own graphs" if case.ops is None else None


RELATION = Relation("graph_is_eager", "a graph's replay is its body, run eagerly", (Tier.BITWISE,), hold, lacks)
