"""Uniforms of a request that follow from its seed, its length and the column: the coins of SGLang's verify."""

from collections.abc import Sequence

from instep_reference.contract.sampling import UNIFORM

WORD = 0xFFFFFFFF  # the largest 32-bit number
SEEDS = 1 << 63  # seeds are below this: SGLang keeps them as int64


def coins(seed: int, length: int, nodes: int) -> tuple[float, ...]:
    """One coin per node of a window, and the final one: columns 0 to `nodes` of this seed and length.

    seed: the request's;  length: its committed tokens before the window, without the root

        coin = hash(seed, length, column) / (2**32 - 1), in fp32, at most 1 - 2**-24

    Mirrors: SGLang 0.5.23, `speculative/eagle_utils.py` (`_seeded_verify_coins`) and
             `kernels/ops/sampling/murmur_hash.py`: MurmurHash3 of 32 bits over the key, with a seed of 0. Differs: a
             coin is rounded to a multiple of 2**-24, as the contract requires. Coins of at least 0.5 are one already;
             a smaller one moves by at most 2**-25. SGLang has as many columns as the batch's windows have nodes; here
             a request has those of its own window. SGLang draws the first token after a prompt, and tokens without
             speculation, by Gumbel noise, which no uniform gives: here their row is a window of one node.
    """
    words = (seed & WORD, seed >> 32 & WORD, length & WORD)
    most = round(1 / UNIFORM) - 1
    hashes = (murmur3((*words, column)) for column in range(nodes + 1))
    return tuple(min(round(hashed / WORD / UNIFORM), most) * UNIFORM for hashed in hashes)


def murmur3(words: Sequence[int]) -> int:
    """MurmurHash3 (x86, 32 bits) of whole 32-bit words, with a seed of 0."""
    mixed = 0
    for word in words:
        word = _turned(word * 0xCC9E2D51 & WORD, 15) * 0x1B873593 & WORD
        mixed = _turned(mixed ^ word, 13) * 5 + 0xE6546B64 & WORD
    mixed ^= 4 * len(words)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = (mixed ^ mixed >> shift) * factor & WORD
    return mixed ^ mixed >> 16


def _turned(word: int, by: int) -> int:
    """Rotate a word to the left."""
    return (word << by | word >> 32 - by) & WORD
