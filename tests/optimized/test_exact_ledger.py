"""Labels that are run again: the chain of every request is the fold that Python's integers make of its tokens.

Leaves out: numbers (`test_exact.py`).
"""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from instep_optimized.ops.base import GdnInputs
from instep_optimized.ops.ledger import LEDGER
from support.label_numbers import block, labels_of, mixed, rows
from support.ops_recurrent_cases import Heads
from support.ring_walk import DEED, WIDEST, Deed, Life, Right, walk
from support.ring_world import World

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
    for _, k, v, log_decay, beta in labels:
        chain = mixed(chain, mixed(k, v, log_decay, beta))
        chains.append(chain)
    states = [block(chain, HEADS.HV, HEADS.K, HEADS.V) for chain in chains]
    return Right(told(labels), states, lambda count, of: told([labels_of(9000 + of + j, 5) for j in range(count)]))


TWO = (right(100), right(500))


@given(rounds=ROUNDS, start=st.integers(0, 40), lazy=st.booleans(), room=st.integers(2 * WIDEST, 2 * WIDEST + 9))
@settings(max_examples=30, deadline=None, database=None)
def test_any_rounds_leave_the_chain_of_the_accepted_tokens(
    rounds: list[tuple[Deed, Deed]], start: int, lazy: bool, room: int
) -> None:
    world = World.of(LEDGER, HEADS, "cpu", size=room, dtype=torch.int64, kept=torch.int64)
    walk(world, [Life(slot, one, start + slot) for slot, one in zip((2, 5), TWO, strict=True)], rounds, lazy)
