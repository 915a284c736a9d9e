"""Which known wrong window a conv window is, where it was not moved bit by bit from rows that the subject shows.

Leaves out: windows whose rows are shown (`bytes.py` has the same wrong ones, bit by bit).
"""

from __future__ import annotations

import torch

from instep_reference.contract.engine import Commit
from instep_reference.contract.place import Place

from ..observe.context import EventContext, branching
from ..observe.earlier import last_forward
from ..observe.rows import row_spans, rows
from .allowance import NEAR
from .bytes import shifted, wrong_windows


def named_window(
    context: EventContext, layer: int, request: str, found: torch.Tensor, truth: torch.Tensor
) -> str | None:
    """The sentence of the wrong window that stands nearest, made of the truth's own rows; None: none is near.

    Shapes:  found, truth [C, W-1]
    """
    forward = last_forward(context)
    if forward is None or request not in forward.spans or not torch.isfinite(found).all():
        return None
    place, stage = Place("trunk", layer, "qkv"), "extend" if isinstance(context.event, Commit) else "trunk"
    span = next((span for span in row_spans(context, stage) if span.request == request), None)
    fed, before = rows(forward.truth, place, forward.spans[request]), forward.truth.before[request].conv[layer]
    if span is None or fed is None:
        return None
    nodes, verb = (list(span.nodes), "accepted") if span.nodes else (list(range(span.count)), "given")
    others = [
        (name, forward.truth.before[name].conv[layer], theirs) for name, its in forward.spans.items()
        if name != request and (theirs := rows(forward.truth, place, its)) is not None
    ]
    right, x = shifted(before, fed[nodes]), found.to(truth)
    tree = branching(forward.parents.get(request, ())) if span.nodes else None
    wrongs = [*wrong_windows(before, fed, nodes, verb, others, tree), ("has the newest input first", right.flip(1)),
              *((f"is shifted by {by} to {side}", right.roll(step, 1)) for by, step, side in
                (("one", 1, "newer inputs"), ("one", -1, "older inputs")))]  # fmt: skip
    near = [
        (float((x - wrong).norm() / (wrong - truth).norm()), says) for says, wrong in wrongs
        if not torch.equal(wrong, right)
    ]
    distance, says = min(near, default=(1.0, ""))
    return says if distance <= NEAR else None
