"""Step counts that a controller with one wrong rule would request.

The reference's controller of SGLang 0.5.12 is run again over the events, once for every wrong rule. A rule explains a
step count if it gives it and, at every earlier event, the right one. Leaves out: when a step count comes into force,
which the driver decides, and the other dialects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from instep_reference.contract.adaptive_controller_file import Bracket
from instep_reference.contract.engine import Commit, Committed, Forward, SetNumSteps
from instep_reference.controllers.sglang_0_5_12 import Brackets, Candidates

from ...watch.event_context import EventContext

MOST = 3  # rules that may fit at most; more of them explain nothing
Counts = Callable[[Sequence[int]], Sequence[int]]  # accepted drafts per request of a commit -> counted drafts


class Told(NamedTuple):
    """Input of the controller at an event: `batch` requests or decode rows, accepted drafts, a new step count.

    wish  the right request after the event
    """

    batch: int | None
    counts: tuple[int, ...]
    in_force: int | None
    idle: bool
    wish: int


def unchanged(rule: Bracket) -> Bracket:
    return rule


class Rule(NamedTuple):
    """A controller with one wrong rule."""

    says: str
    changes: Callable[[Bracket], Bracket] = unchanged
    counts: Counts = lambda counts: counts
    idle: bool = False  # an idle step is a batch
    late: bool = False  # the last batch is not counted yet


def told(context: EventContext) -> Told:
    event, answer = context.event, context.truth.answer
    batch, counts, in_force = None, tuple[int, ...](), None
    if isinstance(event, Commit) and isinstance(answer, Committed):
        batch, counts = len(event.requests), tuple(answer.num_correct_drafts.tolist())
    elif isinstance(event, Forward) and context.expected.num_steps == 0:
        batch = sum(row.kind == "decode" for row in event.rows)
    elif isinstance(event, SetNumSteps):
        in_force = event.num_steps
    return Told(batch, counts, in_force, context.kind == "idle", context.truth.wanted_num_steps)


def wrong_rule(candidates: Candidates, history: Sequence[Told], found: int) -> str | None:
    """The rule that gives the found step count, or a few that are indistinguishable; None if none does."""
    saying = [rule.says for rule in RULES if _is_other(rule, candidates) and _wishes(candidates, rule, history, found)]
    if not 0 < len(saying) <= MOST:
        return None
    also = f" [equal: {'; '.join(saying[1:])}]" if saying[1:] else ""
    return saying[0] + also


def _is_other(rule: Rule, candidates: Candidates) -> bool:
    """Whether the rule changes anything here, as no warm-up is no mistake if none is configured."""
    return rule.changes is unchanged or any(rule.changes(one) != one for one in candidates.rules.values())


def _wishes(candidates: Candidates, rule: Rule, history: Sequence[Told], found: int) -> bool:
    """Whether a controller with this rule requests the right counts before the last event and the found one then."""
    changed = {key: rule.changes(bracket) for key, bracket in candidates.rules.items()}
    controller, owed = Brackets(replace(candidates, rules=changed)), list[Told]()
    for event in history:
        if event.in_force is not None:
            controller.set_num_steps(event.in_force)
        counted = event.batch is not None or (event.idle and rule.idle)
        owed += [event] * counted
        for one in owed[:-1] if rule.late else owed:
            controller.update(one.batch or 1, rule.counts(one.counts))
        owed = owed[-1:] if rule.late else []
        if controller.wish() != (found if event is history[-1] else event.wish):
            return False
    return True


def _with(**changed: object) -> Callable[[Bracket], Bracket]:
    return lambda rule: msgspec.structs.replace(rule, **changed)


RULES = (
    Rule("the first batches decide already: there is no warm-up", _with(warmup_batches=0)),
    Rule("it decides after every batch", _with(update_interval=1)),
    Rule("an idle step counts as a batch", idle=True),
    Rule("the last batch is not counted yet", late=True),
    Rule("the bonus counts among the accepted drafts", counts=lambda counts: [count + 1 for count in counts]),
    Rule("the best request of a batch counts for all", counts=lambda counts: [max(counts, default=0)] * len(counts)),
    Rule("the worst request of a batch counts for all", counts=lambda counts: [min(counts, default=0)] * len(counts)),
    Rule("accepted drafts are summed over a batch, with no mean", counts=lambda counts: [sum(counts)] * len(counts)),
    Rule("the last batch decides alone, with no average", _with(ema_alpha=1.0)),
    Rule("the average weighs the past by alpha and the last batch by 1 - alpha",
         lambda rule: msgspec.structs.replace(rule, ema_alpha=1 - rule.ema_alpha)),
    Rule("the hysteresis of up and that of down are swapped", lambda rule: msgspec.structs.replace(
        rule, down_hysteresis=rule.up_hysteresis, up_hysteresis=rule.down_hysteresis)),
    Rule("each hysteresis has the opposite sign", lambda rule: msgspec.structs.replace(
        rule, down_hysteresis=-rule.down_hysteresis, up_hysteresis=-rule.up_hysteresis)),
    Rule("there is no hysteresis", _with(down_hysteresis=0.0, up_hysteresis=0.0)),
)  # fmt: skip
