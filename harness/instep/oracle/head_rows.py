"""The inputs of the draft head in a step: the subject's rows of other steps, and the row of its layer.

Leaves out: the layer itself (`layer_work.py`), and the steps (`oracle.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from instep_reference import trunk
from instep_reference.contract.place import AFTER_LAYERS, STAGE_LEVEL, Place, See
from instep_reference.norms import rms_norm
from instep_reference.weights import Weights

from ..watch.event_context import EventContext, RowSpan
from ..watch.grown_tree import step_of
from ..watch.rows import row_spans, rows
from .layer_work import Work, draft_of


def one_row(row: torch.Tensor | None) -> torch.Tensor | None:
    return None if row is None else row[None]


def of_node(context: EventContext, span: RowSpan, node: int, layer: int, component: str) -> torch.Tensor | None:
    """A request's row at another node of the same draft. A step has rows only for requests that run it."""
    stage = f"chain.{step_of(context, node)}"
    mine = next((other for other in row_spans(context, stage)
                 if other.request == span.request and other.nodes in ((), (node,))), None)  # fmt: skip
    return None if mine is None else rows(context.subject, Place(stage, layer, component), mine)


def row_of_parent(context: EventContext, span: RowSpan, line: Sequence[int]) -> torch.Tensor | None:
    """The head's own y from which a row continues; line: the nodes from the root to its own."""
    parent = line[-2]
    if not parent:
        return one_row(context.subject.before[span.request].proposal_hidden)
    return of_node(context, span, parent, AFTER_LAYERS, "final")


def wrong_rows(
    context: EventContext, span: RowSpan, line: Sequence[int], nodes: int
) -> list[tuple[str, torch.Tensor]]:
    """The rows that known mistakes would read, each with its sentence; nodes: of the head's tree."""
    grows, right = context.expected.topk is not None, _named(context, line[-2])
    others = [node for node in range(1, nodes) if node not in line] if grows else []
    stale = [(f"reads the head's row of {_named(context, node)}, not of {right}",
              row_of_parent(context, span, (node, -1))) for node in (*line[:-2], *others)]  # fmt: skip
    bare = "reads the head's row before its final norm", of_node(context, span, line[-2], 0, "hidden")
    return [(says, row) for says, row in (*stale, bare) if row is not None]


def _named(context: EventContext, node: int) -> str:
    """A row of the draft head in words."""
    topk = context.expected.topk
    return f"step {node}" if topk is None or not node else (
        f"step {step_of(context, node)}, beam {(node - 1) % topk}")


def reading(tokens: list[int], hidden: torch.Tensor, stage: str) -> Work:
    return lambda weights, see: _fused(weights, tokens, hidden, stage, see)


def _fused(weights: Weights, tokens: list[int], hidden: torch.Tensor, stage: str, see: See) -> None:
    """fc([norm(embedding of token p + 1) | norm(hidden p)]): the input of the head's layer."""
    draft, eps = draft_of(weights), weights.config.drafter().eps
    ids = torch.tensor(tokens, device=weights.embedding.device)
    embedded = rms_norm(trunk.embed(weights, ids, see, stage), draft.norm_embedding, eps)
    embedded = see(Place(stage, STAGE_LEVEL, "normed"), embedded)
    fed = rms_norm(hidden.to(weights.embedding), draft.norm_hidden, eps)
    fed = see(Place(stage, STAGE_LEVEL, "post_normed"), fed)
    joined = see(Place(stage, STAGE_LEVEL, "joined"), torch.cat((embedded, fed), -1))
    see(Place(stage, STAGE_LEVEL, "fused"), joined @ draft.fc.T)
