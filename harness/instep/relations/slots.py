"""Permuted slots and pages: where a request's memory stands changes no bit of what is computed.

Leaves out: the memory itself, of which the law and the byte checks of a replay speak.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from ..trace.file import Trace
from ..verdict import Tier
from .base import Case, Relation, Results
from .retold import Told, as_traced
from .twins import Arm, Twins


def hold(case: Case) -> Results:
    one, other = as_traced(case.trace), moved(case.trace)
    arms = [Arm(name, case.engine(told.header), told) for name, told in (("the trace", one), ("other slots", other))]
    yield from Twins("slots", arms[0], arms[1]).run()


def moved(trace: Trace) -> Told:
    """Slots and pages the other way round, one further up: the same number of each, none at its place."""
    room = trace.header.capacity
    turned = msgspec.structs.replace(
        room, slots=tuple(slot + 1 for slot in reversed(room.slots)), pages=tuple(p + 1 for p in reversed(room.pages))
    )
    return replace(as_traced(trace), header=msgspec.structs.replace(trace.header, capacity=turned))


RELATION = Relation("slots", "slots and pages in another order give the same bits", (Tier.BITWISE,), hold)
