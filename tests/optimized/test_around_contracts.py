"""The contract wrapper: silent over a whole engine's life, and a sentence for each clause that is broken.

Leaves out: what the ops compute.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from instep_optimized import load
from instep_optimized.memory_addresses import Address, Pages, Part
from instep_optimized.ops.check_op_calls import contracts
from instep_optimized.ops.op_protocols import AttentionInputs, GdnInputs
from instep_optimized.ops.plain import PLAIN
from instep_optimized.ops.watch_op_calls import around
from instep_reference.contract.adaptive_controller_file import AdaptiveFile, Bracket
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.place_names import Place, unseen
from support.inputs.checkpoints import write
from support.running.covering import few
from support.worlds.engine_and_reference import engine, scenario

HERE = Place("trunk", 0, "mixed")
POOL = torch.zeros(4, 6, 3)
PART = Part(
    form="window", begin=torch.tensor([0, 2]), count=torch.tensor([2, 1]), most=2,
    read=Address(POOL, torch.tensor([1, 3])), fresh=torch.tensor([False, False]),
    store=Address(POOL, torch.tensor([1, 3])), per_row=Address(torch.zeros(2, 5, 6, 3), torch.tensor([0, 1])),
)
PAGES = Pages(
    keys=torch.zeros(4, 2, 1, 4), values=torch.zeros(4, 2, 1, 4), table=torch.tensor([[77, 0], [2, 1], [3, -1]]),
    slots=torch.tensor([1, 2]), begin=torch.tensor([0, 2]), count=torch.tensor([2, 1]), before=torch.tensor([2, 0]),
    most=2,
)
TREE = replace(PART, store=None, parents=torch.tensor([-1, 0, -1]))
NODES = replace(PAGES, ancestors=torch.tensor([1, 3, 0]), nodes=2)


def broken(op: str, **given: Any) -> list[str]:
    found: list[str] = []
    silent: dict[str, Any] = {op: lambda **_: given["query"].clone() if "query" in given else torch.zeros(3, 6)}
    getattr(around(replace(PLAIN, **silent), unseen, contracts(found.append)), op)(**given)
    return found


@few(2)
@pytest.mark.slow
@pytest.mark.parametrize(("ops", "activation", "state"), [
    ("plain", torch.float32, torch.float32),
    ("plain", torch.bfloat16, torch.float32),
    ("plain", torch.bfloat16, torch.bfloat16),
    ("plain", torch.float16, torch.float16),
    ("ledger", torch.float32, torch.float32),
])  # fmt: skip
def test_an_engine_keeps_every_contract(ops: str, activation: torch.dtype, state: torch.dtype, tmp_path: Path) -> None:
    found: list[str] = []
    checked = around(load(ops), unseen, contracts(found.append))
    file = AdaptiveFile(flat=Bracket(candidate_steps=(0, 1, 3, 7)))
    small = write(tmp_path, "dense", num_hidden_layers=2, full_attention_interval=2)
    subject = engine(Checkpoint.open(small), checked, adaptive=file, activation=activation, state=state)
    for event in scenario(64, (3, 1, 7, 0, 3), forced=True):
        event.on(subject)
        for name in subject.slots():
            kept = subject.state(name)
            assert all(bool((x == x).all()) for x in (*kept.state.values(), *kept.conv.values(), *kept.keys.values()))
    assert found == []


@pytest.mark.parametrize(("part", "sentence"), [
    (replace(PART, read=Address(POOL, torch.tensor([1, 4]))), "read units run from 1 to 4, there are 4"),
    (replace(PART, store=Address(POOL, torch.tensor([0, 3]))), "store is unit 0, which is reserved"),
    (replace(PART, store=Address(POOL, torch.tensor([3, 3]))), "two requests would write the same place"),
    (replace(PART, store=Address(POOL, torch.tensor([1, -2]))), "store units run from -2"),
    (replace(PART, read=Address(POOL, torch.tensor([1, 3], dtype=torch.int32))), "read units are torch.int32"),
    (replace(PART, begin=torch.tensor([0, 1])), "two requests share a row"),
    (replace(PART, begin=torch.tensor([0, 3])), "rows 0 to 3 of 3 are named"),
    (replace(PART, most=1), "most is 1, the largest count is 2"),
    (replace(PART, read=Address(POOL, torch.tensor([1, 3]), torch.tensor([-1, 0]))), "columns run from -1 to 0"),
    (replace(PART, per_row=Address(torch.zeros(2, 1, 6, 3), torch.tensor([0, 1]))), "2 positions do not fit in 1"),
    (replace(TREE, parents=torch.tensor([-1, 1, -1])), "parents: row 1 of a window continues row 1"),
    (replace(TREE, parents=torch.tensor([-2, 0, -1])), "parents: row 0 of a window continues row -2"),
    (replace(TREE, parents=torch.tensor([-1, 0, -1]).int()), "parents are torch.int32, not int64"),
    (replace(TREE, parents=torch.tensor([-1, 0])), "parents is (2,), (3,) fits"),
])  # fmt: skip
def test_a_part_that_breaks_a_clause_is_named(part: Part, sentence: str) -> None:
    given = {"x": torch.zeros(3, 6), "weight": torch.zeros(6, 4), "to": HERE}
    assert broken("conv", parts=(PART,), **given) == broken("conv", parts=(TREE,), **given) == []
    found = broken("conv", parts=(part,), **given)
    assert any(sentence in line and line.startswith("conv (trunk layer 0 mixed)") for line in found), found


@pytest.mark.parametrize(("pages", "sentence"), [
    (replace(PAGES, table=torch.tensor([[77, 0], [2, 0], [3, -1]])), "names page 0"),
    (replace(PAGES, table=torch.tensor([[77, 0], [2, 4], [3, -1]])), "table run from -1 to 4"),
    (replace(PAGES, table=torch.tensor([[77, 0], [2, -1], [3, -1]])), "more positions than its pages hold"),
    (replace(PAGES, slots=torch.tensor([1, 0])), "slots name slot 0, which is reserved"),
    (replace(PAGES, slots=torch.tensor([1, 1])), "slots: two requests would write the same place"),
    (replace(PAGES, slots=torch.tensor([1, 3])), "slots run from 1 to 3, there are 3"),
    (replace(PAGES, slots=torch.tensor([1, 2], dtype=torch.int32)), "slots are torch.int32, not int64"),
    (replace(PAGES, full=True, count=torch.tensor([1, 1])), "full: counts of 2 rows in all, of 3"),
    (replace(NODES, ancestors=torch.tensor([1, 2, 0])), "a node does not see the root"),
    (replace(NODES, ancestors=torch.tensor([1, 0, 0])), "a node does not see the root"),
    (replace(NODES, ancestors=torch.tensor([1, 5, 0])), "a row sees node 2 of 2 nodes"),
    (replace(NODES, ancestors=torch.tensor([1, 5, 0]), nodes=3), "sees a position that no page holds"),
    (replace(NODES, nodes=64), "windows of 64 nodes; from 1 to 63 have a bit"),
    (replace(NODES, ancestors=torch.tensor([1, 3])), "ancestors is (2,), (3,) fits"),
    (replace(NODES, ancestors=torch.tensor([1, 3, 0]).int()), "ancestors are torch.int32, not int64"),
])  # fmt: skip
def test_a_page_table_that_breaks_a_clause_is_named(pages: Pages, sentence: str) -> None:
    for sound in (PAGES, NODES):
        assert broken("attend", query=torch.zeros(3, 2, 4), pages=sound, to=HERE) == []
    assert any(sentence in line for line in broken("attend", query=torch.zeros(3, 2, 4), pages=pages, to=HERE))


@pytest.mark.parametrize(("locations", "sentence"), [
    ([4, 1, 6], "page 0"), ([4, 4, 6], "the same place"), ([4, 5], "2 locations for 3 rows"),
    ([4, 5, 8], "there are 8"),
])  # fmt: skip
def test_a_location_that_breaks_a_clause_is_named(locations: list[int], sentence: str) -> None:
    def store(numbers: list[int]) -> list[str]:
        return broken("store_rows", rows=torch.zeros(3, 1, 4), pool=PAGES.keys, locations=torch.tensor(numbers))

    assert store([4, 5, -1]) == []
    assert any(sentence in line for line in store(locations))


def test_a_token_that_is_not_in_the_table_is_named() -> None:
    for tokens, sentence in ((torch.tensor([1, 5]), "from 1 to 5"), (torch.tensor([-1, 2]), "from -1 to 2"),
                             (torch.tensor([1], dtype=torch.int32), "torch.int32")):
        assert any(sentence in line for line in broken("embed", tokens=tokens, table=torch.zeros(5, 6), to=HERE))


def test_results_that_share_memory_are_named() -> None:
    found: list[str] = []
    places = tuple(Place("trunk", 0, name) for name in ("query", "key"))

    def once(**given: Any) -> AttentionInputs:
        rows = torch.zeros(2, 2, 4)
        return AttentionInputs(rows, rows[:, :1])

    lazy = replace(PLAIN, attention_inputs=once, gdn=lambda **given: given["inputs"].v)
    watched = around(lazy, unseen, contracts(found.append))
    watched.attention_inputs(
        projected=torch.zeros(2, 2, 2, 4), key_raw=torch.zeros(2, 1, 4), positions=torch.arange(2),
        q_norm=torch.zeros(4), k_norm=torch.zeros(4), eps=0.0, rotary_dim=2, theta=1.0, to=(places[0], places[1]),
    )
    bundle = GdnInputs(*(torch.zeros(2, 1, 4) for _ in range(3)), torch.zeros(2, 1), torch.zeros(2, 1))
    watched.gdn(inputs=bundle, parts=(), dtype=torch.float32, to=HERE)
    assert found == [
        "attention_inputs: two results share memory", "gdn (trunk layer 0 mixed): a result is a view on an input",
    ]


def test_results_of_the_wrong_length_and_views_on_inputs_are_named() -> None:
    found: list[str] = []
    lazy = replace(PLAIN, add=lambda **given: given["x"][:1])
    x = torch.zeros(2, 3)
    around(lazy, unseen, contracts(found.append)).add(x=x, y=x, to=Place("trunk", 0, "residual"))
    assert found == [
        "add (trunk layer 0 residual): rows that came back: 1; due: 2",
        "add (trunk layer 0 residual): a result is a view on an input",
    ]


@pytest.mark.parametrize(("op", "given", "sentence"), [
    ("linear", {"x": torch.zeros(3, 4), "weight": torch.zeros(6, 5), "shape": (6,)}, "weight is (6, 5), (6, 4)"),
    ("linear", {"x": torch.zeros(3, 4), "weight": torch.zeros(7, 4), "shape": (7,)}, "(3, 6) came back, (3, 7)"),
    ("conv", {"x": torch.zeros(3, 6), "weight": torch.zeros(6, 5), "parts": (PART,)}, "a window of read is (6, 3)"),
    ("add", {"x": torch.zeros(3, 6), "y": torch.zeros(3, 5)}, "y is (3, 5), (3, 6) fits"),
    ("norm", {"x": torch.zeros(3, 6), "weight": torch.zeros(5), "eps": 0.0}, "weight is (5,), (6,) fits"),
])  # fmt: skip
def test_shapes_that_do_not_fit_are_named(op: str, given: dict[str, Any], sentence: str) -> None:
    found = broken(op, to=HERE, **given)
    assert any(sentence in line and line.startswith(f"{op} (trunk layer 0 mixed)") for line in found), found


@pytest.mark.parametrize(("before", "sentence"), [
    ([9, 4], "6 tokens are pending; with 5 rows a ring of 10 entries has room for 5"),
    ([8, 3], "1 tokens more are in the state than the request has"),
])  # fmt: skip
def test_pending_tokens_that_a_ring_cannot_hold_are_named(before: list[int], sentence: str) -> None:
    def plan(before: list[int]) -> list[str]:
        found = broken(
            "plan_ring", slots=torch.tensor([1, 2, -1]),
            before=torch.tensor([*before, 0]), count=torch.tensor([5, 5, 0]),
            settled=torch.tensor([0, 3, 4]), size=10, most=5, spare=0,
        )
        return [line for line in found if "came back, RingPlan" not in line]  # what `broken` gives back is no plan

    assert not any("state" in line or "pending" in line for line in plan([8, 4]))
    assert any(sentence in line for line in plan(before)), plan(before)


def test_rows_of_another_dtype_than_their_pool_are_named() -> None:
    rows = torch.zeros(3, 1, 4, dtype=torch.bfloat16)
    found = broken("store_rows", rows=rows, pool=PAGES.keys, locations=torch.tensor([4, 5, -1]))
    assert any("a row is ((1, 4), torch.bfloat16), ((1, 4), torch.float32) fits" in line for line in found), found
