"""Adaptive step counts by hand: files, candidates, and every decision of the controller.

Leaves out: the other side's controller (`tests/optimized/test_adaptive_controller.py`).
"""

from pathlib import Path

import pytest

from instep_reference.contract.adaptive_controller_file import AdaptiveFile, Bracket
from instep_reference.contract.errors import BadInput
from instep_reference.controllers.sglang_0_5_12 import Brackets, decide, resolve

EAGER = '"warmup_batches": 0, "update_interval": 1'


def controller(text: str, initial: int) -> Brackets:
    return Brackets(resolve(AdaptiveFile.read(text), initial))


# -- the file ------------------------------------------------------------------------------------


def test_a_file_is_kept_as_written(tmp_path: Path) -> None:
    text = '{"1": {"candidate_steps": [7, 1, 7]}, "8": {"ema_alpha": 0.5}}'
    (tmp_path / "adaptive.json").write_text(text)
    file = AdaptiveFile.open(tmp_path / "adaptive.json")
    assert file.by_batch == {1: Bracket(candidate_steps=(7, 1, 7)), 8: Bracket(ema_alpha=0.5)}
    assert AdaptiveFile.of(file.written()) == file
    assert AdaptiveFile.read("{}").flat == Bracket()


@pytest.mark.parametrize(("text", "field"), [
    ('{"candidate_steps": [1, "x"]}', "adaptive.candidate_steps[1]"),
    ('{"candidate_steps": []}', "adaptive.candidate_steps"),
    ('{"candidate_steps": [-1]}', "adaptive.candidate_steps"),
    ('{"candidate_steps": [true]}', "adaptive.candidate_steps[0]"),
    ('{"ema_alpha": 0}', "adaptive.ema_alpha"),
    ('{"ema_alpha": NaN}', "adaptive.ema_alpha"),
    ('{"warmup_batches": -1}', "adaptive.warmup_batches"),
    ('{"update_interval": 0}', "adaptive.update_interval"),
    ('{"up_hysteresis": 1e999}', "adaptive.up_hysteresis"),
    ('{"steps": [1]}', "adaptive"),
    ('{"8": {"update_interval": 0}}', "adaptive.8.update_interval"),
    ('{"0": {}}', "adaptive.0"),
    ('{"08": {}}', "adaptive.08"),
    ('{"one": {}}', "adaptive.one"),
    ('{"1": {}, "1": {}}', "adaptive.1"),
    ('{"1": {}, "ema_alpha": 1}', "adaptive"),
    ("[1, 3]", "adaptive"),
    ('{"candidate_steps": [1', "adaptive"),
    ('{"candidate_steps": [1.0]}', "adaptive.candidate_steps[0]"),
    pytest.param('{"a":' * 100_000, "adaptive", id="too deep"),
    pytest.param(f'{{"{"9" * 5000}": {{}}}}', f"adaptive.{'9' * 5000}", id="too long a key"),
])  # fmt: skip
def test_a_bad_file_is_refused_by_the_name_of_its_field(text: str, field: str) -> None:
    with pytest.raises(BadInput) as refused:
        AdaptiveFile.read(text)
    assert refused.value.field == field


def test_a_missing_file_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nowhere"):
        AdaptiveFile.open(tmp_path / "nowhere.json")


# -- candidates ----------------------------------------------------------------------------------


def test_candidates_default_to_one_three_seven() -> None:
    found = resolve(AdaptiveFile.read("{}"), 3)
    assert (found.by_bracket, found.maximum, found.messages) == ({1: (1, 3, 7)}, 7, ())


def test_initial_count_is_inserted_in_each_bracket_with_a_message() -> None:
    found = resolve(AdaptiveFile.read('{"1": {"candidate_steps": [9, 2, 9]}, "4": {"candidate_steps": [5]}}'), 5)
    assert found.by_bracket == {1: (2, 5, 9), 4: (5,)}
    assert found.maximum == 9, "pools take the maximum over all brackets"
    assert len(found.messages) == 1 and "5" in found.messages[0] and "bracket 1" in found.messages[0]


def test_initial_count_is_the_only_candidate_without_a_file() -> None:
    alone = Brackets(resolve(None, 3))
    for _ in range(40):
        alone.update(2, [0, 0])
    assert alone.resolved.by_bracket == {1: (3,)}
    assert alone.wish() == 3
    alone.set_num_steps(0)
    assert alone.wish() == 0


@pytest.mark.parametrize(("batch", "key"), [(0, 2), (1, 2), (2, 2), (7, 2), (8, 8), (9, 8), (64, 32)])
def test_bracket_of_a_batch_has_the_largest_key_not_above_it(batch: int, key: int) -> None:
    found = resolve(AdaptiveFile.read('{"8": {}, "2": {}, "32": {}}'), 3)
    assert found.bracket(batch) == key


# -- one decision --------------------------------------------------------------------------------

STEPS = (0, 1, 3, 7)


@pytest.mark.parametrize(("steps", "ema", "wish"), [
    (3, 0.26, 3),  # above 1 - 0.5 - 0.25
    (3, 0.25, 0),  # a tie goes down, and through 1, whose own threshold is 0.5 - 0.25 too
    (7, 2.25, 3),  # a tie with 3 - 0.5 - 0.25
    (7, 2.26, 7),
    (3, 2.5, 3),  # a tie does not go up
    (3, 2.51, 7),
    (1, 0.5, 1),
    (1, 0.51, 3),
    (1, 2.6, 7),  # stepping up repeats while it may
    (7, 9.0, 7),
    (2, 0.3, 2),  # a count from elsewhere is judged by its neighbours
    (2, 1.6, 3),
])  # fmt: skip
def test_decision_follows_the_thresholds(steps: int, ema: float, wish: int) -> None:
    assert decide(steps, ema, STEPS, Bracket()) == wish


def test_decision_never_steps_up_after_a_step_down() -> None:
    """With thresholds that cross, down wins: 3 -> 1, although 1 alone would go up."""
    rule = Bracket(down_hysteresis=2.0, up_hysteresis=-2.0)
    assert decide(3, 2.0, (1, 3, 7), rule) == 1
    assert decide(1, 2.0, (1, 3, 7), rule) == 7


# -- several decisions ----------------------------------------------------------------------------


def test_ema_moves_in_warm_up_without_a_decision() -> None:
    course = controller("{}", 3)
    ema = 2.0
    for batch in range(1, 16):
        assert course.wish() == 3, f"decided before batch {batch}"
        course.update(2, [3, 3])
        ema = (1 - 0.2) * ema + 0.2 * 3.0
        assert course.opinions[1].ema == ema
    assert course.wish() == 7


def test_decisions_fall_on_the_interval_only() -> None:
    course = controller('{"warmup_batches": 1, "update_interval": 3}', 3)
    wishes = []
    for _ in range(7):
        course.update(1, [3])
        wishes.append(course.wish())
        course.opinions[1].ema = 3.0
    assert wishes == [3, 3, 3, 7, 7, 7, 7]


def test_controller_goes_to_zero_and_returns_by_a_probe() -> None:
    course = controller('{"candidate_steps": [0, 1, 3], "warmup_batches": 0, "update_interval": 2}', 1)
    course.update(1, [0])
    assert course.wish() == 1
    course.update(1, [0])
    assert course.wish() == 0, "ema 0 is at most 0.25"
    course.set_num_steps(0)
    course.update(1)
    assert course.wish() == 0
    course.update(1)
    assert course.wish() == 1, "every interval one probe round at the next candidate up"
    assert course.opinions[1].ema == 0.0, "frozen at 0"
    course.set_num_steps(1)
    course.update(1, [1])
    assert (course.opinions[1].ema, course.wish()) == (0.2, 0), "one good round is not enough"
    course.set_num_steps(0)
    course.update(1)
    assert course.wish() == 1
    course.set_num_steps(1)
    course.update(1, [1])
    assert course.opinions[1].ema == pytest.approx(0.36)
    assert course.wish() == 1, "judged at once, off the interval, and it stays"


def test_a_probe_is_judged_once() -> None:
    course = controller('{"candidate_steps": [0, 1], "warmup_batches": 0, "update_interval": 10}', 0)
    for _ in range(10):
        course.update(3)
    assert course.wish() == 1
    course.set_num_steps(1)
    course.update(3, [0, 0, 0])
    assert course.wish() == 0
    course.opinions[1].ema = 0.9
    course.update(3, [1, 1, 1])
    assert course.wish() == 0, "granted late: the next decision is due at the interval"


@pytest.mark.parametrize(("course_of_steps", "judged"), [((1,), True), ((1, 3), True), ((1, 0), False), ((0,), False)])
def test_a_probe_lasts_until_a_commit_or_until_zero(course_of_steps: tuple[int, ...], judged: bool) -> None:
    course = controller('{"candidate_steps": [0, 1, 3], "warmup_batches": 0, "update_interval": 10}', 0)
    for steps in course_of_steps:
        course.set_num_steps(steps)
    assert course.probing is judged
    course.update(1, [0])
    assert course.wish() == 0 and course.probing is False


def test_commit_at_zero_steps_counts_without_moving_the_ema() -> None:
    course = controller('{"candidate_steps": [0, 1], "warmup_batches": 0, "update_interval": 2}', 0)
    course.update(1, [0])
    course.update(1, [0])
    assert (course.opinions[1].ema, course.opinions[1].batches, course.wish()) == (0.0, 2, 1)


def test_no_probe_is_judged_in_warm_up() -> None:
    course = controller('{"candidate_steps": [0, 1], "warmup_batches": 5, "update_interval": 1}', 0)
    course.set_num_steps(1)
    course.update(1, [0])
    assert course.wish() == 1


def test_each_bracket_has_its_own_ema_and_wish() -> None:
    each = f'{{"candidate_steps": [1, 3], {EAGER}}}'
    course = controller(f'{{"1": {each}, "4": {each}}}', 3)
    course.update(2, [3, 3])
    for _ in range(10):
        course.update(4, [0, 0, 0, 0])
    assert course.wish(4) == 1 and course.wish() == 1
    assert course.wish(2) == 3 and course.opinions[1].batches == 1
    course.update(1, [3])
    assert course.wish() == 3, "the wish is that of the last counted batch"


def test_set_count_is_the_wish_until_the_next_decision() -> None:
    course = controller("{}", 3)
    course.set_num_steps(7)
    assert course.wish() == 7
    course.update(1, [0])
    assert course.wish() == 7


def test_empty_batches_change_nothing() -> None:
    course = controller(f'{{{EAGER}}}', 3)
    course.update(0, [])
    assert (course.opinions[1].batches, course.batch, course.wish()) == (0, 0, 3)
