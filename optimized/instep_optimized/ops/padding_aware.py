"""What a watcher sees of a padded launch: only the rows that a request covers, packed in batch order.

It reads the device, so only watched runs use it. Leaves out: what the watcher does with the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from instep_reference.contract.place import Place, See, unseen

from .around import Op, around
from .base import Ops


def watched(ops: Ops, see: See) -> Ops:
    """`ops` with every named result passed through `see`, without padding rows. With `unseen` it is `ops` itself."""
    if see is unseen:
        return ops
    covered = _Covered(see)
    return around(ops, covered.see, covered.note)


def noting(see: See, seen: list[tuple[Place, torch.Tensor]]) -> See:
    """A hook that keeps what a replay shows, until the answer says which rows are covered. With `unseen`: no hook."""

    def note(place: Place, tensor: torch.Tensor) -> torch.Tensor:
        seen.append((place, tensor))
        return tensor

    return unseen if see is unseen else note


def show(see: See, seen: Sequence[tuple[Place, torch.Tensor]], lens: torch.Tensor | None, width: int) -> None:
    """Pass on what a replay showed. lens [B]: how many of its `width` rows each request covers; None: all of them."""
    if not seen:
        return
    covered = None if lens is None else (torch.arange(width, device=lens.device) < lens[:, None]).flatten()
    for place, tensor in seen:
        padded = covered is not None and len(tensor) == len(covered)
        see(place, tensor[covered] if padded else tensor)


class _Covered:
    """Remembers which rows the last launch covered. A result with as many rows is cut to the covered ones."""

    def __init__(self, see: See) -> None:
        self._see = see
        self._rows = torch.ones(0, dtype=torch.bool)

    def note(self, name: str, op: Op) -> Op:
        if name != "place_rows":
            return op

        def call(**given: Any) -> Any:
            row = torch.arange(given["rows"], device=given["begin"].device)[:, None]
            count = torch.where(given["slots"] >= 0, given["count"], 0)
            self._rows = ((row >= given["begin"]) & (row < given["begin"] + count)).any(dim=1)
            return op(**given)

        return call

    def see(self, place: Place, tensor: torch.Tensor) -> torch.Tensor:
        if len(tensor) != len(self._rows) or bool(self._rows.all()):
            return self._see(place, tensor)
        # What `see` gives goes back among the padding rows, because the next op expects all rows of the launch.
        shown = self._see(place, tensor[self._rows])
        whole = tensor.clone()
        whole[self._rows] = shown
        return whole
