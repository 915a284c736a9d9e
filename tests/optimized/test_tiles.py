"""Kernels on memory that is stored in tiles with scales: the bits of `plain`, wherever sums do not part them.

Leaves out: `plain` itself (`tests/harness/test_storage.py`). Every body runs interpreted on a CPU, native on a GPU.
"""

import pytest
import torch

from instep.kit.cases.case import Draw
from instep_optimized.memory.tiled_units import Units, shown
from instep_optimized.memory_addresses import Address, Pages, Part
from instep_optimized.ops.op_protocols import GdnInputs, Ops
from instep_optimized.ops.plain import PLAIN
from instep_optimized.ops.plain.scaled_tiles import packed
from instep_optimized.ops.triton import TRITON
from instep_reference.contract.declared_rounding import SCALED_KV, SCALED_STATE
from instep_reference.contract.place_names import Place

HERE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if HERE == "cuda" else []
CORE, ATTENDED = Place("trunk", 0, "core"), Place("trunk", 0, "attended")
E4M3 = torch.float8_e4m3fn


def pool(seed: int, heads: int, K: int, V: int, layout: str, *leading: int) -> Units:
    """States of very different sizes, tile by tile."""
    draw = Draw(seed, HERE)
    block = draw.normal(*leading, heads, K, V) * draw.normal(*leading, heads, 1, V).exp()
    values, scales = packed(block, E4M3, SCALED_STATE.grid(*block.shape))
    return Units(values.mT.contiguous().mT if layout == "VK" else values, scales)


def ran(
    ops: Ops, form: str, stored: str, layout: str, sizes: tuple[int, int, int, int],
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, Units, Units]:
    """Two requests of three rows, the second one fresh. -> the read-out, the slots, the snapshots"""
    H, HV, K, V = sizes
    draw = Draw(7, HERE)
    q, k = (torch.nn.functional.normalize(draw.normal(6, H, K), dim=-1) for _ in range(2))
    gates = draw.uniform(6, HV, low=-1.0, high=-0.01), draw.uniform(6, HV, low=0.05, high=1.0)
    inputs = GdnInputs(q * K**-0.5, k, draw.normal(6, HV, V), *gates)
    slots, rows = pool(1, HV, K, V, layout, 4), pool(2, HV, K, V, "KV", 2, 4)
    own = slots.at(draw.ints([2, 1]))
    part = Part(
        form, draw.ints([0, 3]), draw.ints([3, 3]), 3, own, draw.ints([0, 1]).bool(),  # type: ignore[arg-type]
        store=own if stored == "slots" else None,
        per_row=rows.at(draw.ints([0, 1])) if stored == "snapshots" else None,
    )
    return ops.gdn(inputs=inputs, parts=(part,), dtype=dtype, to=CORE), slots, rows


@pytest.mark.parametrize("layout", ["VK", "KV"])
@pytest.mark.parametrize(("form", "stored", "sizes"), [
    ("window", "slots", (1, 2, 8, 16)), ("window", "snapshots", (2, 2, 16, 40)), ("window", "slots", (1, 2, 16, 8)),
    ("chunk", "slots", (2, 2, 16, 40)), ("chunk", "slots", (1, 1, 32, 64)),
])  # fmt: skip
def test_the_delta_rule_reads_and_stores_tiles(
    form: str, stored: str, sizes: tuple[int, int, int, int], layout: str
) -> None:
    right, found = (ran(ops, form, stored, layout, sizes) for ops in (PLAIN, TRITON))
    assert torch.allclose(found[0], right[0], rtol=1e-5, atol=1e-5)
    for mine, plain in zip(found[1:], right[1:], strict=True):
        assert torch.allclose(mine.scales, plain.scales, rtol=2e-6, atol=0), "20 bits each"
        apart = mine.pool.view(torch.uint8) != plain.pool.view(torch.uint8)
        assert float(apart.float().mean()) < 1e-3, "a number may lie between two others"


@pytest.mark.parametrize("layout", ["VK", "KV"])
def test_prefill_in_narrow_products_reads_and_stores_tiles(layout: str) -> None:
    """A number in 20 lies on another side of a rounding to 3 bits, and is off by up to an eighth; a scale never is."""
    right, found = (ran(ops, "chunk", "slots", layout, (2, 2, 16, 40), torch.bfloat16) for ops in (PLAIN, TRITON))
    pairs = [(found[0], right[0], 0.01)] + [(shown(found[1].taken(n)), shown(right[1].taken(n)), 0.04) for n in (1, 2)]
    for mine, plain, off in pairs:
        assert float((mine.double() - plain.double()).norm() / plain.double().norm()) < off
    assert torch.allclose(found[1].scales, right[1].scales, rtol=0.02, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_packed_as_plain_packs_them_and_read_again(dtype: torch.dtype) -> None:
    draw = Draw(3, HERE)
    rows, locations, found = draw.normal(7, 2, 24).to(dtype), draw.ints([4, 5, -1, 9, 15, 8, 7]), []
    query = draw.normal(2, 4, 24).to(dtype)
    for ops in (PLAIN, TRITON):
        kept = [Units(torch.zeros(5, 4, 2, 24, device=HERE).to(E4M3), torch.zeros(5, 4, 2, 1, device=HERE))
                for _ in range(2)]  # fmt: skip
        for number, units in enumerate(kept):
            given = (number + 1) * rows
            ops.store_rows(rows=given, pool=units.pool, locations=locations, scales=units.scales)
        table, one = draw.ints([[1, 2, -1]] * 3), draw.ints([0])
        pages = Pages(kept[0].pool, kept[1].pool, table, one + 1, one, one + 2, one, 2,
                      key_scales=kept[0].scales, value_scales=kept[1].scales)  # fmt: skip
        found.append((kept, ops.attend(query=query, pages=pages, to=ATTENDED)))
    (right, attended), (mine, other) = found
    for x, y in zip(mine, right, strict=True):
        assert torch.equal(x.pool.view(torch.uint8), y.pool.view(torch.uint8))
        assert x.scales is not None and y.scales is not None and torch.equal(x.scales, y.scales)
    assert x.scales.shape[1:] == SCALED_KV.grid(4, 2, 24)
    assert torch.allclose(attended.float(), other.float(), rtol=0, atol=4 * torch.finfo(dtype).eps * 4)


def test_a_commit_copies_scales_with_their_numbers() -> None:
    draw = Draw(5, HERE)
    for ops in (PLAIN, TRITON):
        source, target = pool(1, 2, 8, 16, "KV", 2, 4), pool(2, 2, 8, 16, "VK", 4)
        before = shown(target.taken(1)).clone()
        ops.move(source=source.at(draw.ints([1, -1]), draw.ints([3, 0])), target=target.at(draw.ints([2, 3])))
        assert torch.equal(shown(target.taken(2)), shown(source.taken(1, 3)))
        assert torch.equal(shown(target.taken(1)), before)
    assert isinstance(source.at(draw.ints([0])), Address)
