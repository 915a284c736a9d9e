"""The page of a replay: charts of the events of one trace, in addition to the document of its result.

Leaves out: the document (`runs_document.py`), and the HTML (`write_page.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from instep_reference.contract.place_names import STAGE_LEVEL

from ...run.replay import Outcome
from ...trace.file import Trace
from ...verdict import Comparison, Verdict
from ...watch.event_context import EventContext
from .. import outcome_data
from ..divergence_message import DIFFERS, command, command_at, numbers, where
from ..finding_tensors import tensor_at
from ..outcome_data import listed_findings
from . import heat_map, write_page
from .timeline import Lanes, lanes_of

MAPPED = 8  # tensors that are drawn
EVENT = 10**9  # placeholder for an event in a command; no trace is that long
MOST_ROWS, MOST_COLUMNS = 48, 96
MEMORY = {"state": ("key row", "value column"), "conv": ("age", "channel"), "keys": ("position", "number"),
          "values": ("position", "number")}  # component of a request's memory -> the meaning of rows and columns


def page_of(outcomes: Sequence[Outcome], trace: Trace) -> bytes:
    """The page of the result, with the claim of the trace and charts of its events."""
    found = outcome_data.of(outcomes, claim=trace.header.claim)
    return write_page.page_of(found.data(), charts_of(outcomes, trace))


def charts_of(outcomes: Sequence[Outcome], trace: Trace) -> dict[str, Any]:
    """The heat maps of all runs, and the timeline."""
    plan = outcomes[0].plan
    kinds = plan.checkpoint.config.mixers
    lanes = lanes_of(trace, kinds, overlap=plan.setting.overlap)
    return {**lanes.data(), "runs": [_run(outcome, lanes, kinds) for outcome in outcomes]}


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
            "event": found.event, "request": found.request, "row": rows[heat_map.Row.of(found.place)],
            "where": where(found), "says": found.diagnosis or DIFFERS, "measured": numbers(found),
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


def maps_of(context: EventContext | None, finding: Comparison) -> dict[str, Any] | None:
    """The tensor of a finding as small maps: found, expected, and the difference.

    None: the sides have no tensors of one shape, or the finding is of an earlier event, whose tensors are gone. A large
    tensor is cut into blocks, and the number with the largest difference represents its block.
    context: that of the last event
    """
    if context is None or context.index != finding.event or finding.request is None or finding.raised is not None:
        return None
    found, right = (tensor_at(context, side, finding) for side in (context.subject, context.truth))
    if found is None or right is None or found.shape != right.shape or not found.numel():
        return None
    found, right = (tensor.detach().to("cpu", torch.float64) for tensor in (found, right))
    head = None
    if finding.place.component == "state" and found.dim() == 3:
        apart = (found - right).abs().nan_to_num(torch.inf).flatten(1).amax(1)
        head = int(apart.argmax()) if finding.head is None else finding.head
        found, right = found[head], right[head]
    elif finding.place.component == "conv":
        found, right = found.T, right.T
    else:
        found, right = (tensor.reshape(len(tensor), -1) for tensor in (found, right))
    shape, found, right = list(found.shape), *pooled(found, right)
    axes = MEMORY.get(finding.place.component, ("row", "number"))
    return {
        "head": head, "shape": shape, "axes": axes, "found": _numbers(found), "expected": _numbers(right),
        "difference": _numbers(found - right),
    }


def pooled(found: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The number with the largest difference of each block, for both tensors."""
    height, width = (-(-size // most) for size, most in zip(found.shape, (MOST_ROWS, MOST_COLUMNS), strict=True))
    pad = (0, -found.shape[1] % width, 0, -found.shape[0] % height)
    down, across = (found.shape[0] + pad[3]) // height, (found.shape[1] + pad[1]) // width

    def blocks(tensor: torch.Tensor, filled: float) -> torch.Tensor:
        whole = torch.nn.functional.pad(tensor, pad, value=filled).view(down, height, across, width)
        return whole.transpose(1, 2).reshape(down, across, -1)

    largest = blocks((found - right).abs().nan_to_num(torch.inf), -1.0).argmax(-1, keepdim=True)
    return blocks(found, 0.0).gather(-1, largest)[..., 0], blocks(right, 0.0).gather(-1, largest)[..., 0]


def _numbers(tensor: torch.Tensor) -> list[list[float | str]]:
    return [[heat_map.short(number) for number in row] for row in tensor.tolist()]
