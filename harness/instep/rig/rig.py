"""One trace, one model, one subject: build the sides, run them in step, and say what came of it.

Leaves out: telling it (`instep.report`). Every command builds a rig; everything it does can be done from Python:

    outcome = Rig(read(Path("fixtures/traces/adaptive.jsonl")), ops="plain").run()
    assert outcome.verdict.exit == Exit.AGREED
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from instep_optimized.layout import StateLayout
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.errors import BadInput

from ..checks import Check, for_labels, for_numbers
from ..observe.oracle import Oracle
from ..trace.file import Trace
from ..trace.legal import verified
from ..verdict import Verdict
from .history import History
from .lockstep import Lockstep, Progress, run
from .remembered import Remembered
from .sides import DEFAULTS, Plan, Sides, candidates, moves_labels, rounds, seat, wide

PACKAGES = ("instep_reference", "instep_optimized", "instep")


@dataclass(frozen=True)
class Outcome:
    """A verdict with its evidence.

    name      the trace's; of: how many events it has; elsewhere: the model, when it is not where the trace says
    seconds   wall clock per side, checks excluded; calls: op -> how often the subject's op set was called
    served    package -> sha256 of the source that was imported
    """

    name: str
    trace: Path
    elsewhere: Path | None
    plan: Plan
    verdict: Verdict
    history: History
    of: int
    seconds: dict[str, float]
    calls: dict[str, int]
    served: dict[str, str]


class Rig:
    """A trace with everything that is needed to run it, as often as wanted."""

    def __init__(
        self, trace: Trace, checkpoint: Path | None = None, *, ops: str = "plain", device: str = "cpu",
        dtype: str = "float32", layout: StateLayout = "VK", strategy: str = DEFAULTS.strategy,
        conv: str = DEFAULTS.conv, graphs: bool = DEFAULTS.graphs,
        checks: Callable[[Plan], Sequence[Check]] | None = None,
    ) -> None:
        self.trace, header = verified(trace), trace.header
        self.elsewhere = checkpoint
        directory = checkpoint or trace.path.parent / header.checkpoint.near
        opened = Checkpoint.open(directory)
        header.checkpoint.must_be(opened, directory, trace.path.name)
        adaptive = header.adaptive_file(f"{trace.path.name} line 1")
        known, _ = candidates(header.num_steps, adaptive)
        if set(header.candidates) != set(known):
            raise BadInput(f"{trace.path.name} line 1: candidates", found=header.candidates, expected=known)
        self.plan = Plan(
            opened, header.room(), header.num_steps, adaptive, ops, device, dtype, layout, strategy, conv, graphs
        )
        must_hold(opened, self.plan.width, dtype)
        self.checks = checks

    def run(
        self, *, until: int | None = None, layers: Iterable[int] | None = None, progress: Progress | None = None
    ) -> Outcome:
        """Replay from the start, up to and including event `until`; `layers` keeps the findings of these alone."""
        sides = seat(self.plan)
        lockstep = Lockstep(self.trace, sides)
        chosen = checks_for(self.plan, sides, self.trace.recorded) if self.checks is None else self.checks(self.plan)
        verdict = run(lockstep, chosen, until=until, layers=layers, progress=progress)
        ran = self.trace.events[: lockstep.next]
        return Outcome(
            self.trace.header.name, self.trace.path, self.elsewhere, self.plan, verdict,
            History.of(self.trace.header, ran, lockstep.law.book), len(self.trace.events), dict(lockstep.seconds),
            dict(sides.calls), served(),
        )


# What an engine keeps wide whatever its activations are.
KEPT_WIDE = (".A_log", ".dt_bias", ".linear_attn.norm.weight")


def must_hold(checkpoint: Checkpoint, width: torch.dtype, named: str) -> None:
    """Refuse activations that cannot hold the weights: an engine casts those, a rounding that no yardstick declares."""
    for name, tensor in checkpoint.tensors.items():
        if not name.endswith(KEPT_WIDE) and torch.promote_types(width, tensor.dtype) != width:
            stored = str(tensor.dtype).removeprefix("torch.")
            raise BadInput(
                "dtype", found=named, expected=f"one that holds the weights as they are stored ({name}: {stored})",
                hint="cast the checkpoint first; then both sides read the same weights",
            )


def checks_for(plan: Plan, sides: Sides, remembered: Mapping[str, torch.Tensor] | None = None) -> tuple[Check, ...]:
    """Every check that has a meaning for these sides; checks remember their run, so each run has its own.

    remembered: what a recorded trace's reference answered, if there is one.
    """
    if moves_labels(sides.ops):
        return for_labels()
    checks = for_numbers(Oracle(plan.checkpoint, rounds(plan, sides.ops), wide(plan.width)))
    return checks if remembered is None else (Remembered(remembered), *checks)


def served() -> dict[str, str]:
    """What source answered: a digest over the files of each package, wherever it was imported from."""
    found = {}
    for name in PACKAGES:
        root = Path(str(sys.modules[name].__file__)).parent
        digest = hashlib.sha256()
        for file in sorted(root.rglob("*.py")):
            digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
        found[name] = digest.hexdigest()
    return found
