"""The verdicts of compute-sanitizer over replays, read from its logs.

Leaves out: the tool itself, which needs a GPU (`make sanitize`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from instep.bundled import fixtures
from support.running import sanitized
from support.running.sanitized import AGREES, FINDS, NOTHING, Line

HEAD = "========= COMPUTE-SANITIZER\n"
READS = """========= Invalid __global__ read of size 4 bytes
=========     at _keep+0xb0 in under_stress.py:92
=========     by thread (0,0,0) in block (0,0,0)
triton agrees: 621k numbers compared in 5 of 25 events
========= ERROR SUMMARY: 5 errors
"""
RACES = """========= Error: Race reported between Write access at _race+0xb0 in under_stress.py:110
=========     and Read access at _race+0xc0 in under_stress.py:110 [128 hazards]
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


@pytest.mark.parametrize(("log", "ended", "line"), [
    (READS, 6, (FINDS, "5 errors: Invalid __global__ read of size 4 bytes, _keep+0xb0 in under_stress.py:92")),
    (RACES, 0, (FINDS, "1 error: Error: Race reported between Write access at _race+0xb0 in under_stress.py:110")),
    ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0, (AGREES, "0 errors")),
    ("========= ERROR SUMMARY: 0 errors\n", 3, (NOTHING, "0 errors, but the replay ended with 3")),
    ("triton agrees: 621k numbers\n", 0, (NOTHING, "the tool printed no summary")),
    ("", None, (NOTHING, f"stopped after {sanitized.LIMIT_S} s")),
])  # fmt: skip
def test_log_of_a_tool_becomes_a_verdict(log: str, ended: int | None, line: tuple[str, str]) -> None:
    assert sanitized.read(HEAD + log, ended) == line


def test_planted_access_that_a_tool_misses_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from support.kernels import under_stress

    asked = list[tuple[str, str]]()

    def found(tool: str, words: Sequence[str]) -> Line:
        planted = [ops.rpartition(":")[2] for ops in words if ":" in ops]
        asked.extend((tool, getattr(under_stress, ops).name) for ops in planted)
        assert (fixtures().parent / words[1]).is_file()
        return Line(FINDS if planted and tool not in missing else AGREES, "as planted")

    missing = set[str]()
    monkeypatch.setattr(sanitized, "sanitized", found)
    assert sanitized.main([]) == 0
    assert {*asked} == {("memcheck", "past_the_end"), ("racecheck", "raced"), ("initcheck", "unwritten")}
    assert len(capsys.readouterr().out.splitlines()) == len(asked) + len(sanitized.TOOLS) * len(sanitized.RUNS)
    missing.add("racecheck")
    assert sanitized.main([]) == 1
    assert "racecheck, planted RACED: agrees: as planted, but it must find what is planted" in capsys.readouterr().out


TOOL = """#!/bin/sh
{sleep} & echo $! > {pid}
echo "========= ERROR SUMMARY: 0 errors"
wait
"""


@pytest.mark.parametrize(("sleep", "line"), [
    ("sleep 60", (NOTHING, "stopped after 2 s")), ("sleep 0", (AGREES, "0 errors")),
])  # fmt: skip
def test_replay_of_a_tool_that_is_stopped_ends_with_it(
    sleep: str, line: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool, pid = tmp_path / "compute-sanitizer", tmp_path / "pid"
    tool.write_text(TOOL.format(sleep=sleep, pid=pid))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(sanitized, "LIMIT_S", 2)
    assert sanitized.sanitized("memcheck", ["replay"]) == line
    end = time.monotonic() + 10
    while Path("/proc", pid.read_text().strip()).exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert time.monotonic() < end
