"""Cases that are not slower: the pairs that decide whether they are held, and the message otherwise.

Leaves out: two ratios alone (`test_gate_pairs.py`), and the combination of clocks (`test_gate_clocks.py`).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from instep.bundled import model
from instep.verdict import Exit
from instep_speed.gate.clock import CLOCKS
from instep_speed.gate.gate import ARMS, MOST_TIMES, PROBES, _timed, judge
from instep_speed.gate.input_and_result import Question, Report
from instep_speed.gate.result_data import of
from instep_speed.gate.statistics import FEWEST_PAIRS, Say
from support.inputs.outcomes import shown

QUESTION = Question("plain", "plain", model(), ("commit",))


class Told:
    """An arm of one case that takes so long as is written down, in turn, by wall and cpu."""

    def __init__(self, seconds: list[float]) -> None:
        self.source, self.seconds = SimpleNamespace(said="told"), iter(seconds)

    def ask(self, do: str, **given: Any) -> dict[str, Any]:
        taken = next(self.seconds)
        return {"seconds": {"commit": [taken, taken, 0.0]}}


def played(*after: tuple[float, int], alike: bool = True) -> tuple[Report, str]:
    """A gate over arms of 5 ms, whose after / before alternates in stretches: (the two ratios' middle, pairs)."""
    each = [middle + (0.03 if number % 2 else -0.03) for middle, pairs in after for number in range(pairs)]
    many, probes = MOST_TIMES * FEWEST_PAIRS, [5e-3] * PROBES
    same = [1 + (0.001 if alike else 0.2) * (-1) ** number for number in range(many)]
    arms: Any = {name: Told([*probes, *(5e-3 * one for one in ratios)])
                 for name, ratios in {"before": [1.0] * many, "after": each, "again": same}.items()}  # fmt: skip
    report = Report(QUESTION, acceptance=dict.fromkeys(("before", "after"), 1.5))
    samples = _timed(arms, QUESTION, report, lambda what, done, of: None)
    report.judged = judge(QUESTION, samples, 1, report.decided)
    return report, shown(of(report))


def test_open_case_gets_pairs_that_only_decide_held() -> None:
    """An interval that goes beyond 3% is not held, although A/A is quiet. More pairs may bring it within."""
    report, told = played((1.015, 60), (0.985, 180))
    assert report.decided == 60 < report.judged[0].change.pairs and report.says("commit") is Say.HELD
    assert "commit: no slow-down beyond 3%" in told
    report, told = played((1.01, 240))
    assert report.says("commit") is Say.NOISY and report.exit is Exit.INCONCLUSIVE
    assert report.judged[0].change.pairs == 240 and report.judged[0].change.high > 1.03
    assert "after / before is wall 0.980-1.040" in told and "--pairs 240 would narrow it" in told


def test_slow_down_in_later_pairs_only_is_not_called_slower() -> None:
    """Repeated looks find a slow-down too often. The message names the --pairs that decide on all of them."""
    report, told = played((1.01, 60), (1.2, 180))
    assert report.decided == 60 and report.says("commit") is Say.NOISY and all(map(report.late, report.judged))
    assert "but 60 pairs did not show more than 3%" in told and "--pairs 240 decides on all of them" in told
    assert of(report).data()["decided"] == 60
    report, _ = played((1.2, 240))
    assert report.says("commit") is Say.SLOWER and report.judged[0].change.pairs == report.decided == 60


def test_noisy_case_gets_no_further_pairs() -> None:
    report, told = played((1.0, 240), alike=False)
    assert report.decided == 240 and "before against itself gives wall 0.800-1.200" in told


def test_a_spread_is_printed_as_half_of_the_range_between_quartiles() -> None:
    samples = {arm: np.linspace(1.0, 3.0, 81)[:, None, None] * 1e-3 * np.ones((1, 1, len(CLOCKS))) for arm in ARMS}
    report = Report(QUESTION, judged=judge(QUESTION, samples, 1), acceptance={"before": 1.5, "after": 1.5})
    assert "2 ±0.5" in shown(of(report))
