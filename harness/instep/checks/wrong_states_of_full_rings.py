"""Wrong states of rings that have no room for a window, and of prefixes whose parts have different lengths.

An engine may decide with the window that was whether a ring must be folded. If the next window is wider, its last
tokens do not fit. They are not stored, or older tokens are lost. Such states depend on many earlier tokens, so there
are hundreds of them. They are computed only to name a state that is known to be wrong.
Leaves out: rings with enough room (`wrong_ring_states.py`).
"""

from collections.abc import Iterator

import torch

from ..finding_problem import NamedMistake, WrongContent
from ..oracle.miscounted_states import joined, lacking_oldest
from .wrong_state_inputs import Scene, Wrong, add, step

OLDEST_INSTEAD = NamedMistake(
    "oldest-of-a-ring-instead", "has the {} of a ring of {} entries in place of the window's last{}")


def overfull(scene: Scene) -> Iterator[Wrong]:
    """All wrong states of this file."""
    if scene.recent and scene.verb == "accepted":
        yield from _replaced_by_oldest(scene)
        for known, state in lacking_oldest(scene.base, scene.recent):
            yield from (Wrong(known, carried) for carried in scene.carried(state))
    yield from (Wrong(known, state) for known, state in scene.later())
    yield from (Wrong(known, carried) for known, state in scene.stale() for carried in scene.carried(state))


def _replaced_by_oldest(scene: Scene) -> Iterator[Wrong]:
    """The window's last tokens are not stored: their entries still hold the tokens that are one ring older."""
    recent, before = joined(scene.recent), len(joined(scene.recent)[0])
    mine = scene.k, scene.v, scene.log_decay, scene.beta, scene.updates
    k, v, log_decay, beta, updates = (torch.cat((x, y[: scene.count])) for x, y in zip(recent, mine, strict=True))
    end = before + scene.count
    for size in range(max(2, len(scene.k)), end):
        for many in range(1, min(scene.count, end - size) + 1):
            computed = replayed = scene.after(scene.count - many)
            for t in range(end - many - size, end - size):
                computed = step(computed, k[t], v[t], log_decay[t], beta[t], scene.recalls)
                replayed = add(replayed, k[t], log_decay[t], updates[t])
            known = OLDEST_INSTEAD.known(_tokens(many), size, " one" if many == 1 else f" {many}")
            yield from (Wrong(known, state) for state in (computed, replayed))


def unstored_updates(scene: Scene) -> Iterator[tuple[WrongContent, torch.Tensor]]:
    """Mistakes, and the updates [T, HV, V] that a ring without room for the window's last tokens holds for it."""
    if not scene.recent:
        return
    recent, width = joined(scene.recent)[-1], len(scene.updates)
    both = torch.cat((recent, scene.updates))
    for size in range(max(2, width), len(both)):
        for many in range(1, min(width, len(both) - size) + 1):
            end = len(both) - size
            kept = torch.cat((scene.updates[: width - many], both[end - many : end]))
            yield OLDEST_INSTEAD.known(_tokens(many), size, ""), kept


def _tokens(many: int) -> str:
    return "oldest token" if many == 1 else f"{many} oldest tokens"
