"""States and kept updates after a wrong step: the wrong states of T2d, and steps that round.

Leaves out: steps with the input of another row, head or request (`wrong_inputs.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ...checks.base import counted
from ...checks.directed import scene_of
from ...checks.hypotheses import wrong_states
from ...checks.ring_hypotheses import wrong_updates
from ...checks.state_step import Scene
from ...oracle.folding import Run
from ...oracle.recomputation import Recomputation
from ...watch.required_rows import UPDATE
from .case import Case, Explanation
from .ring_wrap import overwritten


def known_states(case: Case) -> Iterator[Explanation]:
    """The wrong states of T2d."""
    scene = own_scene(case)
    if scene is None:
        return
    if case.component == UPDATE:
        for sentence, updates in wrong_updates(scene):
            yield Explanation(sentence, updates)
    else:
        for wrong in wrong_states(scene):
            yield Explanation(wrong.sentence, wrong.state)


def states(case: Case) -> Iterator[Explanation]:
    scene = own_scene(case)
    if scene is None or case.component == UPDATE:
        return
    yield from overwritten(scene)
    yield from _of_others(case)


def own_scene(case: Case) -> Scene | None:
    """The scene of a state, on the subject's own rows."""
    if case.piece is None or case.piece.folding is None or case.component not in ("state", UPDATE):
        return None
    return scene_of(_own(case.piece, case), [_own(piece, case) for piece in case.pieces if piece.folding is not None])


def _own(piece: Recomputation, case: Case) -> Recomputation:
    """The recomputation with the subject's own rows as inputs, except the rows that the finding is about.

    If all of these have the same fault, each of them looks like another one.
    """
    folding = piece.folding
    assert folding is not None, "asked of pieces that fold"
    own = {place: rows.to("cpu", torch.float64) for place, rows in piece.own.items()
           if place in folding.tokens.places and place.component != case.component}  # fmt: skip
    return replace(piece, folding=replace(folding, tokens=Run({**folding.tokens.places, **own})))


def _of_others(case: Case) -> Iterator[Explanation]:
    """A state of another request inside its window, as from a snapshot with a wrong row or stride."""
    for other in case.pieces:
        mine = case.piece
        if mine is None or other.folding is None or other.layer != mine.layer or other.request == mine.request:
            continue
        scene = scene_of(_own(other, case), [])
        for count in scene.counts():
            after = f"after {counted(count)} of its step" if count else "from before its step"
            yield Explanation(f'holds the state of request "{other.request}" {after}', scene.after(count))
