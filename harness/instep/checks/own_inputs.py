"""T2 once more, op by op: every place, and every state, against the reference's op on the subject's own inputs of it.

From the layer's boundary (`derived.py`) nothing is believed that the subject computed on its way, so what it rounds on
its way is granted: in a run of 16 bits some 1e-2. Here an op is granted its own arithmetic alone. What a 16-bit run
keeps in fp32 (q, k, v, gates, updates, states) is then judged at fp32, wherever the slip is made.
Leaves out: how the pieces are run (`observe/own_inputs.py`), and ops whose inputs are a boundary, judged already.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ..observe.context import EventContext
from ..observe.oracle import Oracle
from ..observe.recomputation import ROUNDED_ONCE, Recomputation
from ..observe.storage import before_rounding, narrower
from ..verdict import Comparison, Skipped
from .derived import Derived
from .measure import Spot, measured


class OwnInputs(Derived):
    """Per request, layer, component and head: e_x <= 3 e_r + 4 ulp, of one op."""

    name = "own_inputs"

    def __init__(self, oracle: Oracle, *, once: bool = True) -> None:
        """once: what is wrong from the boundary, too, is left to `derived`."""
        super().__init__(oracle)
        self.once = once

    def __call__(self, context: EventContext) -> Iterator[Comparison | Skipped]:
        for piece in self.oracle.at(context):
            near = piece.from_own_inputs if isinstance(piece, Recomputation) else None
            if near is None:
                continue
            assert isinstance(piece, Recomputation)
            results = list(self._piece(context, near, piece.truth))
            if self.once and not all(result.agrees for result in results):
                told = {one.place for one in Derived(self.oracle)._piece(context, piece) if not one.agrees}
                results = [result for result in results if result.agrees or result.place not in told]
            yield from map(_said, results)

    def _measured(
        self, spot: Spot, found: torch.Tensor | None, truth: torch.Tensor, sampled: torch.Tensor,
        scale: torch.Tensor | None,
    ) -> Comparison:
        """What is rounded once is held to the arithmetic before that: a rounding is half a unit, and no more."""
        if found is None or found.shape != truth.shape or not self.rounded_once(spot.place.component, found, sampled):
            return super()._measured(spot, found, truth, sampled, scale)
        return measured(spot, before_rounding(found, truth), truth, sampled, stored=sampled.dtype, scale=scale)

    def rounded_once(self, component: str, found: torch.Tensor, sampled: torch.Tensor) -> bool:
        """Whether what was found is rounded once, from the width that the yardsticks are summed in."""
        width = sampled.dtype
        wide = not narrower(self.oracle.rounds.get("state", width), width)
        return component in ROUNDED_ONCE and wide and narrower(found.dtype, width)


def _said(result: Comparison) -> Comparison:
    if result.problem is None:
        return result
    clause = f"from the op's own inputs: {result.problem.clause}"
    return replace(result, problem=replace(result.problem, clause=clause))
