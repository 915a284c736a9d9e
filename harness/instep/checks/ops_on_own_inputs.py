"""T2 op by op: every place and every state, compared with the reference's op on the subject's own inputs.

`recomputed_values.py` recomputes a layer from its boundary, so it must allow for all rounding inside the layer: some
1e-2 in a 16-bit run. This check allows only for the arithmetic of one op. Values that a 16-bit run keeps in fp32 (q, k,
v, gates, updates, states) are then judged at fp32. Leaves out: the recomputation (`oracle/recomputation.py`), and ops
whose inputs are a boundary, which `recomputed_values.py` judges.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from instep_reference.contract.declared_rounding import Product
from instep_reference.contract.place_names import COMPONENTS

from ..oracle.oracle import Oracle
from ..oracle.recomputation import ROUNDED_ONCE, Recomputation
from ..oracle.storage_rounding import before_rounding, narrower
from ..verdict import Comparison, Skipped
from ..watch.event_context import EventContext
from .error_measurement import Spot, measured
from .one_sided_errors import CALIBRATED, NO_PRODUCT, are_exact
from .recomputed_values import Derived

ROUNDED_ON_THE_WAY = ("attended", "mlp")  # the weights of attention; the middle of an MLP, and of every expert


def once_in(ops: str, device: str, products: Mapping[str, Product]) -> frozenset[str]:
    """Components whose op rounds nothing but its result, in an op set. ops: its name; empty: one that is not known."""
    if ops not in CALIBRATED:
        return ROUNDED_ONCE
    if device != "cpu" or not are_exact(products):
        return ROUNDED_ONCE.union(NO_PRODUCT)
    return frozenset(COMPONENTS).difference(ROUNDED_ON_THE_WAY)


class OwnInputs(Derived):
    """Per request, layer, component and head: e_x <= 3 e_r + 4 ulp, of one op."""

    name = "own_inputs"

    def __init__(self, oracle: Oracle, *, once: bool = True) -> None:
        """once: leave findings to `derived` that it has, too."""
        super().__init__(oracle)
        self.once = once

    def __call__(self, context: EventContext) -> Iterator[Comparison | Skipped]:
        for piece in self.oracle.at(context):
            if not isinstance(piece, Recomputation) or piece.near is None:
                continue
            results = self._near(context, piece)
            if not all(result.agrees for result in results):
                results = self._near(context, piece.with_all_draws())
            if self.once and not all(result.agrees for result in results):
                told = {one.place for one in Derived(self.oracle)._judged(context, piece) if not one.agrees}
                results = [result for result in results if result.agrees or result.place not in told]
            yield from map(_said, results)

    def _near(self, context: EventContext, piece: Recomputation) -> list[Comparison]:
        near = piece.from_own_inputs
        return [] if near is None else list(self._piece(context, near, piece.truth))

    def _measured(
        self, spot: Spot, found: torch.Tensor | None, truth: torch.Tensor, sampled: torch.Tensor,
        scale: torch.Tensor | None,
    ) -> Comparison:
        """Compare a value that is rounded once by its arithmetic before that, plus half a unit for the rounding."""
        if found is None or found.shape != truth.shape or not self.rounded_once(spot.place.component, found, sampled):
            return super()._measured(spot, found, truth, sampled, scale)
        result = measured(spot, before_rounding(found, truth), truth, sampled, stored=sampled.dtype, scale=scale)
        return before_storage(result, found.dtype, spot.place.component in self.oracle.runner.promised)

    def rounded_once(self, component: str, found: torch.Tensor, sampled: torch.Tensor) -> bool:
        """Whether the found tensor is rounded once, from the width of the yardsticks' sums."""
        width = sampled.dtype
        reads_wide = component != "core" or not narrower(self.oracle.rounds.get("state", width), width)
        return component in self.oracle.runner.once and reads_wide and narrower(found.dtype, width)


def before_storage(result: Comparison, dtype: torch.dtype, promised: bool) -> Comparison:
    """The comparison of a value before its one rounding to a dtype, with words for that.

    promised: whether the subject declares that it rounds only once
    """
    stored = f"before it is stored in {str(dtype).removeprefix('torch.')}"
    before = f"declares that it rounds only its result, yet errs {stored}: " if promised else f"{stored}, "
    return _clause(before, result)


def _said(result: Comparison) -> Comparison:
    return _clause("from the op's own inputs: ", result)


def _clause(before: str, result: Comparison) -> Comparison:
    """The result with words before its clause, if there is a problem."""
    problem = result.problem
    return result if problem is None else replace(result, problem=replace(problem, clause=before + problem.clause))
