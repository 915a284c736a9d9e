"""Kernels for windows that are trees: a path has the bits of the same tokens as a chain, by the kernel for chains.

Leaves out: the plain ops (`test_ops_trees.py`), these against Triton's (`test_kernels.py` runs the shared cases of
`instep.kit.cases.trees`), whole numbers (`test_index_ops.py`), and engines.
Every body runs interpreted on a CPU, native on a GPU at real sizes.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from instep.kit.cases.case import BF16, FP32, Case, Draw, at, serve
from instep.kit.cases.conv_and_gdn import Heads
from instep.kit.cases.guarded_pools import same_bits
from instep.kit.cases.paged_kv import Reading, attend_case
from instep.kit.cases.trees import TREE_INDEX, TREE_ROWS, ancestors, padded, seen
from instep_optimized.kernels.runtime import INTERPRETED
from instep_optimized.memory_addresses import Address, Part
from instep_optimized.ops.op_protocols import GdnInputs, Ops
from instep_optimized.ops.row_invariant_triton import INVARIANT
from instep_optimized.ops.triton import TRITON
from support.inputs.tree_windows import Parents, path
from support.running.covering import each_value
from support.worlds.rings import Turn, World, cut, stream

HERE = "cuda" if torch.cuda.is_available() else "cpu"
NATIVE = HERE == "cuda"
pytestmark = [pytest.mark.gpu] if NATIVE else []
BUSHY: Parents = (-1, 0, 0, 1, 1, 2, 5)
MANY: tuple[Parents, ...] = (BUSHY, (-1, 0, 1, 2), (-1,), (-1, 0, 0, 0))
if NATIVE:
    MANY = (*MANY, (-1, *(node // 2 for node in range(62))), tuple(range(-1, 62)))
SIZES = [Heads(4, 8, 128, 128), Heads(1, 3, 48, 80)] if NATIVE else [Heads(1, 2, 20, 12)]
PENDING = 2


def leaves(tree: Parents) -> list[int]:
    return [node for node in range(len(tree)) if node not in tree]


def some(rows: GdnInputs, nodes: list[int]) -> GdnInputs:
    return GdnInputs(*(x[nodes].contiguous() for x in rows))


FORMS = (SIZES, ("VK", "KV"), (FP32, BF16))


@pytest.mark.parametrize(("heads", "layout", "dtype"), list(product(*FORMS)) if NATIVE else each_value(*FORMS), ids=str)
def test_tree_path_of_the_delta_rule_has_the_bits_of_its_chain(heads: Heads, layout: str, dtype: torch.dtype) -> None:
    """Core rows, states per node and the ring's contents, after rerun tokens; also for a whole chain."""
    swap = layout == "VK"
    size = PENDING + max(map(len, MANY))

    def world() -> World:
        made = World.of(TRITON, heads, HERE, size=size, swap=swap, widest=size, dtype=dtype, slots=len(MANY) + 1)
        made.state.view[1:] = Draw(21, HERE).normal(*made.state.view[1:].shape, scale=0.5).to(dtype)
        for slot, rows in enumerate(tokens, 1):
            made.fill(slot, slot, cut(rows, 0, PENDING))
        return made

    def turn(slot: int, nodes: list[int]) -> Turn:
        rows = some(tokens[slot - 1], [PENDING + node for node in nodes])
        return Turn(slot, rows, slot + PENDING, PENDING, settled=False)

    tokens = [stream(heads, PENDING + len(tree), 22 + slot, HERE) for slot, tree in enumerate(MANY)]
    ours, first = world(), 0
    core = ours.run([turn(slot, [*range(len(tree))]) for slot, tree in enumerate(MANY, 1)], columns=True, trees=MANY)
    for slot, tree in enumerate(MANY, 1):
        for leaf in leaves(tree)[:: 1 if len(tree) < 9 else 7]:
            nodes, chain = path(tree, leaf), world()
            alone = chain.run([turn(slot, nodes)], columns=True)
            assert same_bits(core[[first + node for node in nodes]], alone)
            columns = [world.snapshots.view[slot] for world in (ours, chain)]
            rings = zip(*(world.kept(slot, slot + PENDING, size - PENDING) for world in (ours, chain)), strict=True)
            for of_tree, of_chain in (columns, *rings):
                assert same_bits(of_tree[nodes], of_chain[: len(nodes)])
        first += len(tree)


def conv(x: torch.Tensor, memory: torch.Tensor, kept: torch.Tensor, tree: Parents | None) -> torch.Tensor:
    """One request in unit 1."""
    draw, unit = Draw(0, HERE), Draw(0, HERE).ints([1])
    part = Part(
        "window", draw.ints([0]), draw.ints([len(x)]), len(x), Address(memory, unit), draw.ints([0]).bool(),
        per_row=Address(kept, unit), parents=None if tree is None else draw.ints(tree),
    )  # fmt: skip
    weight = Draw(24, HERE).normal(x.shape[1], memory.shape[2] + 1)
    return TRITON.conv(x=x, weight=weight, parts=(part,), to=at("mixed"))


@pytest.mark.parametrize("tree", MANY, ids=lambda tree: f"{len(tree)}")
def test_tree_path_of_the_conv_has_the_bits_of_its_chain(tree: Parents) -> None:
    channels, draw = 8192 if NATIVE else 40, Draw(23, HERE)
    x, memory = draw.normal(len(tree), channels), draw.normal(2, channels, 3)
    kept, alone = (torch.full((2, len(tree), channels, 3), torch.nan, device=HERE) for _ in range(2))
    mixed = conv(x, memory, kept, tree)
    for leaf in leaves(tree)[:4]:
        nodes = path(tree, leaf)
        assert same_bits(mixed[nodes], conv(x[nodes], memory, alone, None))
        assert same_bits(kept[1, nodes], alone[1, : len(nodes)])


if NATIVE:
    READ = Reading((tuple(range(1, 51)), tuple(range(60, 110))), before=(765, 100), count=(7, 63), page_size=16,
                   heads=16, kv_heads=2, head_dim=256)  # fmt: skip
else:  # steps of 16 positions, two in a part: a window crosses the end of one
    READ = Reading(
        ((9, 2, 4, 6, 5, 14, 12, 11, 13), (1, 3, 8, 7, 10, *4 * (-1,))), before=(28, 13), count=(7, 4),
    )  # fmt: skip
READ_TREES = (BUSHY, (-1, *(node // 2 for node in range(READ.count[1] - 1))))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_path_of_attention_has_the_bits_of_that_chain_with_separate_rows(dtype: torch.dtype) -> None:
    """The path's keys and values are moved to where the chain has them, as a commit moves them."""
    inputs, _ = seen(attend_case(25, READ, dtype), READ_TREES)(HERE)
    query, pages, draw = inputs["query"], inputs["pages"], Draw(0, HERE)
    attended = INVARIANT.attend(**inputs)
    for request, tree in enumerate(READ_TREES):
        for leaf in leaves(tree)[:5]:
            nodes, mine = path(tree, leaf), slice(request, request + 1)
            rows = int(pages.begin[request]) + draw.ints(nodes)
            plan = INVARIANT.plan_path(
                accept_index=padded(draw, [nodes], len(tree), -1), slots=pages.slots[mine], before=pages.before[mine],
                size=pages.keys.shape[1], table=pages.table,
            )
            moved = pages.keys.clone(), pages.values.clone()
            for pool in moved:
                INVARIANT.move_rows(pool=pool, **plan._asdict())
            chain = replace(
                pages, keys=moved[0], values=moved[1], slots=pages.slots[mine], begin=draw.ints([0]),
                count=draw.ints([len(nodes)]), before=pages.before[mine], most=len(nodes), ancestors=None, nodes=0,
            )  # fmt: skip
            alone = INVARIANT.attend(query=query[rows].contiguous(), pages=chain, to=at("attended"))
            assert same_bits(attended[rows], alone)


def test_chain_next_to_a_tree_has_the_same_bits_as_without() -> None:
    """Its rows have no bits of ancestors. They see each other's positions in their order."""
    inputs, _ = seen(attend_case(25, READ, FP32), READ_TREES)(HERE)
    pages, second = inputs["pages"], int(inputs["pages"].begin[1])
    bits = pages.ancestors.clone()
    bits[second:] = 0
    beside, chains = (
        INVARIANT.attend(**inputs | {"pages": replace(pages, **given)})
        for given in ({"ancestors": bits}, {"ancestors": None, "nodes": 0})
    )
    assert same_bits(beside[second:], chains[second:])
    assert not same_bits(beside[:second], chains[:second])
    assert same_bits(beside[:second], INVARIANT.attend(**inputs)[:second])


@pytest.mark.parametrize("ops", [TRITON, INVARIANT], ids=lambda ops: ops.name)
def test_unseen_row_is_not_used_not_even_times_zero(ops: Ops) -> None:
    """Node 2 of the bushy tree is NaN as a key and a value: so are the rows that see it, and no other row."""
    inputs, pools = seen(attend_case(26, READ, FP32), READ_TREES)(HERE)
    sound, pages = ops.attend(**inputs), inputs["pages"]
    page, entry = divmod(READ.before[0] + 2, READ.page_size)
    for name in ("keys", "values"):
        pools[name].view[READ.tables[0][page], entry] = torch.nan
    found = ops.attend(**inputs)
    sees = [bool(bits & 4) for bits in ancestors(BUSHY)]
    mine = slice(int(pages.begin[0]), int(pages.begin[0]) + len(BUSHY))
    assert found[mine].isnan().flatten(1).all(dim=1).tolist() == sees
    found[mine][sees] = sound[mine][sees]
    assert same_bits(found, sound)


def test_a_branch_does_not_reach_another_one() -> None:
    heads = SIZES[-1]
    rows, branch = stream(heads, len(BUSHY), 27, HERE), [node for node, bits in enumerate(ancestors(BUSHY)) if bits & 4]
    world, memory = World.of(TRITON, heads, HERE, size=8), Draw(28, HERE).normal(2, 40, 3)
    world.state.view[1] = 0.5
    kept, x = torch.zeros(2, len(BUSHY), 40, 3, device=HERE), Draw(29, HERE).normal(len(BUSHY), 40)
    sound = world.run([Turn(1, rows)], trees=[BUSHY]), conv(x, memory, kept, BUSHY)
    for each in (*rows, x):
        each[branch] = torch.nan
    found = world.run([Turn(1, rows)], trees=[BUSHY]), conv(x, memory, kept, BUSHY)
    others = [node for node in range(len(BUSHY)) if node not in branch]
    for ours, right in zip(found, sound, strict=True):
        assert same_bits(ours[others], right[others])
        assert bool(ours[branch].isnan().any())


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="no CUDA device here")
@pytest.mark.parametrize("case", [case for case in (*TREE_INDEX, *TREE_ROWS) if "none" not in case.name], ids=str)
def test_graph_replays_the_call_without_waiting_for_the_host(case: Case) -> None:
    def call() -> tuple[Any, Any]:
        made = case.build("cuda")
        return made, getattr(INVARIANT, case.op)

    wanted, (made, op), graph = serve(INVARIANT, case, "cuda"), call(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = op(**made.inputs)
    graph.replay()
    torch.cuda.synchronize()
    results = () if answer is None else (answer,) if isinstance(answer, torch.Tensor) else tuple(answer)
    assert all(same_bits(x, y) for x, y in zip(results, wanted.results.values(), strict=True))
    assert all(same_bits(pool.raw, wanted.pools[name].raw) for name, pool in made.pools.items())
