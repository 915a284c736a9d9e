"""The difference of two result files: coverage, used parts of allowances, and new findings.

Leaves out: the output on the terminal (`cli/diff.py`), and all schemas of result files (`result.py`).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from instep_reference.contract.errors import BadInput

from ..options import OPTIONS
from ..trace.file import decode
from ..verdict import Exit
from .outcome_data import FINDINGS
from .result import runs_of

# Runs with the same values of `KEY` are compared. Other differences of `SETTING` are reported.
WHAT = ("name", "relation", "recording")  # what was run: a trace, a relation on it, a recording
KEY = ("name", "relation", "ops", "engine", "strategy", "conv", "layout", "dtype", "state_dtype", "graphs")
MOVED = 1.25  # ratio from which on a used part of an allowance has moved, up or down
# Fields that place a finding. `where` has the event. The number of a case is not among them, as it may change.
PLACE = ("check", "tier", "where", "case", "request", "stage", "layer", "component", "slot", "head", "columns", "rank",
         "token", "position")  # fmt: skip
Found = Mapping[str, Any]
# Fields of a run that identify it: its trace, relation or recording, and its setting.
SETTING = ("name", "relation", "recording", *OPTIONS, "model")


@dataclass(frozen=True)
class Row:
    """One tier or op of a run in both files. elements: compared numbers; used: used part of the allowance."""

    name: str
    elements: tuple[int, int]
    used: tuple[float | None, float | None]

    @property
    def moved(self) -> bool:
        """Whether the used part has moved; exact and inexact always count as different."""
        one, other = self.used
        if one is None or other is None:
            return one is not other
        low, high = sorted((one, other))
        return not (math.isfinite(high) and high <= MOVED * low) and one != other


@dataclass(frozen=True)
class RunPair:
    """A run that is in both files.

    changed    fields of its setting -> both values
    new, gone  findings, as in a file;  unlisted: findings that are new or that a shortened list did not contain
    findings   how many there are in all, if known;  cut: whether one of the files lists only the first findings
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
        """Whether the second run compared less."""
        return self.events[1] < self.events[0] or any(row.elements[1] < row.elements[0] for row in self.rows)

    @property
    def more(self) -> int:
        """The least number of new findings, listed or not."""
        before, now = self.findings
        return max(len(self.new), 0 if before is None or now is None else now - before)


@dataclass(frozen=True)
class Difference:
    """The difference of two results.

    pairs     runs that both have
    only      names of runs that only the first has, and that only the second has
    added     findings of runs that only the second has
    unjudged  runs of the second that compared nothing, or ended without a verdict
    """

    pairs: tuple[RunPair, ...]
    only: tuple[tuple[str, ...], tuple[str, ...]]
    added: tuple[Found, ...] = ()
    unjudged: tuple[str, ...] = ()

    @property
    def exit(self) -> Exit:
        """1: new findings; 3: nothing can be concluded, for the reasons in `why`; or else 0."""
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
            "a list of findings is shortened, so some findings may be new": any(p.unlisted for p in self.pairs),
        }
        return tuple(reason for reason, holds in reasons.items() if holds)


def difference(before: Found, after: Found, names: Sequence[str] = ("before", "after")) -> Difference:
    """Compare two results that `result.read` returned. names: the files, for errors."""
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
    """Runs by their setting and by their number among the runs of that setting."""
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
    """Whether the run compared something and has a verdict. A relation without meaning in its setting needs none."""
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
    """Tier or op -> compared numbers, and the used part of the allowance."""
    lines = [line for line in run.get("tiers") or () if isinstance(line, dict)] + [*(run.get("by_op") or ())]
    if not lines:
        return {"all": (int(run.get("elements") or 0), _number(run.get("used")))}
    return {str(line.get("tier") or line.get("op")): (int(line["elements"]), _number(line.get("used")))
            for line in lines}  # fmt: skip


def _number(value: float | str | None) -> float | None:
    """The value of a file, where infinity and NaN are text."""
    return None if value is None else float(value)


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


# ---- the schema of a result file that can be compared: runs, each with findings; other fields are ignored

Count = Annotated[int, msgspec.Meta(ge=0)]
Used = float | Annotated[str, msgspec.Meta(pattern="^(-?inf|nan)$")] | None


class Finding(msgspec.Struct):
    check: str
    where: str
    diagnosis: str
    event: Count | None = None


class TierLine(msgspec.Struct):
    tier: str
    elements: Count
    used: Used = None


class OpLine(msgspec.Struct):
    op: str
    elements: Count
    used: Used = None


class Run(msgspec.Struct):
    """One run. tiers: for relations only their names."""

    exit: int
    findings: list[Finding]
    findings_in_all: Count | None = None
    events: Count | None = None
    elements: Count | None = None
    used: Used = None
    tiers: list[TierLine | str] | None = None
    by_op: list[OpLine] | None = None
    lacks: str | None = None


FIELDS = [(name, OPTIONS[name][0] | None if name in OPTIONS else str | None, None) for name in SETTING]
File = msgspec.defstruct("File", [("exit", int), ("runs", list[msgspec.defstruct("Whole", FIELDS, bases=(Run,))])])  # type: ignore[misc]


def readable(result: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """The runs of a result. name: the file, for errors."""
    runs = result.get("runs", [])
    if not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
        raise BadInput(f"{name}: runs", found=type(runs).__name__, expected="a list of objects")
    found = runs_of(result)
    if not found or not all("findings" in run for run in found):
        raise BadInput(name, found=f"the result of `{result.get('command')}`", expected="a result with runs and "
                       "findings, from replay, op, relations, shapes, streams or audit")  # fmt: skip
    decode(msgspec.json.encode({"exit": result.get("exit"), "runs": found}), File, name)
    return found
