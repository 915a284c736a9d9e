"""The runner of all campaigns: shares of the time, Ctrl-C, progress, and the file that is kept.

Leaves out: the trials of each command, and the result of an interrupted one (`test_relations_command.py`).
"""

import pytest

from instep.campaign import runner
from instep.campaign.runner import TrialRunner


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(runner, "time", clock := Clock())
    return clock


def test_trials_begin_within_their_share_of_the_time_that_is_left(clock: Clock) -> None:
    run, ran = TrialRunner(12.0), list[int]()
    for seconds in run.shares((1, 5, 4)):
        for _ in run.trials(range(10), str):
            clock.now += seconds
            ran.append(seconds)
    assert ran == [1] * 4 + [5] + [4], "of 12 seconds 4, of 8 again 4, and the rest"
    assert run.seconds == 4.0 and run.over and clock.now == 13.0
    assert not list(run.trials((1,), str)), "the time is over"


def test_campaign_without_a_limit_runs_every_trial_with_progress_and_keeps_each() -> None:
    said, kept = list[object](), list[int]()
    run = TrialRunner(None, lambda *words: said.append(words), lambda: kept.append(run.ended))
    assert list(run.trials("ab", str.upper)) == ["a", "b"] and not run.over
    assert said == [("A", 0, 2), ("B", 1, 2)] and kept == [1, 2] and run.name == "B"


def test_ctrl_c_before_anything_has_ended_ends_the_command() -> None:
    with pytest.raises(KeyboardInterrupt), TrialRunner() as run:
        for _ in run.trials("ab", str):
            raise KeyboardInterrupt


def test_ctrl_c_keeps_the_trials_that_ended_and_begins_no_other() -> None:
    ran = list[str]()
    with TrialRunner() as run:
        for group in run.shares(("ab", "cd")):
            for one in run.trials(group, str):
                if one == "c":
                    raise KeyboardInterrupt
                ran.append(one)
    assert ran == ["a", "b"] and run.interrupted and run.over and not list(run.shares("e"))


@pytest.mark.parametrize("error", [ValueError, runner.Over])
def test_other_exceptions_are_not_swallowed(error: type[BaseException]) -> None:
    with pytest.raises(error), TrialRunner() as run:
        for _ in run.trials("ab", str):
            if run.ended:
                raise error
