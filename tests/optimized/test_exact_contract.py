"""The contract wrapper on rings: silent on right ones, and a sentence for each clause that is broken.

Leaves out: the other clauses of a part (`test_around_contracts.py`).
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from instep.kit.cases.case import at
from instep.kit.cases.conv_and_gdn import Heads
from instep_optimized.memory_addresses import Address, Part, Updates
from instep_optimized.ops.check_op_calls import contracts
from instep_optimized.ops.plain import PLAIN
from instep_optimized.ops.watch_op_calls import around
from instep_reference.contract.place_names import unseen
from support.worlds.rings import Turn, World, cut, joined, stream

HEADS = Heads(1, 2, 4, 3)
ROWS = stream(HEADS, 3, 1, "cpu")
TURNS = [  # two pending and two rows; a fresh one whose mark is stale; an idle row whose numbers mean nothing
    Turn(2, cut(ROWS, 0, 2), before=5, pending=2),
    Turn(3, cut(ROWS, 2, 1), before=0, pending=77, fresh=True),
    Turn(-1, cut(ROWS, 0, 0), before=99, pending=99),
]


def world() -> World:
    made = World.of(PLAIN, HEADS, "cpu", size=4)
    made.state.view[2] = 0.5
    made.fill(2, 3, cut(ROWS, 0, 2))
    return made


def found(part: Part) -> list[str]:
    """The report of the wrapper, without the op itself, which would fail on some of these calls."""
    said: list[str] = []
    silent = replace(PLAIN, gdn=lambda **given: torch.zeros(given["inputs"].v.shape))
    inputs = joined([turn.rows for turn in TURNS])
    around(silent, unseen, contracts(said.append)).gdn(inputs=inputs, parts=(part,), dtype=torch.float32, to=at("core"))
    return said


def test_a_right_part_and_a_fold_to_scratch_break_no_clause() -> None:
    made = world()
    assert found(made.part(TURNS)) == []
    fold = made.part([Turn(2, cut(ROWS, 0, 0), 5, 2, kept=False, settled=False, goal="scratch")])
    unit = torch.zeros(1, dtype=torch.int64)  # of a scratch pool no unit is reserved
    assert found(replace(fold, store=Address(made.scratch.view, unit))) == []


@pytest.mark.parametrize(("fields", "sentence"), [
    ({"units": [9, 3, -1]}, "ring units run from -1 to 9, there are 6"),
    ({"units": [3, 3, -1]}, "two requests would write the same place"),
    ({"units": [0, 3, -1]}, "ring is unit 0, which is reserved"),
    ({"begin": [4, 0, 0]}, "ring begin run from 4 to 4, there are 4"),
    ({"pending": [5, 0, 0]}, "ring pending run from 5 to 5, there are 5"),
    ({"pending": [-1, 0, 0]}, "ring pending run from -1"),
    ({"keep": [4, 0, -1]}, "ring keep run from 0 to 4, there are 4"),
    ({"keep": [0, 0, -1]}, "a row would be kept where a token waits to be run again"),
    ({"pending": [3, 0, 0]}, "a row would be kept where a token waits to be run again"),
])  # fmt: skip
def test_a_ring_that_breaks_a_clause_is_named(fields: dict[str, list[int]], sentence: str) -> None:
    part = world().part(TURNS)
    changed: dict[str, Any] = {name: torch.tensor(numbers) for name, numbers in fields.items()}
    said = found(replace(part, ring=replace(part.ring, **changed)))
    assert any(sentence in line and line.startswith("gdn (trunk layer 0 core)") for line in said), said


def test_mismatched_pools_windows_and_slot_0_are_named() -> None:
    part = world().part(TURNS)
    ring = part.ring
    uneven = replace(part, ring=replace(ring, kept=ring.kept._replace(update=ring.own[:, :3])))
    assert any("pools of (6, 4), (6, 4), (6, 3) units and entries" in line for line in found(uneven))
    few = replace(part, ring=replace(ring, kept=ring.kept._replace(update=ring.own[:, :1])))
    assert any("2 pending tokens have no 1 entries of update" in line for line in found(few))
    narrow = replace(part, ring=replace(ring, kept=ring.kept._replace(update=ring.own.bfloat16())))
    assert any("an entry of ring update is ((2, 3), torch.bfloat16), ((2, 3), torch.float32) fits" in line
               for line in found(narrow))  # fmt: skip
    short = replace(ring, kept=Updates(*(pool[:, :1] for pool in ring.kept)))
    assert any("2 rows do not fit in 1 entries" in line for line in found(replace(part, ring=short)))
    reserved = replace(part, settled=Address(part.settled.pool, torch.tensor([0, -1, -1])))
    assert any("settled is unit 0, which is reserved" in line for line in found(reserved))
