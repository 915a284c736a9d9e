"""Run an entry: each run in a separate process, with a time limit. Death by a signal is a finding.

Leaves out: which entries there are, and what they need.
"""

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

from .dispatch import Source
from .entry import AGREE, Entry
from .recordings.judged import counted

TOP = Path(__file__).resolve().parents[2]
SAID = {Exit.AGREED: AGREE, Exit.DIVERGED: "diverged", Exit.BAD_INPUT: "refused", Exit.INCONCLUSIVE: "nothing compared",
        Exit.HARNESS_FAILED: "the harness failed"}  # fmt: skip
MISSING, FAILED, UNCALLED, UNJUDGED = "missing", "the runner failed", "not called", "not judged"
MILD = ("diverged", "nothing compared", AGREE)  # every other verdict is worse than these
ASKED = """
import sys, importlib.metadata as metadata, importlib.util as util
modules, pins = sys.argv[1].split(), sys.argv[2].split()
if away := [name for name in modules if util.find_spec(name) is None]:
    raise SystemExit(f"{away[0]} cannot be imported")
for pin in pins:
    name, _, version = pin.partition("==")
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        raise SystemExit(f"{name} is not installed")
    if version and found != version:
        raise SystemExit(f"{name} {found} is installed, not {version}")
"""


def served(
    entry: Entry, environment: Mapping[str, str], unpacked: Path, python: str = sys.executable
) -> dict[str, Any]:
    """The row of an entry: the results of its runs, the worst first."""
    began = time.monotonic()
    try:
        if missing := _missing(entry, environment, python):
            runs = [_row(None, MISSING, missing, entry.command)]
        elif dead := uncalled(entry, unpacked):
            runs = [_row(None, UNCALLED, dead, entry.command)]
        elif entry.door == "native":
            runs = [_row(None, UNJUDGED, entry.expected, entry.command)]
        else:
            runs = [_one(entry, trace, environment, unpacked, python) for trace in entry.runs()]
    except Exception as error:  # whatever it is, the other entries are run and the result is written
        runs = [_row(None, FAILED, f"{type(error).__name__}: {error}", entry.command)]
    runs.sort(key=lambda run: (run["verdict"] == AGREE, _met(entry, run), _mildness(run["verdict"])))
    worst, odd = runs[0], [run for run in runs if run["verdict"] != AGREE]
    return {
        "name": entry.name, "package": entry.package, "version": entry.version, "door": entry.door,
        "expected": entry.expected, "since": entry.since, "switch": entry.switch,
        "verdict": worst["verdict"], "finding": worst["finding"], "command": worst["command"],
        "events": sum(run["events"] for run in runs), "of": sum(run["of"] for run in runs),
        "tiers": sorted({tier for run in runs for tier in run["tiers"]}), "runs": runs,
        "met": all(_met(entry, run) for run in odd or runs),
        "seconds": round(time.monotonic() - began, 1),
        **{name: sum(run[name] for run in runs if name in run) for name in ("decided", "tokens") if name in worst},
    }  # fmt: skip


def uncalled(entry: Entry, unpacked: Path) -> str:
    """The judged functions that the unpacked release does not call, with these options; empty if it calls all."""
    roots = [unpacked / wheel.replace("==", "-") / module for wheel in entry.unpacked for module in entry.modules]
    root = next((root for root in roots if root.is_dir()), None)
    if not entry.calls or root is None:
        return f"the source of {entry.package} {entry.version} is not unpacked" if entry.calls else ""
    source = Source(root, entry.facts)
    return "; ".join(f"no call of {name} with {entry.switch}" for name in entry.calls if not source.calls(name))


def _met(entry: Entry, run: Mapping[str, Any]) -> bool:
    return run["verdict"] not in (MISSING, FAILED, UNCALLED) and entry.met(f"{run['verdict']}: {run['finding']}")


def _mildness(verdict: str) -> int:
    return MILD.index(verdict) + 1 if verdict in MILD else 0


def _missing(entry: Entry, environment: Mapping[str, str], python: str) -> str | None:
    """The needs of the entry that are missing or have another version, looked up as the entry's process would."""
    command = [python, "-c", ASKED, " ".join(entry.modules), " ".join((*entry.needs, *entry.unpacked))]
    if not any(command[-2:]):
        return None
    found = subprocess.run(command, env={**os.environ, **environment}, cwd=TOP, capture_output=True, text=True,
                           errors="replace", timeout=60)  # fmt: skip
    return (found.stderr.strip().splitlines() or ["it cannot be looked up"])[-1] if found.returncode else None


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
            words, cwd=TOP, env={**os.environ, **environment}, text=True, errors="replace",
            start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=entry.seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and what it started
            said, _ = process.communicate()
            return _row(trace, "hangs", f"runs past its limit of {entry.seconds} s", typed)
        if process.returncode < 0:
            known = {one.value: one.name for one in signal.Signals}
            name = known.get(-process.returncode, f"signal {-process.returncode}")
            return _row(trace, "dies", ": ".join([f"the process died by {name}", *_last(said)]), typed)
        data = json.loads(result.read_text()) if result.exists() else {}
    row = _told(trace, typed, process.returncode, said, data)
    return _recorded(row, said) if entry.door == "recording" else row


def _recorded(row: dict[str, Any], said: str) -> dict[str, Any]:
    """The row of a recording: its tokens are judged, by T4. Right with no token decided is not right."""
    decided, tokens = counted(said)
    nothing = row["verdict"] == AGREE and not decided
    verdict = SAID[Exit.INCONCLUSIVE] if nothing else row["verdict"]
    return row | {"verdict": verdict, "decided": decided, "tokens": tokens, "tiers": ["T4"] if decided else []}


def _told(trace: str | None, typed: str, code: int, said: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a process that ended: from its result file, or from its exit code and its last line."""
    runs = data.get("runs", [])
    message = next((run["message"] for run in runs if run.get("message")), None)
    verdict = SAID.get(Exit(code), "") if code in list(Exit) else f"ends with {code}"
    finding = "" if code == Exit.AGREED else sentence(message) if message else "".join(_last(said))
    events = sum(run.get("events_served", run["events"]) for run in runs)
    if typed.startswith("instep ") and code == Exit.AGREED and not events:
        verdict = SAID[Exit.INCONCLUSIVE]
    return _row(
        trace, verdict, finding, typed, events=events, of=sum(run["of"] for run in runs),
        tiers=sorted({tier["tier"] for run in runs for tier in run.get("tiers", []) if tier.get("blocks", 1)}),
    )


def _last(said: str) -> list[str]:
    """The last line of it that has words; none, if it has none."""
    return [line.strip()[-300:] for line in said.splitlines() if line.strip()][-1:]


def sentence(message: str) -> str:
    """The place and the diagnosis in the message of a divergence: its second and its third line."""
    lines = [line.strip() for line in message.splitlines()]
    first = next((number for number, line in enumerate(lines) if line.startswith("event ")), 0)
    return "; ".join(" ".join(line.split()) for line in lines[first : first + 2])


def _row(
    trace: str | None, verdict: str, finding: str, command: str, *, events: int = 0, of: int = 0,
    tiers: list[str] | None = None,
) -> dict[str, Any]:
    return {"trace": trace, "verdict": verdict, "finding": finding, "command": command, "events": events, "of": of,
            "tiers": tiers or []}  # fmt: skip
