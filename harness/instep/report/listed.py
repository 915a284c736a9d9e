"""Findings of two runs, as files list them: which are the same, and what a list that was cut off does not say.

Leaves out: everything else that two runs differ in (`difference.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .data import FINDINGS

# Where a finding stands. The words of `where` have the event; of a case its number says nothing.
PLACE = ("check", "tier", "where", "case", "request", "stage", "layer", "component", "slot", "head", "columns", "token",
         "position")  # fmt: skip
Found = Mapping[str, Any]


def apart(some: Iterable[Found], others: Iterable[Found]) -> tuple[list[Found], list[Found]]:
    """What each has beyond the other: as many of a place, first those whose words are the same. Numbers may differ."""
    mine, theirs = list(some), list(others)
    for same in (_told, _placed):
        both = Counter(map(same, mine)) & Counter(map(same, theirs))
        mine, theirs = _without(mine, same, both), _without(theirs, same, both)
    return mine, theirs


def in_all(run: Found) -> int | None:
    """How many were found. An old file does not say it where its list is full."""
    said, listed = run.get("findings_in_all"), len(run["findings"])
    return int(said) if said is not None else listed if listed < FINDINGS else None


def is_cut(run: Found) -> bool:
    return in_all(run) != len(run["findings"])


def covers(run: Found, finding: Found) -> bool:
    """Whether a run would list this finding if it had it: its list is whole, or goes on behind the finding's event."""
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
