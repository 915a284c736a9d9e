"""The result of `instep relations` as data, and for each failed relation the message where the two runs differ.

The result file has the fields of a replay's (`report/outcome_data.py`), with one run for every relation. Leaves out:
running the relations, and tables (`result_document.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...report.command_lines import command as to_type
from ...report.command_lines import near
from ...report.divergence_message import MEASURES as OF_A_REPLAY
from ...report.divergence_message import message, numbers
from ...report.html.heat_map import Row
from ...report.outcome_data import listed, most_used
from ...report.result import Result
from ...run.replay import served
from ...verdict import Comparison, Tier
from . import Held, worst
from .case import Case

# Two runs of the subject are compared, so a number is the difference between them, not the error of one.
MEASURES = OF_A_REPLAY | dict.fromkeys((Tier.DERIVED, Tier.DIRECTED, Tier.PROPAGATED), "difference")


@dataclass(frozen=True)
class Run:
    """The results of all relations on one case.

    elsewhere  the model's folder, if it is not the one that the trace names
    """

    trace: Path
    elsewhere: Path | None
    until: int | None
    case: Case
    held: Sequence[Held]


def divergence(run: Run, held: Held) -> str:
    """The full message about the first finding of one relation."""
    findings = held.verdict.findings
    setting = run.case.plan.setting
    served = f"{'engine' if setting.led else 'optimized'}[{setting.name}]"
    title = f"{run.case.trace.header.name}, {served}: {held.relation.says}"
    return message(title, findings, numbers(findings[0], MEASURES), [command(run, held)])


def _components(several: Sequence[Held]) -> list[str]:
    return sorted({compared.place.component for held in several for compared in held.verdict.compared})


def command(run: Run, held: Held) -> str:
    """The command that reproduces the finding: this relation alone, on the shortest part of the trace."""
    setting, first = run.case.plan.setting, held.verdict.findings[0]
    words: list[object] = ["instep", "relations", near(run.trace), held.relation.name, *setting.words()[:2]]
    last = len(run.case.trace.events) - 1
    if held.relation.of_the_trace and held.relation.to_the_finding and first.event < last:
        words += ["--until", first.event]
    elsewhere = [] if run.elsewhere is None else ["--checkpoint", near(run.elsewhere)]
    return to_type(words, setting, more=["--bitwise"] * run.case.bitwise + elsewhere)


def of(run: Run, commit: str | None = None) -> Result:
    """The result of the command, with one run for every relation."""
    found = {"trace": run.trace.name, "runs": [_run(run, held) for held in run.held]}
    return Result(worst(run.held), run.case.plan.setting.device, found, commit)


def _run(run: Run, held: Held) -> dict[str, Any]:
    plan, verdict = run.case.plan, held.verdict
    return {
        "name": run.case.trace.header.name, "relation": held.relation.name, "says": held.relation.says,
        **plan.setting.data(), "exit": int(verdict.exit),
        "lacks": held.lacks, "events": verdict.events, "of": len(run.case.trace.events),
        "compared": len(verdict.compared), "elements": verdict.elements,
        "model": plan.checkpoint.digest, "served": served(), "seconds": round(held.seconds, 3),
        "tiers": _tiers(held), "used": most_used(verdict.compared),
        "skipped": [skip.reason for skip in verdict.skipped],
        "played": [skip.reason for skip in verdict.skipped if skip.check == "played"],
        "components": _components([held]), "places": _places(run, held),
        **listed(verdict.findings),
        "message": divergence(run, held) if verdict.findings else None,
    }


def _places(run: Run, held: Held) -> list[dict[str, Any]]:
    """Counts of what was compared, for every layer and draft step."""
    kinds, places = run.case.plan.checkpoint.config.layer_kinds, defaultdict[Row, list[Comparison]](list)
    for one in held.verdict.compared:
        places[Row.of(one.place)].append(one)
    return [
        {"row": row.label(kinds), "stage": row.stage, "layer": row.level, "compared": len(ones),
         "elements": sum(one.elements for one in ones), "used": most_used(ones),
         "wrong": sum(not one.agrees for one in ones)}
        for row, ones in sorted(places.items(), key=lambda each: each[0].order())
    ]  # fmt: skip


def _tiers(held: Held) -> list[Tier]:
    found = {compared.tier for compared in held.verdict.compared}
    return [tier for tier in Tier if tier in found]
