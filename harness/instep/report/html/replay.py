"""The page of a replay: the content of a page, from the outcomes of one trace.

Leaves out: the HTML (`document.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import StringIO
from typing import Any

from rich.console import Console

from instep_reference.contract.place import STAGE_LEVEL

from ...run.replay import Outcome
from ...trace.file import Trace
from ...verdict import Verdict
from .. import terminal
from ..messages import DIFFERS, command, command_at, divergence, numbers, where
from ..outcome_data import listed_findings, worst
from ..result import Result
from . import heat_map
from .document import Listing, Page, document
from .tensor_maps import maps_of
from .timeline import Lanes, lanes_of

WIDE = 160  # columns for printed text, so that no table is broken
MAPPED = 8  # tensors that are drawn
EVENT = 10**9  # placeholder for an event in a command; no trace is that long


def page_of(outcomes: Sequence[Outcome], trace: Trace) -> bytes:
    """The whole file."""
    setting = outcomes[0].plan.setting
    messages = [divergence(outcome) for outcome in outcomes if outcome.verdict.findings]
    said_of_tiers = filter(None, [terminal.left_out(outcomes[0])])
    charts = charts_of(outcomes, trace)
    return document(Page(
        outcomes[0].name, worst(outcomes), [*map(_summary, outcomes), *said_of_tiers], trace.header.claim, messages,
        charts=charts, more=[findings_of(charts), _tiers(outcomes)],
        terminal=printed(lambda console: terminal.show(outcomes, console)),
        made=Result(worst(outcomes), setting.device, {}).data(),
    ))


def printed(show: Callable[[Console], object]) -> str:
    """The output of a command on a wide terminal."""
    said = StringIO()
    show(Console(file=said, width=WIDE, color_system=None))
    return said.getvalue()


def charts_of(outcomes: Sequence[Outcome], trace: Trace) -> dict[str, Any]:
    """The heat maps of all runs, and the timeline."""
    plan = outcomes[0].plan
    kinds = plan.checkpoint.config.layer_kinds
    lanes = lanes_of(trace, kinds, overlap=plan.setting.overlap)
    return {**lanes.data(), "runs": [_run(outcome, lanes, kinds) for outcome in outcomes]}


def findings_of(charts: Mapping[str, Any]) -> Listing:
    """The listed findings, each with its command."""
    heads = ("run", "where", "what it is", "measured", "command")
    return Listing(heads, [
        (run["name"], found["where"], found["says"], found["measured"], found["command"])
        for run in charts["runs"] for found in run["findings"]
    ], "Findings")


def _summary(outcome: Outcome) -> str:
    word, _ = terminal.VERDICTS[outcome.verdict.exit]
    numbers = f"{terminal.short(outcome.verdict.elements)} numbers compared"
    return f"{outcome.plan.setting.name} {word}: {numbers} in {outcome.served_events} of {outcome.of} events"


def _tiers(outcomes: Sequence[Outcome]) -> Listing:
    """The table of the terminal, without the lines on the setting of a run."""
    heads = ("run", "tier", "compared", "blocks", "elements", "undecided", "allowance used")
    return Listing(heads, [
        (outcome.plan.setting.name, *terminal.cells_of(total)) for outcome in outcomes
        for total in terminal.tiers(outcome)
    ], "How much was compared")


def _run(outcome: Outcome, lanes: Lanes, kinds: Sequence[str]) -> dict[str, Any]:
    return run_of(outcome.plan.setting.name, outcome.verdict, lanes, kinds, partial(_command, outcome),
                  partial(listed, outcome))  # fmt: skip


def run_of(
    name: str, verdict: Verdict, lanes: Lanes, kinds: Sequence[str],
    command: Callable[[heat_map.Row], list[str]] = lambda row: ["", ""],
    findings: Callable[[Mapping[heat_map.Row, int]], list[dict[str, Any]]] = lambda rows: [],
) -> dict[str, Any]:
    """The data of one run.  command: the text before and after the event's number;  findings: makes them, by row"""
    due = {row for event, rows in lanes.due.items() for row in rows}
    rows = heat_map.rows_of(len(kinds), verdict.compared, due)
    number = {row: index for index, row in enumerate(rows)}
    return {
        "name": name, "exit": int(verdict.exit),
        "served": max([verdict.events, *(1 + one.event for one in verdict.compared)]),
        "rows": [row.label(kinds) for row in rows],
        "commands": [command(row) for row in rows],
        **heat_map.data(verdict.compared, rows, lanes.requests),
        "not_judged": heat_map.not_judged(lanes.due, rows, verdict.compared, verdict.events),
        "notes": [[skip.event, skip.check, skip.reason, skip.where] for skip in verdict.skipped],
        "findings": findings(number),
    }


def listed(outcome: Outcome, rows: Mapping[heat_map.Row, int]) -> list[dict[str, Any]]:
    """The findings of the result file; the first finding on a tensor has its map."""
    drawn, listed = set[tuple[object, ...]](), []
    for found in listed_findings(outcome.verdict.findings):
        about, new = (found.event, found.place, found.request, found.head), len(drawn) < MAPPED
        new &= about not in drawn
        drawn.add(about)
        listed.append({
            "event": found.event, "row": rows[heat_map.Row.of(found.place)], "where": where(found),
            "says": found.diagnosis or DIFFERS, "measured": numbers(found),
            "command": command(outcome, found) if outcome.again else "",
            "maps": maps_of(outcome.last, found) if new else None,
        })
    return listed


def _command(outcome: Outcome, row: heat_map.Row) -> list[str]:
    if not outcome.again:
        return ["", ""]
    layer = int(row.stage.partition(".")[2] or 0) if row.stage.startswith("extend") else max(row.level, STAGE_LEVEL)
    before, _, behind = command_at(outcome, EVENT, layer).partition(str(EVENT))
    return [before, behind]
