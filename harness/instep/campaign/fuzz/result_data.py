"""The results of `instep fuzz` as data: the conditions that were met and how often, and the finding.

Leaves out: drawing and counting (`campaign.py`, `coverage.py`), and tables (`result_document.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...report.divergence_message import divergence
from ...report.outcome_data import finding, listed_findings
from ...report.result import Result as File
from ...verdict import Exit
from .campaign import Result, place


def of(results: Sequence[Result], commit: str | None = None) -> File:
    """The result of the campaigns of several op sets; the last one may have a finding."""
    worst = Exit.worst(result.exit for result in results)
    return File(worst, results[0].settings.setting.device, {"campaigns": [_data(result) for result in results]},
                commit)  # fmt: skip


def _data(result: Result) -> dict[str, Any]:
    settings, found = result.settings, result.found
    return {
        **settings.setting.data(), "seed": settings.seed, "exit": int(result.exit), "examples": result.examples,
        "events": result.events, "elements": result.elements, "seconds": round(result.seconds, 1),
        "pairs": len(result.coverage.pairs), "histories": len(result.coverage.histories.met),
        "refused": sum(result.refused.values()),
        "met": dict(result.coverage.counts()), "kinds": dict(result.coverage.events.most_common()),
        "interrupted": result.interrupted, "findings": [],
        **({"untested": result.untested} if result.untested and found is None else {}),
        **({} if found is None else {
            "trace": place(settings).name, "shrunk": found.of, "again": result.again, "cut": result.cut,
            "message": f"{divergence(found)}\n  found in run {result.examples}, shrunk to {found.of} events: "
                       f"{place(settings)}",
            "findings": [finding(one) for one in listed_findings(found.verdict.findings)],
        }),
    }  # fmt: skip
