"""Rounding by chance: both sides draw the same bits from the same counters, and a number falls where they say.

Leaves out: replays of it (`tests/harness/test_storage.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from instep_optimized.layout import Chance
from instep_optimized.ops.plain import tiles
from instep_optimized.ops.plain.chance import uniforms
from instep_reference import chance as reference
from instep_reference.contract.rounding import CHANCE_BITS, SCALED_STATE

HERE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if HERE == "cuda" else []
E4M3 = torch.float8_e4m3fn
SEEDS = (0, 7, 2**32 + 5, 2**64 - 1)


def test_the_generator_is_philox_as_it_was_published() -> None:
    """The known answers of Random123, and another implementation: numpy's, which counts before it draws."""
    assert [int(word) for word in reference.philox((0, 0, 0, 0), 0)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = reference.philox((0xFFFFFFFF,) * 4, 2**64 - 1)
    assert [int(word) for word in ones] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("seed", SEEDS)
def test_both_sides_draw_the_same_bits(seed: int) -> None:
    tokens = torch.tensor([1, 5, 2**32 + 5, 4096])
    ours = uniforms(Chance(seed, 3), tokens, (2, 4, 6))
    for drawn, count in zip(ours, tokens.tolist(), strict=True):
        assert torch.equal(drawn.double(), reference.uniforms(seed, 3, count, 2, 4, 6))
    assert torch.equal(ours[1], ours[2]), "tokens count as a word of 32 bits"
    others = uniforms(Chance(seed, 2), tokens, (2, 4, 6)), uniforms(Chance(seed + 1, 3), tokens, (2, 4, 6))
    assert all(float((other == ours).float().mean()) < 0.05 for other in others)


@triton.jit
def _words(out, seed, tokens, layer, N: tl.constexpr):
    at = tl.arange(0, N)
    zero = tl.zeros_like(at)
    word, _, _, _ = tl.philox(seed, at, zero + tokens, zero + layer, zero)
    tl.store(out + at, (word >> 8).to(tl.int64))


@pytest.mark.interpreted
@pytest.mark.parametrize("seed", SEEDS[:3])
def test_a_kernel_s_own_generator_gives_the_same_bits_for_the_same_counters(seed: int) -> None:
    """So a kernel can do it: until one does, `triton` refuses a seed."""
    out = torch.zeros(64, dtype=torch.int64, device=HERE)
    _words[(1,)](out, seed, 17, 3, N=64)
    assert torch.equal(out.cpu() * 2.0**-CHANCE_BITS, reference.uniforms(seed, 3, 17, 64))


def test_a_number_falls_to_its_neighbours_at_the_odds_of_where_it_stands() -> None:
    x = torch.tensor([1.0, 1.03125, -1.09375, 300.0, 447.9999, 448.0, 2.0**-9 * 1.25, 0.0, -(2.0**-12)])
    many = 4096
    u = uniforms(Chance(1, 0), torch.arange(many), x.shape)
    fallen = tiles._fallen(x.expand(many, -1), E4M3, u)
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


def test_what_was_read_is_stored_again_as_the_same_bytes() -> None:
    x = torch.randn(8, 2, 16, 32, generator=torch.Generator().manual_seed(0)).cumsum(0) * 3
    grid = SCALED_STATE.grid(16, 32)
    first = tiles.packed(x, E4M3, grid, uniforms(Chance(7, 0), torch.arange(8), (2, 16, 32)))
    again = tiles.packed(tiles.opened(*first), E4M3, grid, uniforms(Chance(7, 0), torch.arange(8) + 9, (2, 16, 32)))
    pairs = zip(first, again, strict=True)
    assert all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs)
    nearest = tiles.packed(x, E4M3, grid)
    others = (first[0].float() != nearest[0].float()).float().mean()
    # Of evenly spread f the smaller of f and 1 - f is 1/4 in the mean: so many fall otherwise than to nearest.
    assert torch.equal(first[1], nearest[1]) and 0.2 < float(others) < 0.3
