"""Pools: one allocation, pitches, red zones, poison, and what they cost.

Leaves out: who owns a unit (`test_memory_owners.py`).
"""

import math
from dataclasses import replace

import pytest
import torch

from instep_optimized import commit as strategies
from instep_optimized import load
from instep_optimized.commit import CONV_FORMS, STRATEGIES
from instep_optimized.commit.rerun import RERUN
from instep_optimized.memory import Memory
from instep_optimized.memory.budget import Sizes, bytes_per, demands, requests_that_fit
from instep_optimized.memory.pool import ALIGN, RED, Demand, Pool
from instep_optimized.memory_addresses import StateLayout
from instep_optimized.ops.op_protocols import Types
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.engine import Capacity
from instep_reference.contract.errors import OutOfCapacity
from support.inputs.checkpoints import config_of

CPU = torch.device("cpu")
DEMAND = Demand("state", "slot", (0, 2), 3, (2, 4, 5), torch.float32, transposed=True)
CAPACITY = Capacity(slots=(2, 5), pages=(3, 1, 2, 4), page_size=4, max_tokens=32)
FP32 = Types(torch.float32, torch.float32, torch.float32, torch.float32)


def pool(demand: Demand = DEMAND, *, guarded: bool = True, poison: float | None = math.nan) -> Pool:
    return Pool(demand, guarded=guarded, poison=poison, device=CPU)


def wanted(
    layout: StateLayout = "VK", widest: int = 4, types: Types = FP32, capacity: Capacity = CAPACITY,
    strategy: str = "snapshot", conv: str = "windows",
) -> tuple[Demand, ...]:
    config, sizes = ModelConfig.from_dict(config_of()), Sizes(types, layout, capacity, widest)
    return demands(config, sizes) + strategies.demands(config, sizes, strategy, conv)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("guarded", [True, False])
def test_a_pitch_is_aligned_and_when_guarded_never_the_packed_size(dtype: torch.dtype, guarded: bool) -> None:
    for packed in (1, 15, 16, 17, 40, 48):
        units = pool(Demand("conv", "slot", (0,), 3, (packed,), dtype), guarded=guarded).units(0)
        assert units.stride(0) % ALIGN == 0
        assert units[1].data_ptr() % 16 == 0
        assert not guarded or units.stride(0) >= packed + ALIGN


def test_units_are_seen_in_logical_order_whatever_the_layout() -> None:
    swapped, straight = pool().units(0), pool(replace(DEMAND, transposed=False)).units(0)
    assert swapped.shape == straight.shape == (3, 2, 4, 5)
    assert swapped.stride()[1:] == (20, 1, 4)
    assert straight.stride()[1:] == (20, 5, 1)


def test_units_gaps_and_ends_are_the_whole_allocation_and_do_not_overlap() -> None:
    subject = pool()
    pieces = [view for layer in (0, 2) for view in (subject.units(layer), subject.gaps(layer))]
    places: list[int] = []
    for piece in (*pieces, subject.ends()):
        spots = torch.arange(piece.untyped_storage().size() // 4).as_strided(
            piece.shape, piece.stride(), piece.storage_offset()
        )
        places += spots.flatten().tolist()
    assert sorted(places) == list(range(DEMAND.bytes(True) // 4))


def test_red_zones_hold_their_pattern_and_no_scrub_touches_them() -> None:
    subject = pool(poison=3.0)
    subject.scrub([0, 2])
    for zone in (subject.gaps(0), subject.gaps(2), subject.ends()):
        assert (zone.contiguous().view(torch.uint8) == RED).all()
    assert pool(guarded=False).gaps(0) is None
    assert pool(guarded=False).ends() is None


def test_an_index_of_minus_one_or_one_past_lands_in_an_end() -> None:
    subject = pool()
    ends, units = subject.ends(), subject.units(0)
    assert units[0].data_ptr() - units.stride(0) * 4 == ends[0].data_ptr()
    last = subject.units(2)
    assert last[2].data_ptr() + last.stride(0) * 4 == ends[1].data_ptr()


def test_fresh_and_freed_units_are_poison() -> None:
    subject = pool(poison=7.5)
    assert (subject.units(2) == 7.5).all()
    subject.units(2)[1:] = 0
    subject.scrub([1])
    assert (subject.units(2)[1] == 7.5).all()
    assert (subject.units(2)[2] == 0).all()
    assert pool().units(0).isnan().all()


def test_poison_of_labels_is_no_label_and_differs_between_patterns() -> None:
    labels = replace(DEMAND, dtype=torch.int64)
    found = {int(pool(labels, poison=poison).units(0).flatten()[0]) for poison in (math.nan, 7.5)}
    assert len(found) == 2
    assert 0 not in found


def test_without_poison_units_start_as_zeros_and_stay_as_they_were_left() -> None:
    subject = pool(poison=None)
    assert (subject.units(0) == 0).all()
    subject.units(0)[1] = 5
    subject.scrub([1])
    assert (subject.units(0)[1] == 5).all()


def test_released_request_leaves_poison_in_its_units_only() -> None:
    kept = Demand("kept", "request", (0,), 3, (2,), torch.float32)
    memory = Memory((*wanted(), kept), CAPACITY, guarded=True, poison=7.5, device=CPU)
    memory.claim("a")
    memory.pages.grow([("a", 5)])
    for region in memory.regions():
        if not region.name.endswith("_ends"):
            region.units.zero_()
    had = {"slot": {2}, "page": {3, 1}, "row": set(), "request": {2}}
    expected = {demand.name: had[demand.by] for demand in (*wanted(), kept)}
    memory.release("a")
    for region in memory.regions():
        poisoned = {unit for unit in range(len(region.units)) if (region.units[unit] != 0).all()}
        assert region.name.endswith("_ends") or poisoned == expected[region.name], region.name


def test_snapshots_are_as_many_as_slots_and_as_wide_as_the_widest_window() -> None:
    by_name = {demand.name: demand for demand in wanted(widest=8)}
    assert by_name["snapshot_state"].units == len(CAPACITY.slots)
    assert by_name["snapshot_state"].shape == (8, *by_name["state"].shape)
    assert by_name["snapshot_conv"].shape == (8, *by_name["conv"].shape)
    assert by_name["state"].units == 1 + max(CAPACITY.slots)


@pytest.mark.parametrize("layout", ["VK", "KV"])
@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("types", [FP32, Types(torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16),
                                   Types(torch.int64, torch.int64, torch.int64, torch.int64)])
def test_the_budget_is_what_the_pools_take_to_the_byte(types: Types, guarded: bool, layout: StateLayout) -> None:
    for widest in (1, 4, 8):
        subject = Memory(wanted(layout, widest, types), CAPACITY, guarded=guarded, poison=None, device=CPU)
        for name, found in subject.pools.items():
            taken = found.units(found.demand.layers[0]).untyped_storage().nbytes()
            assert taken == found.demand.bytes(guarded), name


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("widest", [2, 8])
def test_last_fitting_request_fits_and_one_more_does_not(widest: int, guarded: bool) -> None:
    """The size of pools for this many requests of 10 tokens, each with 3 pages of 4, is the requested one."""
    for requests in (1, 2, 5):
        slots, pages = tuple(range(1, requests + 1)), tuple(range(1, 3 * requests + 1))
        needs = wanted(widest=widest, capacity=replace(CAPACITY, slots=slots, pages=pages))
        taken = sum(demand.bytes(guarded) for demand in needs) + requests
        assert requests_that_fit(taken, 10, 4, needs, guarded=guarded) == requests
        assert requests_that_fit(taken - 1, 10, 4, needs, guarded=guarded) == requests - 1
    assert requests_that_fit(0, 10, 4, wanted(), guarded=guarded) == 0


def test_a_ring_takes_less_than_a_fiftieth_of_the_snapshots() -> None:
    """The real shapes: 16 key heads, 32 value heads, K = V = 128, windows of 4; per request, whatever the layers."""
    real = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128}
    config, sizes = ModelConfig.from_dict(config_of(**real)), Sizes(FP32, "VK", CAPACITY, 4)

    def costs(strategy: str) -> dict[str, int]:
        return bytes_per(STRATEGIES[strategy].demands(config, sizes), guarded=False)

    snapshots, rerun, lazy, columns = map(costs, ("snapshot", "rerun", "lazy_rerun", "columns"))
    one = 4 * 32 * 128 * 128 * len(config.recurrent)  # bytes of a request's states
    assert (snapshots["slot"], snapshots["row"]) == (one, 4 * one)
    assert 0 < 50 * rerun["ring"] < snapshots["row"]
    mark = rerun["slot"] - one
    assert 0 < mark < 1000 and rerun["row"] == 0
    assert columns["slot"] - mark == 4 * one and columns["ring"] == columns["row"] == 0
    assert rerun["ring"] < lazy["ring"] < snapshots["row"] / 10


@pytest.mark.parametrize("activation", [torch.float32, torch.bfloat16])
def test_a_ring_costs_what_it_keeps(activation: torch.dtype) -> None:
    """Keys and gates of two windows, updates (or values) of one, in fp32 whatever the activations are."""
    config, widest = ModelConfig.from_dict(config_of()), 4
    H, HV, K, V = config.key_heads, config.value_heads, config.key_dim, config.value_dim
    layers = len(config.recurrent)
    sizes = Sizes(load("plain").types(activation, torch.float32), "VK", CAPACITY, widest)
    of_updates, of_inputs = (RERUN.demands(config, replace(sizes, keeps=keeps)) for keeps in ("update", "inputs"))
    costs = [bytes_per(wanted, guarded=False)["ring"] for wanted in (of_updates, of_inputs)]
    two, one = 2 * widest * 4 * layers, widest * 4 * layers
    assert costs == [two * (H * K + HV) + one * HV * V, two * (H * K + 2 * HV) + one * HV * V]
    wide = RERUN.demands(config, replace(sizes, types=load("plain").types(torch.float32, torch.float64)))
    assert {demand.dtype for demand in wide if demand.name.startswith("ring_")} == {torch.float64}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("conv", CONV_FORMS)
def test_every_pair_of_strategies_is_budgeted_as_it_is_allocated(strategy: str, conv: str) -> None:
    needs = wanted(strategy=strategy, conv=conv, widest=8)
    subject = Memory(needs, CAPACITY, guarded=True, poison=None, device=CPU)
    assert set(subject.pools) == {demand.name for demand in needs}
    taken = sum(demand.bytes(True) for demand in needs) + subject.none_fresh.nbytes
    assert requests_that_fit(taken, 8, 4, needs, guarded=True) >= len(CAPACITY.slots)


def test_a_wider_window_leaves_room_for_fewer_requests() -> None:
    fit = [requests_that_fit(1 << 22, 10, 4, wanted(widest=widest), guarded=True) for widest in (2, 4, 8)]
    assert fit[0] > fit[1] > fit[2] > 0


def test_a_slot_or_pages_that_are_missing_leave_everything_as_it_was() -> None:
    memory = Memory(wanted(), CAPACITY, guarded=True, poison=None, device=CPU)
    memory.claim("a", 9)
    with pytest.raises(OutOfCapacity, match="KV pages"):
        memory.claim("b", 5)
    assert (memory.slots.owned(), memory.pages.owned()) == ({"a": 2}, {"a": [3, 1, 2]})
    memory.claim("b", 4)
    memory.pages.release("a")
    with pytest.raises(OutOfCapacity, match="no free slot"):
        memory.claim("c", 4)
    assert (memory.slots.owned(), memory.pages.owned()) == ({"a": 2, "b": 5}, {"b": [4]})
