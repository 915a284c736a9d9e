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
from ..fuzz.coverage import CONDITIONS, listed, untested


class Session(Called):
    """One call of the command, and its share of the totals. In a joined row: all calls of one revision and machine.

    memory_mib  memory of the process after its first stretch and at its end: a soak must not grow. A joined row
                has that of the process that grew most
    calls       the number of calls of the command
    """

    rounds: int = 0
    events: int = 0
    elements: int = 0
    memory_mib: tuple[int, ...] = ()
    calls: int = 1

    def add(self, other: "Session") -> None:
        """Add the calls of another process with the same revision and machine."""
        self.date = min(self.date, other.date)
        self.memory_mib = max(self.memory_mib, other.memory_mib, key=_grown)
        self.seconds = round(self.seconds + other.seconds, 1)
        for name in ("rounds", "events", "elements", "calls"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


def _grown(memory_mib: tuple[int, ...]) -> int:
    return memory_mib[-1] - memory_mib[0] if memory_mib else -1


class Found(msgspec.Struct, forbid_unknown_fields=True):
    """A finding. round: of the whole soak; again: whether the written trace shows it, too."""

    round: int
    trace: str
    again: bool
    message: str


SETTLED = ("setting", "model", "every", "stretch")  # equal in all sessions of a row


class Soaked(msgspec.Struct, forbid_unknown_fields=True):
    """The totals of one setting.

    setting, model  must be the same in every session
    joined          the seeds of other soaks whose counts this row has, too
    engines         how often they were rebuilt; stretches: how often all requests left
    conditions      condition (`campaign/fuzz/coverage.py`) -> events that met it
    impossible      condition that the settings of the last session cannot meet -> the setting
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
    impossible: dict[str, str] = {}
    sessions: list[Session] = []
    found: list[Found] = []
    joined: list[int] = []

    @property
    def seeds(self) -> list[int]:
        return [self.seed, *self.joined]

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

    def takes(self, other: "Soaked") -> bool:
        """Whether a soak with other seeds is summed here: both have the same setting, and both agree."""
        same = all(getattr(self, name) == getattr(other, name) for name in SETTLED)
        return same and self.exit is other.exit is Exit.AGREED

    def add(self, other: "Soaked") -> None:
        self.joined += other.seeds
        for name in ("engines", "stretches", "refused"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.count(Counter(other.conditions))
        for session in other.sessions:
            same = (one for one in self.sessions if (one.commit, one.machine) == (session.commit, session.machine))
            if (known := next(same, None)) is None:
                self.sessions.append(session)
            else:
                known.add(session)


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
        if run.name == begun.name and begun.seed in run.seeds:
            if run.joined:
                raise BadInput(f"{path}: {run.name} with seed {begun.seed}", found=f"a sum of {len(run.seeds)} seeds",
                               expected="another --seed, or a file of this seed that no --join wrote")  # fmt: skip
            for field in SETTLED:
                if getattr(run, field) != getattr(begun, field):
                    raise BadInput(f"{path}: {field} of {run.name}", found=getattr(begun, field),
                                   expected=f"{getattr(run, field)}, with which it was begun")  # fmt: skip
            return run
    runs.append(begun)
    return begun


def join(runs: list[Soaked], path: Path) -> None:
    """Add the runs of another file with other op sets or seeds. Those of one setting are one row if they agree."""
    here = {(run.name, seed) for run in runs for seed in run.seeds}
    for run in read(path):
        for seed in run.seeds:
            if (run.name, seed) in here:
                raise BadInput(f"--join {path}", found=f"a soak of {run.name} with seed {seed}, which is there already",
                               expected="other op sets or seeds: equal ones draw equal rounds")  # fmt: skip
        if (row := next((one for one in runs if one.takes(run)), None)) is None:
            runs.append(run)
        else:
            row.add(run)


def result(runs: list[Soaked], commit: str | None) -> Result:
    """The file: totals for readers, and everything that the next session needs."""
    devices = sorted({str(run.setting["device"]) for run in runs})
    sums = [
        {"ops": run.name, "seeds": run.seeds, "rounds": run.rounds, "events": run.events, "elements": run.elements,
         "minutes": round(run.seconds / 60, 1), "rounds_per_minute": round(60 * run.rounds / max(run.seconds, 1e-9), 1),
         "exit": int(run.exit)}
        for run in runs
    ]  # fmt: skip
    return Result(Exit.worst(run.exit for run in runs), ", ".join(devices), {
        "runs": sums, "soaked": runs,
    }, commit)  # fmt: skip


def _shown(seeds: Sequence[int]) -> str:
    return str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} and {len(seeds) - 1} more"


# ---- the document of the data

ONCE = " (once: its trace alone does not show it; what came before it decides)"


def document(runs: Sequence[Soaked], found: Outcome | None) -> Document:
    """A line per row; then the conditions that were never met, and the finding of this session."""
    counts = ("seeds", "rounds", "events", "elements", "minutes", "rounds a minute", "sessions", "found")
    heads: dict[str, Kind] = {"ops": "word", **dict.fromkeys(counts, "number")}
    rows, notes = list[tuple[str, ...]](), list[str]()
    for run in runs:
        minutes, calls = run.seconds / 60, sum(session.calls for session in run.sessions)
        rows.append((run.name, _shown(run.seeds), f"{run.rounds:,}", f"{run.events:,}", f"{run.elements:,}",
                     f"{minutes:.1f}", f"{run.rounds / minutes if minutes else 0:.0f}", str(calls),
                     str(len(run.found))))  # fmt: skip
    for name in dict.fromkeys(run.name for run in runs):
        those = [run for run in runs if run.name == name]
        never = [one for one in CONDITIONS if not any(run.conditions.get(one) for run in those)]
        without = {one: those[-1].impossible[one] for one in never if all(one in run.impossible for run in those)}
        never = [one for one in never if one not in without]
        notes += [f"{name}: never met: {', '.join(never)}"] * bool(never) + listed(name, without)
        lacking = dict.fromkeys(says for run in those for says in run.untested)
        notes += [f"{name}, inconclusive: {says}" for says in lacking]
        held = [session.memory_mib for run in those for session in run.sessions if session.memory_mib]
        if held:
            most = max(held, key=_grown)
            notes.append(f"{name}: the process that grew most held {most[0]} to {most[-1]} MiB")
    messages = [
        f"{run.name}, round {one.round:,}: {one.message}{'' if one.again else ONCE}\n  {one.trace}"
        for run in runs for one in run.found
    ]  # fmt: skip
    messages += [] if found is None else [divergence(found)]
    bad = [number for number, run in enumerate(runs) if run.found]
    return Document("soak", Exit.worst(run.exit for run in runs), (), messages=messages, notes=notes,
                    tables=[Listing(heads, rows, "soak, all sessions", bad)])  # fmt: skip
