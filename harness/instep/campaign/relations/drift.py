"""Drift: the error of every head's state against fp64 stays flat over thousands of tokens.

The delta rule is contractive: every write along a key replaces what the state held there, errors included. So the error
of a correct engine settles within a few K / beta tokens, and growth is a fault. Leaves out: the runs (`long_runs.py`).
"""

from __future__ import annotations

import torch

from instep_reference.contract.place import Place

from ...allowance import allowed
from ...problem import Problem
from ...verdict import Comparison, Skipped, Tier
from .base import Case, Relation, Results
from .by_position import Stopped
from .compare import unserved
from .long_runs import LongRun, by_the_op, through_the_layers

SPANS = 8  # parts of a run that are judged separately

# Limit for (median error of a head in the last quarter) / (the same in the second quarter). Independent errors that
# never decay add up as the square root of the number of tokens: by sqrt(7 / 3) = 1.53 between the middles of the two
# quarters. An error that grows linearly grows by 7 / 3 = 2.33. A median of 8 launches scatters by about 15%. A head may
# remember longer than a quarter, and the text may change: then the error of a correct engine grows as well. So the
# limit is multiplied by the growth of the rounded reference on the same rows.
GROWTH = 2.0
FEWEST = 8  # launches in a quarter that a median needs


def hold(case: Case) -> Results:
    ops = case.ops
    assert ops is not None, "asked before"
    layer = case.plan.checkpoint.config.layer_kinds.index("gdn")
    for form in ("window", "chunk"):
        yield from judged(by_the_op(case, ops, layer, form))
    for course in through_the_layers(case, ops):
        yield from judged(course)


def judged(course: LongRun | Stopped) -> Results:
    """Require every span to be within the allowance of the yardstick's largest error so far, and no growth."""
    if isinstance(course, Stopped):
        yield unserved("drift", course)
        return
    ends = torch.tensor(course.tokens)
    for span in range(SPANS):
        begin, end = (course.tokens[-1] * part // SPANS for part in (span, span + 1))
        within = (ends > begin) & (ends <= end)
        if bool(within.any()):
            limit = allowed(course.yardstick[ends <= end].amax(0), course.stored)
            error = course.errors[within].amax(0)
            says = f"off by {{:.1e}} within {end} tokens of {course.what}, the yardstick by at most {{:.1e}}"
            yardstick = course.yardstick[ends <= end].amax(0)
            yield _comparison(course, int(within.nonzero()[-1]), error, limit, says, yardstick)
    quarters = [(ends > course.tokens[-1] * n // 4) & (ends <= course.tokens[-1] * (n + 1) // 4) for n in range(4)]
    fewest = min(int(quarters[n].sum()) for n in (1, 3))
    if fewest < FEWEST:
        says = f"a quarter of {course.tokens[-1]} tokens has {fewest} launches, a median needs {FEWEST}"
        yield Skipped("drift", 0, f"{course.what}, whether the error grows: {says}")
    else:
        least = torch.finfo(course.stored).eps
        (early, late), (began, ended) = (
            [errors[quarters[n]].median(0).values for n in (1, 3)] for errors in (course.errors, course.yardstick)
        )
        limit = GROWTH * early.clamp_min(least) * (ended / began.clamp_min(least)).clamp_min(1.0)
        says = f"the error grows: {{:.1e}} in the last quarter of {course.tokens[-1]} tokens of {course.what}, " \
               "{:.1e} in the second"
        yield _comparison(course, len(course.tokens) - 1, late, limit, says, early)


def _comparison(
    course: LongRun, launch: int, error: torch.Tensor, limit: torch.Tensor, says: str, beside: torch.Tensor
) -> Comparison:
    """The comparison for the head with the largest ratio of error to limit."""
    head = int((error / limit).argmax())  # a NaN counts as the largest
    worst, most = float(error[head]), float(limit[head])
    return Comparison(
        "drift", Tier.DERIVED, launch, course.kind, Place("trunk", course.layer, "state"), elements=error.numel(),
        blocks=error.numel(), worst=worst, allowed=most, head=head,
        problem=None if worst <= most else Problem("differs", says.format(worst, float(beside[head]))),
    )


def lacks(case: Case) -> str | None:
    if case.ops is None:
        return "an external engine has no op that can be run alone"
    if case.labels:
        return "labels have no error"
    if "gdn" not in case.plan.checkpoint.config.layer_kinds:
        return "this model has no state that could drift"
    return None


RELATION = Relation(
    "drift", "over thousands of tokens the error against fp64 stays flat",
    "a decay that is the difference of two sums since the first token", (Tier.DERIVED,), hold, lacks,
    of_the_trace=False,
)
