"""The results of checks (`Comparison`, `Skipped`) and of a run (`Verdict`).

A run that compared nothing does not pass, and neither does a NaN. Leaves out: how anything is compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Literal, NamedTuple

from instep_reference.contract.place_names import STAGE_LEVEL, Place

from .finding_problem import Explained, Problem, WrongContent, sentence
from .options import tiers_named

if TYPE_CHECKING:
    import torch


class Tier(Enum):
    """The strongest applicable comparison of a probe; see `tier_allowances.py` for the constants."""

    IDENTITY = "T0"
    BITWISE = "T1"
    DERIVED = "T2"
    DIRECTED = "T2d"
    PROPAGATED = "T3"
    DECISIONS = "T4"


def tiers_of(words: Iterable[str]) -> frozenset[Tier]:
    """The tiers that the words name, such as T0,T2d; every tier where there are no words."""
    return frozenset(map(Tier, tiers_named(words))) or frozenset(Tier)


TIES = "ties"  # the check that counts all choices that could not be decided
UNDECIDABLE = "undecidable"  # the check that counts wrong states that could not be distinguished from the right one


class Exit(IntEnum):
    """Exit codes of every command."""

    AGREED = 0
    DIVERGED = 1
    BAD_INPUT = 2
    INCONCLUSIVE = 3
    HARNESS_FAILED = 4

    @classmethod
    def worst(cls, verdicts: Iterable[Exit]) -> Exit:
        """The code of several runs: a divergence first, then inconclusive, then agreement; inconclusive for no run."""
        found = set(verdicts)
        return next((code for code in (cls.DIVERGED, cls.INCONCLUSIVE, cls.AGREED) if code in found), cls.INCONCLUSIVE)


@dataclass(frozen=True)
class Raised:
    """An exception that the subject raised.

    error, `says`          its type and its message
    file, line, function   the innermost frame in the subject's code, not in torch, a library or the harness
    own                    the traceback from the first frame outside the harness; whole: every frame
    """

    error: str
    says: str
    file: str
    line: int
    function: str
    own: str
    whole: str


@dataclass(frozen=True)
class Sides:
    """The tensors of a finding about bits, for `explain/`. wrongs: the tensors that known mistakes would leave."""

    found: torch.Tensor
    right: torch.Tensor
    wrongs: Callable[[], Iterable[tuple[WrongContent, torch.Tensor]]] = tuple


@dataclass(frozen=True)
class Comparison:
    """One named thing that was compared at one event.

    event      number of the event in the trace, from 0; kind: such as "commit"
    place      stage, layer, component; request, slot, head, columns and rank as far as they are known
    elements   compared numbers; blocks: blocks that were judged one by one
    worst      the largest measured quantity, in the units of `allowed` (an error, a projection, a count of bytes)
    problem    what is wrong, as a code with fields; None means that it agrees
    undecided  blocks that the check could not decide, which it counts and caps itself
    pairs      pairs of a block and a wrong state, if `undecided` counts such pairs; 0: it counts blocks
    raised     the exception of the subject, if the finding is about one
    units      the units of the pool that are wrong, if the comparison is about a whole pool
    sides      the tensors, until the finding is explained (`instep.diagnose`)
    """

    check: str
    tier: Tier
    event: int
    kind: str
    place: Place
    elements: int
    worst: float
    allowed: float
    blocks: int = 1
    undecided: int = 0
    pairs: int = 0
    request: str | None = None
    slot: int | None = None
    head: int | None = None
    columns: tuple[int, int] | None = None
    rank: int | None = None
    problem: Problem | None = None
    raised: Raised | None = None
    units: tuple[int, ...] = ()
    sides: Sides | None = field(default=None, repr=False, compare=False)

    @property
    def agrees(self) -> bool:
        return self.elements > 0 and self.worst <= self.allowed

    @property
    def diagnosis(self) -> str:
        """The problem as a sentence, for readers: code decides by `problem` ("holds the state after 2 tokens")."""
        return "" if self.problem is None else sentence(self.problem)

    @property
    def explained(self) -> Explained | None:
        """The mistake that accounts for the finding; None: no known one does."""
        return None if self.problem is None else self.problem.mistake

    @property
    def lost(self) -> bool:
        """Whether the finding is about NaN or infinite numbers alone."""
        return self.problem is not None and self.problem.code == "not_finite"

    @property
    def used(self) -> float:
        """The used part of the allowance; up to 1 agrees. Exact tiers (allowed 0) give 0 or infinity."""
        if self.allowed > 0:
            return self.worst / self.allowed
        return 0.0 if self.worst == 0 else float("inf")

    def order(self) -> tuple[bool, int, int, int, int, int]:
        """The sort key of findings: the event, then the data flow in it. Totals of ties come last: they have no place.

        A length comes first, as it defines what the memory is. A commit chooses what to accept before it writes. KV
        that a draft event writes is scratch memory of its chain. Events that could not be decided come last.
        """
        place, kind = self.place, self.kind
        scratch = kind == "draft" and place.component in ("keys", "values")
        stage, step, layer, component = (place._replace(stage="chain.1") if scratch else place).order()
        ahead = place.component == "length" or (kind == "commit" and place[::2] == ("trunk", "pick"))
        level = STAGE_LEVEL - 1 if ahead else layer
        return self.check in (TIES, UNDECIDABLE), self.event, stage, step, level, component


def prefer_shared(compared: Sequence[Comparison]) -> list[Comparison]:
    """Name the mistake that explains most findings of an event, if several mistakes leave equal bits."""
    votes = Counter(
        (found.event, key) for found in compared if not found.agrees and found.explained is not None
        for key in {mistake.key for mistake in found.explained.equal}
    )
    return [_renamed(found, votes) for found in compared]


def _renamed(found: Comparison, votes: Mapping[tuple[int, str], int]) -> Comparison:
    if found.agrees or found.problem is None or found.problem.mistake is None or not found.problem.mistake.equal:
        return found
    mistake = found.problem.mistake
    best = max(mistake.equal, key=lambda known: votes[found.event, known.key])
    return replace(found, problem=replace(found.problem, mistake=replace(mistake, says=best.says)))


@dataclass(frozen=True)
class Skipped:
    """Something that was not compared, and why. where: the place and the request, if there is one."""

    check: str
    event: int
    reason: str
    where: str = ""


Cause = Literal["stress", "graph", "op", "place", "memory", "unconfirmed"]


@dataclass(frozen=True)
class Located:
    """The confirmed cause of the first finding: the change that makes everything after it agree again.

    cause    stress: without stress; graph: without graphs; op: with an op of another set; place: with the reference's
             tensor there; memory: wrong memory was written, and its readers agree with the reference's memory;
             unconfirmed: no change helped
    op       the op that was swapped, or that produces the place, if one is known
    `says`   the sentence for readers; options: what to add to `instep replay` to see it
    hints    other observations; replays: how often the trace was run
    """

    finding: Comparison
    cause: Cause
    op: str | None
    says: str
    options: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    replays: int = 0


class Stressed(NamedTuple):
    """The acts of one kind of stress (`run/stress.py`).

    times: their number; says: the same as a sentence; idle: why there may be none
    """

    times: int
    says: str
    idle: str = ""


INTERRUPTED = "it was interrupted"


@dataclass
class Verdict:
    """All comparisons of a run. If the subject computed nothing, agreement about slots does not pass.

    Neither does a run in which graphs of prompts were captured, and none was replayed, nor one with pipeline stages in
    which no commit was relayed or no event had several of the requested micro-batches, nor one of a data-parallel group
    in which no event had rows of several replicas, nor one under a kind of stress that never acted.
    """

    compared: list[Comparison] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    events: int = 0
    unserved: int = 0  # events that name only requests that the subject could not continue
    served: bool = True  # False: no event made the subject compute anything
    stopped: str = ""  # why the run ended before its last event; empty: it did not
    segmented: bool = False  # whether the subject declares graphs of forwards with prompts
    prompts: int = 0  # forwards with prompts;  replayed: of these, the ones that ran in graphs
    replayed: int = 0
    stages: int = 1  # pipeline stages of the subject
    relayed: int = 0  # commits that its last stage relayed to the others
    micro_batches: int = 1  # into how many its stages cut a batch, at most
    overlapped: int = 0  # events with several of them
    replicas: int = 1  # of the subject, if it is a data-parallel group
    shared: int = 0  # events with rows of several of them
    stressed: dict[str, Stressed] = field(default_factory=dict)  # by kind of stress

    def add(self, results: Iterable[Comparison | Skipped]) -> list[Comparison]:
        """Add results; return those that disagree."""
        bad = []
        for result in results:
            if isinstance(result, Skipped):
                self.skipped.append(result)
                continue
            self.compared.append(result)
            if not result.agrees:
                bad.append(result)
        return bad

    @property
    def findings(self) -> list[Comparison]:
        """Everything that disagrees, first finding first."""
        return sorted((c for c in self.compared if not c.agrees), key=Comparison.order)

    @property
    def elements(self) -> int:
        return sum(c.elements for c in self.compared)

    @property
    def undecided(self) -> bool:
        """Whether all findings are events of which too little could be decided: nothing was seen to be wrong."""
        findings = self.findings
        return bool(findings) and all(one.check == UNDECIDABLE for one in findings)

    @property
    def exit(self) -> Exit:
        if self.findings and not self.undecided:
            return Exit.DIVERGED
        unused = (self.segmented and not self.replayed) or (self.stages > 1 and not self.relayed)
        unused |= (self.replicas > 1 and not self.shared) or (self.micro_batches > 1 and not self.overlapped)
        unused |= not all(one.times for one in self.stressed.values())
        if self.undecided or self.stopped or unused or not (self.elements and self.served):
            return Exit.INCONCLUSIVE
        return Exit.AGREED
