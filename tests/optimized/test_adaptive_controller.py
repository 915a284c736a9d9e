"""The controller on this side: the specification's rules by hand, and against the reference's own writing of them.

Leaves out: reading the file (the contract's tests).
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep_optimized.adaptive import Controller
from instep_reference.contract.adaptive import AdaptiveFile, Bracket
from instep_reference.contract.errors import BadInput
from instep_reference.controllers.sglang_0_5_12 import Brackets as Other
from instep_reference.controllers.sglang_0_5_12 import resolve

QUICK = Bracket(candidate_steps=(1, 3, 7), warmup_batches=2, update_interval=2)


def file(**changes: object) -> AdaptiveFile:
    return AdaptiveFile.of({"candidate_steps": [1, 3, 7], "warmup_batches": 2, "update_interval": 2, **changes})


def test_wish_is_the_count_in_force_without_a_file() -> None:
    controller = Controller(3, None)
    assert controller.candidates == (0, 3)
    controller.committed([0, 0])
    assert controller.wish() == 3
    controller.set(0)
    assert controller.wish() == 0
    with pytest.raises(BadInput, match="set_num_steps"):
        controller.set(1)


def test_initial_count_is_inserted_in_each_bracket_with_a_message() -> None:
    by_batch = AdaptiveFile(by_batch={1: Bracket(candidate_steps=(4, 1, 4)), 8: Bracket()})
    controller = Controller(3, by_batch)
    assert controller.candidates == (0, 1, 3, 4, 7)
    assert controller.messages == ["the initial step count 3 was added to the candidates of batch size 1"]


def test_controller_decides_only_after_warm_up_and_on_intervals() -> None:
    controller = Controller(3, file())
    wishes = []
    for _ in range(6):
        controller.committed([3, 3])
        wishes.append(controller.wish())
    # ema starts at 2, 2.5 is passed at the third batch; batches 4 and 6 are due
    assert wishes == [3, 3, 3, 7, 7, 7]


def test_controller_steps_down_while_little_is_accepted() -> None:
    controller = Controller(7, file(ema_alpha=1.0))
    for _ in range(4):
        controller.committed([0])
    assert controller.wish() == 1


def test_controller_goes_to_0_and_returns_by_a_probe() -> None:
    controller = Controller(1, file(candidate_steps=[0, 1, 3], ema_alpha=1.0))
    for _ in range(4):
        controller.committed([0])
    assert controller.wish() == 0
    controller.set(0)
    wishes = []
    for _ in range(2):
        controller.decoded(2)
        wishes.append(controller.wish())
    assert wishes == [0, 1]
    controller.set(1)
    controller.committed([1, 1])
    assert controller.wish() == 3  # judged at once, although the batch is not due


def test_decode_rows_count_only_without_speculation() -> None:
    controller = Controller(1, file(candidate_steps=[0, 1]))
    for _ in range(20):
        controller.decoded(1)
    controller.committed([])
    assert controller.wish() == 1


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("commit"), st.lists(st.integers(0, 7), max_size=5)),
            st.tuples(st.just("decode"), st.integers(0, 5)),
            st.tuples(st.just("set"), st.sampled_from((0, 1, 2, 3, 7))),
            st.tuples(st.just("obey"), st.just(0)),
        ),
        max_size=60,
    ),
    st.sampled_from((0, 1, 2, 3)),
)
def test_both_sides_have_the_same_wish(happenings: list[tuple[str, list[int] | int]], initial: int) -> None:
    wide = Bracket(candidate_steps=(0, 2, 3), warmup_batches=1, update_interval=3, ema_alpha=0.5, up_hysteresis=-0.25)
    both = AdaptiveFile(by_batch={2: QUICK, 4: wide})
    ours, theirs = Controller(initial, both), Other(resolve(both, initial))
    for what, value in happenings:
        if what == "commit":
            assert isinstance(value, list)
            ours.committed(value)
            theirs.update(len(value), value)
        elif what == "decode":
            assert isinstance(value, int)
            ours.decoded(value)
            if theirs.in_force == 0:
                theirs.update(value)
        else:
            steps = ours.wish() if what == "obey" else value
            assert isinstance(steps, int)
            if steps in ours.candidates:
                ours.set(steps)
                theirs.set_num_steps(steps)
        assert ours.wish() == theirs.wish()
