"""Shows what the gate found: as a table on the terminal, and as data.

Leaves out: the judgement (`gate.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..report import tables
from ..report.data import number
from ..report.result import Result
from .baseline import known
from .bounds import FEWEST_TRIALS, SURE, bounds, independent
from .fingerprint import fingerprint
from .pairs import Ratio, Say, Spread
from .power import SLOWED, Power
from .question import Judged, Question, Report

STYLES = {Say.HELD: "green", Say.SLOWER: "red", Say.NOISY: "yellow"}


def show(report: Report, console: Console) -> None:
    """Print everything. After a refusal no figure is printed."""
    question = report.question
    if report.refused:
        after = "  nothing is timed of what does not pass; --keep FOLDER keeps the trace"
        tables.say(console, f"REFUSED  {report.refused}", after)
        return
    tables.show(_table(report), console)
    for case in question.cases:
        tables.say(console, _sentence(report, case), style=STYLES[report.says(case)])
    accepted = ", ".join(f"{name} {report.acceptance[name]:.2f}" for name in ("before", "after"))
    tables.say(
        console,
        f"accepted drafts a window: {accepted}, reference {report.reference_acceptance:.2f}",
        f"states compared before and after timing: {report.elements:,} numbers",
    )
    tables.say(console, _calibrated(question), style="dim")
    found = ", ".join(f"{name} {value}" for name, value in fingerprint(question.setting.device).items() if value)
    tables.say(console, found, style="dim")


def of(report: Report) -> Result:
    """What the gate found, as data. The machine's load is part of it."""
    question = report.question
    setting = asdict(question) | {"checkpoint": str(question.checkpoint)} | question.setting.data()
    del setting["setting"]  # its fields stand beside the others
    found = {
        "refused": report.refused or None, "setting": setting,
        "calibrated": None if report.refused else known(question),
        "says": {} if report.refused else {case: report.says(case).value for case in question.cases},
        "judged": [_judged(one) for one in report.judged],
        "laps": report.laps, "served": report.served, "acceptance": report.acceptance,
        "reference_acceptance": report.reference_acceptance, "elements": report.elements,
        "machine": fingerprint(report.question.setting.device),
    }
    return Result(report.exit, report.question.setting.device, found)


def _judged(one: Judged) -> dict[str, Any]:
    """Of a clock that was never read there are no numbers."""
    told = asdict(one) | {"says": one.says.value}
    for name in ("before", "after", "change", "same"):
        told[name] = {field: number(value) for field, value in told[name].items()}
    return told


def show_power(found: Power, console: Console) -> None:
    """How often the gate was wrong, by case."""
    question = found.report.question
    if found.report.refused:
        tables.say(console, f"REFUSED  {found.report.refused}", "  nothing is timed of what does not pass")
        return
    title = (f"{question.before}: {found.trials} trials each, which share no pair; {found.pairs} pairs, "
             f"{question.pairs} and more a trial")  # fmt: skip
    first, *others = question.judged_by
    made = tables.table(title, {
        "case": "word", "arm": "word", **{say.value: "number" for say in Say}, f"took longer by, {first}": "number",
        **dict.fromkeys(others, "number"),
    })
    for case in question.cases:
        for which, counts in found.says.items():
            taken = [f"{found.ratio[case][clock] - 1:.1%}" if clock in found.ratio[case] and which == "slowed" else ""
                     for clock in (first, *others)]  # fmt: skip
            name = "A/A" if which == "A/A" else f"slowed by {SLOWED:.0%}"
            made.add_row(case, name, *(str(counts[case][say.value]) for say in Say), *taken)
    tables.show(made, console)
    bound = bounds(found.data())
    tables.say(console, *(_fit(found, case, bound) for case in question.cases))
    tables.say(console, f"at most, at least: {SURE:.0%} sure, as no two trials share a pair; they share four processes")
    if found.wanted:
        tables.say(console, f"inconclusive: {found.trials} independent trials say too little, {FEWEST_TRIALS} are the "
                            f"fewest; --minutes {found.wanted} would do", style=STYLES[Say.NOISY])  # fmt: skip


def _fit(found: Power, case: str, bound: Mapping[str, Mapping[str, float]]) -> str:
    alarms, power = found.part("A/A", case, Say.SLOWER), found.part("slowed", case, Say.SLOWER)
    alone = ", ".join(f"{counts[Say.SLOWER.value] / found.trials:.1%} by {clock}"
                      for clock, counts in found.clocks["slowed"][case].items())  # fmt: skip
    said = f"{case}: false alarms {alarms:.1%}, at most {bound['A/A'][case]:.1%}; {_slowed(found.ratio[case])} is found"
    return f"{said} in {power:.1%} of trials, at least {bound['slowed'][case]:.1%} ({alone} alone)"


def _slowed(ratio: Mapping[str, float]) -> str:
    """By how much an arm was slower in truth, by each clock: what was asked of it is not what it came to."""
    return "a true " + ", ".join(f"{value - 1:.1%} ({clock})" for clock, value in ratio.items())


def _calibrated(question: Question) -> str:
    """What the gate is known to do on this machine."""
    told, said = known(question), list[str]()
    bound = bounds(told) if told is not None else {}
    for case in question.cases:
        if told is not None and (slowed := told["ratio"].get(case)):
            found = {which: told["says"][which].get(case, {}).get(Say.SLOWER.value, 0) for which in ("A/A", "slowed")}
            alarms, power = bound["A/A"].get(case, 1.0), bound["slowed"].get(case, 0.0)
            said.append(f"{case} {found['A/A']} false alarms (at most {alarms:.0%}), {_slowed(slowed)} found "
                        f"{found['slowed']} times (at least {power:.0%})")  # fmt: skip
    if told is None or not said:
        return ("not calibrated on this machine with this setting; instep gate BEFORE --calibrate says how often the "
                "gate is wrong here")  # fmt: skip
    trials, alone = told["trials"], independent(told)
    apart = "" if alone == trials else f", no more than {alone} of them independent"
    few = "; too few to tell" if alone < FEWEST_TRIALS else ""
    return f"this machine, of {trials} trials each{apart} ({told['date'][:10]}): {'; '.join(said)}{few}"


def _table(report: Report) -> Table:
    """Medians with their interquartile range, and ratios with their interval."""
    setting, pairs = report.question, report.judged[0].change.pairs
    work = f"batch {setting.batch}, window {setting.num_steps + 1}, {pairs} pairs"
    title = f"{setting.after} against {setting.before}: {work}"
    made = tables.table(title, {
        "case": "word", "clock": "word", "before, ms": "number", "after, ms": "number", "after / before": "number",
        "A/A": "number",
    })
    for one in report.judged:
        change = Text(f"{one.change.value:.3f} ({_interval(one.change)})", style=STYLES[one.says])
        made.add_row(one.case, one.clock, _spread(one.before), _spread(one.after), change, _interval(one.same))
    return made


def _sentence(report: Report, case: str) -> str:
    allowed, clocks = f"{report.question.allowed:.0%}", [one for one in report.judged if one.case == case]
    says = report.says(case)
    if says is Say.SLOWER:
        worst = max((one for one in clocks if one.says is says), key=lambda one: one.change.low)
        return (
            f"{case}: SLOWER by {worst.change.value - 1:.1%}, at least {worst.change.low - 1:.1%} "
            f"({worst.clock}); {allowed} is allowed"
        )
    noisy = [one for one in clocks if one.says is Say.NOISY]
    apart = ", ".join(f"{one.clock} {_interval(one.same) if one.change.pairs else 'never read'}" for one in noisy)
    if says is Say.NOISY:
        return f"{case}: inconclusive: before against itself gives {apart}; {allowed} cannot be seen here"
    waits = f"; too noisy to tell by the other clock{'s' * (len(noisy) > 1)} ({apart})" if noisy else ""
    return f"{case}: no slow-down beyond {allowed}{waits}"


def _spread(spread: Spread) -> str:
    return f"{spread.median * 1e3:.3g} ±{(spread.upper - spread.lower) * 1e3:.2g}"


def _interval(found: Ratio) -> str:
    return f"{found.low:.3f}-{found.high:.3f}"
