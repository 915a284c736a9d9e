"""The counts of `gate_resampled.py` over invented pairs.

Leaves out: figures of a machine.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from instep.report.result import SCHEMA
from instep_speed.gate import statistics
from perf import gate_resampled

SETTING = {"device": "cpu", "pairs": 60, "allowed": 0.03, "seed": 0}


@pytest.fixture
def file(tmp_path: Path) -> Callable[[float], Path]:
    """An A/A run of two cases whose pairs scatter by `noise`, and whose processes differ by 2%."""

    def written(noise: float) -> Path:
        generator = np.random.default_rng(0)
        judged: list[dict[str, Any]] = []
        for case in ("verify", "commit"):
            for clock in ("wall", "cpu"):
                samples = 1e-3 * np.exp(noise * generator.standard_normal((100, 3))) * np.array([1, 1.02, 1])
                judged.append({"case": case, "clock": clock, "samples": samples.tolist()})
        found = tmp_path / "gate.json"
        found.write_text(json.dumps({"schema": SCHEMA, "judged": judged, "setting": SETTING}))
        return found

    return written


@pytest.mark.parametrize(("noise", "slowed", "says"), [
    (0.01, 0.0, "held 6 (6), slower 0 (0), inconclusive 0 (0); 60 pairs"),
    (0.01, 0.08, "held 0 (0), slower 6 (6), inconclusive 0 (0); 60 pairs"),
    (0.2, 0.0, "held 0 (0), slower 0 (0), inconclusive 6 (6); 240 pairs"),
])  # fmt: skip
def test_resampling_removes_differences_between_processes_and_finds_the_slow_down(
    noise: float, slowed: float, says: str, file: Callable[[float], Path], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(statistics, "DRAWS", 300)
    assert gate_resampled.main([str(file(noise)), "--runs", "6", "--slowed", str(slowed)]) == 0
    assert f"{slowed:.1%}: {says}" in capsys.readouterr().out


def test_further_pairs_hold_what_the_first_leave_open(
    file: Callable[[float], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "DRAWS", 300)
    gate_resampled.main([str(file(0.04)), "--runs", "6", "--slowed", "0.0"])
    line = capsys.readouterr().out.splitlines()[-1]
    late, early = (int(one) for one in line.split("held ")[1].split(")")[0].split(" ("))
    assert late > early and not line.endswith("; 60 pairs")


@pytest.mark.parametrize(("change", "says"), [
    ({"judged": []}, "a file without pairs"), ({"schema": None}, "found schema None"),
    ({"setting": SETTING | {"device": "cuda"}}, "a file of cuda; expected one of a CPU"),
    ({"judged": [{"case": "verify", "clock": clock, "samples": [[1.0] * 3] * count} for clock, count in
                 (("wall", 60), ("cpu", 59))]}, "clocks that read different pairs"),
])  # fmt: skip
def test_resampling_refuses_a_file_that_it_cannot_use(
    change: dict[str, Any], says: str, file: Callable[[float], Path]
) -> None:
    found = file(0.01)
    found.write_text(json.dumps(json.loads(found.read_text()) | change))
    with pytest.raises(SystemExit, match=says):
        gate_resampled.main([str(found)])
