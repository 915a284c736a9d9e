"""The results of `instep fuzz` as data: the conditions that were met and how often, and the finding.

Leaves out: drawing and counting (`campaign.py`, `coverage.py`), and tables (`result_document.py`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...report.divergence_message import divergence
from ...report.outcome_data import finding, listed_findings
from ...report.result import Result as File
from ...report.result import read
from ...verdict import Exit
from .campaign import Result, place


def of(results: Sequence[Result], commit: str | None = None) -> File:
    """The result of the campaigns of several op sets; the last one may have a finding."""
    worst = Exit.worst(result.exit for result in results)
    return File(worst, results[0].settings.setting.device, {"campaigns": [_data(result) for result in results]},
                commit)  # fmt: skip


# Fields of a campaign of several trials. The pairs of two trials may be the same ones, so only the most are known.
SUMS, MOST, COUNTS = ("examples", "events", "elements", "seconds", "refused"), ("pairs", "histories"), ("met", "kinds")


def joined(paths: Sequence[Path], machines: Sequence[Mapping[str, object]], commit: str | None = None) -> File:
    """The result of several trials: one campaign per op set, and each trial with a finding separately."""
    found, device = dict[tuple[object, ...], dict[str, Any]](), ""
    for one in (one for path in paths for one in read(path)["campaigns"]):
        key = (one["ops"], one.get("engine"), one["seed"] if one["exit"] == Exit.DIVERGED else None)
        there, device = found.setdefault(key, one), one["device"]
        if there is one:
            there["trials"] = 1
            continue
        there["trials"] += 1
        for name in SUMS:
            there[name] = round(there[name] + one[name], 1)
        for name in MOST:
            there[name] = max(there[name], one[name])
        for name in COUNTS:
            there[name] = dict(Counter(there[name]) + Counter(one[name]))
        there["interrupted"] |= one["interrupted"]
        there["untested"] = [says for says in there.get("untested", ()) if says in one.get("untested", ())]
        there["exit"] = int(Exit.AGREED if there["elements"] and not there["untested"] else Exit.INCONCLUSIVE)
    campaigns = list(found.values())
    worst = Exit.worst(Exit(one["exit"]) for one in campaigns)
    return File(worst, device, {"campaigns": campaigns, "machines": machines}, commit)


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
