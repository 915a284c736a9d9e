"""The document of runs, from replay, op, shapes or streams: how much each compared, and its findings.

Leaves out: events, because a file has none; `instep replay --html` draws them (`html/replay.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..verdict import Exit
from .document import Document, Kind, Listing
from .document_parts import LEVELS, Data, findings, level, matrix, messages, name_of, totals, used, word
from .terminal import short


def document(found: Data) -> Document:
    runs = [{"ops": found.get("ops"), **run} for run in found["runs"]]
    said = [f"{name_of(run)} {word(run['exit'])}: {short(run['elements'])} numbers compared"
            + (f" in {run.get('events_served', run['events'])} of {run['of']} events" if "of" in run else "")
            + (f" in {len(run['cases'])} cases" if "cases" in run else "")
            for run in runs]  # fmt: skip
    said += list(dict.fromkeys(f"only {','.join(run['asked'])} judged; left out: {','.join(run['left_out'])}"
                               for run in runs if run.get("left_out")))  # fmt: skip
    return Document(
        str(found.get("trace") or found.get("command")), Exit(found["exit"]), said, messages=messages(runs),
        tables=[totals(runs), _ops(runs)], charts={"plots": [_plot(runs)], "legend": LEVELS}, more=[findings(runs)],
        notes=list(_not_served(runs)),
    )  # fmt: skip


def _ops(runs: Sequence[Data]) -> Listing:
    heads: dict[str, Kind] = {
        "op": "word", "cases": "number", "not served": "number", "numbers": "number", "allowance used": "number",
    }  # fmt: skip
    return Listing(heads, [
        (one["op"], str(one.get("cases", "")), str(one.get("not_served", "")), short(one["elements"]),
         used(one["used"]) if one["elements"] else "-") for run in runs for one in run.get("by_op", ())
    ], "Ops")  # fmt: skip


def _not_served(runs: Sequence[Data]) -> Iterator[str]:
    """Reasons why cases of ops were skipped."""
    places: dict[str, list[str]] = {}
    for skip in (skip for run in runs if "cases" in run for skip in run["skipped"]):
        places.setdefault(skip["says"], []).append(skip["case"])
    yield from (f"not served, {len(cases)} times, first {cases[0]}: {why}" for why, cases in places.items())


def _plot(runs: Sequence[Data]) -> dict[str, Any]:
    """A plot with a row for each run and a column for each tier or op: the largest used part of an allowance."""
    each = [{one.get("tier") or one["op"]: one["used"] for one in (*run.get("tiers", ()), *run.get("by_op", ()))}
            for run in runs]  # fmt: skip
    wrong = [{one["tier"] for one in run["findings"]} if run.get("tiers") else set() for run in runs]
    columns = sorted({tier for one in (*each, *wrong) for tier in one})
    rows = [(name_of(run), {"message": run.get("message")}) for run in runs]
    return matrix(
        "The largest part of an allowance that was used", rows, columns, [
            (row, columns.index(tier), level(one.get(tier), tier in bad))
            for row, (one, bad) in enumerate(zip(each, wrong, strict=True)) for tier in {**one, **dict.fromkeys(bad)}
        ])  # fmt: skip
