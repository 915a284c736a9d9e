"""Updates of the delta rule are shown where they are kept: of the rows of a verify, by an engine whose rings keep them.

Leaves out: how near they must be (`checks/derived.py`). The reference shows the update of every token; so what a moment
has of it is cut down to what the subject is due to show. Rows of other requests in the same forward are zeros there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from instep_reference.contract.engine import Region
from instep_reference.contract.place import Place

from ..player import Side
from .moment import Moment
from .rows import Share, shares

UPDATE = "update"  # the component


def kept(regions: Sequence[Region]) -> bool:
    """Whether an engine with these pools keeps updates."""
    return any(region.means is not None and region.means.keeps == UPDATE for region in regions)


def due(moment: Moment, place: Place, share: Share) -> bool:
    """Whether the subject has to show these rows of a place."""
    return place.component != UPDATE or (moment.updates and share.kind == "verify")


def cut_down(moment: Moment) -> Moment:
    """The moment with the updates alone that the subject is due to show, on every side."""
    verified = [share for share in shares(moment, "trunk") if moment.updates and share.kind == "verify"]
    rounded = None if moment.rounded is None else _side(moment.rounded, verified)
    return replace(
        moment, subject=_side(moment.subject, verified), truth=_side(moment.truth, verified), rounded=rounded)


def _side(side: Side, verified: Sequence[Share]) -> Side:
    places: dict[Place, torch.Tensor] = {}
    for place, tensor in side.places.items():
        if place.component != UPDATE:
            places[place] = tensor
        elif verified:
            places[place] = torch.zeros_like(tensor)
            for share in verified:
                rows = slice(share.begin, share.begin + share.count)
                places[place][rows] = tensor[rows]
    return replace(side, places=places)

