"""Rows and windows of a conv in words: 2 or 4 adjacent numbers of 16 bits.

Leaves out: kernels (`bf16_short_windows.py`, and `token_inputs_gluon.py` of windows).
"""

from __future__ import annotations

import torch

from ...memory_addresses import Address
from ..device.pool_address import flat

WIDTH = 4  # width of the conv: the taps of a channel are one word of 4
TYPES = {1: torch.uint16, 2: torch.uint32, 4: torch.uint64}  # type of a word, by the number of its numbers


def in_words(x: torch.Tensor, numbers: int, inner: int = 1) -> bool:
    """Return whether every row, of `inner` axes, begins at a word."""
    steps = x.stride()[: x.dim() - inner]
    return x.data_ptr() % (numbers * x.itemsize) == 0 and all(step % numbers == 0 for step in steps)


def words(x: torch.Tensor, numbers: int) -> torch.Tensor:
    """View the same memory with a last axis that counts words."""
    return x.view(TYPES[numbers])


def windows(address: Address | None, otherwise: Address, numbers: int) -> tuple[object, ...]:
    """Return (pool, units, columns, unit step, column step) of windows [channels, WIDTH - 1]; steps count words.

    The pool is None without an address, and the columns are None if it has none. otherwise: as in `flat`.
    """
    pool, units, column, *steps = flat(address, 2, otherwise)
    flattened = pool.as_strided((*pool.shape[:-2], pool.shape[-2] * (WIDTH - 1)), (*pool.stride()[:-2], 1))
    held = None if address is None else words(flattened, numbers)
    absent = address is None or address.column is None
    return held, units, None if absent else column, steps[0] // numbers, steps[1] // numbers
