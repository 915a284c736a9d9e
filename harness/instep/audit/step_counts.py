"""Compare the step count of every recorded round with the controller that the recording names (T0).

A round is a forward with decode or verify rows. It has the count in force if it has windows, and 0 if it has none. The
reference's controller gets the forwards and the accepted counts of the recording, in its order; before every round it
gets the question that an engine asks. So the recording must have every request of the engine, or state the rounds of
all of them (`judged_rounds`). A wrong count does not change the controller's averages, and later rounds are judged by
what was recorded.
Leaves out: the rules of the dialects (`instep_reference.contract.controllers`).
"""

from collections import deque
from collections.abc import Sequence

from instep_reference.contract.controllers import Controlled
from instep_reference.contract.engine import AnyEvent, Commit, Draft, Forward, SetNumSteps
from instep_reference.contract.errors import BadInput
from instep_reference.contract.event_facts import committed_paths
from instep_reference.contract.place_names import AFTER_LAYERS, Place
from instep_reference.controllers import Controller, controller

from ..finding_problem import Problem
from ..trace.event_scheduler import ASKS_WITH
from ..verdict import Comparison, Tier
from .recording import Batch

STEPS = Place("trunk", AFTER_LAYERS, "length")


def judged(
    controlled: Controlled, num_steps: int | None, lag: int, events: Sequence[AnyEvent], field: str
) -> list[Comparison]:
    """Judge every round. num_steps: the initial count; lag: by how many rounds results are late (1: overlap)."""
    controlled.check(num_steps, field)
    trees = (index for index, event in enumerate(events) if isinstance(event, Draft) and grows(event))
    if controlled.varies and (tree := next(trees, None)) is not None:
        raise BadInput(field, found=f"{controlled.dialect}, and a window at event {tree} that is a tree",
                       expected="chains: adaptive step counts are for chains")
    ruled = controller(controlled, num_steps, lag=lag)
    delay, asks_with = controlled.wish_delay(lag), ASKS_WITH.get(controlled.dialect)
    in_force, due, before = ruled.initial, ruled.initial, ruled.initial
    wishes, found, switched = deque[int](), list[Comparison](), None
    for index, event in enumerate(events):
        if isinstance(event, SetNumSteps):
            in_force, switched = event.num_steps, index
        elif isinstance(event, Commit) and event.accepted:
            ruled.committed([len(path.nodes) for path in committed_paths(event)])
        elif isinstance(event, Forward) and event.rows:
            windows = sum(row.kind == "verify" for row in event.rows)
            decodes = sum(row.kind == "decode" for row in event.rows)
            coming = windows + decodes, len(event.rows)
            if asks_with is None or coming[asks_with]:
                wishes.append(ruled.next_num_steps(*coming))
            if len(wishes) > delay:
                due = wishes.popleft()
            count = in_force if windows else 0
            if windows + decodes:
                at, kind = (index, "forward") if switched is None else (switched, "set_num_steps")
                found.append(_compared(at, kind, controlled.dialect, before, count, due, ruled))
                if count != ruled.in_force:
                    ruled.set_num_steps(count)
                before, switched = count, None
            ruled.forwarded(decodes)
    return found


def judged_rounds(
    controlled: Controlled, num_steps: int | None, batches: Sequence[Batch], field: str
) -> list[Comparison]:
    """Judge the rounds that the engine's recorder states, with results as late as the engine processed them.

    The event of a round is that of the batch that states it.
    """
    controlled.check(num_steps, field)
    ruled = controller(controlled, num_steps)
    delay, asks_with = controlled.wish_delay(0), ASKS_WITH.get(controlled.dialect)
    rounds = sorted(((one, batch.event) for batch in batches for one in batch.rounds), key=lambda pair: pair[0].launch)
    late = deque(sorted((one for one, _ in rounds), key=lambda one: (one.processed, one.launch)))
    before, wishes, found = ruled.initial, deque([ruled.initial] * delay), list[Comparison]()
    for one, event in rounds:
        while late and late[0].processed <= one.launch:
            ruled.committed(late.popleft().accepted)
        coming = len(one.accepted), len(one.accepted) if one.scheduled is None else one.scheduled
        if asks_with is None or coming[asks_with]:
            wishes.append(ruled.next_num_steps(*coming))
        due = wishes.popleft()
        if one.steps is None:
            continue
        found.append(_compared(event, "commit", controlled.dialect, before, one.steps, due, ruled))
        if one.steps != ruled.in_force:
            ruled.set_num_steps(one.steps)
        before = one.steps
    return found


def grows(event: Draft) -> bool:
    """Whether a window is a tree."""
    return any(tuple(parents) != tuple(range(len(parents))) for parents in event.parents or ())


def _compared(
    event: int, kind: str, dialect: str, before: int, count: int, due: int, ruled: Controller
) -> Comparison:
    says = f"steps {before} -> {count}" if count != before else f"steps stay {count}"
    slots = "; ".join(f"slot {key}: count {current}, average {average:.4g}"
                      for key, (current, average) in ruled.slots.items())  # fmt: skip
    of = f" ({slots})" if slots else ""
    return Comparison(
        "step counts", Tier.IDENTITY, event, kind, STEPS, elements=1, worst=float(count != due), allowed=0.0,
        problem=Problem("differs", f"{says}; the controller {dialect} requests {due}{of}") if count != due else None,
    )
