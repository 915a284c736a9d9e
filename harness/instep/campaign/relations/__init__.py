"""The table of relations, and `held`, which runs them.

A relation is a row in `same_events.py` or `same_tokens.py`, or a separate file. Leaves out: checks, which look at one
event of one run (`instep.checks`).
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from instep_reference.contract.engine import Forward
from instep_reference.contract.errors import BadInput

from ...run.stress import stressed
from ...verdict import Exit, Skipped, Verdict
from .case import Case, Relation
from .overlapped import RELATION as OVERLAPPED
from .read_late import RELATION as READ_LATE
from .same_events import PAIRWISE
from .same_tokens import REWRITTEN
from .state_error_drift import RELATION as DRIFT
from .step_changes import RELATION as STEP_CHANGES

# Cheap and exact relations come first; relations that share runs are neighbours.
RELATIONS: tuple[Relation, ...] = (*PAIRWISE, OVERLAPPED, READ_LATE, *REWRITTEN, STEP_CHANGES, DRIFT)
NAMES = tuple(relation.name for relation in RELATIONS)


@dataclass(frozen=True)
class Held:
    """The result of one relation.

    lacks  why the relation does not apply to this case; None: it applies
    """

    relation: Relation
    verdict: Verdict
    seconds: float
    lacks: str | None = None


def relations(names: Iterable[str] = ()) -> tuple[Relation, ...]:
    """The relations with these names, in table order; without names, all of them."""
    names = tuple(name.replace("-", "_") for name in names)
    for name in names:
        if name not in NAMES:
            raise BadInput("relation", found=f'"{name}"', expected=f"one of {', '.join(NAMES)}")
    return tuple(relation for relation in RELATIONS if not names or relation.name in names)


def hold(case: Case, relation: Relation) -> Held:
    """Run one relation on a case."""
    begun, verdict, lacks = time.perf_counter(), Verdict(), relation.lacks(case)
    if lacks is None:
        with stressed(case.plan.setting) as under:
            verdict.add(relation.hold(case))
        verdict.stressed = under.results()
    else:
        verdict.add([Skipped(relation.name, 0, lacks)])
    verdict.served = not relation.of_the_trace or any(isinstance(event, Forward) for event in case.trace.events)
    verdict.events = len({compared.event for compared in verdict.compared})
    return Held(relation, verdict, time.perf_counter() - begun, lacks)


def held(case: Case, chosen: Sequence[Relation]) -> list[Held]:
    """Run the chosen relations on a case."""
    return [hold(case, relation) for relation in chosen]


def worst(found: Sequence[Held]) -> Exit:
    """The worst exit code of the relations that apply; inconclusive if none applies."""
    return Exit.worst(one.verdict.exit for one in found if one.lacks is None)
