"""A piece of the reference in which every op reads the subject's own values, so that each op is judged alone.

The reference passes every place to a hook and continues with its answer. Here the hook answers with the subject's own
rows of that place, if the subject shows them. A computed place is then one op away from the subject's bits, without the
errors of the ops before it. The memory before the piece is always the subject's.
Leaves out: the list of pieces (`oracle.py`), and the comparison (`checks/`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from instep_reference.contract.place import Place
from instep_reference.weights import Weights

from ..watch.event_context import EventContext, RowSpan
from ..watch.required_rows import due
from ..watch.rows import rows
from .folding import Run
from .recomputation import Recomputation, settled, true

Changes = Mapping[str, torch.Tensor]  # component of the piece -> the rows that replace it for later ops


def shown(context: EventContext, span: RowSpan, stage: str, layer: int) -> dict[Place, torch.Tensor]:
    """The subject's rows of every place of a piece that it has to show."""
    own = {
        place: rows(context.subject, place, span)
        for place in context.subject.places
        if (place.stage, place.layer) == (stage, layer) and due(context, place, span)
    }
    return {place: mine for place, mine in own.items() if mine is not None}


def rerun(piece: Recomputation, weights: Weights, changes: Changes | None = None) -> Run:
    """Run the piece once more from the subject's own rows; for a commit, the state alone.

    changes: rows that replace some components for later ops, such as another row's key, a gate of 1, or a rounded
    operand.
    The computed value of a place is in `places`, the one that later ops used in `of` its component.
    Other weights, another configuration (`replace(weights, config=..)`) and another piece (`replace(piece, work=..)`,
    with another `start`, `memory` or `hidden`; for a commit `folding=..`, `span=..`) give the results of those.
    """
    own = {**piece.own, **{piece.place(component): put for component, put in (changes or {}).items()}}
    run = true(piece.work, weights, own)
    if piece.span.kind != "commit" or piece.folding is None:
        return run
    return replace(run, places={}, state=settled(run, piece.folding.base, piece.span.nodes)[0])
