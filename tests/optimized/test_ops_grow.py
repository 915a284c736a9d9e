"""The ops that grow a tree: against the reference's definition, and the reports about wrong calls.

Leaves out: kernels (`test_kernels.py`), and rounds of an engine (`test_engine_windows.py`).
"""

import re
from contextlib import suppress
from random import Random
from typing import Any

import pytest
import torch

from instep.kit.cases.case import Draw
from instep.kit.cases.grown_trees import grown, said
from instep_optimized.ops.check_op_calls import contracts
from instep_optimized.ops.integer_op_protocols import Beams
from instep_optimized.ops.ledger_label_ops import LEDGER
from instep_optimized.ops.plain import PLAIN
from instep_optimized.ops.watch_op_calls import around
from instep_reference.contract.place_names import unseen
from instep_reference.draft.grow_draft_tree import Growing
from instep_reference.label_mixing import most_named
from instep_reference.sampling import most_probable


@pytest.mark.parametrize(("topk", "steps"), [(1, 4), (2, 3), (3, 3), (5, 1)])
def test_beams_and_windows_are_those_of_the_definition(topk: int, steps: int) -> None:
    """Whole numbers as scores: many of them are equal."""
    draw, requests = Random(topk), 4
    trees, before = [Growing(topk) for _ in range(requests)], None
    for step in range(1, steps + 1):
        rows = topk if step > 1 else 1
        heard = [[[(draw.randrange(50), -float(at + draw.randrange(3))) for at in range(topk)] for _ in range(rows)]
                 for _ in trees]  # fmt: skip
        flat = [pair for request in heard for row in request for pair in row]
        tokens, chances = (torch.tensor(x).view(requests * rows, topk) for x in zip(*flat, strict=True))
        beams = PLAIN.select_beams(tokens=tokens, log_probs=chances, before=before, step=step, num_steps=steps)
        for number, (tree, told) in enumerate(zip(trees, heard, strict=True)):
            tree.step(told)
            mine = beams.beams.view(requests, topk)[number].tolist()
            assert mine == tree.beams[-1] and beams.next.view(requests, topk)[number].tolist() == tree.tokens()
            for beam, bits, row in zip(mine, beams.ancestors.view(requests, topk)[number].tolist(),
                                       beams.rows.view(requests, topk)[number].tolist(), strict=True):  # fmt: skip
                assert bits.bit_count() == step + 1 and bits & 1
                parent = tree.candidates[beam].parent
                assert row == (number if step == 1 else number * topk + tree.beams[-2].index(parent))
        before = beams
    for nodes in (2, 5, 40):
        window = PLAIN.build_tree(tokens=before.tokens, parents=before.parents, scores=before.scores, nodes=nodes)
        for number, tree in enumerate(trees):
            drafts, parents = tree.tree(nodes - 1)
            rest = nodes - 1 - len(drafts)
            assert window.tokens[number].tolist() == drafts + [0] * rest
            assert window.parents[number].tolist() == [-1, *parents, *[-1] * rest]


def test_best_tokens_match_the_reference() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(1)).mul(3).round()
    found = PLAIN.topk_tokens(logits=logits.double(), topk=5)
    for row, right in enumerate(most_probable(logits.double(), 5)):
        assert found.tokens[row].tolist() == [token for token, _ in right]
        assert found.log_probs[row].tolist() == pytest.approx([chance for _, chance in right])
    labels = LEDGER.topk_tokens(logits=logits, topk=5)
    for row, named in enumerate(logits.argmax(-1).tolist()):
        assert list(zip(labels.tokens[row].tolist(), labels.log_probs[row].tolist(), strict=True)) == (
            most_named(named, 5, 40))


def under_way(**changes: Any) -> Beams:
    tree = grown(Draw(1, "cpu"), 2, 3, 1, 3, False)
    return tree._replace(**changes)


WINDOW = {"tokens": torch.ones(1, 3, dtype=torch.int64), "parents": torch.tensor([[-1, -1, 0]]),
          "scores": torch.tensor([[-1.0, -2.0, -3.0]]), "nodes": 3}  # fmt: skip
STEP = {**said(Draw(2, "cpu"), 6, 3, False), "before": under_way(), "step": 2, "num_steps": 3}


@pytest.mark.parametrize(
    ("op", "given", "says"),
    [
        ("topk_tokens", {"logits": torch.zeros(2, 3), "topk": 4}, "topk is 4, there are 3 tokens"),
        ("select_beams", {**STEP, "before": None}, "step 2 of 3 without the step before"),
        ("select_beams", {**STEP, "step": 4}, "step 4 of 3"),
        ("select_beams", {**STEP, "before": under_way(beams=torch.tensor([0, 1, 2, 0, 1, 7]))}, "beams run from 0"),
        ("select_beams", {**STEP, "tokens": STEP["tokens"].int()}, "tokens are torch.int32, not int64"),
        ("select_beams", {**STEP, "num_steps": 30}, "87 rows of beams, at most 62 have a bit"),
        ("build_tree", {**WINDOW, "parents": torch.tensor([[-1, 1, 0]])}, "continues one that does not come before"),
        ("build_tree", {**WINDOW, "nodes": 64}, "nodes run from 64 to 64"),
        ("build_tree", {**WINDOW, "scores": torch.zeros(1, 4)}, r"scores is \(1, 4\), \(1, 3\) fits"),
    ],
)  # fmt: skip
def test_wrong_call_is_reported(op: str, given: dict[str, Any], says: str) -> None:
    told: list[str] = []
    watched = around(PLAIN, unseen, contracts(told.append))
    for right in (("select_beams", STEP), ("build_tree", WINDOW)):
        getattr(watched, right[0])(**right[1])
    assert told == []
    with suppress(IndexError, RuntimeError):  # a wrong call may raise after it was reported
        getattr(watched, op)(**given)
    assert any(re.search(says, one) for one in told), told
