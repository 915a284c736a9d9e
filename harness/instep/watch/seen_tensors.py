"""Copies of the named tensors that a side hands to `see` during one event, joined per place in call order.

Leaves out: which request a row belongs to (`watch/rows_by_request.py`).
"""

from dataclasses import replace

import torch

from instep_reference.contract.engine import Event
from instep_reference.contract.place_names import Place

from ..player import Observer, Side
from .batched_host_copies import brought


class Activations(Observer):
    """A hook that copies its tensors and returns them; `take` empties it. As an observer it fills in the places."""

    def __init__(self) -> None:
        self._kept: dict[Place, list[torch.Tensor]] = {}
        self.last: Place | None = None  # the place seen last: how far a side got before it failed

    def __call__(self, place: Place, tensor: torch.Tensor) -> torch.Tensor:
        self.last = place
        self._kept.setdefault(place, []).append(tensor.detach().clone())
        return tensor

    def after(self, event: Event, side: Side) -> Side:
        return replace(side, places=self.take())

    def take(self) -> dict[Place, torch.Tensor]:
        """Place -> all rows of the event, packed in batch order, on the host."""
        whole = [parts[0].contiguous() if len(parts) == 1 else torch.cat(parts) for parts in self._kept.values()]
        places = dict(zip(self._kept, brought(whole), strict=True))
        self._kept, self.last = {}, None
        return places
