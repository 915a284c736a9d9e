"""Verify along trees: every node starts from its parent, and siblings never see each other.

Leaves out: what of a tree is accepted (`test_acceptance.py`).
"""

import pytest
import torch

from instep_reference.contract.place_names import unseen
from instep_reference.engine import TensorModel
from instep_reference.gdn import GdnMemory
from instep_reference.verify_by_decoding import verify
from support.inputs.rounds import CLOSE, weights


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TensorModel:
    return TensorModel(weights(tmp_path_factory.mktemp("dense") / "model"))


def test_node_equals_decoding_its_path_token_by_token(model: TensorModel) -> None:
    _, memory = model.advance((4, 8, 15), model.nothing(), 0, unseen)
    nodes = verify(model, (16, 23, 42, 7, 9), (-1, 0, 0, 2, 3), memory, 3, unseen)
    assert [node.depth for node in nodes] == [0, 1, 1, 2, 3]
    final, after = model.advance((16, 42, 7, 9), memory, 3, unseen)
    taken = [nodes[node] for node in (0, 2, 3, 4)]
    assert (torch.cat([node.final for node in taken]) - final).abs().max() <= CLOSE * final.abs().max()
    ours, theirs = ([kept for layer in memory for kept in vars(layer).values()] for memory in (taken[-1].memory, after))
    assert len(ours) == len(theirs) == 8, "window and state, or keys and values, of four layers"
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape and (one - other).abs().max() <= CLOSE * other.abs().max()


def test_siblings_do_not_see_each_other(model: TensorModel) -> None:
    _, memory = model.advance((4, 8, 15), model.nothing(), 0, unseen)
    with_sibling = verify(model, (16, 23, 42, 7), (-1, 0, 0, 2), memory, 3, unseen)
    without = verify(model, (16, 42, 7), (-1, 0, 1), memory, 3, unseen)
    for mine, theirs in zip((with_sibling[0], *with_sibling[2:]), without, strict=True):
        assert torch.equal(mine.final, theirs.final)


def test_memory_before_the_window_is_not_modified(model: TensorModel) -> None:
    _, memory = model.advance((4, 8, 15), model.nothing(), 0, unseen)
    copies = [kept.state.clone() for kept in memory if isinstance(kept, GdnMemory)]
    verify(model, (16, 23, 42), (-1, 0, 1), memory, 3, unseen)
    now = [kept.state for kept in memory if isinstance(kept, GdnMemory)]
    assert copies and all(torch.equal(old, new) for old, new in zip(copies, now, strict=True))
