"""Outcomes as data for JSON: setting, digests, how much was compared, and the findings.

Leaves out: the document (`runs_document.py`), and the result file (`result.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..checks.check_interface import counted
from ..checks.check_interface import listed as range_of
from ..verdict import Comparison, Exit, Raised, Skipped, Tier, Verdict
from .divergence_message import command, declared, divergence, exercised, otherwise, where
from .result import Result

if TYPE_CHECKING:
    from ..run.replay import Outcome
    from ..run.trace_history import History

FINDINGS = 100  # findings of a run that are written, in addition to the first of every check
EXACT = {Tier.IDENTITY, Tier.BITWISE}
DECIDING = {Tier.DIRECTED, Tier.DECISIONS}  # tiers that cannot decide cases that rounding could explain


def of(outcomes: Sequence[Outcome], commit: str | None = None, **more: Any) -> Result:
    """The result of a replay. more: further fields"""
    found = {"trace": str(outcomes[0].trace.name), "runs": [_run(outcome) for outcome in outcomes],
             "run_notes": notes(outcomes), **more}  # fmt: skip
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
        "tiers": tiers(outcome),
        "declared": _declared(outcome), "packed": outcome.packed, "in_parts": outcome.in_parts,
        "exercised": outcome.exercised,
        "asked": [tier for tier in Tier if tier in outcome.tiers],
        "left_out": outcome.left_out,
        "prompts": {"forwards": verdict.prompts, "replayed": verdict.replayed},
        **stressed(verdict),
        "skipped": len(verdict.skipped), "events_served": outcome.served_events,
        "played": [{"event": skip.event, "says": skip.reason} for skip in verdict.skipped if skip.check == "played"],
        "shown": sorted(outcome.shown.feeds) if outcome.led else None,
        "not_judged": [{"shows_no": feed, "what": what} for feed, what in outcome.shown.not_judged()],
        "scratch": [
            {"region": region, "layer": layer, "units": sorted(units)}
            for (region, layer), units in outcome.scratch.items()
        ],
        "looked": {c.check: c.tier for c in verdict.compared if c.event == last},
        **listed(verdict.findings, lambda found: {
            **finding(found), "command": command(outcome, found) if outcome.again else None}),
        "message": divergence(outcome) if verdict.findings else None,
        "located": None if outcome.located is None else {
            name: value for name, value in vars(outcome.located).items() if name != "finding"},
        "history": outcome.history,
    }


def stressed(verdict: Verdict) -> dict[str, dict[str, str]]:
    """The field of a run under stress: what each kind did, or why it never acted."""
    did = {name: one.says if one.times else one.idle for name, one in verdict.stressed.items()}
    return {"stressed": did} if did else {}


@dataclass(frozen=True)
class Total:
    """The comparisons of a run in one tier. used: worst error / allowed error; None if all comparisons were exact.

    undecided  undecided pairs of a block and a wrong state (T2d), or choices (T4)
    pairs      all such pairs or choices; 0 for a tier that decides everything
    """

    tier: Tier
    comparisons: int
    blocks: int
    elements: int
    undecided: int
    pairs: int
    used: float | None


def tiers(outcome: Outcome) -> list[Total]:
    """One total for every tier in which something was compared."""
    totals = []
    for tier in Tier:
        mine = [compared for compared in outcome.verdict.compared if compared.tier is tier]
        if not mine:
            continue
        totals.append(Total(
            tier, len(mine), sum(compared.blocks for compared in mine), sum(compared.elements for compared in mine),
            sum(compared.undecided for compared in mine),
            sum(compared.pairs or compared.blocks for compared in mine) if tier in DECIDING else 0, most_used(mine),
        ))
    return totals


def most_used(compared: Sequence[Comparison]) -> float | None:
    """The largest used part of an allowance, where a NaN is the largest; None if everything was exact."""
    return largest(one.used for one in compared if one.tier not in EXACT or not one.agrees)


def largest(parts: Iterable[float]) -> float | None:
    """The largest part, where a NaN is the largest; None if there is no part."""
    return max(parts, key=lambda part: (math.isnan(part), part), default=None)


# ---- notes: sentences about a run, which the result has in addition to its data


def notes(outcomes: Sequence[Outcome], verbose: bool = True) -> list[str]:
    """Notes on every run, each once, and the history of every trace.

    verbose: list what was not judged; else count it in one line
    """
    longest = {outcome.name: outcome.history for outcome in sorted(outcomes, key=lambda one: one.verdict.events)}
    lines = [f"{outcome.plan.setting.name}: {line}" for outcome in outcomes for line in _notes(outcome, verbose)]
    return list(dict.fromkeys([*lines, *(line for history in longest.values() for line in _history(history))]))


def _notes(outcome: Outcome, verbose: bool) -> Iterator[str]:
    """Parts that were run, not compared, declared, served in parts or called."""
    setting, verdict = outcome.plan.setting, outcome.verdict
    served = f"served {outcome.served_events} of {outcome.of} events"
    how = [served] if outcome.led else [setting.strategy, setting.conv]
    prompts = f", with {verdict.replayed} of {counted(verdict.prompts, 'forward')} with prompts" * bool(verdict.prompts)
    how += [f"in graphs{prompts}"] * setting.graphs + ["packed pools"] * outcome.packed
    took = [f"{side} {seconds:.1f} s" for side, seconds in outcome.seconds.items()]
    yield ", ".join([*how, *otherwise(outcome.variant), *took])
    yield from (f"under {name}: {says}" for name, says in stressed(verdict).get("stressed", {}).items())
    if verdict.exit is Exit.INCONCLUSIVE and not verdict.stopped:
        yield why_inconclusive(outcome)
    hidden, skipped = not_judged(outcome), len(verdict.skipped)
    if verbose:
        yield from (*_skips(verdict.skipped), *hidden)
    elif hidden or skipped:
        parts = [f"{counted(len(hidden), 'kind')} of results and memory that the engine does not show"] * bool(hidden)
        parts += [f"{counted(skipped, 'comparison')}, each with a reason"] * bool(skipped)
        yield f"not judged: {'; '.join(parts)} (--verbose lists them)"
    scratch: dict[tuple[str, frozenset[int]], list[int]] = {}
    for (region, layer), units in outcome.scratch.items():
        scratch.setdefault((region, units), []).append(layer)
    for (region, units), layers in scratch.items():
        where = f"{range_of('layer', layers)}, {range_of('unit', units)}"
        yield f"{region}, {where}: declared as scratch, so not compared"
    if said := declared(outcome):
        yield f"declared rounding: {said}"
    if outcome.in_parts:
        yield (f"{', '.join(outcome.in_parts)}: instep ran the unfused parts to see every place; the relation `fused` "
               "compares their bits with the fused op")  # fmt: skip
    yield from exercised(outcome)


def not_judged(outcome: Outcome) -> list[str]:
    """Lines about memory and results that an engine driven through callbacks does not show, so none is judged."""
    return [f"not judged: {what}{f' [shows no {feed}]' * bool(feed)}" for feed, what in outcome.shown.not_judged()]


def why_inconclusive(outcome: Outcome) -> str:
    """Why a run that was not stopped shows neither agreement nor a divergence."""
    if outcome.verdict.undecided:
        return "nothing wrong was found, but too little could be decided at an event"
    if outcome.verdict.segmented and not outcome.verdict.replayed and outcome.verdict.elements:
        return ("no forward with a prompt ran in a graph: the trace has none up to here, or each has more tokens than "
                f"--prompt-graphs {outcome.plan.setting.prompt_graphs}")  # fmt: skip
    if outcome.verdict.replicas > 1 and not outcome.verdict.shared and outcome.verdict.elements:
        return "no event had rows of several replicas: up to here the trace has none"
    if outcome.verdict.stages > 1 and not outcome.verdict.relayed and outcome.verdict.elements:
        return "no commit was relayed to the other stages: up to here the trace has none"
    if outcome.verdict.micro_batches > 1 and not outcome.verdict.overlapped and outcome.verdict.elements:
        return "no event had several micro-batches: up to here each event of the trace has one request"
    if idle := [name for name, did in outcome.verdict.stressed.items() if not did.times]:
        return f"--stress {','.join(idle)} never acted, so it shows nothing"
    if outcome.led and not outcome.shown.feeds & {"logits", "final", "state", "kv"}:
        return "nothing was compared: the engine shows neither logits, nor final rows, nor states"
    if outcome.verdict.served:
        return "nothing was compared: the selected tiers and layers have no comparison here"
    return "nothing was computed: up to here the trace has only events such as admissions"


def _skips(skipped: Sequence[Skipped]) -> Iterator[str]:
    """A line for every reason; a result file of an audit has them all."""
    alike: dict[tuple[str, str], list[Skipped]] = {}
    for skip in skipped:
        alike.setdefault((skip.check, skip.reason), []).append(skip)
    for (check, reason), skips in alike.items():
        times = counted(len(skips), "time")
        said = times if check == "played" else f"{check} did not compare {times}:"
        yield f"{said} {reason}{f', first at event {skips[0].event}, {skips[0].where}' * bool(skips[0].where)}"


def _history(history: History) -> Iterator[str]:
    first, *changes = history.steps
    yield f"step counts       {' '.join([str(first[1]), *(f'-> {count} (event {event})' for event, count in changes)])}"
    yield f"accepted drafts   {history.mean_accepted_drafts:.2f} a window"
    for text in history.texts:
        lengths = [each[text.request] for _, each in history.accepted if text.request in each]
        yield f'request "{text.request}" accepted lengths {" ".join(map(str, lengths)) or "none"}'
        yield f"  {text.spelled(text.prompt)}|{text.spelled(text.said)}"


# ---- the data of a run, of its totals and of its findings


def _declared(outcome: Outcome) -> dict[str, Any]:
    """The declarations of the subject: components stored narrower than computed, products by form, and
    components that are rounded once.
    """
    stored, products = outcome.declared.narrow(outcome.plan.setting.width), outcome.declared.products
    return {
        "stored": {name: str(dtype).removeprefix("torch.") for name, dtype in stored.items()},
        "products": {
            form: {"format": one.format, "block": one.block} | ({"residual": True} if one.residual else {})
            | ({"results": True} if one.results else {}) | ({"sums": one.sums} if one.sums != "fp32" else {})
            for form, one in products.items()
        },
    } | ({"once": sorted(outcome.declared.once)} if outcome.declared.once else {})


def listed_findings(findings: Sequence[Comparison]) -> list[Comparison]:
    """The first findings, and the first finding of every check, in their order."""
    first = {found.check: found for found in reversed(findings)}
    return [found for number, found in enumerate(findings) if number < FINDINGS or first[found.check] is found]


def listed(
    findings: Sequence[Comparison], told: Callable[[Comparison], dict[str, Any]] | None = None
) -> dict[str, Any]:
    """The fields of a run that list its findings and count them."""
    return {"findings": [*map(told or finding, listed_findings(findings))], "findings_in_all": len(findings)}


def finding(found: Comparison) -> dict[str, Any]:
    return {
        "check": found.check, "tier": found.tier, "event": found.event, "kind": found.kind,
        "stage": found.place.stage, "layer": found.place.layer, "component": found.place.component,
        "request": found.request, "slot": found.slot, "head": found.head, "columns": found.columns,
        **({} if found.rank is None else {"rank": found.rank}),
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
