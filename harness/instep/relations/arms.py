"""Runs that several relations share, and the choice between bits and allowances.

Leaves out: how runs are told and compared (`retold.py`, `compare.py`).
"""

from __future__ import annotations

from instep_reference.contract.engine import Draft

from .base import Case, Results
from .compare import same
from .retold import alone, decoded
from .story import Story
from .within import Yardstick


def by_itself(case: Case) -> Story:
    """Every request alone in the engine, in the steps of the trace."""
    return case.told("alone", lambda: alone(case.trace))


def token_by_token(case: Case) -> Story:
    """Every request alone, decoded without drafts."""
    return case.told("plain decoding", lambda: alone(case.trace, decoded))


def alike(name: str, case: Case, one: Story, other: Story, *, exact: bool | None = None) -> Results:
    """Bit by bit where that is promised (`exact`; left out: where rows are invariant), else within the allowance."""
    if case.rows_are_invariant if exact is None else exact:
        yield from same(name, one, other)
    else:
        yield from Yardstick(name, case.truth(), case.rounded, one, other).compare()


def no_trees(case: Case) -> str | None:
    """A window that is a tree has no course that could be told again in other steps."""
    trees = any(isinstance(event, Draft) and event.parents is not None for event in case.trace.events)
    return "the drafts of this trace form trees" if trees else None


def widest(case: Case) -> int:
    """The widest window's drafts."""
    return max(case.trace.header.candidates)


def nobody_decodes(case: Case) -> str | None:
    """Why a relation about decoding would have nothing to compare."""
    return no_trees(case) or (None if widest(case) else "no step count of this trace makes drafts")
