"""Regions as addresses: the pool that a tensor is a view of, errors in the view, and overlaps of pools.

Strides are the whole layout of a pool, so a view with other strides reads or writes elsewhere. Leaves out: contents.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch

from instep_reference.contract.engine import Region
from instep_reference.contract.place_names import STAGE_LEVEL, Place, draft_stage

NO_LAYER = Place("trunk", STAGE_LEVEL, "length")


class Pools:
    """The regions of an engine by address."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self.regions = sorted((r for r in regions if r.units.numel()), key=lambda region: region.units.data_ptr())
        self._begins = [region.units.data_ptr() for region in self.regions]
        self._known: dict[tuple[object, ...], tuple[str, ...]] = {}

    def of(self, tensor: torch.Tensor) -> Region | None:
        """The region whose memory contains the start of a tensor."""
        number = bisect_right(self._begins, tensor.data_ptr()) - 1
        if number < 0 or tensor.data_ptr() >= self._begins[number] + _reach(self.regions[number].units):
            return None
        return self.regions[number]

    def clauses(self, name: str, view: torch.Tensor, layer: int | None) -> tuple[str, ...]:
        """Errors of a view of a pool. layer: the layer that the pool must belong to."""
        key = name, view.data_ptr(), view.shape, view.stride(), view.dtype, layer
        if key not in self._known:
            self._known[key] = tuple(self._clauses(name, view, layer))
        return self._known[key]

    def _clauses(self, name: str, view: torch.Tensor, layer: int | None) -> Iterator[str]:
        if not view.numel():  # a conv of width 1 keeps no inputs, so nothing is read or written
            return
        region = self.of(view)
        if region is None:
            yield f"{name} is not a pool of this engine, so writes to it are lost"
            return
        whole, by = region.units, region.by
        if view.dtype != whole.dtype:
            yield f"{name} is read as {view.dtype}, {region.name} holds {whole.dtype}"
        if view.shape[0] > whole.shape[0]:
            yield f"{name} has {view.shape[0]} units, {region.name} has {whole.shape[0]}"
        if view.shape[0] > 1 and view.stride(0) != whole.stride(0):
            yield (f"{name} steps {view.stride(0)} elements from {by} to {by}, the pitch of {region.name} is "
                   f"{whole.stride(0)}")  # fmt: skip
        if (offset := (view.data_ptr() - whole.data_ptr()) // whole.element_size()) >= whole.stride(0):
            yield f"{name} begins {offset} elements into {region.name}, after its first {by}"
        inner = range(1, min(view.dim(), whole.dim()))
        if any(view.shape[-axis] > 1 and view.stride(-axis) != whole.stride(-axis) for axis in inner):
            steps, right = view.stride()[1:], whole.stride()[1:]
            yield f"{name} is laid out with inner strides {steps}, {region.name} with {right}"
        if layer is not None and region.layer != layer:
            yield f"{name} is {region.name} of layer {region.layer}, the op serves layer {layer}"

    def overlaps(self) -> list[str]:
        """Units or red zones of any regions that share a byte; the first for every pair of regions."""
        labels, begins, ends = [], [], []
        for region in self.regions:
            for tensor, what in ((region.units, "units"), (region.gaps, "red zones")):
                if tensor is None or not tensor.numel():
                    continue
                pitch, reach = tensor.stride(0) * tensor.element_size(), _reach(tensor[:1])
                begin = tensor.data_ptr() + torch.arange(tensor.shape[0]) * pitch
                labels += [f"{what} of {region.name} (layer {region.layer})"] * tensor.shape[0]
                begins.append(begin)
                ends.append(begin + reach)
        if not begins:
            return []
        begin, order = torch.cat(begins).sort(stable=True)
        reached = torch.cat(ends)[order].cummax(0)
        shared = (begin[1:] < reached.values[:-1]).nonzero()[:, 0].tolist()
        found = {(labels[order[int(reached.indices[at])]], labels[order[at + 1]]): None for at in shared}
        return [f"{one} and {other} share memory" for one, other in found]


class Stands(NamedTuple):
    """The place of a finding about memory; the slot and its request if units are slots."""

    place: Place
    request: str | None = None
    slot: int | None = None


NOBODY: Mapping[str, int] = MappingProxyType({})


def unit_word(region: Region) -> str:
    """The word for a unit of a region in a message."""
    return "request row" if region.by == "request" else region.by


def stands(
    region: Region, unit: int | None = None, slots: Mapping[str, int] = NOBODY, rows: Mapping[str, int] = NOBODY
) -> Stands:
    """The place of a region or of one of its units. An undeclared region has no layer.

    slots: request -> slot;  rows: request -> request row
    """
    means = region.means
    if means is None or means.component == NO_LAYER.component:
        place = NO_LAYER
    else:
        stage = draft_stage(0 if means.block else region.layer) if means.draft else "trunk"
        place = Place(stage, region.layer, means.component)
    if unit is not None and region.by == "request":
        return Stands(place, next((name for name, row in rows.items() if row == unit), None))
    if unit is None or region.by != "slot":
        return Stands(place)
    return Stands(place, next((name for name, slot in slots.items() if slot == unit), None), unit)


def _reach(tensor: torch.Tensor) -> int:
    """The number of bytes from the first element to the end of the last."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
