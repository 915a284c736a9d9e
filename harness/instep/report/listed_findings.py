"""Findings of two runs, as files list them: which are equal, and which a shortened list may not contain.

Leaves out: all other differences of two runs (`difference.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .outcome_data import FINDINGS

# Fields that place a finding. `where` has the event. The number of a case is not among them, as it may change.
PLACE = ("check", "tier", "where", "case", "request", "stage", "layer", "component", "slot", "head", "columns", "token",
         "position")  # fmt: skip
Found = Mapping[str, Any]


def apart(some: Iterable[Found], others: Iterable[Found]) -> tuple[list[Found], list[Found]]:
    """The findings that only one of the two has. Pairs with the same sentence cancel first, then pairs of one place."""
    mine, theirs = list(some), list(others)
    for same in (_told, _placed):
        both = Counter(map(same, mine)) & Counter(map(same, theirs))
        mine, theirs = _without(mine, same, both), _without(theirs, same, both)
    return mine, theirs


def in_all(run: Found) -> int | None:
    """How many findings there are in all; None for an old file whose list is full, which does not record it."""
    said, listed = run.get("findings_in_all"), len(run["findings"])
    return int(said) if said is not None else listed if listed < FINDINGS else None


def is_cut(run: Found) -> bool:
    return in_all(run) != len(run["findings"])


def covers(run: Found, finding: Found) -> bool:
    """Whether a run would list this finding if it had it: its list is whole, or reaches beyond the finding's event."""
    if not is_cut(run):
        return True
    events = [found.get("event") for found in (*run["findings"][:FINDINGS][-1:], finding)]
    return finding.get("case") is None and len(events) == 2 and None not in events and events[1] < events[0]


def _without(findings: list[Found], same: Callable[[Found], str], both: Counter[str]) -> list[Found]:
    left, found = Counter(both), list[Found]()
    for one in findings:
        left[same(one)] -= 1
        if left[same(one)] < 0:
            found.append(one)
    return found


def _placed(finding: Found) -> str:
    return repr([finding.get(field) for field in PLACE])


def _told(finding: Found) -> str:
    return _placed(finding) + str(finding["diagnosis"])
