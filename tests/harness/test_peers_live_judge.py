"""`peers.live.judge`: verdicts of cases that were run on a GPU, without an audit. Leaves out: the audit itself."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from documentation import peers_table
from peers.live import TOP, cases, judge
from peers.live.run import LOG, OUTCOME, RECORDING
from peers.live.serve import ANSWERS

LINES = "DIVERGED  recording, sglang against reference\n  event 26 commit, request b\n  {said}   (limit 1)\n"


def result(*, told: str = "", replayed: str = "", stopped: str = "", elements: int = 5) -> dict:
    """A result file of `instep audit` with findings at tokens (event 30) and in states (event 26)."""
    def part(said: str, event: int) -> dict:
        return {"findings": [{"event": event}] if said else [], "message": LINES.format(said=said) if said else None}

    return part(told, 30) | {
        "elements": elements, "judged": {"stopped": stopped}, "step_counts": "not judged, because", "notes": ["a note"],
        "remarks": ["after steps 3 -> 1"], "decided": 4, "tokens": 6,
        "runs": [part(replayed, 26) | {"elements": 7, "events": 3, "of": 4,
                                       "not_judged": [{"shows_no": "kv", "what": "KV entries"}]}],
    }  # fmt: skip


def case_folder(root: Path, name: str, **outcome: Any) -> Path:
    own = root / name
    (own / RECORDING).mkdir(parents=True)
    (own / RECORDING / "recording.json").write_text("{}")
    (own / LOG).write_text("RuntimeError: sizes must match\n")
    found = {"outcome": "ended", "code": 0, "seconds": 60.0, "error": "", "stopped": ""} | outcome
    (own / OUTCOME).write_text(json.dumps(found))
    (own / ANSWERS).write_text(json.dumps({"prompt": [1, 2], "tokens": [3, 4, 5]}) + "\n")
    return own


def row(monkeypatch: pytest.MonkeyPatch, own: Path, found: dict | None = None, plain: dict | None = None) -> dict:
    (case,) = cases.by_name(own.name)
    fields = judge.of_audit(found or result()) | {"audit_seconds": 1.0, "command": ""}
    monkeypatch.setattr(judge, "audited", lambda what, whole, minutes: fields | {"judged": (what.name, whole)})
    return judge.judged(case, own, plain, 1.0)


def test_the_first_finding_in_the_order_of_events_is_named() -> None:
    found = judge.of_audit(result(told="bonus is 1", replayed="holds the state of request c"))
    assert found["verdict"] == "diverged" and "holds the state of request c" in found["finding"]
    assert found["finding"].startswith("event 26 commit") and found["remarks"] == ["after steps 3 -> 1"]
    right = judge.of_audit(result())
    assert right["verdict"] == "agree" and right["elements"] == 12 and right["remarks"] == []
    assert right["not_covered"] == ["step counts: not judged, because", "a note", "KV entries"]


def test_an_audit_that_ended_early_does_not_agree() -> None:
    found = judge.of_audit(result(stopped="the limit of 4 minutes is over"))
    assert found["verdict"] == "nothing compared" and found["finding"] == "the limit of 4 minutes is over"
    assert judge.of_audit(result(elements=0) | {"runs": []})["verdict"] == "nothing compared"


@pytest.mark.parametrize(("name", "audit", "outcome", "verdict", "met"), [
    ("switch-13", {}, {}, "agree", True),
    ("switch-13", {"replayed": "holds the state of request c"}, {}, "diverged", False),
    ("switch-12", {"replayed": "holds the state of request c"}, {}, "diverged", True),
    ("switch-12", {"replayed": "unknown"}, {}, "diverged", False),
    ("switch-12", {}, {}, "agree", False),
    ("full-16", {}, {"code": 1, "outcome": "died: exit code 1", "error": "RuntimeError"}, "died", True),
    ("start-16", {}, {"code": 1, "outcome": "died: exit code 1", "error": "RuntimeError"}, "died", False),
    ("fixed-16", {}, {"code": None, "outcome": "stopped: time limit"}, "stopped", False),
])  # fmt: skip
def test_a_verdict_is_compared_with_the_expected_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, audit: dict[str, str], outcome: dict[str, Any],
    verdict: str, met: bool,
) -> None:
    found = row(monkeypatch, case_folder(tmp_path, name, **outcome), result(**audit))
    assert (found["verdict"], found["met"]) == (verdict, met)


def test_answers_are_judged_where_the_recorder_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = case_folder(tmp_path, "tree-14", stopped="trees of drafts are not recorded")
    found = row(monkeypatch, own, plain={(1, 2): [3, 4, 9, 9]})
    assert found["judged"] == (ANSWERS, False) and found["met"]
    assert found["not_covered"][0] == "states, windows and counts: trees of drafts are not recorded"
    assert found["answers"] == {"equal": 0, "of": 1, "first": 2}
    assert row(monkeypatch, own, plain={(1, 2): [3, 4, 5, 6]})["answers"] == {"equal": 1, "of": 1, "first": None}


def test_a_case_whose_files_did_not_change_keeps_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own, audits = case_folder(tmp_path / "cases", "switch-13"), list[str]()

    def audited(what: Path, whole: bool, minutes: float) -> dict:
        audits.append(what.name)
        return judge.of_audit(result()) | {"audit_seconds": 1.0, "command": ""}

    monkeypatch.setattr(judge, "audited", audited)
    command = [str(tmp_path / "cases"), "--json", str(tmp_path / "live.json")]
    assert judge.main(command) == 0 and judge.main(command) == 0 and audits == [RECORDING]
    (own / OUTCOME).write_text(json.dumps(json.loads((own / OUTCOME).read_text()) | {"seconds": 61.0}))
    assert judge.main(command) == 0 and len(audits) == 2
    written = json.loads((tmp_path / "live.json").read_text())
    assert written["exit"] == 0 and written["rows"][0]["engine_seconds"] == 61.0
    table = peers_table.live(written)
    assert "| switch-13 | 0.5.13 | adaptive [1, 3] from 3 | agree |" in table and "- KV entries" in table
    assert "0.5.13 to 0.5.13, in 1 configurations on a GPU: 1 agree" in peers_table.live_in_short(written)


def test_an_audit_that_hangs_is_an_error_of_its_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = case_folder(tmp_path, "switch-13")
    monkeypatch.setattr(judge, "GRACE", 0)
    monkeypatch.setattr(sys, "executable", "/bin/sh")  # it fails at once
    found = judge.audited(own / RECORDING, True, 1.0)
    assert found["verdict"] == "the harness failed" and found["finding"]

    def hangs(*given: Any, **named: Any) -> None:
        raise subprocess.TimeoutExpired("instep", named["timeout"])

    monkeypatch.setattr(subprocess, "run", hangs)
    assert "did not end within its 1 minutes" in judge.audited(own / RECORDING, True, 1.0)["finding"]


@pytest.mark.whole
def test_the_recordings_of_the_fixtures_are_judged(tmp_path: Path) -> None:
    for name, release in (("switch-12", "0.5.12"), ("switch-13", "0.5.13")):
        own = case_folder(tmp_path / "cases", name)
        (own / RECORDING / "recording.json").unlink()
        (own / RECORDING).rmdir()
        (own / RECORDING).symlink_to(TOP / "fixtures" / "live" / f"sglang-{release}")
    assert judge.main([str(tmp_path / "cases"), "--json", str(tmp_path / "live.json")]) == 0
    rows = json.loads((tmp_path / "live.json").read_text())["rows"]
    assert [row["verdict"] for row in rows] == ["diverged", "agree"] and rows[1]["elements"] > 400_000
