"""Mistakes in sums over ranks: a partial sum that is missing, is added twice, or replaces that of another rank.

The partial sums follow from the subject's own merged rows and the columns of a rank (`contract/shards.py`). Leaves out:
ranks that hold different results (`checks/rank_replicas.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations

import torch

from instep_reference.contract.shards import Segment
from instep_reference.mlp import swiglu
from instep_reference.weights import MlpWeights, MoeWeights

from .experts import mixture
from .finding_case import Case, Explanation
from .wrong_weights import layer_of


def partial_sums(case: Case) -> Iterator[Explanation]:
    facts = case.context.ranks
    parts = None if facts is None or case.piece is None else _parts(case, facts.size)
    if parts is None:
        return
    for rank, part in enumerate(parts):
        yield Explanation(f"lacks the partial sum of rank {rank}", case.right - part)
        yield Explanation(f"has the partial sum of rank {rank} twice", case.right + part)
        if len(parts) > 2:  # of two ranks, the same as without the other one
            yield Explanation(f"is the partial sum of rank {rank} alone", part)
    for rank, other in permutations(range(len(parts)), 2):
        yield Explanation(f"has the partial sum of rank {rank} in place of that of rank {other}",
                          case.right - parts[other] + parts[rank])  # fmt: skip
    yield Explanation("has every partial sum twice", 2 * case.right)
    yield Explanation(f"is added {len(parts)} times: each rank has the whole sum", len(parts) * case.right)
    yield Explanation("is the mean over the ranks, not the sum", case.right / len(parts))


def _parts(case: Case, size: int) -> list[torch.Tensor] | None:
    """The partial sum of every rank, as each makes it from its columns; None for any other place."""
    layer = layer_of(case)
    if layer is None or case.component not in ("mixer", "mlp"):
        return None
    if case.component == "mixer":
        rows = case.own("gated")
        rows = case.own("opened") if rows is None else rows
        return None if rows is None else [
            rows.flatten(1)[:, mine] @ layer.mixer.out[:, mine].T for mine in _columns(layer.mixer.out.shape[1], size)]
    x = case.own("post_normed")
    if x is None:
        return None
    if isinstance(layer.mlp, MlpWeights):
        return [swiglu(part, x) for part in _cut(layer.mlp, size)]
    mix = mixture(case)
    if mix is None:
        return None
    weighed = mix.weighed(mix.shares(mix.top, mix.config.norm_topk))
    found = []
    for rank, shared in enumerate(_cut(layer.mlp.shared, size)):
        own: MoeWeights = replace(mix.mlp, shared=shared)
        made = torch.stack([swiglu(_cut(expert, size)[rank], x) for expert in mix.mlp.experts])
        found.append(torch.einsum("te,etd->td", weighed, made) + replace(mix, mlp=own).shared())
    return found


def _columns(length: int, size: int) -> list[slice]:
    held = (Segment(length).held(rank, size) for rank in range(size))
    return [slice(mine.start, mine.stop) for mine in held]


def _cut(mlp: MlpWeights, size: int) -> list[MlpWeights]:
    return [MlpWeights(mlp.gate[mine], mlp.up[mine], mlp.down[:, mine]) for mine in _columns(len(mlp.gate), size)]
