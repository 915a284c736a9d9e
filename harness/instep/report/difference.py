"""Two result files side by side: what was compared more or less, whose part of an allowance moved, and new findings.

Leaves out: the words on the terminal (`cli/diff.py`), and what a result is worth by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from instep_reference.contract.errors import BadInput

from ..verdict import Exit

# Fields of a run that say how it was set up: runs that are alike in `KEY` are compared, and the others are told.
WHAT = ("name", "relation", "recording")  # what is run: a trace, a relation on it, a recording
KEY = ("name", "relation", "ops", "engine", "strategy", "conv", "layout", "dtype", "state_dtype", "graphs")
SETTING = (*KEY, "device", "state_rounding", "kv_dtype", "snapshot_layout", "drafter", "overlap", "guarded", "model")
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
    """A run that is in both files. changed: fields of its setting -> both values; new, gone: findings, as in a file."""

    name: str
    rows: tuple[Row, ...]
    changed: Mapping[str, tuple[Any, Any]]
    events: tuple[int, int]
    new: tuple[Mapping[str, Any], ...]
    gone: tuple[Mapping[str, Any], ...]

    @property
    def less(self) -> bool:
        """Whether the second one compared less of something."""
        return self.events[1] < self.events[0] or any(row.elements[1] < row.elements[0] for row in self.rows)


@dataclass(frozen=True)
class Difference:
    """pairs: runs that are in both; only: names of runs that are in the first, and in the second, alone."""

    pairs: tuple[RunPair, ...]
    only: tuple[tuple[str, ...], tuple[str, ...]]
    added: tuple[Mapping[str, Any], ...] = ()  # findings of runs that are in the second alone

    @property
    def exit(self) -> Exit:
        """1: findings that were not there before; 3: nothing to compare, or less was compared than before; else 0."""
        if self.added or any(pair.new for pair in self.pairs):
            return Exit.DIVERGED
        less = self.only[0] or any(pair.less for pair in self.pairs)
        return Exit.INCONCLUSIVE if less or not self.pairs else Exit.AGREED


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> Difference:
    """Of two results as `result.read` gives them."""
    one, other = (list(_runs(result)) for result in (before, after))
    if len(one) == len(other) == 1 and all(one[0].get(field) == other[0].get(field) for field in WHAT):
        named = [[("", one[0])], [("", other[0])]]
    else:
        named = [[(_key(run), run) for run in runs] for runs in (one, other)]
    mine, theirs = map(dict, named)
    pairs = tuple(_pair(mine[key], theirs[key]) for key in mine if key in theirs)
    alone = [tuple(_name(runs[key]) for key in runs if key not in others)
             for runs, others in ((mine, theirs), (theirs, mine))]  # fmt: skip
    added = tuple(found for key, run in theirs.items() if key not in mine for found in run["findings"])
    return Difference(pairs, (alone[0], alone[1]), added)


def _runs(result: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The runs of a result; an audit and the like are one."""
    shared = {name: value for name, value in result.items() if name in ("ops", "model", "recording")}
    runs = result.get("runs", [result] if "findings" in result else [])
    if not runs or not all(isinstance(run, dict) and isinstance(run.get("findings"), list) for run in runs):
        raise BadInput("result", found=f"what `{result.get('command')}` wrote", expected="a file with runs and their "
                       "findings: of replay, op, relations, shapes, streams or audit")  # fmt: skip
    yield from ({**shared, **run} for run in runs)


def _key(run: Mapping[str, Any]) -> str:
    return repr([run.get(field) for field in KEY])


def _name(run: Mapping[str, Any]) -> str:
    parts = [run.get(field) for field in ("name", "recording", "relation", "engine", "ops", "strategy", "dtype")]
    return " ".join(str(part) for part in parts if part)


def _pair(one: Mapping[str, Any], other: Mapping[str, Any]) -> RunPair:
    rows = [_rows(run) for run in (one, other)]
    none: tuple[int, float | None] = (0, None)
    both = tuple(Row(name, (a[0], b[0]), (a[1], b[1])) for name in {**rows[0], **rows[1]}
                 for a, b in [(rows[0].get(name, none), rows[1].get(name, none))])
    found = [{_finding(each): each for each in run["findings"]} for run in (one, other)]
    return RunPair(
        _name(other), both,
        {field: (one.get(field), other.get(field)) for field in SETTING if one.get(field) != other.get(field)},
        (int(one.get("events") or 0), int(other.get("events") or 0)),
        tuple(each for key, each in found[1].items() if key not in found[0]),
        tuple(each for key, each in found[0].items() if key not in found[1]),
    )


def _rows(run: Mapping[str, Any]) -> dict[str, tuple[int, float | None]]:
    """Tier or op -> numbers compared, and the part of the allowance that was used."""
    lines = [line for line in run.get("tiers", ()) if isinstance(line, dict)]
    lines += run.get("by_op", ())
    if not lines:
        return {"all": (int(run.get("elements", 0)), _number(run.get("used")))}
    return {str(line.get("tier") or line.get("op")): (int(line["elements"]), _number(line["used"])) for line in lines}


def _number(value: float | str | None) -> float | None:
    """Infinite parts and NaN stand in a file as text."""
    return None if value is None else float(value)


def _finding(finding: Mapping[str, Any]) -> tuple[object, ...]:
    """What makes two findings the same: the check, and where. Its numbers may differ."""
    return tuple(finding.get(field) for field in ("check", "where", "request", "case", "token"))
