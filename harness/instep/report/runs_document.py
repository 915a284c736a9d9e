"""The document of runs, from replay, op, shapes or streams: how much each compared, and its findings.

Leaves out: events, because a file has none; `instep replay --html` draws them (`html/replay.py`).
"""

from collections.abc import Iterator, Sequence
from typing import Any

from ..verdict import Exit
from .document import (
    LEVELS,
    Data,
    Document,
    Kind,
    Listing,
    findings,
    level,
    matrix,
    messages,
    names_of,
    short,
    totals,
    used,
    word,
)


def document(found: Data) -> Document:
    runs = [{"ops": found.get("ops"), **run} for run in found["runs"]]
    name, names = str(found.get("trace") or found.get("command")), {run.get("name") for run in runs}
    of = name if len(names) > 1 else str(names.pop() or name)
    return Document(
        name, Exit(found["exit"]), conclusions(runs), found.get("claim", ""),
        messages(runs), [totals(runs, of), _ops(runs)], {"plots": [_plot(runs)], "legend": LEVELS}, [findings(runs)],
        [*found.get("warnings", ()), *found.get("run_notes", ()), *_not_served(runs)], omitted(runs),
    )


def conclusions(runs: Sequence[Data]) -> list[str]:
    """The verdict of each run, with how much it compared."""
    return [f"{name} {word(run['exit'])}: {short(run['elements'])} numbers compared"
            + (f" in {run.get('events_served', run['events'])} of {run['of']} events" if "of" in run else "")
            + (f" in {len(run['cases'])} cases" if "cases" in run else "")
            for name, run in zip(names_of(runs), runs, strict=True)]  # fmt: skip


def omitted(runs: Sequence[Data]) -> list[str]:
    """The tiers that were not judged."""
    return list(dict.fromkeys(f"only {','.join(run['asked'])} judged; left out: {','.join(run['left_out'])}"
                              for run in runs if run.get("left_out")))  # fmt: skip


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
    rows = [(name, {"message": run.get("message")}) for name, run in zip(names_of(runs), runs, strict=True)]
    return matrix(
        "The largest part of an allowance that was used", rows, columns, [
            (row, columns.index(tier), level(one.get(tier), tier in bad))
            for row, (one, bad) in enumerate(zip(each, wrong, strict=True)) for tier in {**one, **dict.fromkeys(bad)}
        ])  # fmt: skip
