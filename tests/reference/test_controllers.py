"""Adaptive step counts by hand: files, fields, candidates, and every decision of the dialect sglang-0.5.12.

Leaves out: the rules that both sides have (`tests/optimized/test_controllers.py`), and the released modules
(`tests/peers/controllers.py`).
"""

from pathlib import Path
from typing import Any

import pytest

from instep_reference.contract.adaptive_controller_file import (
    DEFAULT_FILES,
    DIALECTS,
    RELEASES,
    AdaptiveFile,
    Bracket,
    Slot,
)
from instep_reference.contract.controllers import Controlled
from instep_reference.contract.errors import BadInput
from instep_reference.controllers.sglang_0_5_12 import Brackets, decide, resolve

# -- the files of releases -----------------------------------------------------------------------


@pytest.mark.parametrize("release", RELEASES)
def test_default_file_of_every_release_is_read(release: str) -> None:
    dialect, first = RELEASES[release]
    file = AdaptiveFile.of(DEFAULT_FILES[first], dialect)
    assert AdaptiveFile.of(file.written(), dialect) == file
    assert file.slots or release == "0.5.12"


def test_slot_takes_defaults_of_the_file_and_its_own_fields_win() -> None:
    file = AdaptiveFile.read("""{"ema_alpha": 0.5, "candidate_steps": [9], "update_interval": 2, "note": {"a": 1},
        "0": {"candidate_steps": [3, 1, 3, true], "update_interval": 7, "unknown": []},
        "16": {"candidate_steps": [0], "ceiling_coeff": 2}}""", "sglang-0.5.14")
    assert file.slots == {0: Slot((3, 1, 3, 1), ema_alpha=0.5, update_interval=7),
                          16: Slot((0,), ema_alpha=0.5, update_interval=2, ceiling_coeff=2.0)}  # fmt: skip


FLAT = "sglang-0.5.12"


@pytest.mark.parametrize(("dialect", "text", "field"), [
    (FLAT, '{"candidate_steps": [1, "x"]}', "adaptive.candidate_steps[1]"),
    (FLAT, '{"candidate_steps": []}', "adaptive.candidate_steps"),
    (FLAT, '{"candidate_steps": [-1]}', "adaptive.candidate_steps"),
    (FLAT, '{"candidate_steps": [true]}', "adaptive.candidate_steps[0]"),
    (FLAT, '{"ema_alpha": 0}', "adaptive.ema_alpha"),
    (FLAT, '{"ema_alpha": NaN}', "adaptive.ema_alpha"),
    (FLAT, '{"warmup_batches": -1}', "adaptive.warmup_batches"),
    (FLAT, '{"update_interval": 0}', "adaptive.update_interval"),
    (FLAT, '{"up_hysteresis": 1e999}', "adaptive.up_hysteresis"),
    (FLAT, '{"steps": [1]}', "adaptive"),
    (FLAT, '{"8": {"update_interval": 0}}', "adaptive.8.update_interval"),
    (FLAT, '{"0": {}}', "adaptive.0"),
    (FLAT, '{"08": {}}', "adaptive.08"),
    (FLAT, '{"one": {}}', "adaptive.one"),
    (FLAT, '{"1": {}, "1": {}}', "adaptive.1"),
    (FLAT, '{"1": {}, "ema_alpha": 1}', "adaptive"),
    (FLAT, "[1, 3]", "adaptive"),
    (FLAT, '{"candidate_steps": [1', "adaptive"),
    (FLAT, '{"candidate_steps": [1.0]}', "adaptive.candidate_steps[0]"),
    pytest.param(FLAT, '{"a":' * 100_000, "adaptive", id="too deep"),
    pytest.param(FLAT, f'{{"{"9" * 5000}": {{}}}}', f"adaptive.{'9' * 5000}", id="too long a key"),
    ("sglang-0.5.14", '{"candidate_steps": [1, 3]}', "adaptive"),
    ("sglang-0.5.14", '{"1": {}}', "adaptive.1.candidate_steps"),
    ("sglang-0.5.14", '{"1": 3}', "adaptive.1.candidate_steps"),
    ("sglang-0.5.14", '{"1": {"candidate_steps": []}}', "adaptive.1.candidate_steps"),
    ("sglang-0.5.14", '{"1": {"candidate_steps": [-1]}}', "adaptive.1.candidate_steps"),
    ("sglang-0.5.14", '{"1": {"candidate_steps": [1.0]}}', "adaptive.1.candidate_steps"),
    ("sglang-0.5.13", '{"1": {"candidate_steps": [0, 1]}}', "adaptive.1.candidate_steps"),
    ("sglang-0.5.14", '{"1": {"candidate_steps": [1]}, "01": {"candidate_steps": [1]}}', "adaptive.01"),
    ("sglang-0.5.14", '{"1": {"candidate_steps": [1], "ema_alpha": "x"}}', "adaptive.1.ema_alpha"),
    ("sglang-0.5.14", '{"update_interval": 0, "1": {"candidate_steps": [1]}}', "adaptive.1.update_interval"),
    ("sglang-0.5.14", '{"1": {"candidate_steps": [1], "ceiling_coeff": 1e999}}', "adaptive.1.ceiling_coeff"),
    ("sglang-0.5.14", '{"1": {"candidate_steps": [1]}, "1": {"candidate_steps": [1]}}', "adaptive.1"),
    ("sglang-0.5.14", "[1, 3]", "adaptive"), ("vllm-table", "{}", "adaptive"), ("constant", "{}", "adaptive"),
])  # fmt: skip
def test_a_bad_file_is_refused_by_the_name_of_its_field(dialect: Any, text: str, field: str) -> None:
    with pytest.raises(BadInput) as refused:
        AdaptiveFile.read(text, dialect)
    assert refused.value.field == field


def test_file_with_slots_is_refused_by_the_older_dialect_with_its_remedy() -> None:
    with pytest.raises(BadInput, match=r'dialect "sglang-0\.5\.14"'):
        AdaptiveFile.of(DEFAULT_FILES["0.5.14"] | {"1": {"candidate_steps": [1], "ceiling_coeff": 0}})


TABLED = ((1, 4, 3),)


@pytest.mark.parametrize(("fields", "num_steps", "field"), [
    ({"dialect": "sglang-0.5.14"}, 2, "num_steps"),
    ({"dialect": "sglang-0.5.14", "captured": (4, 1)}, 3, "controller.captured"),
    ({"dialect": "sglang-0.5.14", "captured": (0, 1)}, 3, "controller.captured"),
    ({"dialect": "sglang-0.5.14", "defaults": "0.5.13"}, 3, "controller.defaults"),
    ({"dialect": "sglang-0.5.14", "defaults": "0.5.14", "file": {"1": {"candidate_steps": [3]}}}, 3,
     "controller.defaults"),
    ({"dialect": "sglang-0.5.13", "defaults": "0.5.14"}, 3, "controller.defaults"),
    ({"dialect": "sglang-0.5.14", "table": TABLED}, 3, "controller.table"),
    ({"dialect": "sglang-0.5.14", "num_speculative_tokens": 3}, 3, "controller.num_speculative_tokens"),
    ({"dialect": "vllm-table", "table": TABLED}, 3, "controller.num_speculative_tokens"),
    ({"dialect": "vllm-table", "num_speculative_tokens": 3}, 3, "controller.table"),
    ({"dialect": "vllm-table", "table": ((2, 4, 3),), "num_speculative_tokens": 3}, 3, "controller.table"),
    ({"dialect": "vllm-table", "table": ((1, 4, 3), (4, 5, 1)), "num_speculative_tokens": 3}, 3, "controller.table"),
    ({"dialect": "vllm-table", "table": ((1, 4, -1),), "num_speculative_tokens": 3}, 3, "controller.table"),
    ({"dialect": "vllm-table", "table": TABLED, "num_speculative_tokens": 3}, 4, "num_steps"),
    ({"dialect": "vllm-table", "table": TABLED, "num_speculative_tokens": 3, "captured": (1,)}, 3,
     "controller.captured"),
    ({"dialect": "constant", "file": {}}, 3, "controller.file"), ({"dialect": "constant"}, None, "num_steps"),
    ({"dialect": "sglang-0.5.12"}, None, "num_steps"),
])  # fmt: skip
def test_contradicting_fields_are_refused(fields: dict[str, Any], num_steps: int | None, field: str) -> None:
    with pytest.raises(BadInput) as refused:
        Controlled(**fields).check(num_steps)
    assert refused.value.field == field


def test_delays_of_wishes_are_those_of_the_dialects() -> None:
    assert {dialect: [Controlled(dialect).wish_delay(lag) for lag in (0, 1, 2)] for dialect in DIALECTS} == {
        "sglang-0.5.12": [0, 1, 2], "sglang-0.5.13": [0, 0, 0], "sglang-0.5.14": [0, 0, 0], "vllm-table": [1, 1, 1],
        "constant": [0, 0, 0],
    }  # fmt: skip


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


def test_a_missing_file_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nowhere"):
        AdaptiveFile.open(tmp_path / "nowhere.json")


# -- candidates ----------------------------------------------------------------------------------


def test_initial_count_is_inserted_in_each_bracket_with_a_message() -> None:
    found = resolve(AdaptiveFile.read('{"1": {"candidate_steps": [9, 2, 9]}, "4": {"candidate_steps": [5]}}'), 5)
    assert found.by_bracket == {1: (2, 5, 9), 4: (5,)}
    assert found.maximum == 9, "pools take the maximum over all brackets"
    assert len(found.messages) == 1 and "5" in found.messages[0] and "bracket 1" in found.messages[0]


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
