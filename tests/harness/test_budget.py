"""The memory budget of an engine is that of its pools: under every dialect and strategy, and a wrong one is named.

Leaves out: the figures of `instep memory` (`test_memory_command.py`), and the planted fault in whole runs (the
catalogue's `budget-initial-steps`).
"""

from collections.abc import Mapping, Sequence

import pytest
import torch

from instep.campaign.shapes.random_weights import random_checkpoint
from instep.checks.capacity import budgeted
from instep.subject.memory_per_request import PAGE_SIZE, need
from instep.verdict import Comparison
from instep.watch.event_log import Room
from instep_optimized import OptimizedEngine, Options, load
from instep_optimized.commit import CONV_FORMS, STRATEGIES
from instep_optimized.engine_from_checkpoint import budget
from instep_reference.contract.adaptive_controller_file import AdaptiveFile
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.controllers import Controlled
from instep_reference.contract.engine import Capacity
from support.inputs.narrow_models import narrow

TOKENS = 64
CAPACITY = Capacity((2, 1), tuple(range(1, 9)), PAGE_SIZE, max_tokens=32, max_positions=TOKENS)
# The dialect, the initial count, and the largest one.
DIALECTS: dict[str, tuple[Controlled | None, int, int]] = {
    "flat file": (None, 1, 7),
    "sglang-0.5.12": (Controlled("sglang-0.5.12", file={"1": {"candidate_steps": [1]}, "8": {}}), 1, 7),
    "sglang-0.5.13": (Controlled("sglang-0.5.13"), 1, 7),
    "sglang-0.5.14": (Controlled("sglang-0.5.14"), 3, 7),
    "vllm-table": (Controlled("vllm-table", table=((1, 1, 5), (2, 9, 1)), num_speculative_tokens=4), 1, 4),
    "constant": (Controlled("constant"), 2, 2),
}  # fmt: skip


def config() -> ModelConfig:
    return narrow("qwen3.5-4b")


def made(dialect: str, options: Options | None = None) -> OptimizedEngine:
    controlled, initial, _ = DIALECTS[dialect]
    return OptimizedEngine(
        random_checkpoint(config()), load("plain"), options or Options(), CAPACITY, num_steps=initial,
        adaptive=AdaptiveFile.of({}) if controlled is None else None, controlled=controlled,
    )


def judged(engine: OptimizedEngine, found: Mapping[str, int], dialect: str) -> Sequence[Comparison]:
    _, initial, largest = DIALECTS[dialect]
    room = Room(CAPACITY, largest + 1, initial + 1)
    return list(budgeted(engine.regions(), found, room, 0, "admit"))


def said(engine: OptimizedEngine, found: Mapping[str, int], dialect: str = "sglang-0.5.14") -> list[str]:
    return [one.problem.clause for one in judged(engine, found, dialect) if not one.agrees]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_budget_of_every_dialect_is_that_of_the_largest_count(dialect: str) -> None:
    engine, largest = made(dialect), DIALECTS[dialect][2]
    compared = judged(engine, engine.budget(), dialect)
    pools = {region.name for region in engine.regions() if not region.red}
    assert len(compared) == len(pools) > 5 and not said(engine, engine.budget(), dialect)
    figure = need(config(), Options(), largest + 1, TOKENS)
    assert figure.allocation(2) == sum(pool._body.nbytes + pool._ends.nbytes
                                       for pool in engine._memory.pools.values()) + engine._memory.none_fresh.nbytes


@pytest.mark.parametrize("dialect", DIALECTS)
def test_budget_of_the_first_count_is_named_under_every_dialect(dialect: str) -> None:
    _, initial, largest = DIALECTS[dialect]
    options = Options(strategy="snapshot")
    wrong = budget(config(), load("plain"), options, CAPACITY, (initial,))
    found = said(made(dialect, options), wrong, dialect)
    if initial == largest:
        assert not found
        return
    why = f": a budget for windows of {initial + 1} tokens, as the first step count has; the widest has {largest + 1}"
    assert any(one.startswith("the memory budget has") and "snapshot_state" in one for one in found)
    assert all(one.endswith(why) for one in found), found


@pytest.mark.parametrize("conv", CONV_FORMS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_budget_of_the_first_count_is_named_under_every_strategy(strategy: str, conv: str) -> None:
    options = Options(strategy=strategy, conv=conv, activation=torch.bfloat16)
    engine = made("sglang-0.5.14", options)
    assert not said(engine, engine.budget())
    found = said(engine, budget(config(), load("plain"), options, CAPACITY, (3,)))
    kept = {"snapshot": "snapshot_state", "columns": "state"}.get(strategy, "ring_")
    assert any(f"the pool {kept}" in one and "as the first step count has" in one for one in found), found
    assert conv != "widened" or any("the pool conv," in one and "as the first step" in one for one in found), found


def test_other_differences_of_a_budget_are_found_without_a_guess() -> None:
    engine = made("sglang-0.5.14")
    right = dict(engine.budget())
    less = {**right, "state": right["state"] - 1}
    assert said(engine, less) == [f"the memory budget has {less['state']} bytes for the pool state, which takes "
                                  f"{right['state']}"]  # fmt: skip
    without = {name: size for name, size in right.items() if name != "window"}
    missing = f"the memory budget has 0 bytes for the pool window, which takes {right['window']}"
    assert said(engine, without) == [missing]
    assert said(engine, {**right, "scratch": 8, "nothing": 0}) == [
        "the memory budget has bytes for scratch; the engine shows no such region"]
