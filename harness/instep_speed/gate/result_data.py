"""The result of the gate as data, with a sentence for each case.

Leaves out: the judgement (`gate.py`), and tables (`result_document.py`).
"""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from instep.report.machine import fingerprint
from instep.report.result import Result
from instep_reference.contract.errors import BadInput

from .calibration_files import known, ops_of
from .gate import MOST_TIMES
from .input_and_result import Judged, Question, Report
from .statistics import FEWEST_PAIRS, Ratio, Say


def of(report: Report, baselines: Path | None = None, commit: str | None = None) -> Result:
    """The result of the gate as data. The machine's load is part of it."""
    question = report.question
    setting = asdict(question) | {"checkpoint": str(question.checkpoint)} | question.setting.data()
    setting["ops"] = ops_of(question)
    calibrated, wrong = (None, "") if report.refused else _known(question, baselines)
    del setting["setting"], setting["typed"]  # the fields of the setting are at the top level
    found = {
        "refused": report.refused or None, "setting": setting,
        "calibrated": calibrated, "calibration_error": wrong or None,
        "says": {} if report.refused else {case: report.says(case) for case in question.cases},
        "sentences": {case: _sentence(report, case) for case in dict.fromkeys(one.case for one in report.judged)},
        "judged": report.judged,
        "laps": report.laps, "decided": report.decided, "served": report.served, "acceptance": report.acceptance,
        "reference_acceptance": report.reference_acceptance, "elements": report.elements,
        "machine": fingerprint(report.question.setting.device),
    }
    return Result(report.exit, report.question.setting.device, found, commit)


def _known(question: Question, baselines: Path | None) -> tuple[dict[str, Any] | None, str]:
    """This machine's calibration; or none, and why its file cannot be used. The verdict does not depend on it."""
    try:
        return known(question, baselines), ""
    except BadInput as error:
        return None, str(error)


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


def _interval(found: Ratio) -> str:
    return f"{found.low:.3f}-{found.high:.3f}"
