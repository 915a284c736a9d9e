"""Print the results of `instep fuzz`: the conditions that were met and how often, and the finding.

Leaves out: drawing and counting (`campaign.py`, `coverage.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from ...report import terminal_tables
from ...report.divergence_message import divergence
from ...report.outcome_data import finding, listed_findings
from ...report.result import Result as File
from ...verdict import Exit
from .campaign import Result, place


def show(results: Sequence[Result], console: Console) -> None:
    """For each campaign: the conditions met, the conditions missed, and the finding."""
    for result in results:
        _show(result, console)


def _show(result: Result, console: Console) -> None:
    coverage, settings = result.coverage, result.settings
    title = f"fuzz [{settings.setting.name}], seed {settings.seed}"
    made = terminal_tables.table(title, {"condition": "text", "events": "number"})
    for name, count in coverage.counts().items():
        made.add_row(name, f"{count:,}" if count else "[yellow]never[/yellow]")
    terminal_tables.show(made, console)
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in coverage.events.most_common())
    refused = sum(result.refused.values())
    terminal_tables.say(
        console,
        f"{result.examples:,} runs in {result.seconds:.0f} s, {result.events:,} events: {kinds or 'none'}",
        f"{len(coverage.pairs)} different pairs of events; {refused:,} draws refused by the event rules (no room left)",
        f"{result.elements:,} elements compared",
        *["interrupted: the figures are those of the runs until then"] * result.interrupted,
    )
    if result.found is None:
        terminal_tables.say(console, "nothing found" if result.elements else "inconclusive: nothing was compared")
        return
    found, path = result.found, place(settings)
    terminal_tables.say(console,
                        divergence(found), f"  found in run {result.examples}, shrunk to {found.of} events: {path}")
    if result.cut:
        terminal_tables.say(console, f"  shrinking was cut short: {result.cut}")
    if not result.again:
        said = "found once and not again: replayed from its trace, the sides agree. Something outside the trace decides"
        terminal_tables.say(console, f"  {said}")


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
        "pairs": len(result.coverage.pairs), "refused": sum(result.refused.values()),
        "met": dict(result.coverage.counts()),
        "interrupted": result.interrupted, "findings": [],
        **({} if found is None else {
            "trace": place(settings).name, "shrunk": found.of, "again": result.again, "cut": result.cut,
            "message": f"{divergence(found)}\n  found in run {result.examples}, shrunk to {found.of} events: "
                       f"{place(settings)}",
            "findings": [finding(one) for one in listed_findings(found.verdict.findings)],
        }),
    }  # fmt: skip
