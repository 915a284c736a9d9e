"""Long runs of correct engines, for the check that adds up errors of a run: what it accuses, and which slips it finds.

The power follows from the same runs. A slip of size s moves every error by s times the truth, so the sums of a correct
engine tell which s would have been found (`Samples.judged`); tests plant real slips. In 16 bits a slip changes only the
numbers that round to another neighbour, so there no power follows.
Leaves out: the engines, and the other checks, which see single events (both in `allowance_use.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from instep.checks.one_sided_errors import OneSided, Samples
from instep.oracle.recomputation import Runner, Sampled, true
from instep.oracle.single_layer_run import Work
from instep.oracle.states_with_folded_tokens import Run, Runs
from instep.run.build_compared_engines import participants_of
from instep.run.lockstep import Lockstep
from instep.run.lockstep import run as run_all
from instep.run.replay import oracle_for
from instep.tier_allowances import CONSTANT_ULPS, one_sided_limit
from instep_reference.contract.place_names import Place

from .allowance_use import Variant, alarm, described
from .calibration_traces import Scene, scene

LONG = 24  # rounds
SLIPS = (1e-7, 1.5e-7, 2e-7, 3e-7, 5e-7, 1e-6, 1e-5)


@dataclass
class LongRuns:
    """looks: how often a place was judged; groups: its heads and channels, over all looks; used: the largest part of a
    limit, and by: the engine and the place
    found: component -> [groups, those at which a slip of each of SLIPS is found], of engines in fp32
    """

    looks: int = 0
    groups: int = 0
    used: float = 0.0
    by: str = ""
    ran: list[Mapping[str, object]] = field(default_factory=list)
    alarms: list[Mapping[str, object]] = field(default_factory=list)
    found: dict[str, list[int]] = field(default_factory=dict)
    _scene: tuple[int, Scene] | None = None

    def run(self, variant: Variant) -> None:
        """Run one engine through its scene, with this check alone."""
        if self._scene is None or self._scene[0] != variant.scene:
            self._scene = variant.scene, scene(variant.scene, LONG)
        made = self._scene[1]
        plan = variant.plan(made, "cpu")
        participants = participants_of(plan)
        participants.rounded = participants.repeated_runs = None
        oracle = oracle_for(plan, participants)
        assert oracle is not None and isinstance(oracle.runner, Runner), "the subject computes, and shows its layers"
        had = oracle.runner
        oracle.runner = _TruthAlone(had.truth, had.rounded, had.rounds, had.products)
        check = OneSided(oracle)
        verdict = run_all(Lockstep(made.trace, participants), (check,))
        judged = [one for one in verdict.compared if one.check == check.name]
        self.looks, self.groups = self.looks + len(judged), self.groups + sum(one.blocks for one in judged)
        for one in judged:
            if one.used > self.used:
                self.used, self.by = one.used, f"{variant.form} {variant.number}, {one.place}"
        self.alarms += [alarm(variant, one) for one in verdict.findings]
        self.ran.append({**described(variant), "events": verdict.events, "looks": len(judged),
                         "used": max((one.used for one in judged), default=0.0)})  # fmt: skip
        if variant.storage == ("float32", "float32"):
            for (_, _, component), samples in check.samples.items():
                self._slipped(component, samples)

    def _slipped(self, component: str, samples: Samples) -> None:
        if not samples.looks:
            return
        eps = torch.finfo(torch.float32).eps
        found = self.found.setdefault(component, [0] * (1 + len(SLIPS)))
        for number, size in enumerate(SLIPS):
            mean, limit = samples.slipped(size).judged(CONSTANT_ULPS * eps, one_sided_limit(samples.looks))
            found[1 + number] += int((np.abs(mean) > limit).sum())
        found[0] += len(mean)

    def add(self, data: Mapping[str, Any]) -> None:
        """Add what another process found, as its `as_data`."""
        self.looks, self.groups = self.looks + data["looks"], self.groups + data["groups"]
        if data["used"] > self.used:
            self.used, self.by = data["used"], data["by"]
        self.ran += data["ran"]
        self.alarms += data["alarms"]
        for component, counts in data["found"].items():
            had = self.found.setdefault(component, [0] * len(counts))
            self.found[component] = [one + other for one, other in zip(had, counts, strict=True)]

    def as_data(self) -> dict[str, object]:
        return {
            "rounds": LONG, "engines": len(self.ran), "looks": self.looks, "groups": self.groups, "used": self.used,
            "by": self.by, "slips": SLIPS, "found": self.found, "ran": self.ran, "alarms": self.alarms,
        }  # fmt: skip


class _TruthAlone(Runner):
    """Draws nothing, as this check needs no yardstick: the truth is in the place of the draws."""

    def __call__(
        self, work: Work, rows: int, base: torch.Tensor | None = None,
        own: Mapping[Place, torch.Tensor] = MappingProxyType({}),
    ) -> Sampled:
        truth = self.true(work)
        near = true(work, self.truth, own) if own and len(truth.places) > 1 else None
        if near is not None and near.route is not None:
            near = near.route.served(
                lambda ranking: true(work, self.truth, own, ranking), near, own, self.rounded.embedding.dtype)
        return Sampled(_alone(truth), None if near is None else _alone(near))


def _alone(run: Run) -> Runs:
    state = None if run.state is None else run.state[None]
    onward = {place: x[None] for place, x in run.onward.items()}
    return Runs(run, Run({place: x[None] for place, x in run.places.items()}, state, onward))
