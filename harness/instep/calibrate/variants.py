"""Correct variants: engines that are right, no two alike, and how much of every allowance they use.

Consecutive variants share a scene, so its truth is run once. Leaves out: engines that are a little wrong (`graded.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from instep_optimized.layout import StateLayout
from instep_reference.contract.engine import Event

from ..checks.directed import Directed
from ..explain import Older, explained
from ..player import Player, Side
from ..replay.lockstep import Lockstep
from ..replay.lockstep import run as run_all
from ..replay.participant import Participant
from ..replay.participants import Participants, Plan, participants_of
from ..replay.replay import checks_for, oracle_for
from ..replay.setting import FP8, Setting
from ..verdict import Verdict
from .correct_variants import FORMS
from .scenes import Scene, scene

CORRECT = "instep.calibrate.correct_variants:"
A_SCENE = 8  # consecutive variants with the same scene
# (activations, states). If both are fp32, every sum is fp32. With states in fp8, KV is stored so, too.
STORAGES: tuple[tuple[str, str], ...] = (
    ("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16"),
    ("bfloat16", FP8),
)
# (strategy of states, form of conv windows). The last pair does not serve narrow states: see `options.py`.
STRATEGIES: tuple[tuple[str, str], ...] = (
    ("snapshot", "windows"), ("columns", "widened"), ("rerun", "windows"), ("columns", "windows"),
    ("rerun", "widened"), ("snapshot", "widened"), ("lazy_rerun", "windows"),
)
LAYOUTS: tuple[StateLayout, ...] = ("VK", "KV")


@dataclass(frozen=True)
class Variant:
    """form        how sums are formed: one of `correct_variants.FORMS`, or the name of an op set
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
        return on.plan(Setting(
            self.ops, device, self.storage[0], self.layout, strategy=self.strategy, conv=self.conv,
            state_dtype=self.storage[1], kv_dtype=FP8 if self.storage[1] == FP8 else None,
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
        strategy, conv = fitting[number // len(forms) % len(fitting)]
        yield Variant(number, form, storage, strategy, conv, LAYOUTS[number // 3 % 2], number // A_SCENE)


@dataclass
class Stage:
    """Runs variants on their scenes. The answers of truth and rounded reference on the last scene are kept."""

    device: str = "cpu"
    pairs: int = 0  # of a block and a wrong state, over all runs
    _scene: tuple[int, Scene] | None = None
    _kept: dict[str, Kept] = field(default_factory=dict)

    def run(self, variant: Variant) -> Verdict:
        """Run every check over the whole scene, up to the first one that fails. None should fail."""
        scene = self.on(variant.scene)
        plan = variant.plan(scene, self.device)
        participants = self.participants(plan, "/".join(variant.storage))
        oracle, older = oracle_for(plan, participants), Older()
        checks, lockstep = checks_for(oracle), Lockstep(scene.trace, participants)
        verdict = run_all(lockstep, (*checks, older))
        verdict.compared = explained(verdict.compared, lockstep.last, oracle, older)
        self.pairs += sum(check.pairs for check in checks if isinstance(check, Directed))
        return verdict

    def on(self, number: int) -> Scene:
        if self._scene is None or number != self._scene[0]:
            self._scene, self._kept = (number, scene(number)), {}
        return self._scene[1]

    def participants(self, plan: Plan, storage: str) -> Participants:
        """All sides of a plan. Truth and rounded reference give their kept answers if they have run before."""
        participants = participants_of(plan)
        rounded = participants.rounded
        assert rounded is not None, "correct op sets compute"
        draw = participants.rounded_draw
        assert draw is not None, "what has a rounded run can draw it again"
        return replace(
            participants, truth=self._again("truth", lambda: participants.truth),
            rounded=self._again(storage, lambda: rounded),
            rounded_draw=lambda number: self._again(f"{storage} {number}", lambda: draw(number)),
        )

    def _again(self, name: str, make: Callable[[], Participant]) -> Participant:
        """The kept side of that name, from its first event on; `make` makes it the first time."""
        if name not in self._kept:
            self._kept[name] = Kept(make())
        self._kept[name].at = 0
        return self._kept[name]


class Kept(Participant):
    """A side that runs each event once and keeps its answer. `at`: how many events it has answered in this run."""

    def __init__(self, fresh: Participant) -> None:
        Player.__init__(self, fresh.name, fresh.engine, fresh.observers)
        self.activations, self.states, self.arithmetic = fresh.activations, fresh.states, fresh.arithmetic
        self.kept: list[Side] = []
        self.at = 0

    def serve(self, event: Event) -> Side:
        if self.at == len(self.kept):
            self.kept.append(super().serve(event))
        self.at += 1
        return self.kept[self.at - 1]


def described(variant: Variant) -> Mapping[str, object]:
    """The variant as data, for the result file."""
    return {
        "number": variant.number, "form": variant.form, "activations": variant.storage[0], "states": variant.storage[1],
        "strategy": variant.strategy, "conv": variant.conv, "layout": variant.layout, "scene": variant.scene,
    }  # fmt: skip
