"""Mixed steps: prefill chunks, verify windows and decode rows in one forward, in any order, at any step count.

Leaves out: tiers (`tests/harness/test_mixed_steps.py`); here labels and fp64 are compared with the reference, and what
must be the same bits with its twin.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from instep_optimized import OptimizedEngine, Options
from instep_optimized.commit import STRATEGIES
from instep_optimized.memory_addresses import StateLayout
from instep_reference.contract.adaptive_controller_file import AdaptiveFile, Bracket
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Capacity, Commit, Draft, Event, Forward, Idle
from instep_reference.contract.place_names import Place
from support.inputs.mixed_steps import (
    CANDIDATES,
    CONV_WIDTH,
    CROWD,
    LONG,
    LONG_ROOM,
    ROOM,
    WHERE,
    beside_windows,
    by_request,
    comings,
    crowd,
    drawn,
    prompts_in_chunks,
    split_everywhere,
    told,
    trio,
)
from support.running.covering import WHOLE, each_value, few
from support.worlds import engine_and_reference as sides
from support.worlds.engine_and_reference import TwoSides, snapshot

pytestmark = pytest.mark.slow  # whole replays

HERE = "cuda" if torch.cuda.is_available() else "cpu"
FILE = AdaptiveFile(flat=Bracket(candidate_steps=CANDIDATES, warmup_batches=1, update_interval=2))
FEW = settings(
    max_examples=2, derandomize=True, deadline=None, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
MIXED, BACKWARDS = (3, 0, 5, 1, 4, 2), (5, 4, 3, 2, 1, 0)
ORDERS = st.permutations(range(len(CROWD)))
# (op set, activation) for which bits are compared; Triton is interpreted, and small, where there is no GPU.
QUICK = {
    "ledger": ("ledger", torch.float32), "plain fp32": ("plain", torch.float32), "plain bf16": ("plain", torch.bfloat16)
}
TRITON = {"triton fp32": ("triton", torch.float32), "triton bf16": ("triton", torch.bfloat16)}
GPU = (pytest.mark.gpu,) if HERE == "cuda" else ()


@dataclass(frozen=True, eq=False)
class Model:
    """A checkpoint that is not printed with a failing example."""

    checkpoint: Checkpoint = field(repr=False)


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> Model:
    return Model(checkpoint)


def engine(
    model: Model, ops: str, *, num_steps: int = 3, adaptive: AdaptiveFile | None = FILE, room: Capacity = ROOM,
    **options: Any,
) -> OptimizedEngine:
    chosen: dict[str, Any] = {"num_steps": num_steps, "adaptive": adaptive, **options}
    return sides.engine(model.checkpoint, ops, room, device=HERE if ops == "triton" else "cpu", **chosen)


def labels(model: Model, strategy: str, room: Capacity = ROOM) -> TwoSides:
    """Labels on both sides: every place, state and byte is exact."""
    return sides.both_sides(model.checkpoint, "ledger", room, adaptive=FILE, strategy=strategy)


def numbers(model: Model, room: Capacity = ROOM, **options: Any) -> TwoSides:
    """fp64 on both sides."""
    return sides.both_sides(model.checkpoint, "plain", room, adaptive=FILE, **options)


def served(both: TwoSides, events: Iterable[Event]) -> None:
    assert both.serve(events).compared > 10_000


# ---- all kinds of rows in one step, in any order


@few(2)
@pytest.mark.parametrize(("strategy", "course"), each_value(STRATEGIES, ((3, MIXED), (7, BACKWARDS))))
def test_labels_are_right_in_an_order_of_all_kinds(
    model: Model, strategy: str, course: tuple[int, Sequence[int]]
) -> None:
    num_steps, order = course
    served(labels(model, strategy), crowd(num_steps, order))


@FEW
@given(strategy=st.sampled_from(sorted(STRATEGIES)), num_steps=st.sampled_from(CANDIDATES), order=ORDERS)
def test_labels_are_right_in_any_order(model: Model, strategy: str, num_steps: int, order: Sequence[int]) -> None:
    served(labels(model, strategy), crowd(num_steps, order))


@pytest.mark.parametrize("layout", ["VK", "KV"])
@settings(FEW, max_examples=1)
@given(num_steps=st.sampled_from(CANDIDATES), order=ORDERS)
@example(num_steps=3, order=MIXED)
def test_numbers_match_the_reference_in_any_order(
    model: Model, layout: StateLayout, num_steps: int, order: Sequence[int]
) -> None:
    served(numbers(model, layout=layout), crowd(num_steps, order))


def test_labels_are_right_in_every_order_of_three_kinds(model: Model) -> None:
    """A chunk at the end of a prompt, a window of its width and a decode row, and nothing else, in all orders."""
    for order in permutations(range(3)):
        served(labels(model, Options().strategy), trio(3, order))


@few(2)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@FEW
@given(order=ORDERS)
def test_a_request_s_own_rows_do_not_depend_on_the_order(model: Model, strategy: str, order: Sequence[int]) -> None:
    """Labels of every place, request by request, and the states afterwards, as bits."""
    assert own_rows(model, strategy, tuple(order)) == own_rows(model, strategy, tuple(range(len(CROWD))))


@cache
def own_rows(model: Model, strategy: str, order: tuple[int, ...]) -> dict[str, object]:
    num_steps, subject = 3, engine(model, "ledger", strategy=strategy)
    seen: dict[Place, torch.Tensor] = {}
    subject.watch(lambda place, tensor: seen.setdefault(place, tensor.clone()))
    own: dict[str, object] = {}
    for number, event in enumerate(crowd(num_steps, order)):
        seen.clear()
        event.on(subject)
        if not isinstance(event, Forward):
            continue
        windows = {row.request: num_steps + 1 for row in event.rows if row.kind == "verify"}
        unfinished = [row.request for row in event.rows if row.kind == "prefill" and row.root is None]
        for name, places in by_request(event.rows, windows, unfinished, seen).items():
            assert len(places) > 20
            own[f"{number} {name}"] = {place: rows.tolist() for place, rows in places.items()}
            own[f"{number} {name} stands"] = told(subject.state(name))
    return own


# ---- a chunk as wide as a window


@few(4)
@pytest.mark.parametrize(("where", "ops", "activation"), [
    *(pytest.param(where, *QUICK[name], id=f"{where} {name}") for where in WHERE for name in QUICK),
    pytest.param("tail", *TRITON["triton fp32"], id="tail triton fp32", marks=GPU),
])  # fmt: skip
def test_a_chunk_as_wide_as_a_window_is_a_prefill_at_any_step_count(
    model: Model, where: str, ops: str, activation: torch.dtype
) -> None:
    """Eight tokens of a prompt next to eight rows of windows: one of 8, two of 4 or four of 2. Not one bit differs."""
    small = ops == "triton"
    states = [told_after(beside_windows(n, where, small), engine(model, ops, activation=activation), "chunk")
              for n in ((1, 3) if small else CANDIDATES)]
    assert states[0]["length"] == (4 if small else 8) + (3 if where == "tail" else 0)
    assert all(state == states[0] for state in states)


def told_after(events: Iterable[Event], subject: OptimizedEngine, name: str) -> dict[str, object]:
    for event in events:
        event.on(subject)
    return told(subject.state(name))


@few(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_window_wide_chunk_has_the_labels_of_a_prefill(model: Model, strategy: str) -> None:
    for num_steps, where in zip(CANDIDATES, WHERE, strict=True):
        served(labels(model, strategy), beside_windows(num_steps, where, small=False))


@pytest.mark.parametrize("num_steps", CANDIDATES)
def test_window_wide_chunk_matches_the_reference(model: Model, num_steps: int) -> None:
    for where in WHERE:
        served(numbers(model), beside_windows(num_steps, where, small=False))


# ---- speculation enabled and disabled


OTHERS = {f"{strategy} plain {width}" for strategy, width in (
    ("snapshot", "bf16"), ("columns", "fp32"), ("rerun", "bf16"), ("lazy_rerun", "fp32"),
)}  # labels move with every strategy; a width with the other one present is in `make whole`
PREFILLS = [
    *((f"{strategy} {name}", (strategy, *QUICK[name]), (WHOLE,) * (f"{strategy} {name}" in OTHERS))
      for strategy in STRATEGIES for name in QUICK),
    *((name, (Options().strategy, *TRITON[name]), (*GPU, pytest.mark.slow)) for name in TRITON),
]


@few(2)
@pytest.mark.parametrize(("strategy", "ops", "activation", "layout"), [
    pytest.param(*row, layout, id=f"{layout} {name}", marks=(*marks, *((WHOLE,) if other and not GPU else ())))
    for number, (name, row, marks) in enumerate(PREFILLS)
    for at, layout in enumerate(("VK", "KV")) for other in [(number + number // len(QUICK) + at) % 2]
])  # fmt: skip
def test_prefill_state_has_the_same_bits_with_speculation(
    model: Model, strategy: str, ops: str, activation: torch.dtype, layout: StateLayout
) -> None:
    """Conv, state, KV, the draft's KV and what it proposes, after every step; pools of one token a window, or eight."""
    without: tuple[int, AdaptiveFile | None] = (0, None)
    small = ops == "triton"
    arms = (without, (3, FILE)) if small else (without, (3, FILE), (0, FILE), (1, FILE), (7, None))
    stories = [
        told_along(engine(model, ops, num_steps=n, adaptive=file, activation=activation, layout=layout,
                          strategy=strategy), prompts_in_chunks(small))
        for n, file in arms
    ]
    parts = {"conv of layer 0", "state of layer 0", "keys of layer 1", "draft_keys of layer 0"}
    assert parts <= stories[0][-1]["a"].keys() and stories[0][-1]["a"]["length"] == (6 if small else 11)
    assert all(story == stories[0] for story in stories)


def told_along(subject: OptimizedEngine, events: Iterable[Event]) -> list[dict[str, dict[str, object]]]:
    """After every event, the states of all that are there."""
    story = []
    for event in events:
        event.on(subject)
        story.append({name: told(subject.state(name)) for name in subject.slots()})
    return story


# ---- where a prompt is split


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_labels_do_not_depend_on_the_split_of_a_prompt(model: Model, strategy: str) -> None:
    both = labels(model, strategy, LONG_ROOM)
    served(both, split_everywhere(rounds=False))
    names = list(both.subject.slots())
    states = [told(both.subject.state(name)) for name in names]
    roots = [state.pop("root") for state in states]  # each request was given its own, and so has its own last draft row
    assert len(roots) == 8 and {state["length"] for state in states} == {LONG}
    same = [{name: was for name, was in state.items() if name.startswith(("conv", "state", "keys", "values"))}
            for state in states]
    assert all(state == same[0] for state in same)


@pytest.mark.parametrize("layout", ["VK", "KV"])
def test_numbers_do_not_depend_on_the_split_of_a_prompt(model: Model, layout: StateLayout) -> None:
    """Every part is compared with the reference, so all of them with each other, within the noise of fp64."""
    served(numbers(model, LONG_ROOM, layout=layout), split_everywhere())


# ---- step counts change, requests come, and steps are empty


@few(2)
@pytest.mark.parametrize(("strategy", "counts"), [
    ("snapshot", (0, 3, 1)), ("columns", (0, 7, 3)), ("rerun", (0, 3, 1, 7)), ("lazy_rerun", (0, 3, 1, 0, 7)),
])  # fmt: skip
def test_labels_are_right_while_step_counts_change_and_requests_come(
    model: Model, strategy: str, counts: Sequence[int]
) -> None:
    """Longest where inputs wait in rings, whose width the count is. All counts, one after another: the next test."""
    served(labels(model, strategy), comings(counts))


def test_numbers_are_right_while_step_counts_change_and_requests_come(model: Model) -> None:
    served(numbers(model), comings())


EMPTY: dict[str, Callable[[OptimizedEngine], object]] = {
    "idle": Idle().on, "forward": Forward(()).on, "draft": Draft((), ()).on, "free draft": Draft(()).on,
    "commit": Commit((), ()).on, "free commit": Commit(()).on,
}  # fmt: skip


@few(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ops", "strategy"), [*(("ledger", strategy) for strategy in STRATEGIES), ("plain", Options().strategy)]
)
def test_empty_steps_change_no_byte(model: Model, ops: str, strategy: str) -> None:
    """After every event between two rounds all empty events are served, and an engine without them ends the same."""
    left, busy = (engine(model, ops, strategy=strategy, poison=7.5) for _ in range(2))
    flying, seen = False, 0
    for event in comings((0, 3, 1)):
        event.on(left)
        event.on(busy)
        if isinstance(event, Forward | Commit):
            flying = isinstance(event, Forward) and any(row.kind == "verify" for row in event.rows)
        if flying:
            continue
        before = snapshot(busy)
        for name, empty in EMPTY.items():
            empty(busy)
            for (units, gaps), (was, gaps_were) in zip(snapshot(busy), before, strict=True):
                assert torch.equal(units, was), name
                assert gaps is None or gaps_were is None or torch.equal(gaps, gaps_were), name
                seen += units.numel()
        assert busy.next_num_steps(1, 1) == left.next_num_steps(1, 1)
    assert seen > 10_000
    for (units, _), (was, _) in zip(snapshot(busy), snapshot(left), strict=True):
        assert torch.equal(units, was)
    assert {name: told(busy.state(name)) for name in busy.slots()} == {
        name: told(left.state(name)) for name in left.slots()
    }


# ---- whatever comes


@pytest.mark.parametrize("strategy", STRATEGIES)
@FEW
@given(data=st.data())
def test_labels_are_right_in_random_steps(model: Model, strategy: str, data: st.DataObject) -> None:
    both = labels(model, strategy)
    assert both.serve(drawn(data.draw, rounds=4, most=4)).compared > 1000


def test_constants_of_this_file_match_the_model(model: Model) -> None:
    assert model.checkpoint.config.conv_width == CONV_WIDTH and model.checkpoint.config.mtp_layers == 1
    assert model.checkpoint.config.mixers == ("gdn", "attention")
