"""Labels that are run again: the chain of every request is the fold that Python's integers make of its tokens.

Leaves out: numbers (`test_exact.py`).
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.kit.cases.conv_and_gdn import Heads
from instep_optimized.ops.ledger_label_ops import LEDGER
from instep_optimized.ops.op_protocols import GdnInputs, Ops
from support.independent.integer_labels import block, folded, labels_of, mixed, rows
from support.running.covering import few
from support.worlds.rings import DEED, WIDEST, Deed, Life, Right, Turn, World, cut, walk

HEADS = Heads(1, 2, 3, 5)
TOKENS = 30
ROUNDS = st.lists(st.tuples(DEED, DEED), min_size=1, max_size=6)


def told(labels: list[list[int]]) -> GdnInputs:
    """(q, k, v, log_decay, beta) of each token as rows."""
    H, HV, K, V = HEADS
    shapes = ((H, K), (H, K), (HV, V), (HV,), (HV,))
    if not labels:
        return GdnInputs(*(torch.zeros(0, *shape, dtype=torch.int64) for shape in shapes))
    columns = (list(column) for column in zip(*labels, strict=True))
    return GdnInputs(*(rows(column, *shape) for column, shape in zip(columns, shapes, strict=True)))


def right(seed: int) -> Right:
    labels = [labels_of(seed + t, 5) for t in range(TOKENS)]
    chain = mixed(seed, 1)
    chains = [chain]
    for _, *token in labels:
        _, chain = folded(chain, *token)
        chains.append(chain)
    states = [block(chain, HEADS.HV, HEADS.K, HEADS.V) for chain in chains]
    return Right(told(labels), states, lambda count, of: told([labels_of(9000 + of + j, 5) for j in range(count)]))


TWO = (right(100), right(500))
OF_INPUTS = replace(LEDGER, name="ledger of inputs", keeps="inputs")


@few(1)
@pytest.mark.slow
@pytest.mark.parametrize("ops", [LEDGER, OF_INPUTS], ids=lambda ops: ops.name)
@given(rounds=ROUNDS, start=st.integers(0, 40), lazy=st.booleans(), room=st.integers(2 * WIDEST, 2 * WIDEST + 9))
@settings(max_examples=30, deadline=None, database=None)
def test_any_rounds_leave_the_chain_of_the_accepted_tokens(
    ops: Ops, rounds: list[tuple[Deed, Deed]], start: int, lazy: bool, room: int
) -> None:
    world = World.of(ops, HEADS, "cpu", size=room, dtype=torch.int64, kept=torch.int64)
    walk(world, [Life(slot, one, start + slot) for slot, one in zip((2, 5), TWO, strict=True)], rounds, lazy)


def test_update_from_a_wrong_state_makes_every_later_state_wrong() -> None:
    """Its own label is wrong where it is kept, and so is the chain of any rerun of it on the right state."""
    one, wrong = (World.of(LEDGER, HEADS, "cpu", size=4, dtype=torch.int64, kept=torch.int64) for _ in range(2))
    right_, first = TWO[0], cut(TWO[0].rows, 0, 1)
    one.state.view[2], wrong.state.view[2] = right_.states[0], TWO[1].states[0]
    for world in (one, wrong):
        world.run([Turn(2, first, settled=False)])
    update, _ = folded(mixed(100, 1), *labels_of(100, 5)[1:])
    assert torch.equal(one.kept(2, 0, 1)[2][0], block(update, HEADS.HV, HEADS.V))
    assert not torch.equal(wrong.kept(2, 0, 1)[2], one.kept(2, 0, 1)[2])
    wrong.state.view[2] = right_.states[0]
    for world in (one, wrong):
        world.run([Turn(2, cut(right_.rows, 0, 0), 1, 1, kept=False, goal="slot")])
    assert torch.equal(one.state.view[2], right_.states[1])
    assert not torch.equal(wrong.state.view[2], right_.states[1])
