"""The page of `instep relations`: which relations hold, by layer, and where two runs differ.

Leaves out: the runs and their comparison (`instep.campaign.relations`).
"""

from __future__ import annotations

from typing import Any

from ...report.html.document import Listing, Page
from ...report.html.heat_map import Row
from ...report.html.page_parts import LEVELS, Data, findings, level, matrix, messages, used, word
from ...report.terminal import short
from ...verdict import Exit


def page(found: Data) -> Page:
    runs = found["runs"]
    held = sum(run["exit"] == Exit.AGREED for run in runs)
    none = [run["relation"] for run in runs if run.get("lacks")]
    parted = [run["relation"] for run in runs if run["exit"] == Exit.DIVERGED]
    said = [f"{held} of {len(runs)} relations hold: {short(sum(run['elements'] for run in runs))} numbers compared"]
    said += [f"differ: {', '.join(parted)}"] * bool(parted)
    said += [f"do not apply: {', '.join(none)}"] * bool(none)
    setting = " ".join(str(runs[0][field]) for field in ("engine", "ops", "strategy", "dtype") if runs[0].get(field))
    return Page(
        f"Relations of {found.get('trace', 'a trace')} [{setting}]", Exit(found["exit"]), said,
        "Two runs that must agree are compared. A number is the difference between them.", messages(runs),
        [_table(runs)], {"plots": [_plot(runs)] if any(run.get("places") for run in runs) else [], "legend": LEVELS},
        [findings(runs)],
    )


def _table(runs: list[Data]) -> Listing:
    heads = ("relation", "verdict", "what must be equal", "tiers", "numbers", "allowance used", "seconds", "why not")
    rows = [(
        run["relation"], "does not apply" if run["lacks"] else word(run["exit"]), run["says"], " ".join(run["tiers"]),
        short(run["elements"]), used(run["used"]) if run["compared"] else "", f"{run['seconds']:.1f}",
        "; ".join(dict.fromkeys(run["skipped"])),
    ) for run in runs]
    bad = [number for number, run in enumerate(runs) if run["exit"] == Exit.DIVERGED]
    return Listing(heads, rows, "Relations", bad)


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
