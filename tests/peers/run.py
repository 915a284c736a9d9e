"""Runs an entry: each run in a process of its own, with a time limit. Death by a signal is a finding.

Leaves out: which entries there are, and what they need.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from instep.verdict import Exit

from .entry import AGREE, Entry

TOP = Path(__file__).resolve().parents[2]
SAID = {Exit.AGREED: AGREE, Exit.DIVERGED: "diverged", Exit.BAD_INPUT: "refused", Exit.INCONCLUSIVE: "nothing compared",
        Exit.HARNESS_FAILED: "the harness failed"}  # fmt: skip
RANK = (Exit.HARNESS_FAILED, Exit.BAD_INPUT, Exit.INCONCLUSIVE, Exit.DIVERGED, Exit.AGREED)


def served(
    entry: Entry, environment: Mapping[str, str], unpacked: Path, python: str = sys.executable
) -> dict[str, Any]:
    """The row of an entry: what its runs said, the worst first."""
    row = {"name": entry.name, "package": entry.package, "version": entry.version, "door": entry.door,
           "expected": entry.expected, "since": entry.since}  # fmt: skip
    began = time.monotonic()
    if missing := _missing(entry, environment, python):
        runs = [_row(None, "missing", f"{missing} cannot be imported", entry.command)]
    else:
        runs = [_one(entry, trace, environment, unpacked, python) for trace in entry.runs()]
    worst = next((run for run in runs if run["verdict"] != AGREE), runs[0])
    return {
        **row, "verdict": worst["verdict"], "finding": worst["finding"], "command": worst["command"],
        "events": sum(run["events"] for run in runs), "of": sum(run["of"] for run in runs),
        "tiers": sorted({tier for run in runs for tier in run["tiers"]}), "runs": runs,
        "met": worst["verdict"] != "missing" and entry.met(f"{worst['verdict']}: {worst['finding']}"),
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


def _missing(entry: Entry, environment: Mapping[str, str], python: str) -> str | None:
    """The first module that the entry needs and that is not there, looked up as the entry's own process would."""
    if not entry.modules:
        return None
    asked = "import sys, importlib.util as u; print(next((m for m in sys.argv[1:] if u.find_spec(m) is None), ''))"
    command, whole = [python, "-c", asked, *entry.modules], {**os.environ, **environment}
    found = subprocess.run(command, env=whole, capture_output=True, text=True, timeout=60)
    return found.stdout.strip() or (entry.modules[0] if found.returncode else None)


def _one(
    entry: Entry, trace: str | None, environment: Mapping[str, str], unpacked: Path, python: str
) -> dict[str, Any]:
    typed = entry.command.replace("{trace}", trace or "")
    words = shlex.split(typed.replace("{unpacked}", str(unpacked)))
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        if words[0] == "instep":
            words = [python, "-m", "instep", *words[1:], "--json", str(result)]
        elif words[0] == "python":
            words[0] = python
        process = subprocess.Popen(
            words, cwd=TOP, env={**os.environ, **environment}, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=entry.seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and what it started
            said, _ = process.communicate()
            return _row(trace, "hangs", f"runs past its limit of {entry.seconds} s", typed)
        if process.returncode < 0:
            name = signal.Signals(-process.returncode).name
            return _row(trace, "dies", f"the process died by {name}", typed)
        data = json.loads(result.read_text()) if result.exists() else {}
    return _told(trace, typed, process.returncode, said, data)


def _told(trace: str | None, typed: str, code: int, said: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """What a process that ended said: by its result file, or by its exit code and its last line."""
    runs = data.get("runs", [])
    message = next((run["message"] for run in runs if run.get("message")), None)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    verdict = SAID.get(Exit(code), "") if code in list(Exit) else f"ends with {code}"
    finding = "" if code == Exit.AGREED else sentence(message) if message else "".join(lines[-1:])[-300:]
    events = sum(run.get("events_served", run["events"]) for run in runs)
    return _row(
        trace, verdict, finding, typed, events=events, of=sum(run["of"] for run in runs),
        tiers=sorted({tier["tier"] for run in runs for tier in run.get("tiers", []) if tier.get("blocks", 1)}),
    )


def sentence(message: str) -> str:
    """The place and what is said of it, of the message of a divergence: its second and its third line."""
    lines = [line.strip() for line in message.splitlines()]
    first = next((number for number, line in enumerate(lines) if line.startswith("event ")), 0)
    return "; ".join(" ".join(line.split()) for line in lines[first : first + 2])


def _row(
    trace: str | None, verdict: str, finding: str, command: str, *, events: int = 0, of: int = 0,
    tiers: list[str] | None = None,
) -> dict[str, Any]:
    return {"trace": trace, "verdict": verdict, "finding": finding, "command": command, "events": events, "of": of,
            "tiers": tiers or []}  # fmt: skip
