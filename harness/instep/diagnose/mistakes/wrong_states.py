"""States and kept updates after a wrong step: the wrong states of T2d, and steps that round.

Leaves out: steps with the input of another row, head or request (`wrong_inputs.py`), and wrong updates, keys
and decays in the right entries of a ring (`checks/wrong_ring_states.py`).
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import starmap

import torch

from instep_reference.contract.declared_rounding import RING

from ...checks.check_interface import at_end, counted
from ...checks.known_wrong_states import scene_of
from ...checks.wrong_ring_states import overfull, unstored_updates, wrong_parts, wrong_updates
from ...checks.wrong_state_bank import wrong_states
from ...checks.wrong_state_inputs import Scene, add
from ...oracle.recomputation import Recomputation
from ...oracle.states_with_folded_tokens import Run
from ...watch.rows_by_request import UPDATE
from .finding_case import Case, Explanation


def known_states(case: Case) -> Iterator[Explanation]:
    """The wrong states of T2d."""
    scene = own_scene(case)
    if scene is None:
        return
    ring = None if case.oracle is None else case.oracle.rounds.get(RING)
    if isinstance(ring, torch.dtype):
        assert case.piece is not None, "a scene is of a piece"
        shown = case.piece.own.get(case.piece.place(UPDATE)) if case.component == "state" else None
        if shown is not None and (folding := case.piece.folding) is not None and folding.parents is not None:
            shown = shown[list(case.piece.span.nodes)]  # as in the scene of a tree
        shown = None if shown is None else shown.to(scene.k)
        yield from starmap(Explanation.of, wrong_parts(scene, ring, shown, updates=case.component == UPDATE))
    if case.component == UPDATE:
        yield from starmap(Explanation.of, (*wrong_updates(scene), *unstored_updates(scene)))
    else:
        yield from starmap(Explanation.of, (*wrong_states(scene), *overfull(scene)))


def states(case: Case) -> Iterator[Explanation]:
    scene = own_scene(case)
    if scene is None or case.component == UPDATE:
        return
    yield from _overwritten(scene)
    yield from _of_others(case)


def _overwritten(scene: Scene) -> Iterator[Explanation]:
    """States that were replayed from a ring with overwritten entries, as it wraps around too early."""
    if scene.kept:
        yield from _in_a_short_ring(scene)
        yield from _before_an_overwrite(scene)


def _in_a_short_ring(scene: Scene) -> Iterator[Explanation]:
    """A ring with fewer entries than the window has tokens: the later of two tokens in an entry is replayed."""
    tokens = len(scene.k)
    for room in range(1, tokens):
        last = [tokens - 1 - (tokens - 1 - t) % room for t in range(scene.count)]
        if last != list(range(scene.count)):
            k, log_decay, updates = (x[last] for x in (scene.k, scene.log_decay, scene.updates))
            state = scene.again(scene.base, k=k, log_decay=log_decay, updates=updates)
            says = f"was run again from a ring of {counted(room, 'entry', 'entries')}"
            yield Explanation(f"{says}, in which later tokens of the window overwrote earlier ones", state)


def _before_an_overwrite(scene: Scene) -> Iterator[Explanation]:
    """Tokens of the previous step, replayed after this step overwrote the first of their entries."""
    if scene.pending is None or scene.previous is None:
        return
    was, mine = zip(*scene.pending, strict=True), zip(scene.k, scene.log_decay, scene.updates, strict=True)
    older, newer = [*was], [*mine]
    for many in range(1, min(len(newer), len(older)) + 1):
        state = scene.previous
        for entry in (*newer[-many:], *older[many:]):
            state = add(state, *entry)
        for each in scene.carried(state):
            yield Explanation(f"ran the {at_end(many, end='first')} of the previous step again from entries that this "
                              f"step had overwritten", each)  # fmt: skip


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
