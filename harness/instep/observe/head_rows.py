"""What the draft head reads in a step: the subject's rows of other steps, and the row that its layer is given.

Leaves out: the layer itself (`layer_work.py`), and which steps there are (`oracle.py`).
"""

from __future__ import annotations

import torch

from instep_reference import trunk
from instep_reference.contract.place import STAGE_LEVEL, Place, See
from instep_reference.norms import rms_norm
from instep_reference.weights import Weights

from .context import EventContext
from .growth import step_of
from .layer_work import Work, draft_of
from .rows import RowSpan, row_spans, rows


def one_row(row: torch.Tensor | None) -> torch.Tensor | None:
    return None if row is None else row[None]


def of_node(context: EventContext, span: RowSpan, node: int, layer: int, component: str) -> torch.Tensor | None:
    """The row of a request on another node of the same draft. A step has rows only for requests that run it."""
    stage = f"chain.{step_of(context, node)}"
    mine = next((other for other in row_spans(context, stage)
                 if other.request == span.request and other.nodes in ((), (node,))), None)  # fmt: skip
    return None if mine is None else rows(context.subject, Place(stage, layer, component), mine)


def reading(tokens: list[int], hidden: torch.Tensor, stage: str) -> Work:
    return lambda weights, see: _fused(weights, tokens, hidden, stage, see)


def _fused(weights: Weights, tokens: list[int], hidden: torch.Tensor, stage: str, see: See) -> None:
    """fc([norm(embedding of token p + 1) | norm(hidden p)]): what the head's layer reads."""
    draft, eps = draft_of(weights), weights.config.drafter().eps
    ids = torch.tensor(tokens, device=weights.embedding.device)
    embedded = rms_norm(trunk.embed(weights, ids, see, stage), draft.norm_embedding, eps)
    embedded = see(Place(stage, STAGE_LEVEL, "normed"), embedded)
    fed = rms_norm(hidden.to(weights.embedding), draft.norm_hidden, eps)
    fed = see(Place(stage, STAGE_LEVEL, "post_normed"), fed)
    joined = see(Place(stage, STAGE_LEVEL, "joined"), torch.cat((embedded, fed), -1))
    see(Place(stage, STAGE_LEVEL, "fused"), joined @ draft.fc.T)
