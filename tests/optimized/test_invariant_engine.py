"""With the `invariant` ops speculation is plain decoding, bit for bit: hidden rows, states, KV, tokens, proposals.

Leaves out: single ops (`test_invariant.py`). Tiny models; every body runs interpreted on a CPU, native on a GPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import cycle
from pathlib import Path as File
from typing import Any

import pytest
import torch

from instep.kit.cases.guarded_pools import same_bits
from instep_optimized import OptimizedEngine, Options
from instep_optimized.commit import CONV_FORMS, STRATEGIES
from instep_optimized.kernels.invariant.linear import multiply
from instep_optimized.ops.op_protocols import Ops
from instep_optimized.ops.row_invariant_triton import INVARIANT
from instep_reference.contract.adaptive_controller_file import AdaptiveFile, Bracket
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Admit, Commit, Draft, Event, Forward, RequestState, Row, SetNumSteps
from instep_reference.contract.place_names import AFTER_LAYERS, Place
from support.inputs.checkpoints import TWO_LAYERS, Kind, write
from support.running.covering import WHOLE, few
from support.worlds.engine_and_reference import CAPACITY

HERE = "cuda" if torch.cuda.is_available() else "cpu"
NATIVE = HERE == "cuda"
pytestmark = [pytest.mark.slow, pytest.mark.gpu if NATIVE else pytest.mark.interpreted]
TRAINED = File(__file__).parents[2] / "fixtures" / "tiny"
FILE = AdaptiveFile(flat=Bracket(candidate_steps=(0, 1, 2, 3)))
FINAL = Place("trunk", AFTER_LAYERS, "final")
PROMPTS = {"x": (5, 9, 2, 33), "y": (40, 1, 1, 8, 63)}
WANTED, FURTHER = 9, 3  # tokens in memory at the end, and how far a last round may pass them
PAIRS = [(strategy, form) for strategy, form in zip(STRATEGIES, cycle(CONV_FORMS), strict=False)]
FP32, BF16 = torch.float32, torch.bfloat16


class Told:
    """An engine and its results: per request the tokens, the state at every length, every position's hidden row."""

    def __init__(self, checkpoint: Checkpoint, ops: Ops = INVARIANT, nodes: int | None = None, **options: Any) -> None:
        chosen, room = Options(device=HERE, **options), replace(CAPACITY, num_draft_tokens=nodes)
        steps, adaptive = (0, FILE) if nodes is None else (3, None)  # windows are trees: step counts stay
        self.engine = OptimizedEngine(checkpoint, ops, chosen, room, num_steps=steps, adaptive=adaptive)
        self.engine.watch(self._see)
        self.tokens: dict[str, list[int]] = {}
        self.states: dict[str, dict[int, RequestState]] = {}
        self.rows: dict[str, dict[int, torch.Tensor]] = {}
        self.accepted = 0
        self._final: list[torch.Tensor] = []

    def __call__(self, event: Event) -> Any:
        before = {name: max(states, default=0) for name, states in self.states.items()}
        answer = event.on(self.engine)
        if isinstance(event, Admit):
            self.tokens[event.request], self.states[event.request] = list(event.prompt), {}
            self.rows[event.request] = {}
        elif isinstance(event, Forward):
            self._keep_rows(event.rows, before)
            self._keep_states([row.request for row in event.rows if row.kind != "verify"])
            for name, root in answer.roots.items():
                self.tokens[name].append(root)
        elif isinstance(event, Commit):
            for name, index, bonus in zip(
                event.requests, answer.accept_index.tolist(), answer.bonus.tolist(), strict=True
            ):
                path, first, rows = [node for node in index if node >= 0], before[name], self.rows[name]
                self.accepted += len(path) - 1
                self.tokens[name] += [*(self.window[name][node - 1] for node in path[1:]), bonus]
                nodes = [rows.pop(first + node) for node in range(len(self.window[name]) + 1)]
                rows.update((first + j, nodes[node]) for j, node in enumerate(path))
            self._keep_states(event.requests)
        return answer

    def round_of(
        self, names: Sequence[str], steps: int, picks: tuple[tuple[int, ...], ...] | None, *also: Row,
        parents: tuple[tuple[int, ...], ...] | None = None,
    ) -> None:
        """Set the step count, draft, verify with other rows after it, accept the right drafts."""
        self(SetNumSteps(steps))
        drafted = self(Draft(tuple(names), picks, parents))
        drafts = drafted.drafts.tolist() if parents is None else picks or ()
        self.window = dict(zip(names, drafts, strict=True))
        self(Forward((*(Row(name, "verify") for name in names), *also)))
        self(Commit(tuple(names)))

    def _see(self, place: Place, tensor: torch.Tensor) -> torch.Tensor:
        if place == FINAL:
            self._final.append(tensor.clone())
        return tensor

    def _keep_rows(self, rows: Sequence[Row], before: dict[str, int]) -> None:
        (final,), self._final, begin = self._final, [], 0
        for row in rows:
            count = len(self.window[row.request]) + 1 if row.kind == "verify" else row.tokens
            for t in range(count):
                self.rows[row.request][before[row.request] + t] = final[begin + t]
            begin += count

    def _keep_states(self, names: Sequence[str]) -> None:
        for name in names:
            state = self.engine.state(name)
            self.states[name][state.length] = state


def differences(told: Told, plain: Told, name: str) -> list[str]:
    """The places where a request differs from plain decoding; every length and position of `told` is compared."""
    found = []
    shorter = min(len(told.tokens[name]), len(plain.tokens[name]))
    if told.tokens[name][:shorter] != plain.tokens[name][:shorter]:
        found.append("tokens")
    for length, state in told.states[name].items():
        for part in fields(RequestState):
            ours, theirs = getattr(state, part.name), getattr(plain.states[name][length], part.name)
            if not _same(ours, theirs):
                found.append(f"{part.name} after {length} tokens")
    for position, row in told.rows[name].items():
        if not same_bits(row, plain.rows[name][position]):
            found.append(f"hidden row {position}")
    return found


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(_same(ours[layer], theirs[layer]) for layer in ours)
    if isinstance(ours, torch.Tensor):
        return isinstance(theirs, torch.Tensor) and ours.shape == theirs.shape and same_bits(ours, theirs)
    return bool(ours == theirs)


def begin(told: Told, name: str, chunk: int = 3) -> None:
    """A prompt in two chunks: only the same chunks give the same bits."""
    told(Admit(name, PROMPTS[name]))
    told(Forward((Row(name, "prefill", chunk),)))
    told(Forward((Row(name, "prefill", len(PROMPTS[name]) - chunk),)))


def decoding(checkpoint: Checkpoint, *names: str, **options: Any) -> Told:
    """Requests alone, one after the other, token by token: what the others are held against."""
    told = Told(checkpoint, **options)
    for name in names:
        begin(told, name)
        while max(told.states[name]) < WANTED + FURTHER:
            told(Forward((Row(name, "decode"),)))
    return told


def right_drafts(plain: Told, told: Told, name: str, steps: int, right: int) -> tuple[int, ...]:
    """Drafts of which the first `right` continue plain decoding."""
    at = max(told.states[name]) + 1
    return tuple((plain.tokens[name][at + i] + (i >= right)) % 64 for i in range(steps))


def speculate(told: Told, plain: Told, schedule: Sequence[int], name: str = "x") -> None:
    """Rounds of the schedule's step counts; drafts are good ones, then the head's own, by turns."""
    number = 0
    while max(told.states[name]) < WANTED:
        steps = schedule[number % len(schedule)]
        told(SetNumSteps(steps))
        if steps:
            good = (right_drafts(plain, told, name, steps, right=steps - number // 2 % 2),) if number % 2 == 0 else None
            told.round_of((name,), steps, good)
        else:
            told(Forward((Row(name, "decode"),)))
        number += 1


MODELS: dict[str, tuple[Kind, dict[str, Any]]] = {"dense": ("dense", TWO_LAYERS), "moe": ("moe", TWO_LAYERS)}
Given = Callable[[str, torch.dtype], tuple[Checkpoint, Told]]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given:
    """A checkpoint, and its requests decoded plainly and alone, made once."""
    made: dict[tuple[str, torch.dtype], tuple[Checkpoint, Told]] = {}

    def of(name: str, dtype: torch.dtype) -> tuple[Checkpoint, Told]:
        if (name, dtype) not in made:
            kind, overrides = MODELS[name]
            checkpoint = Checkpoint.open(write(tmp_path_factory.mktemp("model"), kind, 5, **overrides))
            names = ("x", "y") if (name, dtype) == ("dense", FP32) else ("x",)
            made[name, dtype] = checkpoint, decoding(checkpoint, *names, activation=dtype)
        return made[name, dtype]

    return of


@few(1)
@pytest.mark.parametrize(("strategy", "form"), PAIRS)
def test_speculation_is_plain_decoding_bit_for_bit_under_every_strategy(strategy: str, form: str, given: Given) -> None:
    checkpoint, plain = given("dense", FP32)
    told = Told(checkpoint, strategy=strategy, conv=form)
    begin(told, "x")
    speculate(told, plain, (3, 2))
    assert differences(told, plain, "x") == []
    assert told.accepted >= 3


ALL = [(name, dtype, schedule) for name in MODELS for dtype in (FP32, BF16) for schedule in ((1, 3, 0), (2,))]


@WHOLE
@pytest.mark.parametrize(
    ("name", "dtype", "schedule"), ALL if NATIVE else [
        ("dense", BF16, (1, 3, 0)), pytest.param("moe", FP32, (2,), marks=WHOLE),
    ], ids=str,
)
def test_any_schedule_of_step_counts_gives_the_same_bits(
    name: str, dtype: torch.dtype, schedule: tuple[int, ...], given: Given
) -> None:
    checkpoint, plain = given(name, dtype)
    told = Told(checkpoint, activation=dtype)
    begin(told, "x")
    speculate(told, plain, schedule)
    assert differences(told, plain, "x") == []
    assert told.accepted >= 1


@pytest.mark.skipif(not NATIVE, reason="takes minutes interpreted")
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_trained_model_speculates_freely_and_keeps_its_tokens(dtype: torch.dtype) -> None:
    checkpoint = Checkpoint.open(TRAINED)
    told, plain = (Told(checkpoint, activation=dtype) for _ in range(2))
    prompt = tuple(b"def test_the_length_is(self):\n    self.assert")
    for side in (told, plain):
        side(Admit("x", prompt))
        side(Forward((Row("x", "prefill", len(prompt)),)))
    while max(plain.states["x"]) < len(prompt) + 36:  # twelve rounds of at most 3 tokens on average
        plain(Forward((Row("x", "decode"),)))
    for number in range(12):
        told.round_of(("x",), (3, 1, 2)[number % 3], None)
    assert differences(told, plain, "x") == []
    assert told.accepted >= 12


def test_batch_gives_each_request_the_bits_it_has_alone(given: Given) -> None:
    checkpoint, plain = given("dense", FP32)
    told = Told(checkpoint)
    for name in ("y", "x"):
        told(Admit(name, PROMPTS[name]))
    told(Forward((Row("y", "prefill", 3), Row("x", "prefill", 3))))
    told(Forward((Row("x", "prefill", 1),)))
    good = right_drafts(plain, told, "x", 3, right=2)
    told.round_of(("x",), 3, (good,), Row("y", "prefill", 2))  # a window next to a chunk
    told(Forward((Row("y", "decode"), Row("x", "decode"))))
    told.round_of(("x",), 2, None, Row("y", "decode"))
    both = tuple(right_drafts(plain, told, name, 2, right=2) for name in ("y", "x"))
    told.round_of(("y", "x"), 2, both)
    assert differences(told, plain, "x") == differences(told, plain, "y") == []
    assert told.accepted >= 5


TREES = {  # parents of the drafts, and which of them are right, in their order
    "x": [((0, 0, 1, 2, 4), (2, 4, 5)), ((0, 0, 1), ())],
    "y": [((0,), (1,)), ((0, 1, 0, 3, 3), (3, 4)), ((0, 0, 2, 2), (2,))],
}


@WHOLE
@pytest.mark.parametrize("strategy", STRATEGIES if NATIVE else [
    pytest.param("columns", marks=WHOLE), "lazy_rerun",
])  # fmt: skip
@pytest.mark.parametrize("graphs", [False, True] if NATIVE else [False])
def test_speculation_over_trees_is_plain_decoding_bit_for_bit(strategy: str, graphs: bool, given: Given) -> None:
    """Other tokens are next to the right path. Trees differ in a batch; one round is next to a decode."""
    checkpoint, plain = given("dense", FP32)
    told = Told(checkpoint, strategy=strategy, graphs=graphs, nodes=6)
    for name in ("x", "y"):
        begin(told, name)
    for number in range(3):
        names = ("x", "y") if number < 2 else ("y",)
        picks = []
        for name in names:
            tree, right = TREES[name][number]
            at = max(told.states[name]) + 1
            next_ = {node: plain.tokens[name][at + j] for j, node in enumerate(right)}
            wrong = (plain.tokens[name][at] + 1) % 64
            picks.append(tuple(next_.get(node, wrong) for node in range(1, len(tree) + 1)))
        beside = () if number < 2 else (Row("x", "decode"),)
        told.round_of(names, 3, tuple(picks), *beside, parents=tuple(TREES[name][number][0] for name in names))
    assert differences(told, plain, "x") == differences(told, plain, "y") == []
    assert told.accepted >= 7


def split_when_few(*, x: torch.Tensor, weight: torch.Tensor, shape: tuple[int, ...], to: Place) -> torch.Tensor:
    """A linear layer whose order of sums follows the number of rows, as in any library."""
    if x.shape[0] > 1:
        return INVARIANT.linear(x=x, weight=weight, shape=shape, to=to)
    rows, half = x.flatten(1), weight.shape[1] // 2
    parts = (multiply(rows[:, cut], weight[:, cut], FP32) for cut in (slice(0, half), slice(half, None)))
    return sum(parts, torch.zeros((), device=x.device)).to(x.dtype).view(-1, *shape)


def test_a_linear_layer_that_follows_the_number_of_rows_is_found(given: Given) -> None:
    checkpoint, plain = given("dense", FP32)
    told = Told(checkpoint, replace(INVARIANT, linear=split_when_few))
    begin(told, "x")
    told.round_of(("x",), 3, (right_drafts(plain, told, "x", 3, right=3),))
    told(Forward((Row("x", "decode"),)))
    found = differences(told, plain, "x")
    assert f"hidden row {max(told.rows['x'])}" in found
