"""Windows that are trees, op by op: what must not reach a node, and chains, which keep their bits next to trees.

Leaves out: what a node computes (`test_ops_plain.py` for numbers, `test_engine_trees.py` for labels, too), and the
whole-number ops (`test_index_ops.py`).
"""

from dataclasses import replace
from random import Random

import pytest
import torch

from instep.kit.cases.guarded_pools import same_bits
from instep_optimized.memory_addresses import Address, Inputs, Keeps, Pages, Part, Ring, Updates
from instep_optimized.ops.ledger_label_ops import LEDGER
from instep_optimized.ops.op_protocols import GdnInputs, Ops
from instep_optimized.ops.plain import PLAIN
from support.independent.integer_labels import block, here, rows
from support.inputs.tree_windows import Launch, chain, path

Tensor = torch.Tensor
H, HV, K, V, C, W, SIZE = 1, 2, 4, 3, 10, 4, 12
SETS = pytest.mark.parametrize("ops", [PLAIN, LEDGER], ids=lambda ops: ops.name)
FORKED = (-1, 0, 0, 1, 1, 2, 3)  # a branch that is left and gone back to, twice
SLOTS = (4, 2, 7, 1, 3)


class Draw:
    """Numbers for an op set: floats, or labels of whole blocks."""

    def __init__(self, ops: Ops, dtype: torch.dtype = torch.float32) -> None:
        self.label = ops.name == "ledger"
        self.dtype = torch.int64 if self.label else dtype
        self._seed, self._generator = Random(5), torch.Generator().manual_seed(5)

    def __call__(self, leading: tuple[int, ...], *shape: int) -> Tensor:
        if not self.label:
            return torch.randn((*leading, *shape), generator=self._generator).to(self.dtype)
        labels = [self._seed.getrandbits(64) for _ in range(torch.Size(leading).numel())]
        return rows(labels, *shape).view(*leading, *shape)


def part_of(launch: Launch, pool: Tensor, each: Tensor, ring: Ring | None = None, *, tree: bool = True) -> Part:
    """The windows over `pool` by slot, kept per row in `each`. The last request is fresh."""
    count = len(launch.trees)
    fresh = torch.tensor([number == len(SLOTS) - 1 for number in range(count)])
    return Part(
        "window", launch.begin, launch.count, max(map(len, launch.trees)), Address(pool, torch.tensor(SLOTS[:count])),
        fresh, per_row=Address(each, torch.arange(count)), ring=ring, parents=launch.parents if tree else None,
    )


def ring_of(draw: Draw, keeps: Keeps, slots: tuple[int, ...]) -> Ring:
    """Three, two, no .. tokens are pending; rows are kept after them, around the end of the ring."""
    k, v, gates = draw((8, SIZE), H, K), draw((8, SIZE), HV, V), [draw((8, SIZE), HV) for _ in range(2)]
    kept: Updates | Inputs = Updates(k, gates[0], v) if keeps == "update" else Inputs(k, v, -gates[0].abs(), gates[1])
    begin, pending = (torch.arange(len(slots)) * 3 + 7) % SIZE, torch.tensor([3, 2, 0, 1, 2])[: len(slots)]
    return Ring(kept, torch.tensor(slots), begin, pending, (begin + pending) % SIZE)


def reading(draw: Draw, launch: Launch, before: int = 6, size: int = 4) -> tuple[Tensor, Pages]:
    """Queries of windows over pages that are NaN (or no label) except at the windows' positions."""
    requests, width = len(launch.trees), -(-(before + launch.width) // size)
    table = torch.arange(1, 1 + requests * width).view(requests, width).flip(0)
    shape = (1 + requests * width, size)
    pools = [draw(shape, 2, 4) for _ in range(2)]
    for pool in pools:
        kept = pool.clone()
        pool.fill_(-99 if draw.label else torch.nan)
        for number, tree in enumerate(launch.trees):
            for at in range(before + len(tree)):
                spot = (table[number, at // size], at % size)
                pool[spot] = kept[spot]
    lines = torch.cat([torch.full((1, width), 77), table])
    pages = Pages(*pools, lines, torch.arange(1, 1 + requests), launch.begin, launch.count,
                  torch.full((requests,), before), max(map(len, launch.trees)), launch.ancestors, launch.width)
    return draw((launch.rows,), 4, 4), pages


def near(ops: Ops, found: Tensor, right: Tensor) -> bool:
    """Labels are equal; sums over positions may have another order."""
    return same_bits(found, right) if ops is LEDGER else bool(((found - right).abs() <= 1e-12).all())


def test_a_nan_in_a_sibling_does_not_reach_a_node() -> None:
    query, pages = reading(Draw(PLAIN, torch.float64), Launch((FORKED,), width=7))
    right = PLAIN.attend(query=query, pages=pages, to=here("attended"))
    pages.keys[pages.table[1, 2], 0] = pages.values[pages.table[1, 2], 0] = torch.nan  # node 2, at position 8
    found = PLAIN.attend(query=query, pages=pages, to=here("attended"))
    sees = torch.tensor([2 in path(FORKED, node) for node in range(7)])
    assert bool(found[sees].isnan().all()) and near(PLAIN, found[~sees], right[~sees])


@SETS
def test_a_tree_that_is_a_chain_has_the_bits_of_a_chain(ops: Ops) -> None:
    launch, draw = Launch((chain(5), chain(2), chain(7)), width=7), Draw(ops)
    x, pool = draw((launch.rows,), C), draw((8, W - 1), C).transpose(1, 2)
    inputs = GdnInputs(*(draw((launch.rows,), *shape) for shape in ((H, K), (H, K), (HV, V), (HV,), (HV,))))
    states, (query, pages) = draw((8,), HV, K, V), reading(draw, launch)
    found = []
    for tree in (True, False):
        windows, after = draw((3, 7, W - 1), C).transpose(2, 3).zero_(), torch.zeros(3, 7, HV, K, V, dtype=draw.dtype)
        weight = Draw(PLAIN)((C,), W)
        found.append([
            ops.conv(x=x, weight=weight, parts=(part_of(launch, pool, windows, tree=tree),), to=here("mixed")),
            ops.gdn(inputs=inputs, parts=(part_of(launch, states, after, tree=tree),), dtype=draw.dtype,
                    to=here("core")),
            ops.attend(query=query, pages=pages if tree else replace(pages, ancestors=None, nodes=0),
                       to=here("attended")),
            windows, after,
        ])  # fmt: skip
    for tree, plain in zip(*found, strict=True):
        assert same_bits(tree, plain)


@SETS
def test_chain_next_to_trees_has_no_ancestor_bits(ops: Ops) -> None:
    """A prefill chunk may be longer than there are bits. Its rows see what they see without trees."""
    launch, draw = Launch((FORKED, chain(7)), width=7), Draw(ops)
    query, pages = reading(draw, launch)
    bits = pages.ancestors.clone()
    bits[7:] = 0
    beside = ops.attend(query=query, pages=replace(pages, ancestors=bits), to=here("attended"))
    alone_ = ops.attend(query=query, pages=replace(pages, ancestors=None, nodes=0), to=here("attended"))
    assert same_bits(beside[7:], alone_[7:])
    assert near(ops, beside[:7], ops.attend(query=query, pages=pages, to=here("attended"))[:7])


def test_folded_request_next_to_a_tree_does_not_get_its_parents() -> None:
    """A request without rows reruns its pending tokens; the parents of row 0 belong to another one, or to none."""
    inputs = GdnInputs(*(torch.full((2, *shape), 0.5) for shape in ((H, K), (H, K), (HV, V), (HV,), (HV,))))
    found = []
    for parents in (torch.tensor([88, 99]), None):
        draw = Draw(PLAIN)
        state, ring = draw((8,), HV, K, V), ring_of(draw, "update", (4,))
        settled = torch.zeros(8, HV, K, V)
        ring = replace(ring, keep=torch.tensor([-1]))
        PLAIN.gdn(inputs=inputs, parts=(Part(
            "window", torch.tensor([0]), torch.tensor([0]), 2, Address(state, torch.tensor([4])), torch.tensor([False]),
            ring=ring, settled=Address(settled, torch.tensor([4])), parents=parents,
        ),), dtype=torch.float32, to=here("core"))  # fmt: skip
        found.append(settled)
    assert same_bits(*found) and bool(found[0][4].any())


def test_drawn_block_of_labels_is_intact() -> None:
    assert torch.equal(Draw(LEDGER)((1,), 3)[0], block(Random(5).getrandbits(64), 3))
