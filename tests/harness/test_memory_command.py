"""`instep memory`: the figures are those of the engine's own pools, for every strategy.

Leaves out: how an engine allocates (`tests/optimized/test_memory_pools.py`).
"""

from __future__ import annotations

import json

import pytest
import torch

from instep.budget import PAGE_SIZE, need, needs, spelled
from instep.rig.alone import engine
from instep.rig.setting import Setting
from instep.shapes import shape
from instep.shapes.drawn import random_checkpoint
from instep_optimized import Options
from instep_optimized.commit import CONV_FORMS, STRATEGIES
from instep_reference.contract.engine import Capacity
from support.command import complaint
from support.narrow import narrow


@pytest.mark.parametrize("conv", CONV_FORMS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_request_costs_what_the_engine_allocates_for_one_more(strategy, conv):
    config = narrow("qwen3.5-4b")
    checkpoint, setting = random_checkpoint(config), Setting("plain", dtype="bfloat16", strategy=strategy, conv=conv)
    allocated = []
    for requests in (2, 3):
        room = Capacity(tuple(range(1, requests + 1)), (1, 2, 3), PAGE_SIZE, 32)
        served = engine(checkpoint, setting, room, num_steps=3)
        allocated.append(sum(
            part.numel() * part.element_size() for region in served.regions() if region.by != "page"
            for part in (region.units, region.gaps) if part is not None
        ))
    told = need(config, setting.options(), widest=4)
    assert (told.strategy, told.conv) == (strategy, conv) and told.fixed == sum(told.pools.values()) + told.board
    assert allocated[1] - allocated[0] == pytest.approx(told.fixed, rel=0.02)  # `regions` leaves the padding out


def test_all_strategies_are_there_and_a_rerun_is_smaller_than_a_snapshot():
    config = shape("qwen3.5-9b")
    found = {(one.strategy, one.conv): one for one in needs(config, Options(activation=torch.bfloat16), widest=4)}
    assert set(found) == {(strategy, conv) for strategy in STRATEGIES for conv in CONV_FORMS}
    snapshot, rerun = found["snapshot", "widened"], found["rerun", "widened"]
    assert rerun.beside < snapshot.beside / 20 and rerun.pools["state"] == snapshot.pools["state"]
    assert rerun.fit(2**36, 4096) > snapshot.fit(2**36, 4096) > 0
    assert rerun.total(PAGE_SIZE + 1) == rerun.fixed + 2 * rerun.page
    half = Options(activation=torch.bfloat16, state=torch.bfloat16)
    assert not any(one.strategy == "lazy_rerun" for one in needs(config, half, widest=4)), "the engine refuses it"


def test_the_command_prints_a_line_for_each_and_writes_them(instep, tmp_path):
    ran = instep("memory", "qwen3.5-9b", "--candidates", "1,3,7", "--gib", "80", "--json", tmp_path / "m.json")
    assert ran.code == 0 and "windows of 8" in ran.out
    assert all(name in ran.out for name in (*STRATEGIES, *CONV_FORMS))
    result = json.loads((tmp_path / "m.json").read_text())
    assert result["widest"] == 8 and len(result["strategies"]) == len(STRATEGIES) * len(CONV_FORMS)
    assert instep("memory", "fixtures/tiny").code == 0
    assert instep("memory", "fixtures/tiny/config.json", "--num-steps", "0").code == 0


@pytest.mark.parametrize(("words", "said"), [
    (("nothing",), "qwen3.5-9b"),
    (("qwen3.5-9b", "--candidates", "1,x"), "step counts"),
    (("qwen3.5-9b", "--candidates", "1", "--num-steps", "2"), "one of them"),
    (("qwen3.5-9b", "--dtype", "int8"), "bfloat16"),
    (("qwen3.5-9b", "--layout", "XX"), "VK or KV"),
    (("qwen3.5-9b", "--gib", "inf"), "a finite number"),
    (("fixtures/tiny/prompts.json",), "JSON object"),
])  # fmt: skip
def test_bad_input_is_one_line(instep, words, said):
    assert said in complaint(instep("memory", *words))


def test_sizes_are_spelled_in_the_largest_whole_unit():
    assert [spelled(size) for size in (12, 2048, 3 * 2**19, 5 * 2**30)] == ["12 B", "2.00 KiB", "1.50 MiB", "5.00 GiB"]
