"""The result of `instep relations` as data, its document, and the messages where two runs differ.

The result file has the fields of a replay's (`report/outcome_data.py`), with one run for every relation. Leaves out:
running the relations.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...report.command_lines import command as to_type
from ...report.command_lines import near
from ...report.divergence_message import MEASURES as OF_A_REPLAY
from ...report.divergence_message import message, numbers
from ...report.document import (
    LEVELS,
    Data,
    Document,
    Kind,
    Listing,
    findings,
    level,
    matrix,
    messages,
    short,
    used,
    word,
)
from ...report.html.heat_map import Row
from ...report.outcome_data import listed, most_used, stressed
from ...report.result import Result
from ...run.replay import served
from ...verdict import Comparison, Exit, Tier
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
        **stressed(verdict), "components": _components([held]), "places": _places(run, held),
        **listed(verdict.findings),
        "message": divergence(run, held) if verdict.findings else None,
    }


def _places(run: Run, held: Held) -> list[dict[str, Any]]:
    """Counts of what was compared, for every layer and draft step."""
    kinds, places = run.case.plan.checkpoint.config.mixers, defaultdict[Row, list[Comparison]](list)
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


# ---- the document of the data

def document(found: Data) -> Document:
    runs = found["runs"]
    held = sum(run["exit"] == Exit.AGREED for run in runs)
    none = [run["relation"] for run in runs if run.get("lacks")]
    parted = [run["relation"] for run in runs if run["exit"] == Exit.DIVERGED]
    said = [f"{held} of {len(runs)} relations hold: {short(sum(run['elements'] for run in runs))} numbers compared"]
    said += [f"differ: {', '.join(parted)}"] * bool(parted)
    said += [f"do not apply: {', '.join(none)}"] * bool(none)
    first = runs[0]
    fields = ("engine", "dtype") if first.get("engine") else ("ops", "dtype", "layout", "strategy", "conv")
    setting = [str(first[field]) for field in fields if first.get(field)] + ["graphs"] * bool(first.get("graphs"))
    named = f"{found.get('trace', 'a trace')} [{', '.join(setting)}]"
    return Document(
        f"Relations of {named}", Exit(found["exit"]), said,
        "Two runs that must agree are compared. A number is the difference between them.", messages(runs),
        [_table(runs, f"Relations of {named}")],
        {"plots": [_plot(runs)] if any(run.get("places") for run in runs) else [], "legend": LEVELS},
        [findings(runs)], [*_not_compared(runs)],
    )


def _table(runs: list[Data], title: str) -> Listing:
    heads: dict[str, Kind] = {
        "relation": "word", "verdict": "word", "what must be equal": "detail", "tiers": "text", "elements": "number",
        "allowance used": "number", "seconds": "number",
    }  # fmt: skip
    rows = [(
        run["relation"], "does not apply" if run["lacks"] else word(run["exit"]), run["says"], " ".join(run["tiers"]),
        "" if run["lacks"] else short(run["elements"]), used(run["used"]) if run["compared"] else "",
        f"{run['seconds']:.1f}",
    ) for run in runs]
    bad = [number for number, run in enumerate(runs) if run["exit"] == Exit.DIVERGED]
    return Listing(heads, rows, title, bad)


def _not_compared(runs: list[Data]) -> Iterator[str]:
    """Reasons by relation; then events that an engine served differently, and the components that it shows."""
    different = Counter(reason for run in runs for reason in run.get("played", ()))
    for run in runs:
        why = "does not apply" if run["lacks"] else "did not compare"
        reasons = [reason for reason in run["skipped"] if reason not in different]
        yield from (f"{run['relation']} {why}: {reason}" for reason in sorted(set(reasons)))
    yield from (f"{count} times {reason}" for reason, count in different.items())
    yield from (f"{run['relation']} under {kind}: {says}" for run in runs
                for kind, says in run.get("stressed", {}).items())
    if engine := runs[0].get("engine"):
        seen = ", ".join(sorted({name for run in runs for name in run["components"]}))
        yield (f"components compared: {seen}; this engine shows no others" if seen
               else f"nothing was compared: {engine} shows none of its components")


def _plot(runs: list[Data]) -> dict[str, Any]:
    places = {(one["stage"], one["layer"]): one["row"] for run in runs for one in run.get("places", ())}
    columns = sorted(places, key=lambda at: Row(*at).order())
    return matrix(
        "Relations and layers: the largest part of an allowance that was used",
        [(run["relation"], {"lines": [run["says"]], "message": run["message"]}) for run in runs],
        [places[at] for at in columns], [
            (row, columns.index((one["stage"], one["layer"])), level(one["used"], bool(one["wrong"])), "", _told(one))
            for row, run in enumerate(runs) for one in run.get("places", ())
        ])  # fmt: skip


def _told(one: Data) -> str:
    said = "exact" if one["used"] is None else f"{used(one['used'])} of the allowance used"
    return f"{one['compared']} comparisons, {short(one['elements'])} numbers, {said}; {one['wrong']} findings"
