"""Correct variants: engines that are right, no two alike, and how much of every allowance they use.

Consecutive variants share a scene, so its truth is run once (`run/reference_cache.py`). Leaves out: the op sets
(`correct_op_sets.py`), and engines that are a little wrong (`graded_errors.py`).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from instep.checks.known_wrong_states import Directed
from instep.checks.ops_on_own_inputs import once_in
from instep.diagnose import RunHistory, explained
from instep.options import FP8
from instep.oracle.recomputation import Runner
from instep.run.build_compared_engines import Plan, participants_of
from instep.run.lockstep import Lockstep
from instep.run.lockstep import run as run_all
from instep.run.replay import checks_for, oracle_for
from instep.setting import Setting
from instep.verdict import Comparison, Verdict
from instep_optimized.memory_addresses import StateLayout

from .calibration_traces import Scene, scene, trees
from .correct_op_sets import FORMS

CORRECT = "instep_proof.calibrate.correct_op_sets:"
A_SCENE = 8  # consecutive variants with the same scene
# (activations, states). If both are fp32, every sum is fp32. With states in fp8, KV is stored so, too.
STORAGES: tuple[tuple[str, str], ...] = (
    ("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16"),
    ("bfloat16", "float16"), ("bfloat16", FP8),
)
# (strategy of states, form of conv windows). The last pair does not serve narrow states: see `options.py`.
STRATEGIES: tuple[tuple[str, str], ...] = (
    ("snapshot", "windows"), ("columns", "widened"), ("rerun", "windows"), ("columns", "windows"),
    ("rerun", "widened"), ("snapshot", "widened"), ("lazy_rerun", "windows"),
)
CHAINS = ("widened",)  # forms that serve chains alone
LAYOUTS: tuple[StateLayout, ...] = ("VK", "KV")


@dataclass(frozen=True)
class Variant:
    """form        how sums are formed: one of `correct_op_sets.FORMS`, or the name of an op set
    storage     dtype of activations, of states
    scene       model, chunk sizes, accepted counts
    """

    number: int
    form: str
    storage: tuple[str, str]
    strategy: str
    conv: str
    layout: StateLayout
    scene: int

    @property
    def ops(self) -> str:
        return f"{CORRECT}{self.form}_{self.number}" if self.form in FORMS else self.form

    def plan(self, on: Scene, device: str) -> Plan:
        scaled = self.storage[1] == FP8
        falls = self.storage[1] != "float32" and self.scene % 2 == 1  # narrow states, in every second scene
        return on.plan(Setting(
            self.ops, device, self.storage[0], self.layout, strategy=self.strategy, conv=self.conv,
            state_dtype=self.storage[1], kv_dtype=FP8 if scaled else None,
            state_rounding=f"stochastic:{self.number}" if falls else None,
        ))


def variants(count: int, op_sets: Iterable[str] = ()) -> Iterator[Variant]:
    """The first `count` variants. Forms, storages, strategies and scenes change with different periods, so all combine.

    op_sets: further correct op sets, which run unchanged; they store states in fp32.
    """
    forms, others = [*FORMS, *op_sets], tuple(op_sets)
    for number in range(count):
        form, storage = forms[number % len(forms)], STORAGES[(number + number // len(STORAGES)) % len(STORAGES)]
        if form in others:
            storage = storage[0], "float32"
        fitting = STRATEGIES if storage[1] == "float32" else STRATEGIES[:-1]
        if trees(number // A_SCENE):
            fitting = tuple(one for one in fitting if one[1] not in CHAINS)
        strategy, conv = fitting[number // len(forms) % len(fitting)]
        yield Variant(number, form, storage, strategy, conv, LAYOUTS[number // 3 % 2], number // A_SCENE)


@dataclass
class Stage:
    """Runs variants on their scenes. The last scene is kept."""

    device: str = "cpu"
    pairs: int = 0  # of a block and a wrong state, over all runs
    _scene: tuple[int, Scene] | None = None

    def run(self, variant: Variant) -> Verdict:
        """Run every check over the whole scene, up to the first one that fails. None should fail."""
        scene = self.on(variant.scene)
        plan = variant.plan(scene, self.device)
        participants = participants_of(plan)
        oracle, history = oracle_for(plan, participants), RunHistory()
        assert oracle is not None and isinstance(oracle.runner, Runner), "the subject computes, and shows its layers"
        oracle.runner.once = once_in("plain", self.device, oracle.runner.products)  # all round as it does
        checks, lockstep = checks_for(oracle, participants.repeated_runs), Lockstep(scene.trace, participants)
        verdict = run_all(lockstep, (*checks, history))
        verdict.compared = explained(verdict.compared, lockstep.last, oracle, history)
        self.pairs += sum(check.pairs for check in checks if isinstance(check, Directed))
        return verdict

    def on(self, number: int) -> Scene:
        if self._scene is None or number != self._scene[0]:
            self._scene = number, scene(number)
        return self._scene[1]


def alarm(variant: Variant, one: Comparison) -> Mapping[str, object]:
    """A finding about a correct variant as data."""
    return {**described(variant), "event": one.event, "place": str(one.place), "check": one.check, "tier": one.tier,
            "diagnosis": one.diagnosis}  # fmt: skip


def described(variant: Variant) -> Mapping[str, object]:
    """The variant as data, for the result file."""
    return {
        "number": variant.number, "form": variant.form, "activations": variant.storage[0], "states": variant.storage[1],
        "strategy": variant.strategy, "conv": variant.conv, "layout": variant.layout, "scene": variant.scene,
    }  # fmt: skip
