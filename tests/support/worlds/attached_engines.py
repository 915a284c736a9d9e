"""Fake engines that record themselves to a folder, and what `instep audit` says of the recording.

Leaves out: the engines (`fake_sglang.py`, `fake_vllm.py`), and what a test lets them serve.
"""

import json
from pathlib import Path
from typing import Any

from instep.audit.audit import Audit, audit
from support.inputs.few_channels import small_model
from support.inputs.recordings import lines

SMALL = small_model("tiny", 4)
A, B = b"Return the", b"def main(self):"
EVERY: dict[str, Any] = {"layers": [], "every": 1}


def judged(tmp_path: Path, **how: Any) -> Audit:
    return audit(tmp_path / "recording", SMALL, **how)


def attached(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "recording" / "recording.json").read_text())["attached"]


def events(tmp_path: Path) -> list[dict[str, Any]]:
    return lines(tmp_path / "recording" / "events.jsonl")


def facts(tmp_path: Path) -> dict[str, Any]:
    """What must hold of every recording of a right engine."""
    return {name: attached(tmp_path)[name] for name in ("missing", "stopped", "written", "dropped", "left_out")}


def accepted(tmp_path: Path) -> dict[str, list[int]]:
    """How many drafts of each request were accepted, round after round."""
    said: dict[str, list[int]] = {}
    for one in events(tmp_path):
        for name, path in zip(one.get("requests", ()), one.get("accepted", ()), strict=False):
            said.setdefault(name, []).append(len(path["nodes"]))
    return said
