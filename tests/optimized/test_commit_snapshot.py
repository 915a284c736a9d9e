"""The snapshot strategy: which addresses it chooses, what it moves at a commit, and its table.

Leaves out: whether a whole engine obeys the table (`test_engine_reference.py`, after every event).
"""

import math

import pytest
import torch

from instep_optimized import commit as strategies
from instep_optimized.commit.base import AcceptedWindows, RequestWrites, Table, changes
from instep_optimized.commit.conv_form_windows import Windows
from instep_optimized.commit.snapshot import Snapshot
from instep_optimized.commit.strategy_pair import CommitPair
from instep_optimized.memory import Memory
from instep_optimized.memory.budget import Sizes, demands
from instep_optimized.memory_addresses import StateLayout
from instep_optimized.ops.op_protocols import Types
from instep_optimized.ops.plain import PLAIN
from instep_optimized.packed_batch import Batch
from instep_optimized.transfer.to_device import sent
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.engine import Capacity
from support.inputs.checkpoints import config_of
from support.inputs.packed_launches import Rows, packed

CAPACITY = Capacity(slots=(5, 2, 4), pages=tuple(range(1, 20)), page_size=4, max_tokens=64)
WIDEST = 8


CONFIG = ModelConfig.from_dict(config_of())
PAIR = ("snapshot", "windows")


def sizes(layout: StateLayout = "VK") -> Sizes:
    return Sizes(Types(torch.float32, torch.float32, torch.float32, torch.float32), layout, CAPACITY, WIDEST)


def memory(layout: StateLayout = "VK") -> Memory:
    wanted = demands(CONFIG, sizes(layout)) + strategies.demands(CONFIG, sizes(layout), *PAIR)
    return Memory(wanted, CAPACITY, guarded=True, poison=math.nan, device=torch.device("cpu"))


def made(subject: Memory, width: int) -> CommitPair:
    return strategies.make(CONFIG, sizes(), subject, width, *PAIR)


def batch(subject: Memory) -> Batch:
    """Rows in mixed order: a verify of "a", a first chunk of "b", a decode of "c"."""
    for name in "abc":
        subject.slots.take(name)
    subject.slot_table.table[:] = -1
    subject.grow([("a", 12), ("b", 5), ("c", 7)])
    rows = (
        Rows("a", "verify", 3, before=9, row=0), Rows("b", "prefill", 5, before=0), Rows("c", "decode", 1, before=6),
    )
    return packed(subject, rows, torch.arange(9))


def test_rows_stay_packed_in_batch_order_and_parts_name_them() -> None:
    subject = memory()
    launch = batch(subject)
    assert launch.tokens.tolist() == list(range(9))
    assert launch.positions.tolist() == [9, 10, 11, 0, 1, 2, 3, 4, 6]
    assert launch.locations.tolist() == [13, 14, 15, 16, 17, 18, 19, 20, 30]
    assert launch.table is subject.slot_table.table and launch.slots.tolist() == [5, 2, 4]
    lines = launch.table[launch.slots].tolist()
    assert lines == [[*own, *[-1] * (19 - len(own))] for own in ((1, 2, 3), (4, 5), (6, 7))]
    assert (launch.begin.tolist(), launch.count.tolist(), launch.before.tolist()) == ([0, 3, 8], [3, 5, 1], [9, 0, 6])
    assert launch.most == 5
    assert [(group.kind, group.begin.tolist()) for group in launch.groups] == [
        ("prefill", [3]), ("verify", [0]), ("decode", [8]),
    ]


def test_numbers_go_to_the_device_together_and_each_list_is_aligned() -> None:
    lists = [[3], [], [1, 2, -1], [7, 8], [9]]
    found = sent(lists, torch.device("cpu"))
    assert [tensor.tolist() for tensor in found] == lists
    assert {tensor.dtype for tensor in found} == {torch.int64}
    assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == 1
    assert all(tensor.data_ptr() % 16 == 0 for tensor in found if len(tensor))


def test_verify_keeps_every_position_by_row_and_commit_moves_by_slot() -> None:
    subject = memory()
    bound = made(subject, 4).bind(PLAIN, batch(subject))
    for parts in (bound.conv(0), bound.state(0)):
        chunk, window, decode = parts
        assert (chunk.form, window.form, decode.form) == ("chunk", "window", "window")
        assert chunk.store is not None and chunk.per_row is None and chunk.fresh.tolist() == [True]
        assert chunk.store.units.tolist() == chunk.read.units.tolist() == [2]
        assert window.store is None and window.per_row is not None and window.fresh.tolist() == [False]
        assert window.read.units.tolist() == [5]
        assert window.per_row.units.tolist() == [0] and window.per_row.column is None
        assert decode.store is not None and decode.store.units.tolist() == [4]


def test_a_narrower_window_keeps_the_strides_of_the_widest() -> None:
    subject = memory()
    launch = batch(subject)
    narrow, wide = (made(subject, width).bind(PLAIN, launch).state(0)[1].per_row for width in (2, WIDEST))
    assert (narrow.pool.shape[1], wide.pool.shape[1]) == (2, WIDEST)
    assert narrow.pool.stride() == wide.pool.stride()
    assert narrow.pool.data_ptr() == wide.pool.data_ptr()


@pytest.mark.parametrize("layout", ["VK", "KV"])
def test_a_commit_moves_the_column_of_a_row_to_a_slot_and_nothing_else(layout: StateLayout) -> None:
    subject = memory(layout)
    generator = torch.Generator().manual_seed(0)
    for region in subject.regions():
        if not region.name.endswith("_ends"):
            region.units.copy_(torch.randn(region.units.shape, generator=generator))
    before = {(r.name, r.layer): r.units.clone() for r in subject.regions()}
    rows, slots, nodes, lens = (torch.tensor(numbers) for numbers in ([1, 0], [2, 4], [3, 0], [4, 1]))
    made(subject, 4).commit(PLAIN, AcceptedWindows(rows, slots, nodes, lens, before=torch.tensor([9, 5])))
    for region in subject.regions():
        expected = before[region.name, region.layer].clone()
        if region.name in ("conv", "state"):
            snapshots = before[f"snapshot_{region.name}", region.layer]
            expected[2], expected[4] = snapshots[1, 3], snapshots[0, 0]
        assert torch.equal(region.units.nan_to_num(), expected.nan_to_num()), region.name


def test_the_table_names_real_regions_and_is_printed() -> None:
    subject = memory()
    names = {region.name for region in subject.regions()} | {"block_keys", "block_values"}  # of a block drafter
    assert {region for regions in made(subject, 4).may.values() for region in regions} <= names
    for text, table in ((Snapshot.__doc__, Snapshot.may), (Windows.__doc__, Windows.may)):
        for deed, regions in table.items():
            line = next(line for line in text.splitlines() if line.split()[:1] == [deed])
            assert all(f"{region} ({which})" in line for region, which in regions.items())


def test_the_table_is_read_for_actual_units() -> None:
    table: Table = made(memory(), 4).may
    found = changes(table, [
        RequestWrites("verify", slot=5, row=0, written=frozenset({3})),
        RequestWrites("decode", slot=4, row=1, written=frozenset({7})),
    ])
    assert found == {
        "snapshot_conv": {0}, "snapshot_state": {0}, "conv": {4}, "state": {4}, "keys": {3, 7}, "values": {3, 7},
        "draft_keys": {7}, "draft_values": {7}, "block_keys": {7}, "block_values": {7},
    }
