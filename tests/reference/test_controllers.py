"""Controllers of every dialect by hand: slots, routing, ceilings, probes, late results, tables.

Leaves out: the dialect sglang-0.5.12 (`test_adaptive.py`), and the released modules (`tests/peers/controllers.py`).
"""

from typing import Any

import pytest

from instep_reference.contract.adaptive_controller_file import DEFAULT_FILES, DIALECTS, RELEASES, AdaptiveFile, Slot
from instep_reference.contract.controllers import Controlled
from instep_reference.contract.errors import BadInput
from instep_reference.controllers import TABLE, Controller, controller

QUICK = {"warmup_batches": 0, "update_interval": 1, "ema_alpha": 1.0}  # every batch decides, by itself alone


def slots(file: dict[str, Any], initial: int | None = None, lag: int = 0, **fields: Any) -> Controller:
    return controller(Controlled(fields.pop("dialect", "sglang-0.5.14"), file=file, **fields), initial, None, lag)


def round_of(course: Controller, accepted: list[int]) -> int:
    """Run one round with the count that is wished for, and return that count."""
    steps = course.next_num_steps(len(accepted), len(accepted))
    course.set_num_steps(steps)
    course.forwarded(0 if steps else len(accepted))
    if steps:
        course.committed(accepted)
    return steps


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


@pytest.mark.parametrize(("dialect", "text", "field"), [
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


def test_every_dialect_is_in_the_table() -> None:
    assert tuple(TABLE) == DIALECTS


# -- slots ---------------------------------------------------------------------------------------


def test_initial_count_is_inserted_nowhere() -> None:
    named = {"1": [7, 1, 3], "8": [0], "4": [1, 7]}
    course = slots({key: {"candidate_steps": counts} for key, counts in named.items()}, 7)
    assert course.slots == {1: (7, 6.0), 8: (0, -1.0), 4: (7, 6.0)}
    assert slots({"1": {"candidate_steps": [1, 5]}, "8": {"candidate_steps": [0, 1, 3]}}, 3).slots == {
        1: (5, 4.0), 8: (3, 2.0)}  # fmt: skip
    assert course.candidates == (0, 1, 3, 7) and course.messages == []


def test_initial_count_is_the_middle_of_all_counts_if_none_is_given() -> None:
    assert controller(Controlled("sglang-0.5.14"), None).initial == 3
    assert controller(Controlled("sglang-0.5.14", defaults="0.5.18"), None).initial == 3
    assert slots({"1": {"candidate_steps": [1, 7]}, "8": {"candidate_steps": [0, 5]}}).initial == 5


@pytest.mark.parametrize(("captured", "keys"), [
    ((), {0: 2, 1: 2, 2: 2, 7: 2, 8: 8, 31: 8, 32: 32, 99: 32}),
    ((1, 8), {0: 2, 1: 2, 2: 8, 8: 8, 9: 8, 31: 8, 40: 32}),  # above the largest size a batch stays as it is
    ((3, 33), {1: 2, 3: 2, 4: 32, 33: 32}),
])  # fmt: skip
def test_batch_is_padded_to_a_captured_size_before_its_slot_is_found(
    captured: tuple[int, ...], keys: dict[int, int]
) -> None:
    file = {str(key): {"candidate_steps": [count]} for key, count in ((2, 1), (8, 3), (32, 7))}
    course = slots(file, 1, captured=captured)
    named = {1: 2, 3: 8, 7: 32}
    assert {batch: named[course.next_num_steps(batch, batch)] for batch in keys} == keys


def test_slots_keep_their_counts_while_others_run() -> None:
    course = slots({**QUICK, "1": {"candidate_steps": [1, 3]}, "2": {"candidate_steps": [1, 7]}}, 1)
    assert [round_of(course, accepted) for accepted in ([1], [3], [0, 0], [3])] == [1, 3, 1, 3]
    course.set_num_steps(0)
    assert course.next_num_steps(1, 1) == 3 and course.next_num_steps(2, 2) == 1


def test_probe_lasts_until_the_next_decision() -> None:
    course = slots({"1": {"candidate_steps": [0, 1], "warmup_batches": 0, "update_interval": 2}}, 1)
    assert [round_of(course, [0]) for _ in range(9)] == [1, 1, 0, 0, 1, 1, 0, 0, 1]


def test_average_is_frozen_at_zero_and_a_first_probe_starts_neutral() -> None:
    course = slots({**QUICK, "1": {"candidate_steps": [0, 3]}, "2": {"candidate_steps": [0]}}, 0)
    assert course.slots == {1: (0, -1.0), 2: (0, -1.0)}
    round_of(course, [0])
    assert course.slots[1] == (3, 2.0), "the probe begins at its count - 1"
    round_of(course, [0, 0])
    assert course.slots[2] == (0, -1.0), "0 is the only count"


@pytest.mark.parametrize(("coefficient", "accepted", "wish"), [
    (0.5, 3, 7),  # a rise
    (1.5, 2, 3), (1.0, 2, 1), (0.5, 2, 1), (0.0, 2, 3), (-1.0, 2, 3),
])
def test_ceiling_lowers_or_holds_and_never_prevents_a_rise(coefficient: float, accepted: int, wish: int) -> None:
    course = slots({**QUICK, "1": {"candidate_steps": [1, 3, 7], "ceiling_coeff": coefficient}}, 3)
    round_of(course, [accepted])
    assert course.next_num_steps(1, 1) == wish


def test_older_slots_step_up_again_after_steps_down() -> None:
    file = {**QUICK, "1": {"candidate_steps": [1, 3, 7], "down_hysteresis": 2.0, "up_hysteresis": -2.0}}
    counts = {}
    for dialect in ("sglang-0.5.13", "sglang-0.5.14"):
        course = slots(file, 3, dialect=dialect)
        round_of(course, [2])
        counts[dialect] = course.next_num_steps(1, 1)
    assert counts == {"sglang-0.5.13": 7, "sglang-0.5.14": 1}


def test_results_are_processed_as_many_forwards_late_as_the_lag() -> None:
    course = slots({**QUICK, "1": {"candidate_steps": [0, 1, 3]}}, 1, lag=1)
    wishes = []
    for accepted in ([0], [0], [0], [1], [1], [1]):
        round_of(course, accepted)
        wishes.append(course.next_num_steps(1, 1))
    # Round 2 still ran at 1 while its predecessor led to 0; its zeros arrive at 0 and freeze the average. The zeros of
    # round 3, at 0, arrive after the probe has begun, and are averaged: it fails at once.
    assert wishes == [1, 0, 1, 0, 1, 0]
    assert course.slots[1][1] == 0.0


def test_forward_without_a_batch_brings_late_results() -> None:
    course = slots({**QUICK, "1": {"candidate_steps": [1, 3]}}, 3, lag=1)
    course.forwarded(0)
    course.committed([0])
    assert course.next_num_steps(1, 1) == 3
    course.forwarded(0)  # a prompt
    assert course.next_num_steps(1, 1) == 1


def test_asking_changes_nothing() -> None:
    course = slots({**QUICK, "1": {"candidate_steps": [0, 1, 3]}}, 3)
    before = course.slots
    assert [course.next_num_steps(batch, batch) for batch in (0, 1, 5, 1)] == [3] * 4 and course.slots == before
    course.committed([])
    assert course.slots == before, "a commit without requests is no batch"


# -- the others ----------------------------------------------------------------------------------


def test_table_gives_gaps_and_the_tail_the_count_before_them() -> None:
    controlled = Controlled("vllm-table", table=((8, 9, 1), (1, 2, 5), (4, 4, 3)), num_speculative_tokens=4)
    course = controller(controlled, None)
    assert (course.initial, course.candidates) == (4, (0, 1, 3, 4))
    wishes = {scheduled: course.next_num_steps(1, scheduled) for scheduled in (0, 1, 2, 3, 4, 7, 8, 9, 99)}
    assert wishes == {0: 4, 1: 4, 2: 4, 3: 4, 4: 3, 7: 3, 8: 1, 9: 1, 99: 1}


def test_constant_count_ignores_everything() -> None:
    course = controller(Controlled("constant"), 3)
    course.set_num_steps(0)
    course.forwarded(4)
    course.committed([0])
    assert course.next_num_steps(9, 9) == 3 and course.candidates == (0, 3)


def test_delays_of_wishes_are_those_of_the_dialects() -> None:
    assert {dialect: [Controlled(dialect).wish_delay(lag) for lag in (0, 1, 2)] for dialect in DIALECTS} == {
        "sglang-0.5.12": [0, 1, 2], "sglang-0.5.13": [0, 0, 0], "sglang-0.5.14": [0, 0, 0], "vllm-table": [1, 1, 1],
        "constant": [0, 0, 0],
    }  # fmt: skip
