"""Every pair of strategy and conv form serves the same events with the same logical states, and writes what it may.

Leaves out: the addresses that a strategy chooses (`test_commit_*.py`), and faults in them (`instep faults`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch

from instep_optimized import OptimizedEngine, load
from instep_optimized.commit import CONV_FORMS, STRATEGIES
from instep_optimized.memory_addresses import Keeps, StateLayout
from instep_reference.contract import engine as e
from instep_reference.contract.adaptive_controller_file import AdaptiveFile, Bracket
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.declared_rounding import SCALED_KV, SCALED_STATE, Storage
from instep_reference.contract.engine import Path as Way
from instep_reference.contract.errors import Unsupported
from instep_reference.contract.place_names import Place
from support.inputs.checkpoints import write
from support.running.covering import WHOLE, few
from support.worlds import engine_and_reference as sides
from support.worlds.engine_and_reference import both_sides, scenario, snapshot, untouched

pytestmark = pytest.mark.slow  # whole replays or commands

STEPS = (3, 1, 7, 0)  # after them every scenario continues with the first one
FILE = AdaptiveFile(flat=Bracket(candidate_steps=(0, 1, 7), warmup_batches=1, update_interval=2))
LAYOUTS: tuple[StateLayout, ...] = ("VK", "KV", "KV", "VK")  # each strategy and each form has both
PAIRS = [(strategy, conv) for strategy in STRATEGIES for conv in CONV_FORMS]
# Labels are moved in one half of the pairs, numbers in two of the other, whose bits all have: `make whole` runs all.
NUMBERS = [("snapshot", "widened"), ("lazy_rerun", "windows")]
HALF = [pair for number, pair in enumerate(PAIRS) if (number + number // len(CONV_FORMS)) % 2 == 0]
# (activation, state): every pair occurs in one width or two, and every width with strategies of other kinds.
TYPES: list[tuple[torch.dtype, Storage]] = [
    (torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16),
    (torch.float32, SCALED_STATE),
]
RINGS = [pair for pair in PAIRS if pair[0] in ("rerun", "lazy_rerun")]
KEPT: tuple[Keeps, ...] = ("update", "inputs")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """One GDN layer alone, of few heads, for the interpreter."""
    told = {"num_hidden_layers": 1, "layer_types": ["linear_attention"], "mtp_num_hidden_layers": 0}
    return Checkpoint.open(write(tmp_path_factory.mktemp("tiny"), "dense", **told))


def chosen(ops: str, pair: tuple[str, str], keeps: Keeps = "update") -> dict[str, Any]:
    return {"ops": replace(load(ops), keeps=keeps), "strategy": pair[0], "conv": pair[1], "adaptive": FILE}


def engine(checkpoint: Checkpoint, *which: Any, **options: Any) -> OptimizedEngine:
    return sides.engine(checkpoint, **chosen(*which), **options)


@few(1)
@pytest.mark.parametrize(("pair", "layout"), [
    pytest.param(pair, layout, marks=() if pair in HALF else WHOLE)
    for pair, layout in zip(PAIRS, cycle(LAYOUTS), strict=False)
])  # fmt: skip
def test_every_label_matches_the_ledger_under_every_strategy(
    checkpoint: Checkpoint, pair: tuple[str, str], layout: StateLayout
) -> None:
    both = both_sides(checkpoint, **chosen("ledger", pair), layout=layout)
    assert both.serve(scenario(64, STEPS, forced=True)).compared > 10_000


@pytest.mark.parametrize(
    "pair", [pytest.param(pair, marks=WHOLE if pair in HALF else ()) for pair in RINGS], ids="-".join
)
def test_labels_of_rings_that_keep_inputs_are_right_too(checkpoint: Checkpoint, pair: tuple[str, str]) -> None:
    """Whose updates are shown nowhere, as nothing keeps them."""
    both = both_sides(checkpoint, **chosen("ledger", pair, "inputs"))
    assert not {"ring_update", "ring_decay"} & {region.name for region in both.subject.regions()}
    assert both.serve(scenario(64, STEPS, forced=True)).compared > 10_000


@pytest.mark.parametrize(
    "pair", [pytest.param(pair, marks=() if pair in NUMBERS else WHOLE) for pair in PAIRS], ids="-".join
)
def test_every_number_matches_the_reference(checkpoint: Checkpoint, pair: tuple[str, str]) -> None:
    both = both_sides(checkpoint, **chosen("plain", pair))
    assert both.serve(scenario(64, STEPS, forced=False)).compared > 10_000


# ---- the same bits as `snapshot`, from the same events


def story(prompt: int = 5, steps: tuple[int, ...] = (3, 1, 7, 1, 7, 7, 0, 3)) -> Iterator[e.Event]:
    """Two requests through ragged rounds of changing width (all of eight, then a window of two), a plain step after
    them, a slot that is used again."""
    yield e.Admit("a", tuple(range(1, prompt + 1)))
    yield e.Admit("b", (7, 8))
    yield e.Forward((e.Row("a", "prefill", prompt), e.Row("b", "prefill", 2)))
    for number, n in enumerate(steps):
        yield e.SetNumSteps(n)
        if not n:
            yield e.Forward((e.Row("b", "decode", root=3), e.Row("a", "decode", root=4)))
            continue
        yield e.Draft(("a", "b"), (tuple(range(n)), tuple(range(n))))
        yield e.Forward((e.Row("b", "verify"), e.Row("a", "verify")))
        full, some = tuple(range(1, n + 1)), tuple(range(1, n // 2 + 1))
        yield e.Commit(("a", "b"), (Way(full if number % 2 == 0 else some, 11), Way(some if number else full, 12)))
    yield e.Preempt("a")
    yield e.Finish("b")
    yield e.Admit("c", (9, 10, 11))
    yield e.Forward((e.Row("c", "prefill", 3),))
    yield e.Resume("a")
    yield e.Draft(("c", "a"), (tuple(range(steps[-1])), tuple(range(steps[-1]))))
    yield e.Forward((e.Row("a", "verify"), e.Row("c", "verify")))
    yield e.Commit(("c", "a"), (Way((), 5), Way((1,), 6)))
    yield e.Forward((e.Row("c", "decode", root=7),))


def bits(state: e.RequestState) -> list[bytes]:
    return [
        tensor.contiguous().view(torch.uint8).numpy().tobytes()
        for layers in (state.conv, state.state) for tensor in layers.values()
    ]


def served(subject: OptimizedEngine, events: Sequence[e.Event]) -> Iterator[tuple[e.Event, bool]]:
    """Serve the events; for each, whether a window is in flight after it."""
    for event in events:
        event.on(subject)
        yield event, isinstance(event, e.Forward) and any(row.kind == "verify" for row in event.rows)


States = list[dict[str, list[bytes]]]  # by event: the bits of every state; none of a window in flight


@pytest.fixture(scope="module")
def of_snapshot() -> Callable[..., States]:
    """The states with the strategy `snapshot`: made once for all that are held to them."""
    made: dict[str, States] = {}

    def told(checkpoint: Checkpoint, events: Sequence[e.Event], ops: str, **options: Any) -> States:
        key = repr((id(checkpoint), events, ops, options))
        if key not in made:
            subject = engine(checkpoint, ops, PAIRS[0], **options)
            made[key] = [{} if flying else {name: bits(subject.state(name)) for name in subject.slots()}
                         for _, flying in served(subject, events)]
        return made[key]

    return told


def same_bits(subject: OptimizedEngine, right: States, events: Sequence[e.Event]) -> int:
    """Serve the events; how many states were compared, bit by bit. Asking for one must change no byte."""
    compared = 0
    for (event, flying), wanted in zip(served(subject, events), right, strict=True):
        before = snapshot(subject)
        for name in subject.slots():
            state = subject.state(name)
            if not flying:
                assert bits(state) == wanted[name], (event, name)
                compared += 1
        assert untouched(subject, before, {}) > 0
    return compared


@few(2)
@pytest.mark.parametrize(("pair", "activation", "state"), [
    pytest.param(pair, *types, marks=() if (number + at) % 3 == 0 else WHOLE)
    for number, types in enumerate(TYPES) for at, pair in enumerate(PAIRS[1:])
])  # fmt: skip
def test_every_state_has_the_bits_that_snapshot_gives(
    checkpoint: Checkpoint, of_snapshot: Callable[..., States], pair: tuple[str, str], activation: torch.dtype,
    state: Storage,
) -> None:
    if pair[0] == "lazy_rerun" and state is not torch.float32:
        with pytest.raises(Unsupported, match="depend on the schedule"):
            engine(checkpoint, "plain", pair, activation=activation, state=state)
        return
    kv = SCALED_KV if state == SCALED_STATE else None
    told = {"activation": activation, "state": state, "poison": math.nan, "kv": kv}
    right = of_snapshot(checkpoint, [*story()], "plain", **told)
    assert same_bits(engine(checkpoint, "plain", pair, **told), right, [*story()]) > 20


@pytest.mark.parametrize("strategy", ["rerun", "lazy_rerun"])
def test_rings_of_inputs_give_the_bits_of_snapshot(
    checkpoint: Checkpoint, of_snapshot: Callable[..., States], strategy: str
) -> None:
    subject = engine(checkpoint, "plain", (strategy, "windows"), "inputs")
    assert same_bits(subject, of_snapshot(checkpoint, [*story()], "plain"), [*story()]) > 20


def test_replaced_update_of_another_engine_is_rerun(checkpoint: Checkpoint) -> None:
    """An observer that replaces an update changes the state after the window, and nothing of the window itself."""
    def run(factor: float) -> tuple[list[bytes], list[torch.Tensor]]:
        subject, shown = engine(checkpoint, "plain", ("rerun", "windows")), []

        def see(place: Place, tensor: torch.Tensor) -> torch.Tensor:
            shown.append(tensor.clone())
            return tensor * factor if place.component == "update" else tensor

        events = story(steps=(3,))
        for event in events:
            if isinstance(event, e.Forward) and event.rows[0].kind == "verify":
                break
            event.on(subject)
        subject.watch(see)
        event.on(subject)
        next(events).on(subject)
        return bits(subject.state("a")), shown

    correct, same, other = run(1.0), run(1.0), run(0.5)
    assert correct[0] == same[0] != other[0]
    assert all(torch.equal(x, y) for x, y in zip(correct[1], other[1], strict=True))


@few(1)
@pytest.mark.parametrize(
    "pair", [("rerun", "widened"), ("lazy_rerun", "windows"), ("columns", "widened")], ids="-".join
)
def test_kernels_give_the_bits_of_snapshot(
    tiny: Checkpoint, of_snapshot: Callable[..., States], pair: tuple[str, str]
) -> None:
    events = [*story(prompt=2, steps=(3, 0, 1))]
    assert same_bits(engine(tiny, "triton", pair), of_snapshot(tiny, events, "triton"), events) > 10


def test_a_mark_is_written_before_it_is_read(checkpoint: Checkpoint) -> None:
    """Any old contents of a new slot, including marks and rings, leave the states unchanged."""
    def run(poison: float | None) -> list[list[bytes]]:
        subject = engine(checkpoint, "plain", ("rerun", "widened"), poison=poison)
        for event in story():
            event.on(subject)
        return [bits(subject.state(name)) for name in subject.slots()]

    assert run(math.nan) == run(7.5) == run(-1.0) == run(None)
