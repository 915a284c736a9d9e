"""Counter-based random bits: Philox4x32-10 in torch integers, on any device.

Leaves out: the rounding that uses them (`scaled_tiles.py`).
"""

import math

import torch

from instep_reference.contract.declared_rounding import CHANCE_BITS

from ...memory_addresses import Chance

WORD, HALF = (1 << 32) - 1, (1 << 16) - 1


def uniforms(chance: Chance, tokens: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Draw [n, *shape] fp32 below 1, in logical order, for states [n] that contain these numbers of tokens."""
    element = torch.arange(math.prod(shape), device=tokens.device) + chance.first
    a, b, c, d = element, tokens[:, None] & WORD, torch.full_like(element, chance.layer), torch.zeros_like(element)
    low, high = chance.seed & WORD, chance.seed >> 32 & WORD
    for _ in range(10):
        (over, under), (above, below) = _product(a, 0xD2511F53), _product(c, 0xCD9E8D57)
        a, b, c, d = above ^ b ^ low, below, over ^ d ^ high, under
        low, high = low + 0x9E3779B9 & WORD, high + 0xBB67AE85 & WORD
    return ((a >> 32 - CHANCE_BITS) * 2.0**-CHANCE_BITS).view(-1, *shape)


def _product(x: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the upper and the lower word of x times a factor. A single product would not fit into a signed number."""
    lower, upper = x * (factor & HALF), x * (factor >> 16)
    upper = upper + (lower >> 16)
    return upper >> 16, (upper & HALF) << 16 | lower & HALF
