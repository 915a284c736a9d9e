"""Whole texts in arms, by step count: what one model decoded, played and timed by another that was checked.

Leaves out: figures, which need a GPU (`instep bench --kind decoding`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from instep.campaign.shapes.random_weights import random_checkpoint
from instep.generate.decode import Ask, Decoded
from instep.setting import Setting
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import SetNumSteps
from instep_reference.contract.errors import BadInput
from instep_speed.bench.replayed_acceptance import Extent, play, trace_of
from instep_speed.bench.step_count_arms import arms, hardest_first, mixed, parted
from support.build.narrow_models import narrow

pytestmark = pytest.mark.slow

TINY = Path("fixtures/tiny")


@pytest.fixture(scope="module")
def decoded() -> dict[str, Decoded]:
    prompts = {"a": tuple(b"Return the"), "b": tuple(b"spam, spam, spam, ")}
    ask = Ask(Checkpoint.open(TINY), Setting(), prompts, 1, tokens=6, batch=2, stop=0)
    return arms(ask, {"candidate_steps": [1, 3], "warmup_batches": 0, "update_interval": 1}, (0,))


@pytest.fixture(scope="module")
def large() -> Checkpoint:
    return random_checkpoint(narrow("qwen3.5-9b"))


def test_the_hardest_come_first() -> None:
    prompts = {"easy": tuple(b"Shifting operations\n****************"), "hard": tuple(b"&qw }7b3p}dkhx4py8")}
    ask = Ask(Checkpoint.open(TINY), Setting(), prompts, 3, tokens=12, batch=2, stop=0)
    assert list(hardest_first(ask).prompts) == ["hard", "easy"]


def test_arms_say_the_same(decoded: dict[str, Decoded]) -> None:
    assert list(decoded) == ["adaptive", "0"] and not parted(decoded)


def test_played_arms_are_checked_and_their_laps_hold_the_checked_bits(
    decoded: dict[str, Decoded], large: Checkpoint
) -> None:
    played = play(decoded, large, Setting(), laps=1)
    for name, one in played.items():
        assert one.right and one.checked.verdict.events == len(decoded[name].events)
        assert set(one.digests) == {"a, finished", "b, finished"}
        assert one.speed().tokens == 12 and 0 < one.latency_s() <= sum(one.laps[0].seconds)
    spoilt = replace(played["0"].laps[0], digests={"a, finished": "", "b, finished": ""})
    assert not replace(played["0"], laps=(spoilt,)).right
    assert not replace(played["0"], extent=Extent(until=10**6), digests={}).right


def test_a_wrong_engine_is_not_right(decoded: dict[str, Decoded], large: Checkpoint) -> None:
    played = play({"0": decoded["0"]}, large, Setting("support.wrong.ops:SWAPPED"), laps=1)
    assert not played["0"].right


def test_a_part_may_be_checked(decoded: dict[str, Decoded], large: Checkpoint) -> None:
    played = play({"0": decoded["0"]}, large, Setting(), laps=1, extents={"0": Extent(until=5, layers=(0,))})["0"]
    assert played.right and played.checked.verdict.events == 6 and set(played.digests) == {"a, event 5", "b, event 5"}


def test_graphs_are_compared_while_batches_are_full(decoded: dict[str, Decoded], large: Checkpoint) -> None:
    extent = Extent.full_batches(decoded["0"])
    played = play({"0": decoded["0"]}, large, Setting(graphs=True), laps=1, extents={"0": extent})["0"]
    assert played.right and set(played.digests) == {f"a, event {extent.until}", f"b, event {extent.until}"}


def test_laps_begin_at_the_first_step_count_again(large: Checkpoint) -> None:
    ask = Ask(Checkpoint.open(TINY), Setting(), {"a": tuple(b"0, 1, 2, 3, " * 4)}, 1, tokens=16, batch=2, stop=0)
    decoded = arms(ask, {"candidate_steps": [1, 3], "warmup_batches": 0, "update_interval": 1}, ())
    counts = [event.num_steps for event in decoded["adaptive"].events if isinstance(event, SetNumSteps)]
    assert counts and counts[-1] != 1
    assert play(decoded, large, Setting(graphs=True), laps=1)["adaptive"].right


def test_a_model_with_a_smaller_vocabulary_is_refused(decoded: dict[str, Decoded]) -> None:
    with pytest.raises(BadInput, match="256 tokens"):
        trace_of(decoded["0"], random_checkpoint(narrow("qwen3.5-9b", vocab=64)), "0")


def test_prompts_of_all_kinds_are_mixed() -> None:
    found = mixed({f"p{number}": (1,) for number in range(12)})
    names = list(found)
    assert len(found) == 18 and {name.split()[0] for name in names[:6]} >= {"repeated", "noise"}
    assert found["noise 0"] != found["noise 1"]
