"""Rows and windows of a conv in words: 2 or 4 numbers of 16 bits that lie side by side.

Leaves out: kernels (`walk_words.py`, and `rows_staged.py` of windows).
"""

from __future__ import annotations

import torch

from ...layout import Address
from ..device.address import flat

WIDTH = 4  # of the conv: the taps of a channel are one word of 4
TYPES = {1: torch.uint16, 2: torch.uint32, 4: torch.uint64}  # of a word, by its numbers


def in_words(x: torch.Tensor, numbers: int, inner: int = 1) -> bool:
    """Whether every row, of `inner` axes, begins at a word."""
    steps = x.stride()[: x.dim() - inner]
    return x.data_ptr() % (numbers * x.itemsize) == 0 and all(step % numbers == 0 for step in steps)


def words(x: torch.Tensor, numbers: int) -> torch.Tensor:
    """The same memory; the last axis counts words."""
    return x.view(TYPES[numbers])


def windows(address: Address | None, otherwise: Address, numbers: int) -> tuple[object, ...]:
    """(pool, units, columns, unit step, column step) of windows [channels, WIDTH - 1]; all steps count words.

    The pool is None where there is no address, and the columns where it has none. otherwise: as `flat` takes it.
    """
    pool, units, column, *steps = flat(address, 2, otherwise)
    flattened = pool.as_strided((*pool.shape[:-2], pool.shape[-2] * (WIDTH - 1)), (*pool.stride()[:-2], 1))
    held = None if address is None else words(flattened, numbers)
    absent = address is None or address.column is None
    return held, units, None if absent else column, steps[0] // numbers, steps[1] // numbers
