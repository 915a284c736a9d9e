"""Print the result of the gate as a table, and turn it into data.

Leaves out: the judgement (`gate.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from instep.report import terminal_tables
from instep.report.outcome_data import number
from instep.report.result import Result
from instep_reference.contract.errors import BadInput

from .binomial_bounds import FEWEST_TRIALS, SURE, bounds, independent
from .calibration_files import known, ops_of
from .fingerprint import fingerprint
from .gate import MOST_TIMES
from .input_and_result import Judged, Question, Report
from .power import SLOWED, Power
from .statistics import FEWEST_PAIRS, Ratio, Say, Spread

STYLES = {Say.HELD: "green", Say.SLOWER: "red", Say.NOISY: "yellow"}


def show(report: Report, console: Console, baselines: Path | None = None) -> None:
    """Print everything. After a refusal no figure is printed. baselines: the folder of calibrations, None: the shipped
    one.
    """
    question = report.question
    if report.refused:
        terminal_tables.say(console, *_refused(report, "; --keep FOLDER keeps the trace"))
        return
    terminal_tables.show(_table(report), console)
    for case in question.cases:
        terminal_tables.say(console, _sentence(report, case), style=STYLES[report.says(case)])
    accepted = ", ".join(f"{name} {report.acceptance[name]:.2f}" for name in ("before", "after"))
    terminal_tables.say(
        console,
        f"accepted drafts a window: {accepted}, reference {report.reference_acceptance:.2f}",
        f"states compared before and after timing: {report.elements:,} numbers",
    )
    terminal_tables.say(console, _calibrated(question, baselines), style="dim")
    found = ", ".join(f"{name} {value}" for name, value in fingerprint(question.setting.device).items() if value)
    terminal_tables.say(console, found, style="dim")


def of(report: Report, baselines: Path | None = None, commit: str | None = None) -> Result:
    """The result of the gate as data. The machine's load is part of it."""
    question = report.question
    setting = asdict(question) | {"checkpoint": str(question.checkpoint)} | question.setting.data()
    setting["ops"] = ops_of(question)
    del setting["setting"]  # its fields are at the top level
    found = {
        "refused": report.refused or None, "setting": setting,
        "calibrated": None if report.refused else _known(question, baselines)[0],
        "says": {} if report.refused else {case: report.says(case).value for case in question.cases},
        "judged": [_judged(one) for one in report.judged],
        "laps": report.laps, "decided": report.decided, "served": report.served, "acceptance": report.acceptance,
        "reference_acceptance": report.reference_acceptance, "elements": report.elements,
        "machine": fingerprint(report.question.setting.device),
    }
    return Result(report.exit, report.question.setting.device, found, commit)


def _refused(report: Report, more: str = "") -> tuple[str, str]:
    word = "INCONCLUSIVE" if report.unjudged else "REFUSED"
    return f"{word}  {report.refused}", f"  only arms that pass the checks are timed{more}"


def _known(question: Question, baselines: Path | None) -> tuple[dict[str, Any] | None, str]:
    """This machine's calibration; or none, and why its file cannot be used. The verdict does not depend on it."""
    try:
        return known(question, baselines), ""
    except BadInput as error:
        return None, str(error)


def _judged(one: Judged) -> dict[str, Any]:
    """The numbers of a clock; none for a clock that was never read."""
    told = asdict(one) | {"says": one.says.value}
    for name in ("before", "after", "change", "same"):
        told[name] = {field: number(value) for field, value in told[name].items()}
    return told


def show_power(found: Power, console: Console) -> None:
    """Print how often the gate was wrong, by case."""
    question = found.report.question
    if found.report.refused:
        terminal_tables.say(console, *_refused(found.report))
        return
    trials = "1 trial each" if found.trials == 1 else f"{found.trials} trials each, which share no pair"
    title = f"{question.before}: {trials}; {found.pairs} pairs, {question.pairs} and more a trial"
    first, *others = question.judged_by
    made = terminal_tables.table(title, {
        "case": "word", "arm": "word", **{say.value: "number" for say in Say}, f"took longer by, {first}": "number",
        **dict.fromkeys(others, "number"),
    })
    for case in question.cases:
        for which, counts in found.says.items():
            taken = [f"{found.ratio[case][clock] - 1:.1%}" if clock in found.ratio[case] and which == "slowed" else ""
                     for clock in (first, *others)]  # fmt: skip
            name = "A/A" if which == "A/A" else f"slowed by {SLOWED:.0%}"
            made.add_row(case, name, *(str(counts[case][say.value]) for say in Say), *taken)
    terminal_tables.show(made, console)
    bound = bounds(found.data())
    terminal_tables.say(console, *(_fit(found, case, bound) for case in question.cases))
    terminal_tables.say(console,
                        f"at most, at least: {SURE:.0%} sure, as no two trials share a pair; they share four processes")
    if found.wanted:
        few = "1 trial says" if found.trials == 1 else f"{found.trials} independent trials say"
        terminal_tables.say(console, f"inconclusive: {few} too little, {FEWEST_TRIALS} are the fewest; "
                            f"--minutes {found.wanted} would do", style=STYLES[Say.NOISY])  # fmt: skip


def _fit(found: Power, case: str, bound: Mapping[str, Mapping[str, float]]) -> str:
    alarms, power = found.part("A/A", case, Say.SLOWER), found.part("slowed", case, Say.SLOWER)
    alone = ", ".join(f"{counts[Say.SLOWER.value] / found.trials:.1%} by {clock}"
                      for clock, counts in found.clocks["slowed"][case].items())  # fmt: skip
    said = f"{case}: false alarms {alarms:.1%}, at most {bound['A/A'][case]:.1%}; {_slowed(found.ratio[case])} is found"
    return f"{said} in {power:.1%} of trials, at least {bound['slowed'][case]:.1%} ({alone} alone)"


def _slowed(ratio: Mapping[str, float]) -> str:
    """The true slow-down of the slowed arm by each clock, which differs from the requested one."""
    return "a true " + ", ".join(f"{value - 1:.1%} ({clock})" for clock, value in ratio.items())


def _calibrated(question: Question, baselines: Path | None) -> str:
    """Describe the calibration of the gate on this machine."""
    (told, wrong), said = _known(question, baselines), list[str]()
    if wrong:
        return f"this machine's calibration cannot be used: {wrong}; instep gate BEFORE --calibrate makes another"
    bound = bounds(told) if told is not None else {}
    for case in question.cases:
        if told is not None and (slowed := told["ratio"].get(case)):
            found = {which: told["says"][which].get(case, {}).get(Say.SLOWER.value, 0) for which in ("A/A", "slowed")}
            alarms, power = bound["A/A"].get(case, 1.0), bound["slowed"].get(case, 0.0)
            alarmed, right = (f"{times} {word}{'s' * (times != 1)}" for times, word in
                              ((found["A/A"], "false alarm"), (found["slowed"], "time")))  # fmt: skip
            said.append(f"{case} {alarmed} (at most {alarms:.0%}), {_slowed(slowed)} found {right} (at least "
                        f"{power:.0%})")  # fmt: skip
    if told is None or not said:
        return ("not calibrated on this machine with this setting; instep gate BEFORE --calibrate measures how often "
                "the gate is wrong here")  # fmt: skip
    trials, alone = told["trials"], independent(told)
    apart = "" if alone == trials else f", no more than {alone} of them independent"
    few = "; too few to tell" if alone < FEWEST_TRIALS else ""
    each = f"{trials} trial{'s' * (trials != 1)} each{apart} ({told['date'][:10]})"
    return f"this machine, of {each}: {'; '.join(said)}{few}"


def _table(report: Report) -> Table:
    """Medians with half of their interquartile range, and ratios with their interval."""
    setting, pairs = report.question, report.judged[0].change.pairs
    work = f"batch {setting.batch}, window {setting.num_steps + 1}, {pairs} pairs"
    title = f"{setting.after} against {setting.before}: {work}"
    made = terminal_tables.table(title, {
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
    if says is Say.NOISY:
        return f"{case}: inconclusive: {'; '.join(_undecided(report, case, clocks))}"
    noisy = [one for one in clocks if one.says is Say.NOISY]
    apart = ", ".join(map(_same, noisy))
    waits = f"; too noisy to tell by the other clock{'s' * (len(noisy) > 1)} ({apart})" if noisy else ""
    return f"{case}: no slow-down beyond {allowed}{waits}"


def _undecided(report: Report, case: str, clocks: list[Judged]) -> Iterator[str]:
    """Why a case is neither slower nor held, and a remedy: a sentence for each reason."""
    allowed, pairs = f"{report.question.allowed:.0%}", max(min(one.change.pairs, one.same.pairs) for one in clocks)
    if 0 < pairs < FEWEST_PAIRS:
        yield f"of {pairs} pairs, and {FEWEST_PAIRS} are the fewest; --pairs {FEWEST_PAIRS} would take them"
        return
    late = [one for one in clocks if report.late(one)]
    if late:
        shown = ", ".join(f"{one.clock} {_interval(one.change)}" for one in late)
        yield (f"after / before is {shown}, but {report.decided} pairs did not show more than {allowed}, and later "
               f"pairs cannot make it slower; --pairs {max(one.change.pairs for one in late)} decides on all of them")
    open_ = [one for one in report.open(case) if one not in late]
    if open_:
        shown = ", ".join(f"{one.clock} {_interval(one.change)}" for one in open_)
        more = MOST_TIMES * report.question.pairs
        yield f"after / before is {shown}, so it may be more than {allowed} or less; --pairs {more} would narrow it"
    noisy = [one for one in clocks if one.says is Say.NOISY and one not in late and one not in open_]
    if noisy:
        yield f"before against itself gives {', '.join(map(_same, noisy))}; {allowed} cannot be seen here"


def _same(one: Judged) -> str:
    pairs = min(one.change.pairs, one.same.pairs)
    read = _interval(one.same) if pairs >= FEWEST_PAIRS else f"read in {pairs} pairs alone" if pairs else "never read"
    return f"{one.clock} {read}"


def _spread(spread: Spread) -> str:
    """A median and half of the interquartile range."""
    return f"{spread.median * 1e3:.3g} ±{(spread.upper - spread.lower) / 2 * 1e3:.2g}"


def _interval(found: Ratio) -> str:
    return f"{found.low:.3f}-{found.high:.3f}"
