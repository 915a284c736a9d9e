"""The document of `instep relations`: which relations hold, by layer, and where two runs differ.

Leaves out: the runs and their comparison (`instep.campaign.relations`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from ...report.document import Document, Kind, Listing
from ...report.document_parts import LEVELS, Data, findings, level, matrix, messages, short, used, word
from ...report.html.heat_map import Row
from ...verdict import Exit


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
