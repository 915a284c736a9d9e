"""The page of a file of runs, as replay, shapes and streams write it: how much each compared, and its findings.

Leaves out: the events, which such a file has not: `instep replay --html` draws them.
"""

from __future__ import annotations

from typing import Any

from ..report.terminal import short
from ..verdict import Exit
from .document import Page
from .parts import LEVELS, Data, findings, level, matrix, messages, name_of, totals, word


def page(found: Data) -> Page:
    runs = found["runs"]
    said = [f"{name_of(run)} {word(run['exit'])}: {short(run['elements'])} numbers compared"
            + (f" in {run.get('events_served', run['events'])} of {run['of']} events" if "of" in run else "")
            for run in runs]  # fmt: skip
    return Page(
        str(found.get("trace") or found.get("command")), Exit(found["exit"]), said, messages=messages(runs),
        tables=[totals(runs)], charts={"plots": [_plot(runs)], "legend": LEVELS}, more=[findings(runs)],
    )  # fmt: skip


def _plot(runs: list[Data]) -> dict[str, Any]:
    """A row for each run, a column for each tier: the largest part of an allowance."""
    each = [{one["tier"]: one["used"] for one in run.get("tiers", ())} for run in runs]
    wrong = [{one["tier"] for one in run["findings"]} for run in runs]
    columns = sorted({tier for one in (*each, *wrong) for tier in one})
    return matrix(
        "Runs and tiers", [(name_of(run), {"message": run.get("message")}) for run in runs], columns, [
            (row, columns.index(tier), level(one.get(tier), tier in bad))
            for row, (one, bad) in enumerate(zip(each, wrong, strict=True)) for tier in {**one, **dict.fromkeys(bad)}
        ])  # fmt: skip
