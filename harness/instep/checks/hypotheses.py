"""The bank of wrong states: what a state would be if a known mistake had been made. One small function each.

Leaves out: the comparison with them (`directed.py`). The table at the end is the bank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from .base import counted, held

EVERY_COUNT_UP_TO = 16  # windows up to this long are tried after each of their tokens; longer ones are prompts

BLOCKS = (16, 64)  # tokens that kernels of a chunk take at once


class Wrong(NamedTuple):
    """What the subject would hold, [HV, K, V], and the sentence that says so."""

    sentence: str
    state: torch.Tensor


@dataclass(frozen=True)
class Scene:
    """One request's GDN layer over one step, in fp64, from the subject's own bits.

    base      [HV, K, V] the state before; k [T, HV, K], v [T, HV, V], log_decay, beta [T, HV]: what each token of
              the window, or of the prompt's chunk, folds in (k as the value head reads it)
    count     tokens of these that are committed, the first ones; verb: "accepted", "given"
    previous  the state before the step before this one, if there was one
    others    what the others hold: whose it is ("of request ..."), and [HV, K, V]
    handed    what a miscounted step before this one would have left instead of `base`: a sentence, and [HV, K, V]
    """

    base: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor
    count: int
    verb: str
    previous: torch.Tensor | None
    others: Sequence[tuple[str, torch.Tensor]]
    handed: Sequence[tuple[str, torch.Tensor]] = ()

    @cached_property
    def right(self) -> torch.Tensor:
        return self.after(self.count)

    def after(self, count: int) -> torch.Tensor:
        return self._kept[count]

    def counts(self) -> Iterable[int]:
        """The wrong counts that are tried."""
        few = self.k.shape[0] <= EVERY_COUNT_UP_TO
        tried = self._kept if few else {0, 1, self.count - 1, self.count + 1, self.k.shape[0]}
        return (count for count in self._kept if count != self.count and count in tried)

    def fold(self, state: torch.Tensor, begin: int = 0) -> torch.Tensor:
        """The committed tokens from `begin` on, folded into another state."""
        for t in range(begin, self.count):
            state = step(state, self.k[t], self.v[t], self.log_decay[t], self.beta[t])
        return state

    def undecayed(self, begin: int) -> torch.Tensor:
        """The right state, but the tokens from `begin` on did not make it forget what was there before them."""
        decay = self.log_decay[begin : self.count].sum(0).exp()
        return self.right + (1 - decay)[:, None, None] * self.after(begin)

    def last(self, *, k: torch.Tensor | None = None, log_decay: torch.Tensor | None = None,
             beta: torch.Tensor | None = None) -> torch.Tensor:  # fmt: skip
        """The right state but for something of its last token."""
        t = self.count - 1
        return step(
            self.after(t), self.k[t] if k is None else k, self.v[t],
            self.log_decay[t] if log_decay is None else log_decay, self.beta[t] if beta is None else beta,
        )  # fmt: skip

    @cached_property
    def _kept(self) -> dict[int, torch.Tensor]:
        window = self.k.shape[0]
        wanted = {1, self.count - 1, self.count, self.count + 1, window, *(_block(self.count, b) for b in BLOCKS)}
        state, kept = self.base, {0: self.base}
        for t in range(window):
            state = step(state, self.k[t], self.v[t], self.log_decay[t], self.beta[t])
            if window <= EVERY_COUNT_UP_TO or t + 1 in wanted:
                kept[t + 1] = state
        return kept


def _block(count: int, size: int) -> int:
    """Where the last of so many tokens' blocks begins."""
    return (count - 1) // size * size


def step(
    state: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """One token into the state: forget, then write only what k does not already recall.

    Shapes:  state [HV, K, V]   k [HV, K]   v [HV, V]   log_decay, beta [HV]  ->  [HV, K, V]
    """
    state = log_decay.exp()[:, None, None] * state
    surprise = beta[:, None] * (v - torch.einsum("hk,hkv->hv", k, state))
    return state + k[:, :, None] * surprise[:, None, :]


def _count(scene: Scene, count: int) -> list[Wrong]:
    if count == scene.count or count not in scene.counts():
        return []
    return [Wrong(held("state", count, scene.count, scene.verb), scene.after(count))]


def one_less(scene: Scene) -> list[Wrong]:
    return _count(scene, scene.count - 1)


def one_more(scene: Scene) -> list[Wrong]:
    """One draft too many; where all tokens were taken, the last of them twice."""
    if scene.count < scene.k.shape[0]:
        return _count(scene, scene.count + 1)
    t = scene.count - 1
    twice = step(scene.right, scene.k[t], scene.v[t], scene.log_decay[t], scene.beta[t])
    return [Wrong("counts the last token twice", twice)]


def column_zero(scene: Scene) -> list[Wrong]:
    return _count(scene, 1)


def all_drafts(scene: Scene) -> list[Wrong]:
    return _count(scene, scene.k.shape[0])


def no_commit(scene: Scene) -> list[Wrong]:
    return _count(scene, 0)


def another_count(scene: Scene) -> list[Wrong]:
    return [wrong for count in scene.counts() for wrong in _count(scene, count)]


def another_slot(scene: Scene) -> list[Wrong]:
    return [Wrong(f"holds the state {name}", state) for name, state in scene.others]


def previous_step(scene: Scene) -> list[Wrong]:
    if scene.previous is None:
        return []
    return [Wrong("holds the state from before the previous step", scene.previous)]


def previous_step_lost(scene: Scene) -> list[Wrong]:
    """The tokens of the step before were not run again, or not from the right state."""
    if scene.previous is None:
        return []
    return [Wrong("lacks the tokens of the previous step", scene.fold(scene.previous))]


def previous_step_miscounted(scene: Scene) -> list[Wrong]:
    """The tokens of the step before were run again twice, or some of them not at all."""
    return [Wrong(sentence, scene.fold(state)) for sentence, state in scene.handed]


def zero(scene: Scene) -> list[Wrong]:
    return [Wrong("is all zero", torch.zeros_like(scene.base))]


def began_at_zero(scene: Scene) -> list[Wrong]:
    """The state before was dropped (at a chunk's boundary, after a resume)."""
    return [Wrong("was begun anew: what came before these tokens is lost", scene.fold(torch.zeros_like(scene.base)))]


def transposed(scene: Scene) -> list[Wrong]:
    """Written in the other layout: the memory [V, K] read as [K, V]."""
    return [Wrong("is transposed", _other_layout(scene.right)), Wrong("is transposed", _other_layout_back(scene.right))]


def began_transposed(scene: Scene) -> list[Wrong]:
    """Read in the other layout, then carried on."""
    return [
        Wrong("was carried on from a transposed state", scene.fold(turned(scene.base)))
        for turned in (_other_layout, _other_layout_back)
    ]


def last_decay_dropped(scene: Scene) -> list[Wrong]:
    none = torch.zeros_like(scene.log_decay[0])
    sentence = "lacks the decay of the last token"
    return [Wrong(sentence, scene.last(log_decay=none)), Wrong(sentence, scene.undecayed(scene.count - 1))]


def block_decay_dropped(scene: Scene) -> list[Wrong]:
    """The last block of a chunk, perhaps not a full one, is read with its decay and stored without."""
    begins = sorted({_block(scene.count, size) for size in BLOCKS} - {scene.count - 1})
    return [
        Wrong(f"lacks the decay of the last {counted(scene.count - begin)}", scene.undecayed(begin)) for begin in begins
    ]


def last_decay_doubled(scene: Scene) -> list[Wrong]:
    twice = 2 * scene.log_decay[scene.count - 1]
    return [Wrong("has the decay of the last token twice", scene.last(log_decay=twice))]


def stale_gate(scene: Scene) -> list[Wrong]:
    if scene.count < 2:
        return []
    t = scene.count - 2
    state = scene.last(log_decay=scene.log_decay[t], beta=scene.beta[t])
    return [Wrong("took the last token with the gates of the token before", state)]


def stale_k(scene: Scene) -> list[Wrong]:
    if scene.count < 2:
        return []
    return [Wrong("took the last token with the key of the token before", scene.last(k=scene.k[scene.count - 2]))]


def _other_layout(state: torch.Tensor) -> torch.Tensor:
    return state.mT.reshape(state.shape)


def _other_layout_back(state: torch.Tensor) -> torch.Tensor:
    heads, key_dim, value_dim = state.shape
    return state.reshape(heads, value_dim, key_dim).mT


BANK: tuple[Callable[[Scene], list[Wrong]], ...] = (
    one_less, one_more, column_zero, all_drafts, no_commit, another_count, another_slot, previous_step,
    previous_step_lost, previous_step_miscounted, zero, began_at_zero, transposed, began_transposed, last_decay_dropped,
    block_decay_dropped, last_decay_doubled, stale_gate, stale_k,
)  # fmt: skip


def wrong_states(scene: Scene) -> list[Wrong]:
    """Everything in the bank; one sentence is said once for each state that it can mean."""
    found: list[Wrong] = []
    for make in BANK:
        for wrong in make(scene):
            if not any(wrong.sentence == known.sentence and wrong.state is known.state for known in found):
                found.append(wrong)
    return found
