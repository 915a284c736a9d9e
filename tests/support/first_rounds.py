"""The first rounds of the small policy of `traces.py`: its chunks, windows and plain steps, once each.

Leaves out: what comes later there, a resume, an abort and rounds that are like those before.
"""

from __future__ import annotations

from msgspec.structs import replace

from instep.trace.policy import Policy
from support.traces import brief

LATER = ("resume", "abort")


def first(rounds: int) -> Policy:
    """Three rounds end with a plain step, four with windows of two requests of which one rejects every draft.

    A request is saved, one is preempted, and one begins with what was saved.
    """
    told = brief()
    deeds = tuple(deed for deed in told.deeds if deed.do not in LATER)
    return replace(told, rounds=rounds, deeds=deeds)
