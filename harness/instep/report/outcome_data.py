"""Outcomes as data for JSON: setting, digests, how much was compared, and the findings.

Leaves out: the terminal (`terminal.py`), and the result file (`result.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..verdict import Comparison, Exit, Located, Raised, Tier
from .divergence_message import command, divergence, where
from .result import Result
from .terminal import Total, tiers

if TYPE_CHECKING:
    from ..run.replay import Outcome

FINDINGS = 100  # findings of a run that are written, in addition to the first of every check


def of(outcomes: Sequence[Outcome], commit: str | None = None) -> Result:
    """The result of a replay."""
    runs = [_run(outcome) for outcome in outcomes]
    found = {"trace": str(outcomes[0].trace.name), "runs": runs}
    return Result(worst(outcomes), outcomes[0].plan.setting.device, found, commit)


def worst(outcomes: Sequence[Outcome]) -> Exit:
    """The exit code of several runs; inconclusive for no run."""
    return Exit.worst(outcome.verdict.exit for outcome in outcomes)


def _run(outcome: Outcome) -> dict[str, Any]:
    verdict, plan = outcome.verdict, outcome.plan
    last = verdict.events - 1 if outcome.last is None else outcome.last.index
    return {
        "name": outcome.name, **plan.setting.data(),
        "swap": dict(outcome.variant.swap), "graft": [str(patch) for patch in outcome.variant.patch],
        "exit": int(verdict.exit), "events": verdict.events, "of": outcome.of, "elements": verdict.elements,
        "model": plan.checkpoint.digest, "served": outcome.served, "calls": outcome.calls,
        "seconds": {side: round(seconds, 3) for side, seconds in outcome.seconds.items()},
        "tiers": [_total(total) for total in tiers(outcome)],
        "declared": _declared(outcome), "packed": outcome.packed, "in_parts": list(outcome.in_parts),
        "exercised": {form: asdict(kernel) for form, kernel in outcome.exercised.items()},
        "asked": [tier.value for tier in Tier if tier in outcome.tiers],
        "left_out": [tier.value for tier in outcome.left_out],
        "skipped": len(verdict.skipped), "events_served": outcome.served_events,
        "played": [{"event": skip.event, "says": skip.reason} for skip in verdict.skipped if skip.check == "played"],
        "shown": sorted(outcome.shown.feeds) if outcome.led else None,
        "not_judged": [{"shows_no": feed, "what": what} for feed, what in outcome.shown.not_judged()],
        "scratch": [
            {"region": region, "layer": layer, "units": sorted(units)}
            for (region, layer), units in outcome.scratch.items()
        ],
        "looked": {c.check: c.tier.value for c in verdict.compared if c.event == last},
        **listed(verdict.findings, lambda found: {
            **finding(found), "command": command(outcome, found) if outcome.again else None}),
        "message": divergence(outcome) if verdict.findings else None,
        "located": None if outcome.located is None else _located(outcome.located),
        "history": asdict(outcome.history),
    }


def _declared(outcome: Outcome) -> dict[str, Any]:
    """The declarations of the subject: components stored narrower than computed, and products by form."""
    stored, products = outcome.declared.narrow(outcome.plan.setting.width), outcome.declared.products
    return {
        "stored": {name: str(dtype).removeprefix("torch.") for name, dtype in stored.items()},
        "products": {
            form: {"format": one.format, "block": one.block} | ({"residual": True} if one.residual else {})
            | ({"results": True} if one.results else {}) | ({"sums": one.sums} if one.sums != "fp32" else {})
            for form, one in products.items()
        },
    }


def _total(total: Total) -> dict[str, Any]:
    return {**asdict(total), "tier": total.tier.value, "used": number(total.used)}


def number(value: float | None) -> float | str | None:
    """The value for JSON, which has no infinity: an infinite value becomes text."""
    return value if value is None or math.isfinite(value) else str(value)


def listed_findings(findings: Sequence[Comparison]) -> list[Comparison]:
    """The first findings, and the first finding of every check, in their order."""
    first = {found.check: found for found in reversed(findings)}
    return [found for number, found in enumerate(findings) if number < FINDINGS or first[found.check] is found]


def listed(
    findings: Sequence[Comparison], told: Callable[[Comparison], dict[str, Any]] | None = None
) -> dict[str, Any]:
    """The fields of a run that list its findings and count them."""
    return {"findings": [*map(told or finding, listed_findings(findings))], "findings_in_all": len(findings)}


def _located(located: Located) -> dict[str, Any]:
    """The cause of the first entry of `findings`."""
    return {
        "cause": located.cause, "op": located.op, "says": located.says, "options": located.options,
        "hints": located.hints, "replays": located.replays,
    }


def finding(found: Comparison) -> dict[str, Any]:
    return {
        "check": found.check, "tier": found.tier.value, "event": found.event, "kind": found.kind,
        "stage": found.place.stage, "layer": found.place.layer, "component": found.place.component,
        "request": found.request, "slot": found.slot, "head": found.head, "columns": found.columns,
        "worst": str(found.worst), "allowed": found.allowed,
        "code": None if found.problem is None else found.problem.code, "diagnosis": found.diagnosis,
        "where": where(found),
        "raised": None if found.raised is None else _raised(found.raised),
        "explained": None if found.explained is None else {
            "by": found.explained.by, "says": found.explained.sentence, "names": found.explained.names,
        },
    }


def _raised(raised: Raised) -> dict[str, Any]:
    return {
        "error": raised.error, "says": raised.says, "file": raised.file, "line": raised.line,
        "function": raised.function, "traceback": raised.whole,
    }
