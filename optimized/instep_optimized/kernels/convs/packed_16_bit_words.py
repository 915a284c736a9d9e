"""Rows and windows of a conv in words: 2 or 4 adjacent numbers of 16 bits.

Leaves out: kernels (`bf16_short_windows.py`, and `token_inputs_gluon.py` of windows).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...memory_addresses import Address
from ..device.pool_address import flat

WIDTH = 4  # width of the conv: the taps of a channel are one word of 4
TYPES = {1: torch.uint16, 2: torch.uint32, 4: torch.uint64}  # type of a word, by the number of its numbers


class WordWindows(NamedTuple):
    """Units of a pool of windows; steps count words. None: units have no columns, or there is no address at all.

    Triton 3.6 cannot compare a tuple in which something is None with None, so an absent address is a tuple, too.
    """

    pool: torch.Tensor | None = None
    units: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    per_unit: int | None = None
    per_column: int | None = None


def in_words(x: torch.Tensor, numbers: int, inner: int = 1) -> bool:
    """Return whether every row, of `inner` axes, begins at a word."""
    steps = x.stride()[: x.dim() - inner]
    return x.data_ptr() % (numbers * x.itemsize) == 0 and all(step % numbers == 0 for step in steps)


def words(x: torch.Tensor, numbers: int) -> torch.Tensor:
    """View the same memory with a last axis that counts words."""
    return x.view(TYPES[numbers])


def windows(address: Address | None, numbers: int) -> WordWindows:
    """Return an address of windows [channels, WIDTH - 1] as a kernel argument."""
    if address is None:
        return WordWindows()
    pool, units, _, *steps = flat(address, 2, address)
    flattened = pool.as_strided((*pool.shape[:-2], pool.shape[-2] * (WIDTH - 1)), (*pool.stride()[:-2], 1))
    return WordWindows(words(flattened, numbers), units, address.column, steps[0] // numbers, steps[1] // numbers)
