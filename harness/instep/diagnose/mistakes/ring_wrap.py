"""States that were replayed from a ring with overwritten entries, as it wraps around too early.

Leaves out: wrong updates, keys and decays in the right entries (`checks/ring_hypotheses.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from ...checks.base import at_end, counted
from ...checks.state_step import Scene, add
from .case import Explanation


def overwritten(scene: Scene) -> Iterator[Explanation]:
    if scene.kept:
        yield from _within(scene)
        yield from _before(scene)


def _within(scene: Scene) -> Iterator[Explanation]:
    """A ring with fewer entries than the window has tokens: the later of two tokens in an entry is replayed."""
    tokens = len(scene.k)
    for room in range(1, tokens):
        last = [tokens - 1 - (tokens - 1 - t) % room for t in range(scene.count)]
        if last != list(range(scene.count)):
            k, log_decay, updates = (x[last] for x in (scene.k, scene.log_decay, scene.updates))
            state = scene.again(scene.base, k=k, log_decay=log_decay, updates=updates)
            says = f"was run again from a ring of {counted(room, 'entry', 'entries')}"
            yield Explanation(f"{says}, in which later tokens of the window overwrote earlier ones", state)


def _before(scene: Scene) -> Iterator[Explanation]:
    """Tokens of the previous step, replayed after this step overwrote the first of their entries."""
    if scene.pending is None or scene.previous is None:
        return
    mine, tokens = (scene.k, scene.log_decay, scene.updates), len(scene.pending[0])
    for many in range(1, min(len(scene.k), tokens) + 1):
        state, first = scene.previous, len(scene.k) - many
        for t in range(tokens):
            entry = [x[first + t] if t < many else was[t] for x, was in zip(mine, scene.pending, strict=True)]
            state = add(state, *entry)
        for each in scene.carried(state):
            yield Explanation(f"ran the {at_end(many, end='first')} of the previous step again from entries that this "
                              f"step had overwritten", each)  # fmt: skip
