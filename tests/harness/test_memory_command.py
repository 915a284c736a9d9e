"""`instep memory`: the figures are those of the engine's own pools, for every strategy.

Leaves out: how an engine allocates (`tests/optimized/test_memory_pools.py`).
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.campaign.shapes import shape
from instep.campaign.shapes.random_weights import random_checkpoint
from instep.subject.memory_per_request import PAGE_SIZE, need, needs, spelled, weights_bytes
from instep_optimized import OptimizedEngine, Options, load
from instep_optimized.commit import CONV_FORMS, STRATEGIES
from instep_optimized.memory_addresses import Pages
from instep_reference.contract.checkpoint_tensor_shapes import expected_shapes
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.declared_rounding import SCALED_KEPT, SCALED_STATE, Blocked
from instep_reference.contract.engine import Capacity, Row
from instep_reference.contract.place_names import Place
from support.inputs.checkpoints import config_of
from support.inputs.narrow_models import narrow
from support.running.command import Runner, complaint
from support.running.golden import Golden

MADE = torch.Tensor.new_empty
TOKENS = 600  # of a request: 38 pages, more than the alignment of a pitch hides

def allocated(served: OptimizedEngine) -> int:
    """Bytes of all memory of the engine's pools, including the red zones at their ends, and of everything else."""
    parts = [part for pool in served._memory.pools.values() for part in (pool._body, pool._ends)]
    storages = [part.untyped_storage() for part in (*parts, served._memory.none_fresh)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "packed"])
@pytest.mark.parametrize("conv", CONV_FORMS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_figure_is_what_the_engine_allocates_to_the_byte(strategy: str, conv: str, guarded: bool) -> None:
    config = narrow("qwen3.5-4b")
    options = Options(activation=torch.bfloat16, strategy=strategy, conv=conv, guarded=guarded)
    told, each = need(config, options, widest=4, tokens=TOKENS), -(-TOKENS // PAGE_SIZE)
    assert (told.strategy, told.conv) == (strategy, conv) and told.fixed == sum(told.pools.values()) + told.slot_table
    for requests in (1, 3):
        slots, pages = tuple(range(requests, 0, -1)), tuple(range(1, requests * each + 1))
        room = Capacity(slots, pages, PAGE_SIZE, max_tokens=32, max_positions=TOKENS)
        served = OptimizedEngine(random_checkpoint(config), load("plain"), options, room, num_steps=3)
        assert told.allocation(requests) == allocated(served)
        assert told.fit(allocated(served)) == requests and told.fit(allocated(served) - 1) == requests - 1
    assert told.allocation(3) - told.allocation(2) == told.total


@pytest.mark.parametrize(("nodes", "strategy"), [(4, "snapshot"), (9, "columns"), (9, "rerun"), (9, "lazy_rerun")])
def test_the_figure_of_trees_is_what_the_engine_allocates_to_the_byte(nodes: int, strategy: str) -> None:
    config, options = narrow("qwen3.5-4b"), Options(activation=torch.bfloat16, strategy=strategy)
    told = need(config, options, 4, TOKENS, nodes=nodes)
    pages = tuple(range(1, 2 * -(-TOKENS // PAGE_SIZE) + 1))
    room = Capacity((2, 1), pages, PAGE_SIZE, max_tokens=32, max_positions=TOKENS, num_draft_tokens=nodes)
    served = OptimizedEngine(random_checkpoint(config), load("plain"), options, room, num_steps=3)
    assert told.allocation(2) == allocated(served) != need(config, options, 4, TOKENS).allocation(2)


@pytest.mark.parametrize(("layers", "state", "kept"), [
    (1, torch.float32, None), (3, SCALED_STATE, None), (1, torch.bfloat16, SCALED_KEPT),
])  # fmt: skip
def test_prefix_figure_equals_the_engines_bytes(
    layers: int, state: Blocked | torch.dtype, kept: Blocked | None
) -> None:
    config = replace(narrow("qwen3.5-4b"), mtp_layers=layers)
    options = Options(drafter="vanilla" if layers > 1 else "eagle", state=state, kept=kept)
    told, each = need(config, options, 2, 24, tracked=2), -(-24 // PAGE_SIZE)
    pages = tuple(range(1, 2 * each + 1))
    room = Capacity((2, 1), pages, PAGE_SIZE, 64, max_positions=24, track_interval=24, tracked=2)
    served = OptimizedEngine(random_checkpoint(config), load("plain"), options, room, num_steps=1)
    for name in "ab":
        served.admit(name, (1,) * 24)
    served.forward(tuple(Row(name, "prefill", 24, root=1, track=name) for name in "ab"))
    held = sum(part.untyped_storage().nbytes() for copy in served.copies().values() for part in copy.values())
    assert held == 2 * told.prefix and told.allocation(2) == allocated(served) + held
    assert told.fit(told.allocation(2)) == 2 and told.fit(told.allocation(2) - 1) == 1


@pytest.mark.parametrize("latent", [0, pytest.param(12, marks=pytest.mark.whole)])
def test_the_figure_of_attention_in_parts_is_what_it_allocates(monkeypatch: pytest.MonkeyPatch, latent: int) -> None:
    """The division of a GPU, and the one that is interpreted; here the bytes of the interpreted one are seen."""
    attention = pytest.importorskip("instep_optimized.kernels.attention.dispatch")
    config, sizes = replace(narrow("qwen3.5-4b"), heads=4, kv_heads=2, head_dim=16), list[int]()
    config = replace(config, kv_heads=1, latent=latent, shared_key=4, value_width=24) if latent else config
    (heads, width), (_, of_values) = config.stored_rows
    attend: Any = load("triton").attend_latents if latent else attention.attend
    for requests, positions in ((1, 64), (1, 160), (3, 160)):
        pages, taken = positions // PAGE_SIZE, list[int]()
        pool, values = (torch.zeros(requests * pages + 1, PAGE_SIZE, heads, size) for size in (width, of_values))
        numbers = torch.arange(requests)
        table = 1 + torch.arange(requests * pages).view(requests, pages)
        for rows in (8, attention.WINDOW):
            given = Pages(pool, values, table, numbers, numbers * rows, torch.full((requests,), rows),
                          torch.full((requests,), positions - rows), most=rows)  # fmt: skip
            monkeypatch.setattr(
                torch.Tensor, "new_empty", lambda *a, **k: sizes.append((made := MADE(*a, **k)).nbytes) or made)
            up = {"up": torch.zeros(4 * (16 - 4 + 24), latent)} if latent else {}
            attend(query=torch.zeros(requests * rows, 4, 16), pages=given, to=Place("trunk", 0, "attended"), **up)
            monkeypatch.undo()
            taken.append(sum(sizes))
            sizes.clear()
        here = attention.Division(attention.WINDOW, attention.PART, attention.GROUP, attention.FEW)
        asked = [load("triton").scratch(config, 4, requests, positions, PAGE_SIZE, 1, *of) for of in ((here,), ())]
        assert max(taken) == asked[0] and 0 < asked[1] <= attention.SCRATCH


def test_scratch_memory_of_ops_reduces_the_room() -> None:
    options, config = Options(activation=torch.bfloat16), shape("qwen3.5-9b")
    plain, kernels = (need(config, options, 4, 4096, load(name)) for name in ("plain", "triton"))
    fits = [one.fit(2**34) for one in (plain, kernels)]
    assert not plain.scratch(9) and 0 < kernels.scratch(9) <= 2**28 and fits[1] < fits[0]
    assert kernels.allocation(fits[1]) + kernels.scratch(fits[1]) <= 2**34


def test_a_longer_request_has_a_longer_line_in_the_page_table() -> None:
    short, long = (need(shape("qwen3.5-9b"), Options(), 4, tokens) for tokens in (PAGE_SIZE, 4096))
    # Pitches: a red zone of at least 16 numbers.
    assert long.slot_table - short.slot_table == 8 * ((4096 // PAGE_SIZE + 16) - 32)
    assert (long.pools, long.page) == (short.pools, short.page)


def test_table_has_all_strategies_and_rerun_is_smaller() -> None:
    config = shape("qwen3.5-9b")
    found = {(one.strategy, one.conv): one for one in needs(config, Options(activation=torch.bfloat16), 4, 4096)}
    assert set(found) == {(strategy, conv) for strategy in STRATEGIES for conv in CONV_FORMS}
    snapshot, rerun = found["snapshot", "widened"], found["rerun", "widened"]
    assert rerun.beside < snapshot.beside / 20 and rerun.pools["state"] == snapshot.pools["state"]
    assert rerun.fit(2**36) > snapshot.fit(2**36) > 0
    assert rerun.total == rerun.fixed + 4096 // PAGE_SIZE * rerun.page
    half = Options(activation=torch.bfloat16, state=torch.bfloat16)
    assert not any(one.strategy == "lazy_rerun" for one in needs(config, half, 4, 4096)), "the engine refuses it"


@pytest.mark.slow
def test_the_command_prints_a_line_for_each_and_writes_them(instep: Runner, tmp_path: Path, golden: Golden) -> None:
    ran = instep("memory", "qwen3.5-9b", "--candidates", "1,3,7", "--gib", "80", "--json", tmp_path / "m.json")
    assert ran.code == 0, ran
    golden("memory", ran.out)
    result = json.loads((tmp_path / "m.json").read_text())
    assert result["widest"] == 8 and len(result["strategies"]) == len(STRATEGIES) * len(CONV_FORMS)
    assert instep("memory", "fixtures/tiny").code == 0
    trees = instep("memory", "fixtures/tiny", "--num-draft-tokens", "9", "--json", tmp_path / "t.json")
    told = json.loads((tmp_path / "t.json").read_text())
    assert trees.code == 0 and "windows of 9" in trees.out and told["widest"] == 9
    assert {(one["strategy"], one["conv"]) for one in told["strategies"]} == {(one, "windows") for one in STRATEGIES}
    few = complaint(instep("memory", "fixtures/tiny", "--num-draft-tokens", "3"))
    assert "capacity.num_draft_tokens" in few and "from 4, the root and 3 drafts, to 63" in few
    assert instep("memory", "fixtures/tiny/config.json", "--num-steps", "0").code == 0


def config_of_experts(tmp_path: Path, experts: int) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config_of("moe", num_experts=experts)))
    return file


@pytest.mark.parametrize("experts", [4, 2**31])
def test_expert_weights_are_counted_without_listing_names(experts: int, tmp_path: Path) -> None:
    config = ModelConfig.from_file(config_of_experts(tmp_path, experts))
    layers, more = len(config.layers) + config.mtp_layers, replace(config, experts=experts + 1)
    each = config.hidden + 3 * config.hidden * config.expert_intermediate  # its router row and its three matrices
    assert weights_bytes(more, torch.bfloat16) - weights_bytes(config, torch.bfloat16) == 2 * layers * each
    if experts < 9:
        one_by_one = sum(math.prod(size) for size in expected_shapes(config).values())
        assert weights_bytes(config, torch.bfloat16) == 2 * one_by_one


def test_two_billion_experts_are_counted_and_absurd_numbers_refused(instep: Runner, tmp_path: Path) -> None:
    ran = instep("memory", config_of_experts(tmp_path, 2**31))
    assert ran.code == 0 and "weights 31360.00 GiB" in ran.out, ran.out
    said = complaint(instep("memory", config_of_experts(tmp_path, 10**400)))
    assert "config.json: num_experts" in said and "expected at most 9223372036854775807" in said


def test_sizes_are_spelled_in_the_largest_whole_unit() -> None:
    assert [spelled(size) for size in (12, 2048, 3 * 2**19, 5 * 2**30)] == ["12 B", "2.00 KiB", "1.50 MiB", "5.00 GiB"]
