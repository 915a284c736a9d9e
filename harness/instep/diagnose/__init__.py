"""Diagnose a divergence: a known mistake that explains the first findings, and the change that removes them.

Leaves out: finding anything (`instep.checks`), and wrong states that T2d recognises (`checks/wrong_state_bank.py`).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from ..checks import Check
from ..run.lockstep import Progress
from ..run.replay import Outcome, Replay
from ..run.run_variants import AS_IS, Variant
from ..threads import threads_for
from ..verdict import Tier
from .confirm_cause import locate
from .explanation_bank import explained
from .mistakes.run_history import RunHistory

__all__ = ["RunHistory", "diagnose", "explain_outcome", "explained", "locate"]


def diagnose(
    replay: Replay, *, until: int | None = None, layers: Collection[int] | None = None,
    progress: Progress | None = None, variant: Variant = AS_IS, also: Sequence[Check] = (), judged_from: int = 0,
    tiers: Collection[Tier] = frozenset(Tier), ladder: bool = False, before_ladder: Callable[[], object] = tuple,
) -> Outcome:
    """Run a replay and explain its first findings. All parameters but the last two are those of `Replay.run`.

    ladder: whether to confirm the cause of the first finding by further runs (`locate`), unless this run has changes.
    before_ladder: called before these runs.
    """
    history = RunHistory(replay.plan.steps)
    outcome = explain_outcome(replay.run(
        until=until, layers=layers, progress=progress, variant=variant, also=(*also, history),
        judged_from=judged_from, tiers=tiers,
    ), history)  # fmt: skip
    if not (ladder and outcome.verdict.findings) or variant != AS_IS:
        return outcome
    del history  # further runs need its memory
    before_ladder()
    return replace(outcome, located=locate(replay, outcome, layers))


def explain_outcome(outcome: Outcome, history: RunHistory | None = None) -> Outcome:
    """Explain the first findings of a run, and drop the tensors that only explanations need.

    history: an observer of that run; None means that it had none.
    """
    with threads_for(outcome.plan.checkpoint.config.hidden):
        compared = explained(outcome.verdict.compared, outcome.last, outcome.oracle, history or RunHistory())
    return replace(outcome, verdict=replace(outcome.verdict, compared=compared), oracle=None)
