"""The page of `instep gate`: how much slower each case became, compared with noise and with the allowed slow-down.

Next to it, the page of a calibration. Leaves out: timing (`instep_speed.gate`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from instep.report.document import Document, Listing
from instep.report.html.page_parts import Data
from instep.report.terminal import short
from instep.verdict import Exit

from .binomial_bounds import FEWEST_TRIALS, SURE, bounds, independent
from .statistics import Say

COLORS = {Say.HELD.value: "good", Say.SLOWER.value: "bad", Say.NOISY.value: "unsure"}


def page(found: Data) -> Document:
    setting, judged = found["setting"], found["judged"]
    said = []
    for case, says in found["says"].items():
        most = max((one for one in judged if one["case"] == case), key=lambda one: float(one["change"]["low"]))
        said.append(f"{case}: {says}; after / before {_ratio(most['change'])} by {most['clock']}")
    accepted = {**found["acceptance"], "reference": found["reference_acceptance"]}
    said += [f"accepted drafts a window: {', '.join(f'{arm} {float(each):.2f}' for arm, each in accepted.items())}; "
             f"{short(found['elements'])} numbers compared before and after timing"] * bool(judged)  # fmt: skip
    known = found.get("calibrated")
    plots = [_plot(setting, judged)] if judged else []
    word = {Exit.DIVERGED: "SLOWER", Exit.AGREED: "held"}.get(Exit(found["exit"]), "")
    if found["refused"]:
        word = "INCONCLUSIVE" if Exit(found["exit"]) is Exit.INCONCLUSIVE else "REFUSED"
    refused = [f"{word}  {found['refused']}\n  only arms that pass the checks are timed"] if found["refused"] else []
    return Document(
        f"{setting['after']} against {setting['before']}", Exit(found["exit"]), said,
        f"No case is slower by more than {setting['allowed']:.0%}, in {judged[0]['change']['pairs'] if judged else 0} "
        f"interleaved pairs; batch {setting['batch']}, window {setting['num_steps'] + 1}.", refused, [_table(judged)],
        {"plots": [*plots, *(_bars(known) if known else [])]},
        word=word,
    )


def _table(judged: list[Data]) -> Listing:
    heads = ("case", "clock", "before, ms", "after, ms", "after / before", "A/A", "pairs", "says")
    rows = [(one["case"], one["clock"], _spread(one["before"]), _spread(one["after"]), _ratio(one["change"]),
             _ratio(one["same"]), str(one["change"]["pairs"]), one["says"]) for one in judged]  # fmt: skip
    return Listing(heads, rows, "Cases", [number for number, row in enumerate(rows) if row[-1] == Say.SLOWER.value])


def _spread(one: Data) -> str:
    return "{:.4g} ({:.4g}-{:.4g})".format(*(float(one[field]) * 1e3 for field in ("median", "lower", "upper")))


def _ratio(one: Data) -> str:
    return "{:.3f} ({:.3f}-{:.3f})".format(*(float(one[field]) for field in ("value", "low", "high")))


def _plot(setting: Data, judged: list[Data]) -> dict[str, Any]:
    """A row for each case and clock, and one for A/A below it; the band is the allowed change, in both directions.

    Pairs outside all intervals and the band are drawn at the edge.
    """
    rows = []
    for one in judged:
        name = f"{one['case']}, {one['clock']}"
        told = {"title": name, "lines": [
            f"after / before {_ratio(one['change'])}: {one['says']}", f"A/A {_ratio(one['same'])}",
            f"before {_spread(one['before'])} ms, after {_spread(one['after'])} ms"]}  # fmt: skip
        pairs = [tuple(map(float, pair)) for pair in one.get("samples", ()) if float(pair[0])]
        rows += [{"name": name, **one["change"], "color": COLORS[one["says"]], "told": told,
                  "dots": [after / before for before, after, _ in pairs]},
                 {"name": "before again / before", **one["same"], "color": "hatch", "thin": True, "told": told,
                  "dots": [again / before for before, _, again in pairs]}]  # fmt: skip
    allowed = 1 + setting["allowed"]
    return {"form": "intervals", "title": "How much longer it takes: medians of pairs, 98% intervals; a dot is a pair",
            "x": "after / before; the band is allowed", "band": [1 / allowed, allowed], "rows": rows}  # fmt: skip


def calibration_page(found: Data) -> Document:
    """The page of `instep gate --calibrate`: how often the gate is wrong on this machine, by case."""
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
    return Document(
        f"The gate on this machine: {setting.get('source')} [{setting.get('ops')}]", Exit(found["exit"]), said,
        'A/A compares one source with itself, so "slower" is a false alarm. The slowed arm does take longer, so "held" '
        "is a miss.", refused, [_verdicts(found)], {"plots": list(_bars(found))},
        word="REFUSED" if refused else {Exit.AGREED: "fit for this machine"}.get(Exit(found["exit"]), ""),
    )


def _trials(found: Data) -> Iterator[tuple[str, str, Data]]:
    """case, arm, verdict -> trials"""
    for which, cases in found["says"].items():
        for case, counts in cases.items():
            yield case, which, counts


def _verdicts(found: Data) -> Listing:
    heads = ("case", "arm", *(say.value for say in Say), "took longer by")
    rows = []
    for case, which, counts in sorted(_trials(found)):
        ratio = found.get("ratio", {}).get(case, {}) if which == "slowed" else {}
        taken = ", ".join(f"{value - 1:.1%} ({clock})" for clock, value in ratio.items())
        rows.append((case, which, *(str(counts.get(say.value, 0)) for say in Say), taken))
    return Listing(heads, rows, "Verdicts of the gate")


def _bars(found: Data) -> Iterator[dict[str, Any]]:
    """The verdicts of trials as bars. found: a calibration, from its own file or from the result of a gate."""
    every = sorted(_trials(found))
    if every:
        yield {"form": "bars", "title": f"Verdicts of the gate in {found['trials']} trials each", "x": "trials",
               "names": [f"{case}, {which}" for case, which, _ in every], "parts": [say.value for say in Say],
               "values": {say.value: [counts.get(say.value, 0) for _, _, counts in every] for say in Say},
               "colors": {Say.HELD.value: "use-1", Say.NOISY.value: "hatch", Say.SLOWER.value: "line-3"}}  # fmt: skip
