"""The input and the result of a gate.

Leaves out: how the result is found (`gate.py`), and how it is shown (`result_document.py`).
"""

from dataclasses import dataclass, field
from pathlib import Path

from instep.setting import Setting
from instep.verdict import Exit
from instep_reference.contract.errors import BadInput

from .cases import CASES, USUAL
from .clock import judged
from .statistics import FEWEST_PAIRS, Ratio, Say, Spread, resolves, say

PLAIN = Setting()
SAMPLES = 100
MOST_PATIENCE_S = 1e9  # thirty years; the system cannot wait much longer


@dataclass(frozen=True)
class Question:
    """The input of a gate.

    setting     how both arms are set up; a source tree runs its op set
    pairs       minimum number of pairs
    allowed     the allowed slow-down, 0.03 is 3%
    batch, rounds, num_steps  of the course
    clocks      the judged clocks; empty: all that the device has. Others are not read
    patience_s  how long an arm may take for an answer, including its checks
    typed       fields of the setting that the user gave, which each arm gets even if they are today's defaults
    """

    before: str
    after: str
    checkpoint: Path
    cases: tuple[str, ...] = USUAL
    pairs: int = FEWEST_PAIRS
    allowed: float = 0.03
    setting: Setting = PLAIN
    batch: int = 4
    rounds: int = 2
    num_steps: int = 3
    seed: int = 0
    patience_s: float = 600.0
    clocks: tuple[str, ...] = ()
    typed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        cases, clocks = set(self.cases), judged(self.setting.device)
        for name, found, right, expected in (
            ("--case", ", ".join(self.cases), bool(cases) and cases <= set(CASES), f"some of {', '.join(CASES)}"),
            ("--clock", ", ".join(self.clocks), set(self.clocks) <= set(clocks), f"some of {', '.join(clocks)}"),
            ("--pairs", self.pairs, self.pairs >= FEWEST_PAIRS, f"at least {FEWEST_PAIRS}: fewer decide nothing"),
            ("--allowed", self.allowed, 0 < self.allowed < 1, "a part between 0 and 1, as 0.03"),
            ("--batch", self.batch, self.batch > 0, "at least 1"),
            ("--rounds", self.rounds, self.rounds > 0, "at least 1"),
            ("--seed", self.seed, self.seed >= 0, "at least 0"),
            ("--patience", self.patience_s, 0 < self.patience_s <= MOST_PATIENCE_S,
             f"more than 0 seconds, at most {MOST_PATIENCE_S:g}"),
        ):
            if not right:
                raise BadInput(name, found=found, expected=expected)
        chosen = tuple(clock for clock in clocks if clock in self.clocks)
        object.__setattr__(self, "clocks", () if chosen == clocks else chosen)  # one form for each choice

    @property
    def judged_by(self) -> tuple[str, ...]:
        """The clocks that are judged, in the order in which they are read."""
        return self.clocks or judged(self.setting.device)


@dataclass(frozen=True)
class Judged:
    """One case by one clock. Spreads in seconds per event.

    samples  of pairs, at most SAMPLES of them in the order in which they were taken: before, after, before again
    """

    case: str
    clock: str
    before: Spread
    after: Spread
    change: Ratio
    same: Ratio
    says: Say
    samples: tuple[tuple[float, ...], ...] = ()


@dataclass
class Report:
    """The result of the gate. `refused`: why an arm was not timed; then no arm was.

    unjudged    it was refused because its checks could judge too little, and found nothing wrong
    decided     pairs on which *slower* was decided; later ones only separate *held* from *inconclusive*
    served      arm -> package -> digest of the source that ran
    acceptance  arm -> its own count of accepted drafts a window
    elements    numbers compared with the gate's own reference, before and after timing
    laps        laps of the course per sample
    """

    question: Question
    refused: str = ""
    judged: list[Judged] = field(default_factory=list)
    served: dict[str, dict[str, str]] = field(default_factory=dict)
    acceptance: dict[str, float] = field(default_factory=dict)
    reference_acceptance: float = 0.0
    elements: int = 0
    laps: int = 0
    unjudged: bool = False
    decided: int = 0

    def says(self, case: str) -> Say:
        """Slower if any clock finds that. Held if none does, at least one finds held, and none leaves it open.

        So a clock that is too noisy revokes nothing. A slow-down that only this clock would have seen is not known to
        be held.
        Nothing is held if a clock can be read before the change and never after it: the change removed the clock.
        """
        judged = [one for one in self.judged if one.case == case]
        found = {one.says for one in judged}
        if Say.SLOWER in found:
            return Say.SLOWER
        lost = any(one.same.pairs and not one.change.pairs for one in judged)
        return Say.HELD if Say.HELD in found and not lost and not self.open(case) else Say.NOISY

    def open(self, case: str) -> list[Judged]:
        """The clocks that should decide, because A/A resolves what is allowed or the change exceeds it, and do not.

        Such a clock shows a change that may be slower than is allowed. It is not noise, so no other clock outvotes it.
        """
        noisy = [one for one in self.judged if one.case == case and one.says is Say.NOISY]
        return [
            one for one in noisy if self.late(one)
            or (one.change.pairs >= FEWEST_PAIRS and resolves(one.same, self.question.allowed))
        ]

    def late(self, one: Judged) -> bool:
        """Whether a clock finds slower only with pairs after those on which it is decided."""
        return one.says is Say.NOISY and say(one.change, one.same, self.question.allowed) is Say.SLOWER

    @property
    def exit(self) -> Exit:
        found = {self.says(case) for case in self.question.cases}
        if self.unjudged:
            return Exit.INCONCLUSIVE
        if self.refused or Say.SLOWER in found:
            return Exit.DIVERGED
        return Exit.INCONCLUSIVE if Say.NOISY in found else Exit.AGREED
