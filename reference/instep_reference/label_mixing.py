"""The mixture of two labels (`contract/label_algebra.py`), and numbers that follow from the token that a label names.

Leaves out: the engine that moves labels (`label_ledger.py`).
"""

from itertools import accumulate

from .contract.label_algebra import MIX_A, MIX_B, MIX_C, MIX_D, SCORES

MASK = (1 << 64) - 1


def mix(a: int, b: int) -> int:
    """Mix two labels into one. In 64 bits two different mixtures do not collide by accident."""
    x = (a * MIX_A + b * MIX_B + MIX_C) & MASK
    x ^= x >> 29
    x = x * MIX_D & MASK
    return x ^ (x >> 32)


def most_named(token: int, count: int, vocab: int) -> list[tuple[int, float]]:
    """Substitute for the most probable tokens if the logits name `token`: tokens, and log-probabilities."""
    falls = list(accumulate((mix(token, rank) >> 1) % SCORES for rank in range(count)))
    return [((token + rank) % vocab, -float(fall)) for rank, fall in enumerate(falls)]
