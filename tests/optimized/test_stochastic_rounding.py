"""Stochastic rounding: both sides draw the same bits from the same counters, and round numbers accordingly.

Leaves out: replays with it (`tests/harness/test_storage.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from instep.kit.cases.case import Draw
from instep_optimized.kernels.device.stochastic_rounding import counters, drawn
from instep_optimized.memory.tiled_units import Units
from instep_optimized.memory_addresses import Address, Chance, Part, Ring, Updates
from instep_optimized.ops.op_protocols import GdnInputs, Ops
from instep_optimized.ops.plain import PLAIN, scaled_tiles
from instep_optimized.ops.plain.scaled_tiles import uniforms
from instep_optimized.ops.triton import TRITON
from instep_reference import stochastic_rounding as reference
from instep_reference.contract.declared_rounding import CHANCE_BITS, SCALED_STATE
from instep_reference.contract.place_names import Place
from support.running.covering import few

HERE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if HERE == "cuda" else []
E4M3 = torch.float8_e4m3fn
SEEDS = (0, 7, 2**32 + 5, 2**64 - 1)


def test_generator_matches_published_philox() -> None:
    """The known answers of Random123, and another implementation: numpy's, which counts before it draws."""
    assert [int(word) for word in reference.philox((0, 0, 0, 0), 0)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = reference.philox((0xFFFFFFFF,) * 4, 2**64 - 1)
    assert [int(word) for word in ones] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("seed", SEEDS)
def test_both_sides_draw_the_same_bits(seed: int) -> None:
    tokens = torch.tensor([1, 5, 2**32 + 5, 4096])
    ours = uniforms(Chance(seed, 3), tokens, (2, 4, 6))
    for one, count in zip(ours, tokens.tolist(), strict=True):
        assert torch.equal(one.double(), reference.uniforms(seed, 3, count, 2, 4, 6))
    assert torch.equal(ours[1], ours[2]), "tokens count as a word of 32 bits"
    others = uniforms(Chance(seed, 2), tokens, (2, 4, 6)), uniforms(Chance(seed + 1, 3), tokens, (2, 4, 6))
    assert all(float((other == ours).float().mean()) < 0.05 for other in others)


@triton.jit(do_not_specialize=["layer", "low", "high"])
def _words(out, tokens, layer, low, high, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, drawn(at, tl.load(tokens), layer, low, high).to(tl.int64))


@pytest.mark.interpreted
@pytest.mark.parametrize("seed", SEEDS)
def test_kernels_draw_the_same_bits(seed: int) -> None:
    out, tokens = (torch.full((n,), 2**32 + 17, dtype=torch.int64, device=HERE) for n in (64, 1))
    own = Address(out, tokens, chance=Chance(seed, 3))
    part = Part("window", tokens, tokens, 1, own, tokens.bool(), before=tokens)
    _words[(1,)](out, *counters(part), N=64)
    assert torch.equal(out.cpu() * 2.0**-CHANCE_BITS, reference.uniforms(seed, 3, 17, 64))


def stored(ops: Ops, form: str, dtype: torch.dtype, layout: str, activation: torch.dtype) -> list[torch.Tensor]:
    """Two requests of which one is fresh, and a fold. Keys are apart and nothing is forgotten: no sum rounds.

    form: chunk; window; snapshots, of a chain; tree, the same of a tree; again, kept tokens and then rows
    -> the bytes of all states and scales
    """
    H, HV, K, V = 1, 2, 16, 40
    draw, chance = Draw(7, HERE), Chance(2**32 + 5, 3)
    keys = torch.eye(K, device=HERE)
    k = keys[[0, 1, 2, 0, 1, 2]][:, None].contiguous()
    ones, v = torch.ones(6, HV, device=HERE), draw.normal(6, HV, V).to(activation).float()
    inputs = GdnInputs(draw.normal(6, H, K), k, v, 0 * ones, ones)
    block = draw.normal(4, HV, K, V)
    block[:, :, :5] = 0

    def pool(*leading: int) -> Units:
        x = block[0].expand(*leading, HV, K, V)
        grid = SCALED_STATE.grid(*x.shape)
        values, scales = scaled_tiles.packed(x, E4M3, grid) if dtype == E4M3 else (x.to(dtype), None)
        return Units(values.mT.contiguous().mT if layout == "VK" else values.contiguous(), scales, chance)

    slots, rows = pool(4), pool(3, 4)
    own, ring = slots.at(draw.ints([2, 1, 3])), None
    if form == "again":
        kept = Updates(keys[[3, 4]].view(1, 2, 1, K).repeat(3, 1, 1, 1), torch.ones(3, 2, HV, device=HERE),
                       draw.normal(3, 2, HV, V))  # fmt: skip
        ring = Ring(kept, draw.ints([0, 1, 2]), draw.ints([0, 1, 1]), draw.ints([2, 2, 1]), draw.ints([-1, -1, -1]))
    aside = form in ("snapshots", "tree", "again")
    part = Part(
        "chunk" if form == "chunk" else "window", draw.ints([0, 3, 6]), draw.ints([3, 3, 0]), 3, own,
        draw.ints([0, 1, 0]).bool(), store=None if aside else own, settled=own if form == "again" else None,
        per_row=rows.at(draw.ints([0, 1, 2])) if aside else None, ring=ring,
        parents=draw.ints([-1, 0, 0, -1, 0, 1]) if form == "tree" else None, before=draw.ints([5, 0, 4096]),
    )  # fmt: skip
    ops.gdn(inputs=inputs, parts=(part,), dtype=activation, to=Place("trunk", 0, "core"))
    return [x.cpu().contiguous().view(torch.uint8) for units in (slots, rows)
            for x in (units.pool, units.scales) if x is not None]


@few(7)
@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [E4M3, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("form", "layout", "activation"), [
    ("window", "VK", torch.float32), ("snapshots", "KV", torch.float32), ("tree", "VK", torch.float32),
    ("again", "KV", torch.float32), ("chunk", "VK", torch.float32), ("chunk", "KV", torch.bfloat16),
], ids=str)  # fmt: skip
def test_kernels_store_the_bits_of_plain(form: str, layout: str, activation: torch.dtype, dtype: torch.dtype) -> None:
    right, found = (stored(ops, form, dtype, layout, activation) for ops in (PLAIN, TRITON))
    assert all(map(torch.equal, found, right))


def test_number_rounds_to_each_neighbour_with_the_right_probability() -> None:
    x = torch.tensor([1.0, 1.03125, -1.09375, 300.0, 447.9999, 448.0, 2.0**-9 * 1.25, 0.0, -(2.0**-12)])
    many = 4096
    u = uniforms(Chance(1, 0), torch.arange(many), x.shape)
    fallen = scaled_tiles._narrow(x.expand(many, -1), E4M3, u, 1 - 2.0**-19).float()
    exact = x != 447.9999
    assert torch.equal(fallen[:, exact], fallen[:, exact].to(E4M3).float()), "each is a number of the dtype"
    fallen = fallen.to(E4M3).float()
    for number, column in zip(x.tolist(), fallen.T, strict=True):
        assert len(set(column.tolist())) <= 2
        unit = float(column.max() - column.min())
        # A fall deviates by at most half a unit, so this is five deviations of the mean; 1e-4: 448 - 447.9999.
        assert abs(float(column.mean()) - number) <= 2.5 * unit / many**0.5 + 1e-4 * (number > 400), number
    assert set(fallen[:, 4].tolist()) == set(fallen[:, 5].tolist()) == {448.0} and not fallen[:, 7].any()
    assert set(fallen[:, 0].tolist()) == {1.0} and u.max() < 1 and np.log2(float(u[u > 0].min())) >= -CHANCE_BITS


def test_stored_number_is_stored_again_with_the_same_bytes() -> None:
    x = torch.randn(8, 2, 16, 32, generator=torch.Generator().manual_seed(0)).cumsum(0) * 3
    grid = SCALED_STATE.grid(16, 32)
    first = scaled_tiles.packed(x, E4M3, grid, uniforms(Chance(7, 0), torch.arange(8), (2, 16, 32)))
    chances = uniforms(Chance(7, 0), torch.arange(8) + 9, (2, 16, 32))
    again = scaled_tiles.packed(scaled_tiles.opened(*first), E4M3, grid, chances)
    pairs = zip(first, again, strict=True)
    assert all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs)
    nearest = scaled_tiles.packed(x, E4M3, grid)
    others = (first[0].float() != nearest[0].float()).float().mean()
    # With uniform f the mean of the smaller of f and 1 - f is 1/4: this share does not round to nearest.
    assert torch.equal(first[1], nearest[1]) and 0.2 < float(others) < 0.3
