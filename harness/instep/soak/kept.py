"""The file of a soak: its sums over all sessions, from which the next session goes on.

Leaves out: running it (`soak.py`).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from instep_reference.contract.errors import BadInput

from ..report.result import Result
from ..report.session import Session as Called
from ..verdict import Exit


class Session(Called):
    """One call of the command, and what it added.

    memory_mib  what the process held behind its first stretch and at its end: a soak must not grow
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
    """What one setting has been through.

    setting, model  must be the same in every session
    engines         how often they were made anew; stretches: how often every request left
    conditions      condition (`fuzz/coverage.py`) -> events that met it;  refused: draws that the rules refused
    """

    setting: dict[str, Any]
    model: str
    seed: int
    every: int
    stretch: int
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
        """What was ever found stays found; nothing compared is no pass."""
        if self.found:
            return Exit.DIVERGED
        return Exit.AGREED if self.elements else Exit.INCONCLUSIVE

    def count(self, met: Counter[str]) -> None:
        self.conditions = dict(Counter(self.conditions) + met)


def read(path: Path | None) -> list[Soaked]:
    """The sums in a file; none where there is no file yet."""
    if path is None or not path.is_file():
        return []
    try:
        runs = msgspec.json.decode(path.read_bytes(), type=dict[str, Any]).get("soaked")
        return msgspec.convert(runs, list[Soaked])
    except msgspec.MsgspecError as error:
        raise BadInput(str(path), found=str(error), expected="a file that `instep soak` wrote") from None


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
    """Take in the runs of another file, which went on elsewhere: their op set or their seed is another one."""
    if not path.is_file():
        raise BadInput("--join", found=f"no file {path}", expected="a file that `instep soak` wrote")
    here = {(run.name, run.seed) for run in runs}
    for run in read(path):
        if (run.name, run.seed) in here:
            raise BadInput(f"--join {path}", found=f"a soak of {run.name} with seed {run.seed}, which is there already",
                           expected="op sets or seeds of its own: the same ones draw the same rounds")  # fmt: skip
        runs.append(run)


def result(runs: list[Soaked], device: str, commit: str | None) -> Result:
    """The file: the sums for whoever reads it, and all that the next session needs."""
    sums = [
        {"ops": run.name, "seed": run.seed, "rounds": run.rounds, "events": run.events, "elements": run.elements,
         "minutes": round(run.seconds / 60, 1), "rounds_per_minute": round(60 * run.rounds / max(run.seconds, 1e-9), 1),
         "exit": int(run.exit)}
        for run in runs
    ]  # fmt: skip
    return Result(Exit.worst(run.exit for run in runs), device, {
        "runs": sums, "soaked": msgspec.to_builtins(runs),
    }, commit)  # fmt: skip
