"""Forwards of windows alone, of decodes alone, and of both where bodies are held in graphs.

Of both each kind is a replay of its own, first the windows. So a proposer that finds nothing for some requests costs a
second reading of the weights, and no eager forward. What both replays say and show is put back into batch order. Leaves
out: forwards with prompts, and eagerly those of both kinds (`mixed.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from instep_reference.contract.place import Place, See, unseen

from .mixed import Planned
from .sampling import in_units
from .transfer.to_device import ints

WINDOWS, DECODES = frozenset(("verify",)), frozenset(("decode",))
BOTH = WINDOWS | DECODES
Shown = list[tuple[Place, torch.Tensor]]


@dataclass(frozen=True)
class Forwards:
    """run: the engine's own, of one body;  width: packed rows of a window;  trees: whether windows may end before

    see: what a replay shows goes there; None: to who watches
    """

    run: Callable[..., Any]
    width: int
    trees: bool

    def windows(self, plan: Sequence[Planned], see: See | None = None) -> torch.Tensor:
        """-> the target's own choice at every row, in batch order"""
        own: torch.Tensor = self._run("verify", plan, (), self.width, see).picks.flatten()
        if not self.trees:
            return own
        spots = [number * self.width + node for number, p in enumerate(plan) for node in range(p.asked)]
        return own[ints(spots, own.device)]

    def decodes(self, plan: Sequence[Planned], see: See | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """-> the target's own choices, and the roots that are now in force"""
        own, roots = self._run("decode", plan, [[p.forced] for p in plan], 1, see)
        return own, roots

    def both(self, plan: Sequence[Planned], see: See) -> tuple[torch.Tensor, torch.Tensor]:
        """-> as `mixed.forward`: own choices at every row, in batch order, and the roots of the decodes

        see: who watches
        """
        windows, singles = ([p for p in plan if p.span.kind == kind] for kind in ("verify", "decode"))
        shown: tuple[Shown, Shown] = [], []
        first, second = (unseen if see is unseen else _copying(one) for one in shown)
        said = self.windows(windows, first)
        own, roots = self.decodes(singles, second)
        order = ints(_order(plan), own.device)
        for place, rows in _together(*shown, order):
            see(place, rows)
        return torch.cat((said, own))[order], roots

    def _run(
        self, kind: str, plan: Sequence[Planned], forced: Sequence[Sequence[int]], width: int, see: See | None
    ) -> Any:
        return self.run(kind, [p.request for p in plan], forced, rows=[p.span.row for p in plan],
                        uniforms=in_units([p.row for p in plan], width), see=see)  # fmt: skip


def _copying(shown: Shown) -> See:
    """A hook that keeps copies: the next replay may write over what this one shows."""

    def keep(place: Place, rows: torch.Tensor) -> torch.Tensor:
        shown.append((place, rows.clone()))
        return rows

    return keep


def _order(plan: Sequence[Planned]) -> list[int]:
    """For every packed row of the batch its place among those of all windows, with those of all decodes behind."""
    at = {"verify": 0, "decode": sum(p.span.count for p in plan if p.span.kind == "verify")}
    order = list[int]()
    for p in plan:
        order += range(at[p.span.kind], at[p.span.kind] + p.span.count)
        at[p.span.kind] += p.span.count
    return order


def _together(windows: Shown, singles: Shown, order: torch.Tensor) -> Shown:
    """The rows of both at every place that both show, and behind these what decodes alone show: their draft extend."""
    rest, found = list(singles), Shown()
    for place, rows in windows:
        at = [other for other, _ in rest].index(place)
        found.append((place, torch.cat((rows, rest.pop(at)[1]))[order]))
    return found + rest
