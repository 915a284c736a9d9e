"""A piece of the reference in which every op reads what the subject itself had there, so that one op is one judgement.

The reference hands every place to a hook and goes on with the answer. Here the hook answers with the subject's own rows
of that place, wherever the subject shows them. What is computed at a place is then one op away from the subject's bits,
and the error of the ops before it is not in it. The memory before the piece is the subject's in any case.
Leaves out: which pieces there are (`oracle.py`), and the comparison (`checks/`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from instep_reference.contract.place import Place
from instep_reference.weights import Weights

from .context import EventContext
from .folding import Run
from .recomputation import Recomputation, settled, true
from .row_span import RowSpan
from .rows import rows
from .updates import due

Changes = Mapping[str, torch.Tensor]  # component of the piece -> the rows that go on from there


def shown(context: EventContext, span: RowSpan, stage: str, layer: int) -> dict[Place, torch.Tensor]:
    """The subject's rows of every place of a piece that it has to show."""
    own = {
        place: rows(context.subject, place, span)
        for place in context.subject.places
        if (place.stage, place.layer) == (stage, layer) and due(context, place, span)
    }
    return {place: mine for place, mine in own.items() if mine is not None}


def rerun(piece: Recomputation, weights: Weights, changes: Changes | None = None) -> Run:
    """The piece once more from the subject's own rows; of a commit, the state alone.

    changes: what goes on from some components instead of the subject's rows, as another row's key, a gate of 1, or an
    operand rounded. What is computed at a place stands in `places`, what went on from it is `of` its component.
    Other weights, another configuration (`replace(weights, config=..)`), another piece (`replace(piece, work=..)`,
    with another `start`, `memory` or `hidden`; of a commit `folding=..`, `span=..`) answer what would be then.
    """
    own = {**piece.own, **{piece.place(component): put for component, put in (changes or {}).items()}}
    run = true(piece.work, weights, own)
    if piece.span.kind != "commit" or piece.folding is None:
        return run
    return replace(run, places={}, state=settled(run, piece.folding.base, piece.span.nodes)[0])
