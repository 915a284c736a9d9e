"""The verdict of a run that must agree, the first finding of one that must not, and one relation of a replay."""

from typing import Any

from instep.campaign.relations import Held, held, relations
from instep.campaign.relations.case import Case
from instep.run.replay import Replay
from instep.verdict import Comparison, Exit, Verdict


def agreed(ran: Any, *, events: int | None = None) -> Verdict:
    """The verdict of a run that agrees; events: how many it served."""
    verdict: Verdict = getattr(ran, "verdict", ran)
    assert verdict.exit is Exit.AGREED, verdict.findings[:2]
    assert events in (None, verdict.events)
    return verdict


def first_finding(ran: Any) -> Comparison:
    verdict: Verdict = getattr(ran, "verdict", ran)
    assert verdict.exit is Exit.DIVERGED
    return verdict.findings[0]


def related(name: str, replay: Replay, **case: Any) -> Held:
    """One relation between runs of a replay's trace."""
    (found,) = held(Case.of(replay.trace, replay.plan, **case), relations([name]))
    return found
