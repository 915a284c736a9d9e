"""Graded errors: the smallest error that each tier finds, place by place, next to the error of a correct engine.

An error in memory is made after the first commit that accepts a draft, in the state that the checks are shown. An error
in an op acts from the start and affects everything after it: `plain` with one result off in the first layer of its
kind, by a size that is part of the name, as `beta@0.001`:

    gates, beta, k   of one head, times 1 + size        qkv        one column, times 1 + size
    core, attended   of one head, times 1 + size        mlp        every row, times 1 + size
    logits           of one token, plus size times the row's largest
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
from instep_optimized import load
from instep_optimized.ops.op_protocols import Ops
from instep_reference.contract.engine import Commit
from instep_reference.contract.place_names import AFTER_LAYERS, Place
from instep_reference.contract.recurrences import GDN

from .allowance_use import Stage
from .calibration_traces import Scene

TOKEN = 7  # whose logit is off
COLUMN = 3


def __getattr__(name: str) -> Ops:
    """beta@0.001 and the like, for `--ops instep_proof.calibrate.graded_errors:beta@0.001`."""
    error, at, size = name.partition("@")
    if not at or error not in ERRORS:
        raise AttributeError(name)
    try:
        return with_error(error, float(size))
    except ValueError:
        raise AttributeError(name) from None


@dataclass(frozen=True)
class InjectedError:
    """op     whose result is off; place: where, in the first layer that has it (kind "linear" serves many places)
    off    (result, size) -> what is handed on instead
    """

    op: str
    place: Place
    off: Callable[[Any, float], Any]


def with_error(name: str, size: float) -> Ops:
    """`plain` with that error."""
    error, plain = ERRORS[name], load("plain")
    op = getattr(plain, error.op)

    def wrong(**given: Any) -> Any:
        result, to = op(**given), given["to"]
        return error.off(result, size) if error.place in (to if isinstance(to[0], Place) else (to,)) else result

    changed: dict[str, Any] = {error.op: wrong}
    return replace(plain, name=f"{name}@{size!r}", **changed)


def _head(x: torch.Tensor, size: float) -> torch.Tensor:
    """x [rows, heads, ...] with the first head times 1 + size."""
    return torch.cat((x[:, :1] * (1 + size), x[:, 1:]), dim=1)


def _of(name: str) -> Callable[[Any, float], Any]:
    return lambda inputs, size: inputs._replace(**{name: _head(getattr(inputs, name), size)})


def _column(x: torch.Tensor, size: float) -> torch.Tensor:
    x = x.clone()
    x[:, COLUMN] *= 1 + size
    return x


def _token(x: torch.Tensor, size: float) -> torch.Tensor:
    x = x.clone()
    x[:, TOKEN] += size * x.abs().amax(-1)
    return x


# A line is a place that can be off. Layer 0 is of GDN, layer 1 of attention (`calibration_traces.py`).
ERRORS: dict[str, InjectedError] = {
    "log_decay": InjectedError("gdn_inputs", Place("trunk", 0, "log_decay"), _of("log_decay")),
    "beta": InjectedError("gdn_inputs", Place("trunk", 0, "beta"), _of("beta")),
    "k": InjectedError("gdn_inputs", Place("trunk", 0, "k"), _of("k")),
    "qkv": InjectedError("linear", Place("trunk", 0, "qkv"), _column),
    "core": InjectedError(GDN.name, Place("trunk", 0, "core"), _head),
    "attended": InjectedError("attend", Place("trunk", 1, "attended"), _head),
    "mlp": InjectedError("mlp", Place("trunk", 0, "mlp"), lambda x, size: x * (1 + size)),
    "logits": InjectedError("lm_head", Place("trunk", AFTER_LAYERS, "logits"), _token),
}


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
        return lambda size: ran(f"instep_proof.calibrate.graded_errors:{name}@{size!r}")[0]
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
