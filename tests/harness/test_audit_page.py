"""Every example in docs/audit.md is the exact output of the tool, and so are three of its alarms.

Leaves out: whether the judgement is right (`test_audit.py`).
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from instep.audit.audit import audit
from instep.audit.result_data import told
from instep.verdict import Exit
from support.inputs.recordings import TINY, edited, lines, recorded, shown, stated, tensors

PAGE, RECORD = (
    (Path(__file__).resolve().parents[2] / "docs" / f"{name}.md").read_text() for name in ("audit", "audit-record")
)
FILE, MESSAGE, HOOKS = (
    re.search(f"```{kind}(.*?)```", PAGE + RECORD, re.S)[1] for kind in ("json\n", "text\n(?=DIVERGED)", "python\n")
)


MARGIN = re.compile(r"(?<=margin )\d+(?=, limit)")  # in units of the allowance, which is a draw


def margin(message: str) -> int:
    return int(MARGIN.findall(message)[0])


def test_file_of_the_page_gives_its_message(tmp_path: Path) -> None:
    file = tmp_path / "said.jsonl"
    file.write_text(FILE)
    says = told(audit(file, TINY, dtype="float32"))
    assert MARGIN.sub("#", says) == MARGIN.sub("#", MESSAGE.rstrip())
    # The page shows one draw, which depends on machine and threads, but no verdict depends on it.
    assert margin(MESSAGE) / 3 < margin(says) < 3 * margin(MESSAGE)
    right = FILE.replace("52, 44", "51, 44")
    file.write_text(right)
    assert right != FILE and audit(file, TINY, dtype="float32").exit is Exit.AGREED


def test_calls_of_the_page_make_an_agreeing_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fixtures").symlink_to(Path("fixtures").resolve())
    monkeypatch.chdir(tmp_path)
    exec(compile(HOOKS, "docs/audit-record.md", "exec"), {})
    found = audit(Path("recording"), TINY)
    assert found.exit is Exit.AGREED and found.tokens.ties.made == 3 and found.told.accepted == 1


@pytest.mark.slow
def test_alarms_of_the_page_are_printed(tmp_path: Path) -> None:
    alarms = re.findall(r"^\| .*? \| `(.*?)` \|$", PAGE.partition("## See it fail")[2], re.M)
    assert alarms[0] in MESSAGE and len(alarms) == 4
    made = recorded(tmp_path / "r")
    tensors(made, 10, "state.a.0", lambda x: shown(made, 7)["state.a.0"])
    assert audit(made, TINY).replay.verdict.findings[0].diagnosis.startswith(alarms[2])
    commit = lines(made / "events.jsonl")[7]
    bonus = commit["accepted"][0]["bonus"]
    edited(made, 7, accepted=[{**commit["accepted"][0], "bonus": bonus + 2}])
    assert audit(made, TINY, level=1).verdict.findings[0].diagnosis == alarms[1]
    file = {"candidate_steps": [3, 7], "up_hysteresis": -9, "warmup_batches": 1, "update_interval": 1}
    stated(made, controller={"dialect": "sglang-0.5.12", "file": file}, num_steps=3)
    steps = [one.diagnosis for one in audit(made, TINY, level=1).verdict.findings if one.check == "step counts"]
    assert steps[0].startswith(f"{alarms[3]} (slot 1: count 7, average ")


def test_page_has_every_option_of_the_command() -> None:
    assert all(option in PAGE for option in ("--model", "--dtype", "--level", "--verbose")), json.dumps(PAGE[:80])
