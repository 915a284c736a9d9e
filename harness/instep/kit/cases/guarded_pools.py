"""Guarded pools for op tests: strided views on one poisoned allocation, and which elements an op may write.

Leaves out: the product's own allocation (`instep_optimized.memory`); these pools are independent of it.
"""

import math
from dataclasses import dataclass

import torch

from instep_optimized.memory_addresses import Address, Part

GAP = 48  # elements of red zone after every position, or unit without positions; keeps pitches multiples of 16


@dataclass(frozen=True)
class Pool:
    """raw: the whole allocation, NaN at first; view: what the op sees, pitch wider than packed.

    numbers: index in `raw` of every element of `view`; writable: the elements of `raw` that an op may write.
    """

    raw: torch.Tensor
    view: torch.Tensor
    numbers: torch.Tensor
    writable: torch.Tensor

    def allow(self, *at: int) -> None:
        """Allow the op to write the unit (and column) at these leading indices."""
        self.writable[self.numbers[at].flatten()] = True


def guarded(
    leading: tuple[int, ...], block: tuple[int, ...], dtype: torch.dtype, *, swap: bool = False, device: str = "cpu"
) -> Pool:
    """Make a pool [*leading, *block] with a red zone after every leading index.

    swap: the last two axes of the block are exchanged in memory (a `VK` state pool, a channel-last window).
    """
    stored = (*block[:-2], block[-1], block[-2]) if swap else block
    strides = [math.prod(stored[i + 1 :]) for i in range(len(stored))]
    pitch = -(-math.prod(block) // 16) * 16 + GAP
    outer: list[int] = []
    for size in reversed(leading):
        outer.insert(0, pitch)
        pitch = pitch * (size + 1)  # one more position: an engine may pass a part of its pool
    if swap:
        strides[-2], strides[-1] = strides[-1], strides[-2]
    raw = torch.full((GAP + pitch,), math.nan).to(dtype).to(device)
    spot = torch.arange(raw.numel(), device=device)
    shape, steps = (*leading, *block), (*outer, *strides)
    return Pool(
        raw,
        raw.as_strided(shape, steps, GAP),
        spot.as_strided(shape, steps, GAP),
        torch.zeros(raw.numel(), dtype=torch.bool, device=device),
    )


def runs(part: Part, request: int) -> bool:
    """Whether a request of a part runs: it has rows, and its unit is not -1."""
    return int(part.count[request]) > 0 and int(part.read.units[request]) >= 0


def permit(part: Part, store: Pool | None, each: Pool | None) -> None:
    """Mark the elements that `part` may write: `store` units, and the columns of `per_row` below the count."""
    for request in range(part.count.numel()):
        if not runs(part, request):
            continue
        if store is not None and part.store is not None and int(part.store.units[request]) >= 0:
            store.allow(*place(part.store, request))
        if each is not None and part.per_row is not None and int(part.per_row.units[request]) >= 0:
            for column in range(int(part.count[request])):
                each.allow(int(part.per_row.units[request]), column)


def place(address: Address, request: int) -> tuple[int, ...]:
    """Leading indices of a request's unit."""
    unit = int(address.units[request])
    return (unit,) if address.column is None else (unit, int(address.column[request]))


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Equal as bytes: -0 and NaN payloads count."""
    return x.dtype == y.dtype and torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
