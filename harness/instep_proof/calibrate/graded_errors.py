"""Graded errors: the smallest error that each tier finds, place by place, next to the error of a correct engine.

An error in memory is made after the first commit that accepts a draft, in the state that the checks are shown. An error
in an op acts from the start and affects everything after it. Leaves out: the errors in ops (`injected_errors.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from instep.checks.accumulated_errors import Propagated
from instep.checks.check_interface import Check
from instep.checks.decisions import Decisions
from instep.checks.known_wrong_states import Directed
from instep.checks.ops_on_own_inputs import OwnInputs, once_in
from instep.checks.recomputed_values import Derived
from instep.oracle.oracle import Oracle
from instep.oracle.recomputation import Recomputation
from instep.run.build_compared_engines import Plan, participants_of
from instep.run.compared_engine import RepeatedRuns
from instep.run.lockstep import Lockstep
from instep.setting import Setting
from instep.verdict import Comparison, Skipped, Tier
from instep.watch.event_context import EventContext
from instep_reference.contract.engine import Commit
from instep_reference.contract.place_names import Place

from .allowance_use import Stage
from .calibration_traces import Scene
from .injected_errors import ERRORS

SIZES = tuple(10.0**-decade for decade in range(9))
RUNS = 3  # scenes, one per shape of model; an error counts as found when it is in all of them
QUIET = 2  # sizes in a row that no tier finds, after which smaller ones are not tried
OWN = f"{Tier.DERIVED.value}, own inputs"
NUMBERS = (Tier.DERIVED.value, OWN, Tier.DIRECTED.value, Tier.PROPAGATED.value, Tier.DECISIONS.value)
STORAGES = ("float32", "bfloat16")  # of activations; states are fp32
TILE = 8  # columns

Mix = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


def _within(right: torch.Tensor, wrong: torch.Tensor) -> torch.Tensor:
    """Wrong in the first tile of the first head alone."""
    found = right.clone()
    found[0, :, :TILE] = wrong[0, :, :TILE]
    return found


# (the state after a commit, the one before, size) -> the wrong state
IN_MEMORY: dict[str, Mix] = {
    "state, one tile": lambda right, before, size: _within(right, right * (1 + size)),
    "state, part of the one before": lambda right, before, size: right + size * (before - right),
    "state, one tile, part of the one before":
        lambda right, before, size: _within(right, right + size * (before - right)),
}


@dataclass(frozen=True)
class Limit:
    """The results for one injected error.

    correct  the largest relative error of a correct engine at that place
    found    tier -> the smallest size from which on every run finds it, None if there is none
    """

    place: str
    storage: str
    correct: float
    found: Mapping[str, float | None]
    runs: int
    sizes: int


def judged_as(one: Comparison) -> str:
    """Its tier; T2 has two pieces."""
    return OWN if one.check == OwnInputs.name else one.tier.value


def names() -> tuple[str, ...]:
    return (*ERRORS, *IN_MEMORY)


def limit(name: str, storage: str, stages: Sequence[Stage]) -> Limit:
    """From the largest size down; a stage is a run, and keeps its scene."""
    place = ERRORS[name].place if name in ERRORS else Place("trunk", 0, "state")
    trials = [_trial(stage, name, storage, run) for run, stage in enumerate(stages)]
    none = [one for trial in trials for one in trial(0.0)]
    if wrong := next((one for one in none if not one.agrees), None):
        said = f"{wrong.check} finds an injected error of size 0 at {wrong.place}: {wrong.diagnosis}"
        raise RuntimeError(f"{name}, {storage}: {said}")
    correct = max(one.worst for one in none if judged_as(one) == Tier.DERIVED.value and one.place == place)
    found: dict[str, float | None] = dict.fromkeys(NUMBERS)
    lost: set[str] = set()
    quiet = tried = 0
    for size in SIZES:
        seen = [{judged_as(one) for one in trial(size) if not one.agrees} for trial in trials]
        tried, quiet = tried + 1, 0 if any(seen) else quiet + 1
        for tier in NUMBERS:
            if all(tier in each for each in seen) and tier not in lost:
                found[tier] = size
            elif found[tier] is not None:
                lost.add(tier)
        if quiet == QUIET:
            break
    return Limit(name, storage, correct, found, len(stages), tried)


def _trial(stage: Stage, name: str, storage: str, run: int) -> Callable[[float], Sequence[Comparison]]:
    """size -> what the checks of numbers say on that scene."""
    scene = stage.on(run)

    def ran(ops: str) -> _Ran:
        return _to_the_commit(stage, scene, scene.plan(Setting(ops, stage.device, storage)))

    if name in ERRORS:
        return lambda size: ran(f"instep_proof.calibrate.injected_errors:{name}@{size!r}")[0]
    _, context, pieces, rest, runs = ran("plain")
    return lambda size: _judged(_disturbed(context, IN_MEMORY[name], size), _checks(_Known(pieces, rest), runs))


# All comparisons up to the first commit that accepts a draft, its context, the oracle's recomputations, further draws.
_Ran = tuple[
    list[Comparison], EventContext, Sequence[Recomputation | Skipped], Oracle, RepeatedRuns | None
]  # fmt: skip


def _to_the_commit(stage: Stage, scene: Scene, plan: Plan) -> _Ran:
    participants = participants_of(plan)
    lockstep, said = Lockstep(scene.trace, participants), list[Comparison]()
    declared, setting = participants.declared, plan.setting
    oracle = Oracle(plan.checkpoint, declared.rounds, setting.width, declared.products,
                    once_in("plain", setting.device, declared.products))  # which injected errors change
    checks = _checks(oracle, participants.repeated_runs)
    while True:
        context = lockstep.step()
        said += _judged(context, checks)
        if isinstance(context.event, Commit) and any(path.nodes for path in context.event.accepted or ()):
            return said, context, oracle.at(context), oracle, participants.repeated_runs


def _checks(oracle: Oracle, repeated_runs: RepeatedRuns | None) -> tuple[Check, ...]:
    return Directed(oracle), Derived(oracle), OwnInputs(oracle, once=False), Propagated(repeated_runs), Decisions()


def _judged(context: EventContext, checks: Sequence[Check]) -> list[Comparison]:
    return [one for check in checks for one in check(context) if isinstance(one, Comparison)]


def _disturbed(context: EventContext, mix: Mix, size: float) -> EventContext:
    """The state of the first request that had a draft accepted, in the first layer."""
    assert isinstance(context.event, Commit) and context.event.accepted is not None
    name = next(n for n, p in zip(context.event.requests, context.event.accepted, strict=True) if p.nodes)
    after, before = context.subject.after[name], context.subject.before[name]
    wrong = replace(after, state={**after.state, 0: mix(after.state[0], before.state[0], size)})
    return replace(context, subject=replace(context.subject, after={**context.subject.after, name: wrong}))


class _Known(Oracle):
    """Answers for one context with any states after it: recomputations start from the memory before."""

    def __init__(self, pieces: Sequence[Recomputation | Skipped], of: Oracle) -> None:
        self.pieces, self.runner, self.config, self.rounds = list(pieces), of.runner, of.config, of.rounds

    def at(self, context: EventContext) -> list[Recomputation | Skipped]:
        return self.pieces
