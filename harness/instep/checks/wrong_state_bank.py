"""The bank of wrong states: one small function per known mistake returns the state that the mistake leaves.

The table at the end is the bank. Leaves out: the comparison with these states (`known_wrong_states.py`), and mistakes
in the replay of kept updates (`wrong_ring_states.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .check_interface import counted, held
from .wrong_ring_states import RUN_AGAIN
from .wrong_state_inputs import BLOCKS, Scene, Wrong, block, step


def _count(scene: Scene, count: int) -> list[Wrong]:
    if count == scene.count or count not in scene.counts():
        return []
    return [Wrong(held("state", count, scene.count, scene.verb), scene.after(count))]


def one_less(scene: Scene) -> list[Wrong]:
    return _count(scene, scene.count - 1)


def one_more(scene: Scene) -> list[Wrong]:
    """One draft too many; or the last token twice, if all tokens were taken."""
    if scene.count < scene.k.shape[0]:
        return _count(scene, scene.count + 1)
    t = scene.count - 1
    twice = [step(scene.right, scene.k[t], scene.v[t], scene.log_decay[t], scene.beta[t])]
    if scene.kept:
        twice.append(scene.again(scene.right, begin=t))
    return [Wrong("counts the last token twice", state) for state in twice]


def column_zero(scene: Scene) -> list[Wrong]:
    return _count(scene, 1)


def all_drafts(scene: Scene) -> list[Wrong]:
    return _count(scene, scene.k.shape[0])


def no_commit(scene: Scene) -> list[Wrong]:
    return _count(scene, 0)


def another_count(scene: Scene) -> list[Wrong]:
    return [wrong for count in scene.counts() for wrong in _count(scene, count)]


def another_node(scene: Scene) -> list[Wrong]:
    return list(scene.branches)


def another_slot(scene: Scene) -> list[Wrong]:
    return [Wrong(f"holds the state {name}", state) for name, state in scene.others]


def previous_step(scene: Scene) -> list[Wrong]:
    if scene.previous is None:
        return []
    return [Wrong("holds the state from before the previous step", scene.previous)]


def previous_step_lost(scene: Scene) -> list[Wrong]:
    """The tokens of the previous step were not replayed, or not from the right state."""
    if scene.previous is None:
        return []
    return [Wrong("lacks the tokens of the previous step", state) for state in scene.carried(scene.previous)]


def previous_step_miscounted(scene: Scene) -> list[Wrong]:
    """The tokens of the previous step were replayed twice, or some of them not at all."""
    return [Wrong(sentence, state) for sentence, left in scene.handed for state in scene.carried(left)]


def zero(scene: Scene) -> list[Wrong]:
    return [Wrong("is all zero", torch.zeros_like(scene.base))]


def began_at_zero(scene: Scene) -> list[Wrong]:
    """The previous state was dropped (at a chunk's boundary, after a resume)."""
    sentence = "was started from zero: everything before these tokens is lost"
    return [Wrong(sentence, state) for state in scene.carried(torch.zeros_like(scene.base))]


def transposed(scene: Scene) -> list[Wrong]:
    """Written in the other layout: the memory [V, K] read as [K, V]."""
    return [Wrong("is transposed", _other_layout(scene.right)), Wrong("is transposed", _other_layout_back(scene.right))]


def began_transposed(scene: Scene) -> list[Wrong]:
    """Read in the other layout, then continued."""
    return [
        Wrong("was continued from a transposed state", state)
        for turned in (_other_layout, _other_layout_back) for state in scene.carried(turned(scene.base))
    ]


def last_decay_dropped(scene: Scene) -> list[Wrong]:
    none = torch.zeros_like(scene.log_decay[0])
    sentence = "lacks the decay of the last token"
    return [Wrong(sentence, scene.last(log_decay=none)), Wrong(sentence, scene.undecayed(scene.count - 1))]


def block_decay_dropped(scene: Scene) -> list[Wrong]:
    """The last block of a chunk, possibly incomplete, is read with its decay but stored without it."""
    begins = sorted({block(scene.count, size) for size in BLOCKS} - {scene.count - 1})
    return [
        Wrong(f"lacks the decay of the last {counted(scene.count - begin)}", scene.undecayed(begin)) for begin in begins
    ]


def last_decay_doubled(scene: Scene) -> list[Wrong]:
    t = scene.count - 1
    states = [scene.last(log_decay=2 * scene.log_decay[t])]
    if scene.kept:
        states.append(scene.again(scene.after(t), log_decay=2 * scene.log_decay, begin=t))
    return [Wrong("has the decay of the last token twice", state) for state in states]


def stale_gate(scene: Scene) -> list[Wrong]:
    if scene.count < 2:
        return []
    t = scene.count - 2
    state = scene.last(log_decay=scene.log_decay[t], beta=scene.beta[t])
    return [Wrong("takes the last token with the gates of the token before", state)]


def stale_k(scene: Scene) -> list[Wrong]:
    if scene.count < 2:
        return []
    t = scene.count - 1
    states = [scene.last(k=scene.k[t - 1])]
    if scene.kept:
        states.append(scene.again(scene.after(t), k=scene.k.roll(1, 0), begin=t))
    return [Wrong("takes the last token with the key of the token before", state) for state in states]


def _other_layout(state: torch.Tensor) -> torch.Tensor:
    return state.mT.reshape(state.shape)


def _other_layout_back(state: torch.Tensor) -> torch.Tensor:
    heads, key_dim, value_dim = state.shape
    return state.reshape(heads, value_dim, key_dim).mT


BANK: tuple[Callable[[Scene], list[Wrong]], ...] = (
    one_less, one_more, column_zero, all_drafts, no_commit, another_count, another_node, another_slot,
    previous_step, previous_step_lost, previous_step_miscounted, zero, began_at_zero, transposed, began_transposed,
    last_decay_dropped, block_decay_dropped, last_decay_doubled, stale_gate, stale_k, *RUN_AGAIN,
)  # fmt: skip


def wrong_states(scene: Scene) -> list[Wrong]:
    """All wrong states of the bank, without duplicates."""
    found: list[Wrong] = []
    for make in BANK:
        for wrong in make(scene):
            if not any(wrong.sentence == known.sentence and wrong.state is known.state for known in found):
                found.append(wrong)
    return found
