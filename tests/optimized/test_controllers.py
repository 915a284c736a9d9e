"""The controllers of both sides: the rules of each dialect, worked out by hand, and that both have the same wishes.

Leaves out: reading and refusing files (the contract's tests), and the released modules (`tests/peers`).
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep_optimized.controllers import TABLE
from instep_optimized.controllers import controller as optimized
from instep_reference.contract.adaptive_controller_file import AdaptiveFile, Bracket, Dialect
from instep_reference.contract.controllers import DIALECTS, Controlled
from instep_reference.contract.errors import BadInput
from instep_reference.controllers import TABLE as OF_REFERENCE
from instep_reference.controllers import controller as reference
from support.running.covering import few

Make = Callable[..., Any]
# Each batch decides, by its own mean alone.
AT_ONCE = {"ema_alpha": 1, "warmup_batches": 0, "update_interval": 1}


@pytest.fixture(params=[reference, optimized], ids=["reference", "optimized"])
def controller(request: pytest.FixtureRequest) -> Make:
    return request.param


@pytest.fixture
def flat(controller: Make) -> Make:
    """A controller of sglang-0.5.12 with one bracket."""
    usual = {"candidate_steps": [1, 3, 7], "warmup_batches": 2, "update_interval": 2}
    return lambda initial, **changes: controller(None, initial, AdaptiveFile.of({**usual, **changes}))


@pytest.fixture
def slots(controller: Make) -> Make:
    def made(
        file: dict[str, Any] | None, initial: int | None = None, *, lag: int = 0, dialect: Dialect = "sglang-0.5.14",
        **fields: Any,
    ) -> Any:
        return controller(Controlled(dialect, file=file, **fields), initial, None, lag)

    return made


def rounds(made: Any, *batches: list[int]) -> list[int]:
    """Verify and commit these batches; return the wish for a batch of as many requests after each."""
    wishes = []
    for accepted in batches:
        made.forwarded(0)
        made.committed(accepted)
        wishes.append(made.next_num_steps(len(accepted), len(accepted)))
    return wishes


def test_tables_have_every_dialect() -> None:
    assert tuple(TABLE) == tuple(OF_REFERENCE) == DIALECTS


# sglang-0.5.12


def test_wish_is_the_count_in_force_without_a_file(controller: Make) -> None:
    made = controller(None, 3)
    assert made.candidates == (0, 3)
    assert rounds(made, *[[0, 0]] * 40) == [3] * 40
    made.set_num_steps(0)
    assert made.next_num_steps(1, 1) == 0


def test_count_that_is_no_candidate_is_refused_by_our_engines_controllers() -> None:
    file = {"1": {"candidate_steps": [1, 3]}, "4": {"candidate_steps": [0, 1]}}
    for made in (optimized(None, 3), optimized(Controlled("sglang-0.5.14", file=file), 1)):
        with pytest.raises(BadInput, match="set_num_steps: found 2"):
            made.set_num_steps(2)


def test_initial_count_is_inserted_in_each_bracket_with_a_message(controller: Make) -> None:
    by_batch = AdaptiveFile(by_batch={1: Bracket(candidate_steps=(4, 1, 4)), 8: Bracket()})
    made = controller(None, 3, by_batch)
    assert made.candidates == (0, 1, 3, 4, 7)
    (message,) = made.messages
    assert "initial step count 3" in message and re.search(r"(bracket|batch size) 1\b", message)


def test_controller_decides_only_after_warm_up_and_on_intervals(flat: Make) -> None:
    # ema starts at 2, 2.5 is passed at the third batch; batches 4 and 6 are due
    assert rounds(flat(3), *[[3, 3]] * 6) == [3, 3, 3, 7, 7, 7]


def test_controller_steps_down_while_little_is_accepted(flat: Make) -> None:
    assert rounds(flat(7, ema_alpha=1.0), *[[0]] * 4)[-1] == 1


def test_controller_goes_to_0_and_returns_by_a_probe(flat: Make) -> None:
    made = flat(1, candidate_steps=[0, 1, 3], ema_alpha=1.0)
    assert rounds(made, *[[0]] * 4)[-1] == 0
    made.set_num_steps(0)
    wishes = []
    for _ in range(2):
        made.forwarded(2)
        wishes.append(made.next_num_steps(2, 2))
    assert wishes == [0, 1]
    made.set_num_steps(1)
    assert rounds(made, [1, 1]) == [3]  # judged at once, although the batch is not due


def test_controller_without_a_rule_in_its_file_has_the_usual_numbers(controller: Make) -> None:
    """1, 3 and 7 drafts; a warm-up of 10 batches, and a decision every 5."""
    made = controller(None, 3, AdaptiveFile.read("{}"))
    assert made.candidates == (0, 1, 3, 7) and rounds(made, *[[3, 3]] * 15) == [3] * 14 + [7]


def test_decode_rows_count_only_without_speculation(flat: Make) -> None:
    made = flat(1, candidate_steps=[0, 1])
    for _ in range(20):
        made.forwarded(1)
    made.committed([])
    assert made.next_num_steps(1, 1) == 1


def test_flat_dialect_ignores_the_batch_that_comes_and_the_lag(controller: Make) -> None:
    controlled = Controlled("sglang-0.5.12", file={"candidate_steps": [1, 3, 7], **AT_ONCE})
    made = controller(controlled, 3, None, lag=1)
    made.committed([3])
    assert {made.next_num_steps(batch, batch) for batch in (0, 1, 100)} == {7}


# sglang-0.5.13 and sglang-0.5.14


@pytest.mark.parametrize(("dialect", "defaults", "initial", "begun"), [
    ("sglang-0.5.13", None, 3, {1: (3, 2.0), 8: (3, 2.0), 32: (1, 0.0)}),
    ("sglang-0.5.14", "0.5.18", 3, {1: (3, 2.0), 8: (3, 2.0), 32: (1, 0.0), 64: (0, -1.0)}),
    ("sglang-0.5.14", "0.5.20", 3, {1: (3, 2.0), 8: (3, 2.0), 32: (1, 0.0), 64: (0, -1.0)}),
])  # fmt: skip
def test_default_file_starts_at_the_middle_count(
    slots: Make, dialect: Dialect, defaults: str | None, initial: int, begun: dict[int, tuple[int, float]]
) -> None:
    made = slots(None, dialect=dialect, defaults=defaults)
    assert (made.initial, made.slots) == (initial, begun)
    assert made.candidates == ((0, 1, 3, 5, 7) if defaults == "0.5.20" else (0, 1, 3, 7))


def test_initial_count_in_no_slot_is_refused_and_elsewhere_replaced(slots: Make) -> None:
    file = {"1": {"candidate_steps": [7, 1, 7, 4]}, "4": {"candidate_steps": [0, 2]}}
    made = slots(file, 2)
    assert made.slots == {1: (4, 3.0), 4: (2, 1.0)}  # 4 is the middle of 1, 4, 7
    assert (made.initial, made.candidates, made.messages) == (2, (0, 1, 2, 4, 7), [])
    with pytest.raises(BadInput, match="num_steps: found 3"):
        slots(file, 3)


@pytest.mark.parametrize(("captured", "wishes"), [
    ((), {0: 1, 1: 1, 3: 1, 4: 2, 9: 2, 10: 3, 99: 3}),
    ((1, 2, 4, 8, 16), {0: 1, 2: 1, 3: 2, 8: 2, 9: 3, 10: 3, 17: 3}),  # 3 is padded to 4, 9 to 16; 17 stays
    ((1, 3), {2: 1, 3: 1, 4: 2, 9: 2, 10: 3}),  # 4 is above the largest graph
])  # fmt: skip
def test_batch_is_padded_to_its_graph_and_routed_to_a_slot(
    slots: Make, captured: tuple[int, ...], wishes: dict[int, int]
) -> None:
    file = {"10": {"candidate_steps": [3]}, "2": {"candidate_steps": [1]}, "4": {"candidate_steps": [2]}}
    made = slots(file, captured=captured)
    assert {batch: made.next_num_steps(batch, 99) for batch in wishes} == wishes


def test_padded_batch_counts_in_the_slot_that_serves_it(slots: Make) -> None:
    file = {"1": {"candidate_steps": [1, 3]}, "4": {"candidate_steps": [1, 3]}, **AT_ONCE}
    made = slots(file, 1, captured=(4,))
    rounds(made, [1, 1, 1])
    assert made.slots == {1: (1, 0.0), 4: (3, 1.0)}


def test_average_moves_by_the_mean_of_a_batch(slots: Make) -> None:
    made = slots({"0": {"candidate_steps": [3]}})
    rounds(made, [3, 0, 0], [2])
    first = 0.8 * 2.0 + 0.2 * 1.0  # ema_alpha is 0.2
    assert made.slots == {0: (3, (1 - 0.2) * first + 0.2 * 2.0)}


def test_slot_decides_after_warm_up_and_on_intervals(slots: Make) -> None:
    file = {"1": {"candidate_steps": [1, 3], "warmup_batches": 2, "update_interval": 3}, "ema_alpha": 1.0}
    assert rounds(slots(file, 1), *[[1]] * 6) == [1, 1, 1, 1, 3, 3]  # batch 5 is the first that is due
    wishes = rounds(slots(file, 1), [1], [], [1], [], [1], [1], [1])
    assert wishes[-2:] == [1, 3], "a batch without requests does not count"


def test_field_of_a_slot_wins_over_the_default_of_the_file(slots: Make) -> None:
    file = {**AT_ONCE, "1": {"candidate_steps": [1, 3]}, "4": {"candidate_steps": [1, 3], "warmup_batches": 1}}
    made = slots(file, 1)
    assert rounds(made, [1], [1] * 4, [1] * 4) == [3, 1, 3]


def test_several_counts_are_passed_at_once(slots: Make) -> None:
    made = slots({"1": {"candidate_steps": [1, 3, 5, 7]}, **AT_ONCE}, 1)
    assert rounds(made, [7], [0], [4], [2]) == [7, 1, 5, 3]


def test_average_is_frozen_at_0_and_a_probe_lasts_an_interval(slots: Make) -> None:
    file = {"1": {"candidate_steps": [0, 1]}, "ema_alpha": 0.5, "warmup_batches": 0, "update_interval": 2}
    made = slots(file, 1)
    assert rounds(made, [0], [0]) == [1, 0]  # 0 <= 0.5 - 0.25
    made.set_num_steps(0)
    made.forwarded(1)
    assert made.slots == {1: (0, 0.0)}
    made.forwarded(1)
    assert made.slots == {1: (1, 0.0)}, "the probe begins, and the average is that of before"
    made.set_num_steps(1)
    assert rounds(made, [1]) == [1] and made.slots == {1: (1, 0.5)}
    assert rounds(made, [0]) == [0] and made.slots == {1: (0, 0.25)}, "a probe that fails"


def test_slot_that_begins_at_0_probes_with_a_neutral_average(slots: Make) -> None:
    made = slots({"1": {"candidate_steps": [0, 3, 5]}, **AT_ONCE, "warmup_batches": 1}, 0)
    assert made.slots == {1: (0, -1.0)}
    for _ in range(2):
        made.forwarded(3)
    assert made.slots == {1: (3, 2.0)}
    alone = slots({"1": {"candidate_steps": [0]}, **AT_ONCE})
    alone.forwarded(3)
    assert alone.slots == {1: (0, -1.0)}, "there is nothing to probe"


def test_ceiling_lowers_or_stops_but_never_prevents_a_rise(slots: Make) -> None:
    file = {"1": {"candidate_steps": [1, 3, 5, 7]}, **AT_ONCE, "ceiling_coeff": 1}
    # 2 of 5: down to 3 (2 <= 2.25), and the ceiling is 2, so 1. 1 of 1: up to 3, above the ceiling of 1.
    # 1 of 3: it would stay at 3 (0.25 < 1 <= 2.5), and the ceiling of 1 lowers it.
    assert rounds(slots(file, 5), [2], [1], [1]) == [1, 3, 1]
    for off in (0, -1):
        assert rounds(slots({**file, "ceiling_coeff": off}, 5), [2], [1], [1]) == [3, 3, 3]
    assert rounds(slots({**file, "ceiling_coeff": 1.5}, 5), [2]) == [3], "ceil(2 * 1.5) is 3"


@pytest.mark.parametrize(("dialect", "wish"), [("sglang-0.5.13", 5), ("sglang-0.5.14", 3)])
def test_only_the_older_dialect_rises_after_a_fall(slots: Make, dialect: Dialect, wish: int) -> None:
    """3 of 5: down to 3 (3 <= 2.5 + 1), not to 1 (3 > 0.5 + 1); then 3 > 2.5 - 1 would lead up again."""
    file = {"1": {"candidate_steps": [1, 3, 5], "down_hysteresis": 1.0, "up_hysteresis": -1.0}, **AT_ONCE}
    assert rounds(slots(file, 5, dialect=dialect), [3]) == [wish]


def test_slot_keeps_its_count_while_other_slots_run_and_steps_change(slots: Make) -> None:
    file = {"1": {"candidate_steps": [1, 3]}, "4": {"candidate_steps": [0, 1]}, **AT_ONCE}
    made = slots(file, 1)
    assert rounds(made, [1], [0] * 4) == [3, 0]
    made.set_num_steps(0)
    assert (made.next_num_steps(1, 1), made.slots) == (3, {1: (3, 1.0), 4: (0, 0.0)})


def test_late_results_are_processed_under_the_new_count(slots: Make) -> None:
    """Rounds overlap: the batch of forward k is processed at forward k + 1, whatever that is a forward of."""
    made = slots({"1": {"candidate_steps": [0, 1], "down_hysteresis": -0.1}, **AT_ONCE, "ema_alpha": 0.5}, 0, lag=1)
    made.forwarded(2)
    assert made.slots == {1: (0, -1.0)}, "the zeros of forward 1 are not processed"
    made.forwarded(2)
    assert made.slots == {1: (1, 0.0)}, "forward 1: the probe"
    made.set_num_steps(1)
    made.forwarded(0)
    assert made.slots == {1: (0, 0.0)}, "forward 2, a round at 0: its zeros are averaged and end the probe"
    made.committed([1, 1])
    made.forwarded(0)
    assert made.slots == {1: (1, 0.0)}, "forward 3, with accepted drafts: not averaged at 0, and a probe again"


@pytest.mark.parametrize("lag", [1, 2])
def test_batch_is_processed_as_many_forwards_later_as_the_lag(slots: Make, lag: int) -> None:
    made = slots({"1": {"candidate_steps": [1, 3]}, **AT_ONCE}, 1, lag=lag)
    assert rounds(made, *[[1]] * lag) == [1] * lag
    made.forwarded(0)  # a prefill
    assert made.next_num_steps(1, 1) == 3


def test_asking_and_a_commit_without_requests_change_nothing(slots: Make) -> None:
    made = slots({"1": {"candidate_steps": [0, 1, 3]}, **AT_ONCE}, 3)
    before = made.slots
    assert [made.next_num_steps(batch, batch) for batch in (0, 1, 5, 1)] == [3] * 4
    made.committed([])
    assert made.slots == before


# vllm-table and constant


def test_table_fills_gaps_and_the_tail_and_is_capped(controller: Make) -> None:
    table = ((8, 15, 1), (1, 4, 5), (20, 20, 0), (21, 21, 2))
    made = controller(Controlled("vllm-table", table=table, num_speculative_tokens=4), None, None, 1)
    expected = {0: 4, 1: 4, 4: 4, 5: 4, 7: 4, 8: 1, 15: 1, 19: 1, 20: 0, 21: 2, 22: 2, 10**6: 2}
    assert {scheduled: made.next_num_steps(1, scheduled) for scheduled in expected} == expected
    assert (made.initial, made.candidates) == (4, (0, 1, 2, 4))


def test_table_has_no_feedback(controller: Make) -> None:
    made = controller(Controlled("vllm-table", table=((1, 2, 3), (3, 9, 1)), num_speculative_tokens=8), 2)
    assert (made.initial, made.candidates) == (2, (0, 1, 2, 3))
    assert rounds(made, *[[0]] * 9) == [3] * 9


def test_constant_wish_is_the_initial_count(controller: Make) -> None:
    made = controller(Controlled("constant"), 2)
    assert rounds(made, [0], [2, 2]) == [2, 2]
    made.set_num_steps(0)
    assert (made.next_num_steps(1, 1), made.candidates) == (2, (0, 2))


# Both sides

HAPPENINGS = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), st.lists(st.integers(0, 7), max_size=9)),
        st.tuples(st.just("forward"), st.integers(0, 9)),
        st.tuples(st.just("set"), st.sampled_from((0, 1, 2, 3, 7))),
        st.tuples(st.just("obey"), st.integers(0, 9)),
    ),
    max_size=60,
)
RULES = {"warmup_batches": 1, "update_interval": 2, "ema_alpha": 0.5, "ceiling_coeff": 1.5}
CONTROLLED = [
    (Controlled("sglang-0.5.12", file={"2": {"candidate_steps": [1, 3, 7], "warmup_batches": 2, "update_interval": 2},
                                       "4": {"candidate_steps": [0, 2, 3], "ema_alpha": 0.5, "up_hysteresis": -0.25}}),
     (0, 1, 2, 3)),
    (Controlled("sglang-0.5.13", captured=(2, 6), file={
        **RULES, "0": {"candidate_steps": [1, 3, 7]}, "4": {"candidate_steps": [2, 3], "down_hysteresis": 1.0}}),
     (None, 1, 2, 3)),
    (Controlled("sglang-0.5.14", captured=(1, 3), file={
        **RULES, "2": {"candidate_steps": [0, 1, 3, 7]}, "5": {"candidate_steps": [0, 2], "update_interval": 1}}),
     (None, 0, 2, 7)),
    (Controlled("vllm-table", table=((1, 2, 7), (5, 6, 1)), num_speculative_tokens=3), (None, 0, 2)),
    (Controlled("constant"), (0, 3)),
]  # fmt: skip


@few(3)
@pytest.mark.parametrize(("controlled", "begins"), CONTROLLED, ids=[one.dialect for one, _ in CONTROLLED])
@given(happenings=HAPPENINGS, begin=st.integers(0, 3), lag=st.integers(0, 2))
def test_both_sides_have_the_same_wishes(
    controlled: Controlled, begins: tuple[int | None, ...], happenings: list[tuple[str, Any]], begin: int, lag: int
) -> None:
    initial = begins[begin % len(begins)]
    ours, theirs = optimized(controlled, initial, None, lag), reference(controlled, initial, None, lag)
    assert (ours.candidates, ours.initial) == (theirs.candidates, theirs.initial)
    for happening, value in happenings:
        for made in (ours, theirs):
            if happening == "commit":
                made.committed(value)
            elif happening == "forward":
                made.forwarded(value)
            else:
                steps = ours.next_num_steps(value, value) if happening == "obey" else value
                if steps in ours.candidates:
                    made.set_num_steps(steps)
        assert ours.slots == theirs.slots
        for batch in range(9):
            assert ours.next_num_steps(batch, batch + 1) == theirs.next_num_steps(batch, batch + 1)
