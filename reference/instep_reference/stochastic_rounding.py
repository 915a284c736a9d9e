"""Stochastic rounding, from the words of `contract/declared_rounding.py`: the number that each rounds to, in numpy.

Leaves out: the rest of storage (scales, and rounding to nearest).
"""

import math

import numpy as np
import torch

from .contract.declared_rounding import CHANCE_BITS

FACTORS, STEPS, ROUNDS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 10  # of Philox4x32
WORD = np.uint64(0xFFFFFFFF)


def uniforms(seed: int, layer: int, tokens: int, *shape: int) -> torch.Tensor:
    """Draw [*shape] fp64, multiples of 2 ** -CHANCE_BITS below 1, which decide how each element of a state is rounded.

    tokens: how many there are in the state
    """
    words = philox((np.arange(math.prod(shape), dtype=np.uint64), tokens, layer, 0), seed)[0]
    return torch.from_numpy((words >> np.uint64(32 - CHANCE_BITS)) * 2.0**-CHANCE_BITS).view(shape)


def philox(counter: tuple[np.ndarray | int, ...], key: int) -> list[np.ndarray]:
    """Return four words of 32 bits per counter of four (Salmon et al., 2011); key: 64 bits."""
    first, second, third, fourth = (np.asarray(word, dtype=np.uint64) & WORD for word in counter)
    low, high = np.uint64(key & 0xFFFFFFFF), np.uint64(key >> 32 & 0xFFFFFFFF)
    for _ in range(ROUNDS):
        one, other = first * np.uint64(FACTORS[0]), third * np.uint64(FACTORS[1])
        first, second, third, fourth = (
            other >> np.uint64(32) ^ second ^ low, other & WORD, one >> np.uint64(32) ^ fourth ^ high, one & WORD)
        low, high = (low + np.uint64(STEPS[0])) & WORD, (high + np.uint64(STEPS[1])) & WORD
    return [first, second, third, fourth]
