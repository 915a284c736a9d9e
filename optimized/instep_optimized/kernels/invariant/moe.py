"""Row-invariant mixture of experts: the kernels of `..moe`, one row per program, and a row-invariant shared expert.

Leaves out: grouping rows by expert. It could be row-invariant too, with a fixed tile.
"""

from __future__ import annotations

import torch

from instep_reference.contract.place_names import Place

from ...ops.op_protocols import ExpertWeights
from ..products.moe import mix
from . import linear


def moe(*, x: torch.Tensor, weights: ExpertWeights, top_k: int, norm_topk: bool, to: Place) -> torch.Tensor:
    """`Moe` of the seam."""
    return mix(x, weights, top_k, norm_topk, linear, to)
