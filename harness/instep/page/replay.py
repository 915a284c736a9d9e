"""The page of a replay: outcomes of one trace, as what stands on it.

Leaves out: how a page is written down (`document.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import StringIO
from typing import Any

from rich.console import Console

from instep_reference.contract.place import STAGE_LEVEL

from ..replay.replay import Outcome
from ..report import terminal
from ..report.data import listed_findings, worst
from ..report.result import Result
from ..report.words import DIFFERS, command, command_at, divergence, numbers, where
from ..trace.file import Trace
from ..verdict import Verdict
from . import cells
from .document import Listing, Page, document
from .lanes import Lanes, lanes_of
from .maps import maps_of

WIDE = 160  # columns of what the terminal says, where nothing has to be broken
MAPPED = 8  # tensors that are drawn
EVENT = 10**9  # stands for any event in a command; no trace is so long


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
    """What a command prints where there is room for it."""
    said = StringIO()
    show(Console(file=said, width=WIDE, color_system=None))
    return said.getvalue()


def charts_of(outcomes: Sequence[Outcome], trace: Trace) -> dict[str, Any]:
    """Layers and events of every run, and the timeline."""
    plan = outcomes[0].plan
    kinds = plan.checkpoint.config.layer_kinds
    lanes = lanes_of(trace, kinds, overlap=plan.setting.overlap)
    return {**lanes.data(), "runs": [_run(outcome, lanes, kinds) for outcome in outcomes]}


def findings_of(charts: Mapping[str, Any]) -> Listing:
    """Every finding that is listed, with its command."""
    heads = ("run", "where", "what it is", "measured", "seen again with")
    return Listing(heads, [
        (run["name"], found["where"], found["says"], found["measured"], found["command"])
        for run in charts["runs"] for found in run["findings"]
    ], "Findings")


def _summary(outcome: Outcome) -> str:
    word, _ = terminal.VERDICTS[outcome.verdict.exit]
    numbers = f"{terminal.short(outcome.verdict.elements)} numbers compared"
    return f"{outcome.plan.setting.name} {word}: {numbers} in {outcome.served_events} of {outcome.of} events"


def _tiers(outcomes: Sequence[Outcome]) -> Listing:
    """As the terminal has it, without lines that only tell how a run was set up."""
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
    command: Callable[[cells.Row], list[str]] = lambda row: ["", ""],
    findings: Callable[[Mapping[cells.Row, int]], list[dict[str, Any]]] = lambda rows: [],
) -> dict[str, Any]:
    """command: what stands before and behind the event's number;  findings: by the numbers of rows"""
    due = {row for event, rows in lanes.due.items() for row in rows}
    rows = cells.rows_of(len(kinds), verdict.compared, due)
    number = {row: index for index, row in enumerate(rows)}
    return {
        "name": name, "exit": int(verdict.exit),
        "served": max([verdict.events, *(1 + one.event for one in verdict.compared)]),
        "rows": [row.label(kinds) for row in rows],
        "commands": [command(row) for row in rows],
        **cells.data(verdict.compared, rows, lanes.requests),
        "not_judged": cells.not_judged(lanes.due, rows, verdict.compared, verdict.events),
        "notes": [[skip.event, skip.check, skip.reason, skip.where] for skip in verdict.skipped],
        "findings": findings(number),
    }


def listed(outcome: Outcome, rows: Mapping[cells.Row, int]) -> list[dict[str, Any]]:
    """As the result file lists them; of each tensor one map, at the first finding that is about it."""
    drawn, listed = set[tuple[object, ...]](), []
    for found in listed_findings(outcome.verdict.findings):
        about, new = (found.event, found.place, found.request, found.head), len(drawn) < MAPPED
        new &= about not in drawn
        drawn.add(about)
        listed.append({
            "event": found.event, "row": rows[cells.Row.of(found.place)], "where": where(found),
            "says": found.diagnosis or DIFFERS, "measured": numbers(found),
            "command": command(outcome, found) if outcome.again else "",
            "maps": maps_of(outcome.last, found) if new else None,
        })
    return listed


def _command(outcome: Outcome, row: cells.Row) -> list[str]:
    if not outcome.again:
        return ["", ""]
    layer = int(row.stage.partition(".")[2] or 0) if row.stage.startswith("extend") else max(row.level, STAGE_LEVEL)
    before, _, behind = command_at(outcome, EVENT, layer).partition(str(EVENT))
    return [before, behind]
