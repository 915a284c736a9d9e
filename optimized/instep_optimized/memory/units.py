"""The units of a pool with the scales that stand beside it, if it is stored in tiles: addressed, copied, written back.

Copies keep the stored bits, and so do copies that are written back. Leaves out: arithmetic, but for `shown`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..layout import Address, Chance
from ..ops.plain.tiles import opened
from .pool import RED

SCALES = "_scales"  # the name of a pool of scales is that of its pool with this behind it


class Block(NamedTuple):
    """A copy of memory that is stored in tiles."""

    values: torch.Tensor
    scales: torch.Tensor


Copied = torch.Tensor | Block


@dataclass(frozen=True)
class Units:
    """pool [units, ...] or [units, positions, ...]; scales: those of its tiles, None where it has none.

    chance: as in `Address`
    """

    pool: torch.Tensor
    scales: torch.Tensor | None = None
    chance: Chance | None = None

    def at(self, units: torch.Tensor, column: torch.Tensor | None = None) -> Address:
        return Address(self.pool, units, column, self.scales, self.chance)

    def until(self, width: int) -> Units:
        """The first positions of every unit."""
        return Units(self.pool[:, :width], None if self.scales is None else self.scales[:, :width], self.chance)

    def taken(self, *at: int, length: int = 1) -> Copied:
        """A contiguous copy in the logical order of axes. Before the first token it is zeros, whatever stands there."""
        if self.scales is None:
            return taken(self.pool[at], length)
        return Block(taken(self.pool[at], length), taken(self.scales[at], length))

    def put(self, at: tuple[int | torch.Tensor, ...], copied: Copied) -> None:
        """The reverse of `taken`."""
        values, scales = copied if isinstance(copied, Block) else (copied, None)
        self.pool[at] = values
        if self.scales is not None and scales is not None:
            self.scales[at] = scales

    def rows(self, at: tuple[torch.Tensor, ...]) -> Copied:
        """Contiguous copies of the rows at these leading indices."""
        rows = self.pool[at].contiguous()
        return rows if self.scales is None else Block(rows, self.scales[at].contiguous())

    def scratch(self, units: int) -> Units:
        """New memory of the same form, with the strides of the pool: a kernel then runs as it does on the pool.

        It is filled as red zones are, so that what a kernel does not write is the same in every run, and no number.
        """
        def like(x: torch.Tensor) -> torch.Tensor:
            shape = units, *x.shape[1:]
            span = 1 + sum((size - 1) * step for size, step in zip(shape, x.stride(), strict=True))
            raw = torch.full((span * x.element_size(),), RED, dtype=torch.uint8, device=x.device)
            return raw.view(x.dtype).as_strided(shape, x.stride())

        return Units(like(self.pool), None if self.scales is None else like(self.scales), self.chance)


def shown(copied: Copied) -> torch.Tensor:
    """A copy as a reader of the memory gets it."""
    return opened(*copied) if isinstance(copied, Block) else copied


def tensors(copied: Copied) -> tuple[torch.Tensor, ...]:
    return tuple(copied) if isinstance(copied, Block) else (copied,)


def taken(unit: torch.Tensor, length: int) -> torch.Tensor:
    """A contiguous copy of a unit in its logical order. Before the first token it is zeros, whatever the slot holds."""
    copy = unit.new_zeros(unit.shape)
    return copy.copy_(unit) if length else copy
