"""T1: unowned memory holds poison, and no value that is read does.

The trace determines the owners. Poison that is read shows as a NaN or as the declared number. Leaves out: the relation
that outputs do not depend on the poison, and units that this event released (`leaks.py`).
"""

import math
from collections.abc import Collection, Iterator
from itertools import chain

import torch

from instep_reference.contract.answers import BLOCKS
from instep_reference.contract.place_names import Place

from ..finding_problem import Problem
from ..verdict import Comparison, Skipped, Tier
from ..watch.event_context import EventContext
from ..watch.memory_changes import Looked, bits, pattern
from ..watch.pool_addresses import stands, unit_word
from ..watch.rows_by_request import whose
from .check_interface import TellsOnce, compared, counted, verb

SUMMED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
IN_FLIGHT = BLOCKS  # undefined between a verify and its commit


class Poison(TellsOnce):
    """Free units hold poison from the start, and between their owners; logical states and places hold none."""

    name = "poison"
    tier = Tier.BITWISE

    def __init__(self) -> None:
        super().__init__()
        self.begun = False

    def __call__(self, context: EventContext) -> Iterator[Comparison | Skipped]:
        poison = context.log.poison
        if poison is None:
            yield from self.once(context, "this engine does not poison unowned memory")
            return
        if not self.begun:
            for looked in context.changes.looked:
                yield from self._untouched(context, looked)
        self.begun = True
        held = owned(context)
        for looked in context.changes.looked:
            if looked.poison is not None and looked.region.by in held:
                yield from self._free(context, looked, held[looked.region.by] | looked.region.scratch)
        yield from self._visible(context, poison)

    def _untouched(self, context: EventContext, looked: Looked) -> Iterator[Comparison]:
        """Compare pools before the first event: new units are poison, and all red zones have one pattern."""
        if looked.gap:
            said = "the red zones differ from each other: something wrote there while the engine was built"
            yield self._comparison(context, looked, looked.before != looked.before[0], said)
        elif looked.poison is not None:
            yield self._comparison(context, looked, looked.spoiled(looked.before), "is new and not poison")

    def _free(self, context: EventContext, looked: Looked, busy: set[int]) -> Iterator[Comparison]:
        units = looked.after.shape[0]
        busy = {unit for unit in busy if unit < units}
        if len(busy) < units:
            yield self._comparison(context, looked, looked.spoiled(), "is free and not poison", busy)

    def _comparison(
        self, context: EventContext, looked: Looked, wrong: torch.Tensor, says: str,
        busy: Collection[int] = (),
    ) -> Comparison:
        some = bool(wrong.any())
        units = [unit for unit in wrong.any(1).nonzero().flatten().tolist() if unit not in busy] if some else []
        region = looked.region
        first = units[0] if units else None
        place, _, slot = stands(region, first)
        said = f"{region.name}: {says}"
        if not looked.gap:
            more = f"; so are {counted(len(units) - 1, unit_word(region))} more" if len(units) > 1 else ""
            said = f"{region.name} {unit_word(region)} {first} {says}{more}"
        return compared(
            self, context, place, wrong.numel() - len(busy) * wrong.shape[1], float(wrong[units].sum()) if units else 0,
            Problem.of(said) if units else None, slot=slot, blocks=wrong.shape[0] - len(busy), rank=region.rank)

    def _visible(self, context: EventContext, poison: float) -> Iterator[Comparison]:
        """Look for poison in the memory of live requests and in the results of ops."""
        for name, state in context.subject.after.items():
            for place, tensor in state.parts():
                if name not in context.expected.flying or place.component not in IN_FLIGHT:
                    yield from self._seen(context, place, tensor, poison, name)
        for place, tensor in context.subject.places.items():
            yield from self._seen(context, place, tensor, poison, None)

    def _seen(
        self, context: EventContext, place: Place, tensor: torch.Tensor, poison: float, request: str | None
    ) -> Iterator[Comparison]:
        if not tensor.numel():
            return
        wrong, said, count = None if _clean(tensor, poison) else _suspect(tensor, poison), "", 0
        if wrong is not None and bool(wrong.any()):
            own = poisoned(tensor, poison)
            wrong = own if bool(own.any()) else wrong
            count = int(wrong.sum())
            first = int(wrong.flatten(1).any(1).nonzero()[0]) if wrong.dim() > 1 else int(wrong.nonzero()[0])
            request = request or whose(context, place, first)
            what = f"poison ({poison:g})" if wrong is own else "NaN, but not with the bits of the poison"
            said = f"{count} of {tensor.numel()} elements {verb(count, 'is', 'are')} {what}, the first in row {first}"
        yield compared(self, context, place, tensor.numel(), count, Problem.of(said, "poison"), request=request)


def _clean(tensor: torch.Tensor, poison: float) -> bool:
    """Whether a sum, which is fast, proves that there is no NaN; only for a NaN as poison."""
    return math.isnan(poison) and tensor.dtype in SUMMED and not math.isnan(float(tensor.sum()))


def _suspect(tensor: torch.Tensor, poison: float) -> torch.Tensor:
    """The forbidden elements: every NaN if the poison is a NaN, or else the poison."""
    return tensor.isnan() if math.isnan(poison) and tensor.is_floating_point() else poisoned(tensor, poison)


def poisoned(tensor: torch.Tensor, poison: float) -> torch.Tensor:
    """Whether each element has the bits of the poison. A NaN from arithmetic has other bits, except in 16 bits."""
    own = torch.tensor([pattern(poison, tensor.dtype)], dtype=tensor.dtype)
    return bits(tensor) == bits(own)


def owned(context: EventContext) -> dict[str, set[int]]:
    """"slot", "request" and "page" -> the units that some request owns before or after the event, by the trace."""
    expected = context.expected
    slots = {*expected.slots_before.values(), *expected.slots_after.values()}
    rows = {*expected.request_rows_before.values(), *expected.request_rows_after.values()}
    pages = {*chain(*expected.pages_before.values(), *expected.pages_after.values())}
    return {"slot": slots, "request": rows, "page": pages}


