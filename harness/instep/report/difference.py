"""Two result files side by side: what was compared more or less, whose part of an allowance moved, and new findings.

Leaves out: the words on the terminal (`cli/diff.py`), what a file must have (`readable.py`), and what a result is worth
by itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..verdict import Exit
from .listed import Found, apart, covers, in_all, is_cut
from .readable import SETTING, readable

# Runs that are alike in `KEY` are compared. What else differs of `SETTING` is told.
WHAT = ("name", "relation", "recording")  # what is run: a trace, a relation on it, a recording
KEY = ("name", "relation", "ops", "engine", "strategy", "conv", "layout", "dtype", "state_dtype", "graphs")
MOVED = 1.25  # a part of an allowance has moved when it is so many times what it was, or that part of it


@dataclass(frozen=True)
class Row:
    """One tier, or op, of a run in both files. elements: compared numbers; used: the part of the allowance."""

    name: str
    elements: tuple[int, int]
    used: tuple[float | None, float | None]

    @property
    def moved(self) -> bool:
        """Whether the part that is used has moved: exact and inexact are worlds apart."""
        one, other = self.used
        if one is None or other is None:
            return one is not other
        low, high = sorted((one, other))
        return not (math.isfinite(high) and high <= MOVED * low) and one != other


@dataclass(frozen=True)
class RunPair:
    """A run that is in both files.

    changed    fields of its setting -> both values
    new, gone  findings, as in a file;  unlisted: those that may be new, or may have been behind the end of a list
    findings   how many there are in all, where that is known;  cut: whether one of the files lists only the first
    """

    name: str
    rows: tuple[Row, ...]
    changed: Mapping[str, tuple[Any, Any]]
    events: tuple[int, int]
    new: tuple[Found, ...]
    gone: tuple[Found, ...]
    unlisted: tuple[Found, ...] = ()
    findings: tuple[int | None, int | None] = (0, 0)
    cut: bool = False

    @property
    def less(self) -> bool:
        """Whether the second one compared less of something."""
        return self.events[1] < self.events[0] or any(row.elements[1] < row.elements[0] for row in self.rows)

    @property
    def more(self) -> int:
        """So many findings are new at least, listed or not."""
        before, now = self.findings
        return max(len(self.new), 0 if before is None or now is None else now - before)


@dataclass(frozen=True)
class Difference:
    """pairs: runs that are in both; only: names of runs that are in the first, and in the second, alone.

    added     findings of runs that are in the second alone
    unjudged  runs of the second that compared nothing, or did not end with a verdict
    """

    pairs: tuple[RunPair, ...]
    only: tuple[tuple[str, ...], tuple[str, ...]]
    added: tuple[Found, ...] = ()
    unjudged: tuple[str, ...] = ()

    @property
    def exit(self) -> Exit:
        """1: findings that were not there before; 3: for one of the reasons `why`; else 0."""
        if self.added or any(pair.more for pair in self.pairs):
            return Exit.DIVERGED
        return Exit.INCONCLUSIVE if self.why else Exit.AGREED

    @property
    def why(self) -> tuple[str, ...]:
        """Why nothing can be concluded."""
        reasons = {
            f"no verdict now: {', '.join(self.unjudged)}": bool(self.unjudged),
            "less was compared than before": bool(self.only[0]) or any(pair.less for pair in self.pairs),
            "no run is in both": not self.pairs,
            "a list of findings is cut off: what it does not list may be new": any(p.unlisted for p in self.pairs),
        }
        return tuple(reason for reason, holds in reasons.items() if holds)


def difference(before: Found, after: Found, names: Sequence[str] = ("before", "after")) -> Difference:
    """Of two results as `result.read` gives them. names: of the files, for errors."""
    one, other = (readable(result, name) for result, name in zip((before, after), names, strict=True))
    if len(one) == len(other) == 1 and all(one[0].get(field) == other[0].get(field) for field in WHAT):
        mine, theirs = {("", 0): one[0]}, {("", 0): other[0]}
    else:
        mine, theirs = _keyed(one), _keyed(other)
    pairs = tuple(_pair(mine[key], theirs[key]) for key in mine if key in theirs)
    alone = [tuple(_name(runs[key]) for key in runs if key not in others)
             for runs, others in ((mine, theirs), (theirs, mine))]  # fmt: skip
    added = tuple(found for key, run in theirs.items() if key not in mine for found in run["findings"])
    unjudged = [_name(run) for run in other if not _is_judged(run)]
    if int(after["exit"]) not in (Exit.AGREED, Exit.DIVERGED) and not unjudged:
        unjudged = [f"exit code {after['exit']}"]
    return Difference(pairs, (alone[0], alone[1]), added, tuple(unjudged))


def _keyed(runs: Sequence[Found]) -> dict[tuple[str, int], Found]:
    """Runs by their setting. Of several in the same setting the first is held against the first."""
    seen, found = Counter[str](), dict[tuple[str, int], Found]()
    for run in runs:
        key = repr([run.get(field) for field in KEY])
        found[key, seen[key]] = run
        seen[key] += 1
    return found


def _name(run: Found) -> str:
    parts = [run.get(field) for field in ("name", "recording", "relation", "engine", "ops", "strategy", "dtype")]
    return " ".join(dict.fromkeys(str(part) for part in parts if part))


def _is_judged(run: Found) -> bool:
    """Whether it compared something and came to a verdict. A relation that has no meaning in a setting need not."""
    ended = int(run["exit"]) in (Exit.AGREED, Exit.DIVERGED)
    return bool(run.get("lacks")) or bool(run["findings"]) or (ended and any(n for n, _ in _rows(run).values()))


def _pair(one: Found, other: Found) -> RunPair:
    rows = [_rows(run) for run in (one, other)]
    none: tuple[int, float | None] = (0, None)
    both = tuple(Row(name, (a[0], b[0]), (a[1], b[1])) for name in {**rows[0], **rows[1]}
                 for a, b in [(rows[0].get(name, none), rows[1].get(name, none))])
    here, there = apart(other["findings"], one["findings"])
    new, gone = [found for found in here if covers(one, found)], [found for found in there if covers(other, found)]
    return RunPair(
        _name(other), both,
        {field: (one.get(field), other.get(field)) for field in SETTING if one.get(field) != other.get(field)},
        (int(one.get("events") or 0), int(other.get("events") or 0)), tuple(new), tuple(gone),
        tuple(found for found in here if found not in new),
        (in_all(one), in_all(other)), is_cut(one) or is_cut(other),
    )


def _rows(run: Found) -> dict[str, tuple[int, float | None]]:
    """Tier or op -> numbers compared, and the part of the allowance that was used."""
    lines = [line for line in run.get("tiers") or () if isinstance(line, dict)] + [*(run.get("by_op") or ())]
    if not lines:
        return {"all": (int(run.get("elements") or 0), _number(run.get("used")))}
    return {str(line.get("tier") or line.get("op")): (int(line["elements"]), _number(line.get("used")))
            for line in lines}  # fmt: skip


def _number(value: float | str | None) -> float | None:
    """Infinite parts and NaN stand in a file as text."""
    return None if value is None else float(value)
