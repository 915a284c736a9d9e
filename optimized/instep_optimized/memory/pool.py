"""One allocation per pool over (layer, unit): pitch, red zones, scrubbing.

Leaves out: the owner of a unit (`slots.py`, `pages.py`) and the number of units (`budget.py`).

    ends[0] | layer 0: unit 0 | gap | unit 1 | gap | ... | layer 1: unit 0 | gap | ... | ends[1]

A unit and the gap after it make one pitch. The two ends catch a write to unit -1 of the first layer, and a write one
unit past the last layer.
"""

import math
import struct
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch

from instep_reference.contract.answers import MEMORY
from instep_reference.contract.declared_rounding import Blocked
from instep_reference.contract.engine import Region
from instep_reference.contract.pool_meaning import Meaning

from ..transfer.to_device import ints

ALIGN = 16  # elements: a pitch that Triton knows to be divisible by 16, in every dtype at least 16 bytes
RED = 0xFF  # every byte of a red zone: a NaN in every float dtype, with other bits than a NaN from arithmetic


@dataclass(frozen=True)
class Demand:
    """Contents of a pool: for each layer `units` blocks of `shape`.

    by          what a unit is: a request's slot, a batch row of a snapshot, a KV page, or a request row
    transposed  the last two axes of `shape` are exchanged in memory (the `VK` layout of a state)
    means       what a unit holds, and what its positions are
    tiles       how the pool is stored in tiles; their scales, if any, have a separate pool (`budget.with_scales`)
    """

    name: str
    by: Literal["slot", "row", "page", "request"]
    layers: tuple[int, ...]
    units: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    transposed: bool = False
    means: Meaning | None = None
    tiles: Blocked | None = None

    @property
    def packed(self) -> int:
        return math.prod(self.shape)

    @property
    def component(self) -> str:
        """The component of memory that its units hold (`MEMORY`); "" if they hold other data of a request."""
        if self.name in MEMORY or self.means is None:
            return self.name if self.name in MEMORY else ""
        prefix = "block_" if self.means.block else "draft_" if self.means.draft else ""
        return found if (found := prefix + self.means.component) in MEMORY else ""

    def pitch(self, guarded: bool) -> int:
        """Elements from one unit to the next, a multiple of ALIGN.

        With a guard it is never the packed size. So an op that computes strides from the shape reads wrong memory.
        """
        return -(-(self.packed + (ALIGN if guarded else 0)) // ALIGN) * ALIGN

    def bytes(self, guarded: bool) -> int:
        """Size of the whole allocation, ends included."""
        return (len(self.layers) * self.units + 2) * self.pitch(guarded) * self.dtype.itemsize


class Pool:
    """The memory for one demand. Fresh units are poisoned, as freed ones are."""

    def __init__(self, demand: Demand, *, guarded: bool, poison: float | None, device: torch.device) -> None:
        self.demand, self.guarded = demand, guarded
        pitch, layers = demand.pitch(guarded), len(demand.layers)
        # One line of `pitch` elements per unit, and one more at each end; all of it is a red zone at first.
        lines = torch.empty(layers * demand.units + 2, pitch, dtype=demand.dtype, device=device)
        lines.view(torch.uint8).fill_(RED)
        self._ends = lines[:: layers * demand.units + 1]  # this step picks the first and the last line
        self._body = lines[1:-1].view(layers, demand.units, pitch)
        self._number = {layer: number for number, layer in enumerate(demand.layers)}
        self._poison = None if poison is None else _pattern(poison, demand.dtype)
        self._views = {layer: self._view(layer) for layer in demand.layers}
        if self._poison is None:
            self._body[..., : demand.packed] = 0
        self.scrub(range(demand.units))

    def units(self, layer: int) -> torch.Tensor:
        """[units, *shape]: a view on the pool itself, in the logical order of the axes whatever the physical one."""
        return self._views[layer]

    def gaps(self, layer: int) -> torch.Tensor | None:
        """[units, gap]: the red zone after each unit."""
        return self._body[self._number[layer], :, self.demand.packed :] if self.guarded else None

    def ends(self) -> torch.Tensor | None:
        """[2, pitch]: the red zones before the first unit and after the last."""
        return self._ends if self.guarded else None

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """Return the whole allocation, a region per layer; both ends are one more."""
        demand, means = self.demand, self.demand.means
        found = [
            Region(demand.name, layer, demand.by, self.units(layer), self.gaps(layer), means)
            for layer in demand.layers
        ]
        if (ends := self.ends()) is not None and found:
            whole = means and replace(means, positions=None)
            found.append(Region(f"{demand.name}_ends", demand.layers[0], "row", ends, means=whole, red=True))
        return tuple(found)

    def scrub(self, units: range | list[int]) -> None:
        """Poison units in every layer, so that a read of them shows. Does not wait: rounds may be running meanwhile."""
        if self._poison is not None and len(units):
            body, at = self._body[..., : self.demand.packed], ints(units, self._body.device)
            (body.view(torch.uint8) if body.element_size() == 1 else body).index_fill_(1, at, self._poison)

    def _view(self, layer: int) -> torch.Tensor:
        shape = list(self.demand.shape)
        if self.demand.transposed:
            shape[-1], shape[-2] = shape[-2], shape[-1]
        block = self._body[self._number[layer], :, : self.demand.packed].view(self.demand.units, *shape)
        return block.transpose(-1, -2) if self.demand.transposed else block


def _pattern(poison: float, dtype: torch.dtype) -> float | int:
    """Poison of a dtype: the number itself; for 8 bits its byte; for integers the bits that it has in fp64."""
    if dtype.itemsize == 1:
        return int(torch.tensor(poison).to(dtype).view(torch.uint8))
    if dtype.is_floating_point:
        return poison
    return int(struct.unpack("<q", struct.pack("<d", poison))[0])
