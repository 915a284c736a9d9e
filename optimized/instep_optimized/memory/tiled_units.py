"""The units of a pool with their scales, if it is stored in tiles: addressed, copied, written back.

Copies keep the stored bits, and so do copies that are written back. Leaves out: arithmetic, except in `shown`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..memory_addresses import Address, Chance
from ..ops.plain.scaled_tiles import opened
from .pool import RED

SCALES = "_scales"  # suffix: the name of a pool of scales is that of its pool plus this


class Block(NamedTuple):
    """A copy of memory that is stored in tiles."""

    values: torch.Tensor
    scales: torch.Tensor


Copied = torch.Tensor | Block


@dataclass(frozen=True)
class Units:
    """pool [units, ...] or [units, positions, ...]; scales: those of its tiles, or None.

    chance: as in `Address`
    """

    pool: torch.Tensor
    scales: torch.Tensor | None = None
    chance: Chance | None = None

    def at(self, units: torch.Tensor, column: torch.Tensor | None = None) -> Address:
        return Address(self.pool, units, column, self.scales, self.chance)

    def until(self, width: int) -> "Units":
        """Return the first positions of every unit."""
        return Units(self.pool[:, :width], None if self.scales is None else self.scales[:, :width], self.chance)

    def taken(self, *at: int, length: int = 1) -> Copied:
        """Copy contiguously, in the logical order of axes. Before the first token the copy is zeros."""
        if self.scales is None:
            return taken(self.pool[at], length)
        return Block(taken(self.pool[at], length), taken(self.scales[at], length))

    def put(self, at: tuple[int | torch.Tensor, ...], copied: Copied) -> None:
        """Reverse `taken`."""
        values, scales = copied if isinstance(copied, Block) else (copied, None)
        self.pool[at] = values
        if self.scales is not None and scales is not None:
            self.scales[at] = scales

    def rows(self, at: tuple[torch.Tensor, ...]) -> Copied:
        """Copy the rows at these leading indices, contiguously."""
        rows = self.pool[at].contiguous()
        return rows if self.scales is None else Block(rows, self.scales[at].contiguous())

    def scratch(self, units: int) -> "Units":
        """Allocate new memory of the same form, with the strides of the pool: a kernel runs on it as on the pool.

        It is filled like a red zone, so that elements which a kernel does not write are the same NaN in every run.
        """
        def like(x: torch.Tensor) -> torch.Tensor:
            shape = units, *x.shape[1:]
            span = 1 + sum((size - 1) * step for size, step in zip(shape, x.stride(), strict=True))
            raw = torch.full((span * x.element_size(),), RED, dtype=torch.uint8, device=x.device)
            return raw.view(x.dtype).as_strided(shape, x.stride())

        return Units(like(self.pool), None if self.scales is None else like(self.scales), self.chance)


def shown(copied: Copied) -> torch.Tensor:
    """Unpack a copy as a reader of the memory gets it."""
    return opened(*copied) if isinstance(copied, Block) else copied


def tensors(copied: Copied) -> tuple[torch.Tensor, ...]:
    return tuple(copied) if isinstance(copied, Block) else (copied,)


def taken(unit: torch.Tensor, length: int) -> torch.Tensor:
    """Copy a unit contiguously in its logical order. Before the first token the copy is zeros."""
    copy = unit.new_zeros(unit.shape)
    return copy.copy_(unit) if length else copy
