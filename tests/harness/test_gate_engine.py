"""The timed engine of an arm: as production has it, with `event.on(engine)` and nothing else.

Leaves out: clocks and statistics (`test_gate.py`, `test_gate_pairs.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from instep.run.build_compared_engines import bare
from instep.run.replay import Replay
from instep.setting import Setting
from instep.verdict import Exit
from instep_optimized import load
from instep_speed.gate.cases import Walk
from instep_speed.gate.clock import Clock
from instep_speed.gate.forced_trace import Course, lay
from instep_speed.gate.worker import Worker

SETTING = Setting("plain", strategy="columns", conv="widened", graphs=True, overlap=True, guarded=False)


@pytest.fixture(scope="module")
def course(model: Path) -> Course:
    return lay(model, model / "course.jsonl", batch=2, rounds=1, num_steps=3)


@pytest.mark.slow
def test_timed_engine_is_not_instrumented(model: Path, course: Course) -> None:
    worker = Worker()
    worker.build(str(course.trace.path), str(model), SETTING.data())
    engine: Any = worker.walk.player.engine
    assert engine._ops is engine._base is load("plain")
    assert engine.graphs is not None
    options = engine._options
    assert (options.strategy, options.conv, options.overlap, options.guarded) == ("columns", "widened", True, False)


@pytest.mark.slow
def test_checked_engine_has_the_setting_of_the_timed_one(model: Path, course: Course) -> None:
    worker = Worker()
    worker.build(str(course.trace.path), str(model), SETTING.data())
    assert worker.replay.plan.setting == SETTING.recorded(course.trace.header.recording)
    assert worker.check()["exit"] == Exit.AGREED


class Recorder:
    """Replaces an engine, and records every access to it."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.asked = engine, list[str]()

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        return getattr(self.engine, name)


def test_lap_calls_only_the_events_of_an_engine(model: Path, course: Course) -> None:
    recorder = Recorder(bare(Replay(course.trace, SETTING, checkpoint=model).plan))
    walk = Walk(recorder, course)  # type: ignore[arg-type]
    recorder.asked.clear()

    walk.laps(1, Clock("cpu"))
    assert set(recorder.asked) == {"abort", "admit", "load", "draft", "forward", "commit"}
