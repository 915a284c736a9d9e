"""The page of `instep gate --calibrate`: how often the gate is wrong on this machine, by case.

Leaves out: the gate's own runs (`page.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from instep.report.html.document import Listing, Page
from instep.report.html.parts import Data
from instep.verdict import Exit

from .rate_bounds import FEWEST_TRIALS, SURE, bounds, independent
from .statistics import Say


def page(found: Data) -> Page:
    setting = found["setting"]
    refused = [f"REFUSED  {found['refused']}"] if found.get("refused") else []
    trials = f"{found['trials']} trial{'s' * (found['trials'] != 1)}"
    said = [f"{trials} of each, {independent(found)} of them independent, of {found['pairs']} pairs; "
            f"{setting['pairs']} and more a trial, {setting['allowed']:.0%} is allowed"]  # fmt: skip
    bound = bounds(found)
    said += [f"{case}: at most {highest:.1%} of A/A are called slower, at least {bound['slowed'][case]:.1%} of slowed "
             f"arms are found ({SURE:.0%} sure of each)" for case, highest in bound["A/A"].items()]  # fmt: skip
    if found["trials"] and independent(found) < FEWEST_TRIALS:
        said.append(f"too few to tell: {FEWEST_TRIALS} independent trials are the fewest")
    return Page(
        f"The gate on this machine: {setting.get('source')} [{setting.get('ops')}]", Exit(found["exit"]), said,
        'A/A compares one source with itself, so "slower" is a false alarm. The slowed arm does take longer, so "held" '
        "is a miss.", refused, [_table(found)], {"plots": list(bars(found))},
        word="REFUSED" if refused else {Exit.AGREED: "fit for this machine"}.get(Exit(found["exit"]), ""),
    )


def _rows(found: Data) -> Iterator[tuple[str, str, Data]]:
    """case, arm, verdict -> trials"""
    for which, cases in found["says"].items():
        for case, counts in cases.items():
            yield case, which, counts


def _table(found: Data) -> Listing:
    heads = ("case", "arm", *(say.value for say in Say), "took longer by")
    rows = []
    for case, which, counts in sorted(_rows(found)):
        ratio = found.get("ratio", {}).get(case, {}) if which == "slowed" else {}
        taken = ", ".join(f"{value - 1:.1%} ({clock})" for clock, value in ratio.items())
        rows.append((case, which, *(str(counts.get(say.value, 0)) for say in Say), taken))
    return Listing(heads, rows, "Verdicts of the gate")


def bars(found: Data) -> Iterator[dict[str, Any]]:
    """The verdicts of trials as bars. found: a calibration, from its own file or from the result of a gate."""
    every = sorted(_rows(found))
    if every:
        yield {"form": "bars", "title": f"Verdicts of the gate in {found['trials']} trials each", "x": "trials",
               "names": [f"{case}, {which}" for case, which, _ in every], "parts": [say.value for say in Say],
               "values": {say.value: [counts.get(say.value, 0) for _, _, counts in every] for say in Say},
               "colors": {Say.HELD.value: "use-1", Say.NOISY.value: "hatch", Say.SLOWER.value: "line-3"}}  # fmt: skip
