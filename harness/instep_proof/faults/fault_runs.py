"""The runs of a fault: ordinary commands, each in a separate process with its own copy of the source.

Leaves out: comparing two runs (`compare_with_control.py`).
"""

import json
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from instep.checks.check_interface import NOWHERE
from instep.finding_problem import Problem
from instep.report.outcome_data import finding
from instep.setting import Setting
from instep.verdict import Comparison, Exit, Raised, Tier

from . import plant
from .free_run import POLICY

# A frame of a traceback, as Python prints it; without a function for a syntax error.
FRAME = re.compile(r'^ +File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?$', re.MULTILINE)
MODULE = "<module>"
FAILED = "the harness itself failed: "  # a line on stderr, after the name of the command
# Tokens of a request in the free run; interpreted kernels take a hundred times as long per token.
TOKENS, INTERPRETED_TOKENS = 64, 10


@dataclass(frozen=True)
class Arm:
    """The result of a replay.

    code      its exit code; None: it did not end in time
    findings  those of the event at which it stopped, first finding first, as in a result file
    looked    check -> its tier, for the checks that compared something at that event
    served    package -> digest of the source that ran
    trail     a line for every event that was served (`watch/event_digests.py`)
    events    number of events that were served; of: number of events in the trace
    cause     the confirmed cause (`instep.diagnose`)
    error     the last line of its output, if there is no result
    """

    code: int | None
    seconds: float
    findings: tuple[Mapping[str, Any], ...] = ()
    looked: Mapping[str, str] = field(default_factory=dict)
    served: Mapping[str, str] = field(default_factory=dict)
    trail: tuple[str, ...] = ()
    calls: Mapping[str, int] = field(default_factory=dict)
    events: int = 0
    of: int = 0
    message: str = ""
    cause: str = ""
    error: str = ""

    @property
    def clean(self) -> bool:
        return self.code == Exit.AGREED and not self.findings and self.events == self.of > 0


@dataclass(frozen=True)
class Said:
    """The result of a free run (`free_run.py`). error: why it stopped early, or did not run."""

    texts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    drafts: int = 0
    accepted: int = 0
    states: Mapping[str, str] = field(default_factory=dict)
    served: Mapping[str, str] = field(default_factory=dict)
    error: str = ""

    @property
    def acceptance(self) -> float | None:
        """Accepted drafts per verified draft."""
        return self.accepted / self.drafts if self.drafts else None


def replayed(folder: Path, trace: Path, how: Setting, out: Path) -> Arm:
    """Run `instep replay` with the packages of that folder; the result goes to `out`, a trail next to it."""
    trail = out.with_suffix(".trail")
    words = ("replay", str(trace), *how.words(), "--json", str(out), "--trail", str(trail))
    arm, run = _of_command(folder, out, words)
    return arm if run is None else replace(
        arm, looked=run["looked"], trail=tuple(trail.read_text().splitlines()), calls=run["calls"],
        events=run["events"], cause=(run["located"] or {}).get("cause", ""),
    )


def related(folder: Path, trace: Path, how: Setting, out: Path, relation: str) -> Arm:
    """Run `instep relations` with one relation."""
    words = ("relations", str(trace), relation, *how.words(), "--json", str(out))
    arm, run = _of_command(folder, out, words)
    return arm if run is None else replace(
        arm, looked={run["relation"]: run["tiers"][0]} if run["tiers"] else {},
        events=run["of"] if run["elements"] else 0,
    )


def both(replay: Arm, relation: Arm) -> Arm:
    """Combine a replay and a relation of the same copy: the findings of both, and the replay's trail."""
    return replace(
        replay, code=relation.code if replay.code == Exit.AGREED else replay.code,
        seconds=replay.seconds + relation.seconds, findings=replay.findings + relation.findings,
        looked={**replay.looked, **relation.looked}, events=min(replay.events, relation.events),
        message=replay.message or relation.message, error=replay.error or relation.error,
    )


def spoken(folder: Path, trace: Path, how: Setting, out: Path) -> Said:
    """Run the free run with the packages of that folder."""
    if not trace.with_suffix(POLICY).exists():
        return Said(error="the trace has no policy file")
    tokens = INTERPRETED_TOKENS if how.ops == "triton" else TOKENS
    words = (str(trace), str(tokens), str(out), msgspec.json.encode(how).decode())
    _, _, error = _ran(lambda: plant.run_python(folder, "-m", "instep_proof.faults.free_run", *words))
    return msgspec.json.decode(out.read_bytes(), type=Said) if out.exists() else Said(error=error or "no result")


def _of_command(folder: Path, out: Path, words: Sequence[str]) -> tuple[Arm, dict[str, Any] | None]:
    """Run a command -> the common fields of its result, and the run in the result file; None: there is no result.

    Paths in the copy are given without its folder, which is deleted afterwards.
    """
    code, seconds, error = _ran(lambda: plant.run(folder, *words))
    if not out.exists():
        found = _not_started(folder, words) if code in (Exit.BAD_INPUT, Exit.HARNESS_FAILED) else None
        findings, message = ((), "") if found is None else ((found,), f"DIVERGED  {found['diagnosis']}")
        return Arm(code, seconds, findings, message=message, error=error or "no result"), None
    run: dict[str, Any] = json.loads(out.read_text().replace(f"{folder}/", ""))["runs"][0]
    return Arm(code, seconds, tuple(run["findings"]), served=run["served"], of=run["of"],
               message=run["message"] or ""), run  # fmt: skip


def _not_started(folder: Path, words: Sequence[str]) -> dict[str, Any] | None:
    """The finding that an engine of that folder cannot be imported, or is refused; None: anything else is wrong.

    All other errors of the engine are findings of the run itself, and a failure of the harness is none.
    """
    told = plant.run(folder, *words, traceback=True).stderr.replace(f"{folder}/", "")
    frames = [(frame["file"], int(frame["line"]), frame["function"] or MODULE) for frame in FRAME.finditer(told)
              if frame["file"].startswith(plant.ENGINE)]  # fmt: skip
    (_, _, said), raised = told.strip().rpartition("\n")[-1].partition("instep: "), None
    if not said.startswith(FAILED):
        problem = Problem("failed", f"the engine is refused: {said}")
    elif any(function == MODULE for _, _, function in frames):
        (kind, _, says), (file, line, function) = said.removeprefix(FAILED).partition(": "), frames[-1]
        problem = Problem("failed", f"the engine cannot be imported: {kind} ({says}) at {file} line {line}")
        raised = Raised(kind, says, file, line, function, "", told)
    else:
        return None
    found = finding(Comparison(
        "interface", Tier.IDENTITY, 0, "start", NOWHERE, elements=1, worst=1.0, allowed=0.0, problem=problem,
        raised=raised,
    ))  # fmt: skip
    return {**msgspec.to_builtins(found), "where": "before the first event"}


def _ran(run: Callable[[], subprocess.CompletedProcess[str]]) -> tuple[int | None, float, str]:
    """Exit code, seconds, and the last line of the complaint."""
    begun = time.perf_counter()
    try:
        done = run()
    except subprocess.TimeoutExpired:
        return None, time.perf_counter() - begun, f"it did not end within {plant.TIMEOUT_S:.0f} s"
    return done.returncode, time.perf_counter() - begun, (done.stderr.strip().splitlines() or [""])[-1]
