"""The document of `instep gate`: how much slower each case became, compared with noise and with the allowed slow-down.

Next to it, the page of a calibration. Leaves out: timing (`instep_speed.gate`).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from instep.report.document import Data, Document, Kind, Listing
from instep.verdict import Exit

from .statistics import FEWEST_TRIALS, SURE, Say, bounds, independent

COLORS = {Say.HELD.value: "good", Say.SLOWER.value: "bad", Say.NOISY.value: "unsure"}


def document(found: Data) -> Document:
    setting, judged, sentences = found["setting"], found["judged"], found.get("sentences", {})
    accepted = {**found["acceptance"], "reference": found["reference_acceptance"]}
    known = found.get("calibrated")
    word = {Exit.DIVERGED: "SLOWER", Exit.AGREED: "held"}.get(Exit(found["exit"]), "")
    if found["refused"]:
        word = "INCONCLUSIVE" if Exit(found["exit"]) is Exit.INCONCLUSIVE else "REFUSED"
    plots = [_plot(setting, judged)] if judged else []
    work = (f"{judged[0]['change']['pairs'] if judged else 0} interleaved pairs; batch {setting['batch']}, "
            f"window {setting['num_steps'] + 1}")  # fmt: skip
    name = f"{setting['after']} against {setting['before']}"
    return Document(
        name, Exit(found["exit"]), [sentences.get(case, f"{case}: {says}") for case, says in found["says"].items()],
        f"No case is slower by more than {setting['allowed']:.0%}, in {work}.", _refused(word, found),
        [_table(judged, f"{name}: {work}")], {"plots": [*plots, *(_bars(known) if known else [])]},
        notes=[] if found["refused"] else [
            f"accepted drafts a window: {', '.join(f'{arm} {float(each):.2f}' for arm, each in accepted.items())}",
            f"states compared before and after timing: {found['elements']:,} numbers", calibration_of(found),
            ", ".join(f"{name} {value}" for name, value in found["machine"].items() if value),
        ], word=word,
    )  # fmt: skip


def _refused(word: str, found: Data) -> list[str]:
    more = "; --keep FOLDER keeps the trace" * ("judged" in found)
    said = f"{word}  {found['refused']}\n  only arms that pass the checks are timed{more}"
    return [said] if found.get("refused") else []


def calibration_of(found: Data) -> str:
    """How often the gate is wrong on the machine of a result, by its calibration."""
    if wrong := found.get("calibration_error"):
        return f"this machine's calibration cannot be used: {wrong}; instep gate BEFORE --calibrate makes another"
    known = found.get("calibrated")
    said, bound = list[str](), bounds(known) if known else {}
    for case in found["says"]:
        if known and (slowed := known["ratio"].get(case)):
            seen = {which: known["says"][which].get(case, {}).get(Say.SLOWER.value, 0) for which in ("A/A", "slowed")}
            alarms, power = bound["A/A"].get(case, 1.0), bound["slowed"].get(case, 0.0)
            alarmed, right = (f"{times} {word}{'s' * (times != 1)}" for times, word in
                              ((seen["A/A"], "false alarm"), (seen["slowed"], "time")))  # fmt: skip
            said.append(f"{case} {alarmed} (at most {alarms:.0%}), {_slowed(slowed)} found {right} (at least "
                        f"{power:.0%})")  # fmt: skip
    if not known or not said:
        return ("not calibrated on this machine with this setting; instep gate BEFORE --calibrate measures how often "
                "the gate is wrong here")  # fmt: skip
    trials, alone = known["trials"], independent(known)
    apart = "" if alone == trials else f", no more than {alone} of them independent"
    few = "; too few to tell" if alone < FEWEST_TRIALS else ""
    each = f"{trials} trial{'s' * (trials != 1)} each{apart} ({known['date'][:10]})"
    return f"this machine, of {each}: {'; '.join(said)}{few}"


def _slowed(ratio: Mapping[str, float]) -> str:
    """The true slow-down of the slowed arm by each clock, which differs from the requested one."""
    return "a true " + ", ".join(f"{value - 1:.1%} ({clock})" for clock, value in ratio.items())


def _table(judged: list[Data], title: str) -> Listing:
    """Medians with half of their interquartile range, and ratios with their interval."""
    numbers = ("before, ms", "after, ms", "after / before", "A/A")
    heads: dict[str, Kind] = {
        "case": "word", "clock": "word", **dict.fromkeys(numbers, "number"), "pairs": "detail", "says": "word",
    }  # fmt: skip
    rows = [(one["case"], one["clock"], _spread(one["before"]), _spread(one["after"]), _ratio(one["change"]),
             _ratio(one["same"]), str(one["change"]["pairs"]), one["says"]) for one in judged]  # fmt: skip
    return Listing(heads, rows, title, [number for number, row in enumerate(rows) if row[-1] == Say.SLOWER.value])


def _spread(one: Data) -> str:
    median, lower, upper = (float(one[field]) * 1e3 for field in ("median", "lower", "upper"))
    return f"{median:.3g} ±{(upper - lower) / 2:.2g}"


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


def calibration_document(found: Data) -> Document:
    """The document of `instep gate --calibrate`: how often the gate is wrong on this machine, by case."""
    setting, trials, bound = found["setting"], found["trials"], bounds(found)
    alone = independent(found)
    apart = ", which share no pair" if alone == trials else f", {alone} of them independent"
    each = "1 trial each" if trials == 1 else f"{trials} trials each{apart}"
    said = [_fit(found, case, bound) for case in bound["A/A"]]
    said += [f"at most, at least: {SURE:.0%} sure, as no two trials share a pair; they share four processes"
             ] * bool(said)  # fmt: skip
    if trials and alone < FEWEST_TRIALS:
        few = "1 trial says" if trials == 1 else f"{alone} independent trials say"
        said.append(f"inconclusive: {few} too little, {FEWEST_TRIALS} are the fewest"
                    + (f"; --minutes {found['wanted']} would do" if found.get("wanted") else ""))  # fmt: skip
    refused = _refused("REFUSED", found)
    title = f"{setting.get('source')}: {each}; {found['pairs']} pairs, {setting['pairs']} and more a trial"
    return Document(
        f"The gate on this machine: {setting.get('source')} [{setting.get('ops')}]", Exit(found["exit"]), said,
        'A/A compares one source with itself, so "slower" is a false alarm. The slowed arm does take longer, so "held" '
        "is a miss.", refused, [_verdicts(found, title)], {"plots": list(_bars(found))},
        word="REFUSED" if refused else {Exit.AGREED: "fit for this machine"}.get(Exit(found["exit"]), ""),
    )


def _fit(found: Data, case: str, bound: Mapping[str, Mapping[str, float]]) -> str:
    def part(counts: Mapping[str, int]) -> float:
        return counts.get(Say.SLOWER.value, 0) / int(found["trials"])

    alarms, power = (part(found["says"][which][case]) for which in ("A/A", "slowed"))
    clocks = found.get("clocks", {}).get("slowed", {}).get(case, {})
    alone = ", ".join(f"{part(counts):.1%} by {clock}" for clock, counts in clocks.items())
    return (f"{case}: false alarms {alarms:.1%}, at most {bound['A/A'][case]:.1%}; {_slowed(found['ratio'][case])} is "
            f"found in {power:.1%} of trials, at least {bound['slowed'][case]:.1%}{f' ({alone} alone)' * bool(alone)}")


def _trials(found: Data) -> Iterator[tuple[str, str, Data]]:
    """case, arm, verdict -> trials"""
    for which, cases in found["says"].items():
        for case, counts in cases.items():
            yield case, which, counts


def _verdicts(found: Data, title: str) -> Listing:
    heads: dict[str, Kind] = {
        "case": "word", "arm": "word", **{say.value: "number" for say in Say}, "took longer by": "text",
    }  # fmt: skip
    rows = []
    for case, which, counts in sorted(_trials(found)):
        ratio = found.get("ratio", {}).get(case, {}) if which == "slowed" else {}
        taken = ", ".join(f"{value - 1:.1%} ({clock})" for clock, value in ratio.items())
        rows.append((case, which, *(str(counts.get(say.value, 0)) for say in Say), taken))
    return Listing(heads, rows, title)


def _bars(found: Data) -> Iterator[dict[str, Any]]:
    """The verdicts of trials as bars. found: a calibration, from its own file or from the result of a gate."""
    every = sorted(_trials(found))
    if every:
        yield {"form": "bars", "title": f"Verdicts of the gate in {found['trials']} trials each", "x": "trials",
               "names": [f"{case}, {which}" for case, which, _ in every], "parts": [say.value for say in Say],
               "values": {say.value: [counts.get(say.value, 0) for _, _, counts in every] for say in Say},
               "colors": {Say.HELD.value: "use-1", Say.NOISY.value: "hatch", Say.SLOWER.value: "line-3"}}  # fmt: skip
