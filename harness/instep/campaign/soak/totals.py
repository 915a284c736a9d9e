"""The totals of a soak over all sessions, from which the next session continues: their file, and their document.

Leaves out: running it (`soak.py`).
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from instep_reference.contract.errors import BadInput, bytes_of

from ...report.divergence_message import divergence
from ...report.document import Document, Kind, Listing
from ...report.result import Result
from ...report.result import Session as Called
from ...run.replay import Outcome
from ...trace.file import decode
from ...verdict import Exit
from ..fuzz.coverage import CONDITIONS, untested


class Session(Called):
    """One call of the command, and its share of the totals.

    memory_mib  memory of the process after its first stretch and at its end: a soak must not grow
    """

    rounds: int = 0
    events: int = 0
    elements: int = 0
    memory_mib: tuple[int, ...] = ()


class Found(msgspec.Struct, forbid_unknown_fields=True):
    """A finding. round: of the whole soak; again: whether the written trace shows it, too."""

    round: int
    trace: str
    again: bool
    message: str


class Soaked(msgspec.Struct, forbid_unknown_fields=True):
    """The totals of one setting.

    setting, model  must be the same in every session
    engines         how often they were rebuilt; stretches: how often all requests left
    conditions      condition (`campaign/fuzz/coverage.py`) -> events that met it
    refused         draws that the rules refused
    """

    setting: dict[str, Any]
    model: str
    seed: int
    every: int = 20
    stretch: int = 200
    engines: int = 0
    stretches: int = 0
    refused: int = 0
    conditions: dict[str, int] = {}
    sessions: list[Session] = []
    found: list[Found] = []

    @property
    def name(self) -> str:
        return str(self.setting["ops"])

    @property
    def rounds(self) -> int:
        return sum(session.rounds for session in self.sessions)

    @property
    def events(self) -> int:
        return sum(session.events for session in self.sessions)

    @property
    def elements(self) -> int:
        return sum(session.elements for session in self.sessions)

    @property
    def seconds(self) -> float:
        return sum(session.seconds for session in self.sessions)

    @property
    def exit(self) -> Exit:
        """The verdict over all sessions. A finding stays a finding; nothing compared or tested is no pass."""
        if self.found:
            return Exit.DIVERGED
        return Exit.AGREED if self.elements and not self.untested else Exit.INCONCLUSIVE

    @property
    def untested(self) -> list[str]:
        """Sentences about options that no session tested."""
        return untested(self.setting, self.conditions)

    def count(self, met: Counter[str]) -> None:
        self.conditions = dict(Counter(self.conditions) + met)


class _Kept(msgspec.Struct):
    soaked: list[Soaked]


def read(path: Path | None) -> list[Soaked]:
    """The sums in a file; none where there is no file yet."""
    if path is None or not path.is_file():
        return []
    kept: _Kept = decode(bytes_of(path), _Kept, str(path), "a file that `instep soak` wrote")
    return kept.soaked


def going_on(runs: list[Soaked], begun: Soaked, path: Path | None) -> Soaked:
    """The run to go on with: the one of the same op set and seed in the file, or `begun`, which joins it."""
    for run in runs:
        if (run.name, run.seed) == (begun.name, begun.seed):
            for field in ("setting", "model", "every", "stretch"):
                if getattr(run, field) != getattr(begun, field):
                    raise BadInput(f"{path}: {field} of {run.name}", found=getattr(begun, field),
                                   expected=f"{getattr(run, field)}, with which it was begun")  # fmt: skip
            return run
    runs.append(begun)
    return begun


def join(runs: list[Soaked], path: Path) -> None:
    """Add the runs of another file, which used another op set or another seed."""
    here = {(run.name, run.seed) for run in runs}
    for run in read(path):
        if (run.name, run.seed) in here:
            raise BadInput(f"--join {path}", found=f"a soak of {run.name} with seed {run.seed}, which is there already",
                           expected="other op sets or seeds: equal ones draw equal rounds")  # fmt: skip
        runs.append(run)


def result(runs: list[Soaked], commit: str | None) -> Result:
    """The file: totals for readers, and everything that the next session needs."""
    devices = sorted({str(run.setting["device"]) for run in runs})
    sums = [
        {"ops": run.name, "seed": run.seed, "rounds": run.rounds, "events": run.events, "elements": run.elements,
         "minutes": round(run.seconds / 60, 1), "rounds_per_minute": round(60 * run.rounds / max(run.seconds, 1e-9), 1),
         "exit": int(run.exit)}
        for run in runs
    ]  # fmt: skip
    return Result(Exit.worst(run.exit for run in runs), ", ".join(devices), {
        "runs": sums, "soaked": runs,
    }, commit)  # fmt: skip


# ---- the document of the data

ONCE = " (once: its trace alone does not show it; what came before it decides)"


def document(runs: Sequence[Soaked], found: Outcome | None) -> Document:
    """A line per op set; then the conditions that were never met, and the finding of this session."""
    counts = ("seed", "rounds", "events", "elements", "minutes", "rounds a minute", "sessions", "found")
    heads: dict[str, Kind] = {"ops": "word", **dict.fromkeys(counts, "number")}
    rows, notes = list[tuple[str, ...]](), list[str]()
    for run in runs:
        minutes = run.seconds / 60
        rows.append((run.name, str(run.seed), f"{run.rounds:,}", f"{run.events:,}", f"{run.elements:,}",
                     f"{minutes:.1f}", f"{run.rounds / minutes if minutes else 0:.0f}", str(len(run.sessions)),
                     str(len(run.found))))  # fmt: skip
    for name in dict.fromkeys(run.name for run in runs):
        those = [run for run in runs if run.name == name]
        never = [one for one in CONDITIONS if not any(run.conditions.get(one) for run in those)]
        notes += [f"{name}: never met: {', '.join(never)}"] * bool(never)
        lacking = dict.fromkeys(says for run in those for says in run.untested)
        notes += [f"{name}, inconclusive: {says}" for says in lacking]
        held = [session.memory_mib for run in those for session in run.sessions[-1:] if session.memory_mib]
        if held:
            most = max(held, key=lambda mib: mib[-1] - mib[0])
            notes.append(f"{name}, last sessions: the process that grew most held {most[0]} to {most[-1]} MiB")
    messages = [
        f"{run.name}, round {one.round:,}: {one.message}{'' if one.again else ONCE}\n  {one.trace}"
        for run in runs for one in run.found
    ]  # fmt: skip
    messages += [] if found is None else [divergence(found)]
    bad = [number for number, run in enumerate(runs) if run.found]
    return Document("soak", Exit.worst(run.exit for run in runs), (), messages=messages, notes=notes,
                    tables=[Listing(heads, rows, "soak, all sessions", bad)])  # fmt: skip
