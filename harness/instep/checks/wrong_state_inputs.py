"""One request's state and tokens over one step in fp64, from which wrong states are computed.

Leaves out: the mistakes (`wrong_state_bank.py`, `wrong_ring_states.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from ..finding_problem import Mistake, WrongContent
from ..oracle.states_with_folded_tokens import Run

EVERY_COUNT_UP_TO = 16  # windows up to this length are tried after each of their tokens; longer ones are prompts

BLOCKS = (16, 64)  # block sizes of chunked kernels, in tokens


class Wrong(NamedTuple):
    """The mistake that leaves a wrong state [HV, K, V], and that state."""

    known: WrongContent
    state: torch.Tensor

    @property
    def sentence(self) -> str:
        return self.known.says


# The states that a mistake leaves; with the detail that fills the {} of its sentence, or under its own sentence.
States = Callable[["Scene"], Iterable[torch.Tensor | tuple[str, torch.Tensor] | Wrong]]


def wrong_of(scene: "Scene", mistakes: Iterable[Mistake[States]]) -> Iterator[Wrong]:
    """The states that mistakes leave in a scene."""
    for mistake in mistakes:
        for one in mistake.wrong(scene):
            if isinstance(one, torch.Tensor):
                yield Wrong(mistake.known(), one)
            else:
                yield one if isinstance(one, Wrong) else Wrong(mistake.known(one[0]), one[1])


@dataclass(frozen=True)
class Scene:
    """One request's GDN layer over one step, in fp64, from the subject's own bits.

    base      [HV, K, V] the state before; k [T, HV, K], v [T, HV, V], log_decay, beta [T, HV]: the inputs of each token
              of the window or of the prompt's chunk (k as the value head reads it)
    count     number of committed tokens, which are the first ones; verb: "accepted", "given"
    previous  the state before the previous step, if there was one
    others    states of other requests: whose ("of request ..."), and [HV, K, V]
    handed    states that a miscounted previous step would have left instead of `base`: the mistake, and [HV, K, V]
    theirs    updates [T', HV, V] of other requests in the same event: whose ("of request ...")
    their_decays  log_decay [T', HV] or [T', HV, K] of the same tokens
    older     updates [T', HV, V] of the previous step; pending: k, log_decay and updates of its tokens
    recent    tokens that a ring may hold, since the prompt, the oldest first
    later     mistakes, and states after a prompt's chunk that a wrong conv window preceded; costly
    stale     mistakes, and states before a prompt's chunk that lack the last tokens of the chunk before
    branches  for a tree: the states at other nodes. k, v, log_decay and beta are then those of the accepted path
    recalls   whether tokens obey the delta rule. If not, beta is the write gate alone
    shared    number of value heads that read one key head
    safe      of a safe gate: its bound in nats, and exp(A_log) [HV]; None: the gate has no bound
    skip      [HV], with which values are added to read-outs, if it is known
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
    handed: Sequence[tuple[WrongContent, torch.Tensor]] = ()
    theirs: Sequence[tuple[str, torch.Tensor]] = ()
    older: torch.Tensor | None = None
    pending: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    branches: Sequence[Wrong] = ()
    recent: Sequence[Run] = ()
    later: Callable[[], Iterable[tuple[WrongContent, torch.Tensor]]] = tuple
    stale: Callable[[], Iterable[tuple[WrongContent, torch.Tensor]]] = tuple
    recalls: bool = True
    shared: int = 1
    safe: tuple[float, torch.Tensor] | None = None
    their_decays: Sequence[tuple[str, torch.Tensor]] = ()
    skip: torch.Tensor | None = None

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
        """Another state after the committed tokens from `begin` on."""
        for t in range(begin, self.count):
            state = step(state, self.k[t], self.v[t], self.log_decay[t], self.beta[t], self.recalls)
        return state

    @property
    def kept(self) -> bool:
        """Whether the tokens form a window, whose updates an engine may keep and replay, and not a prompt."""
        return self.verb == "accepted" and self.k.shape[0] <= EVERY_COUNT_UP_TO

    @cached_property
    def updates(self) -> torch.Tensor:
        """[T, HV, V]: the update that every token of a window adds along its key."""
        before = [self.after(t) for t in range(self.k.shape[0])]
        return torch.stack([
            update(state, self.k[t], self.v[t], self.log_decay[t], self.beta[t], self.recalls)
            for t, state in enumerate(before)
        ])  # fmt: skip

    def again(
        self, state: torch.Tensor, *, k: torch.Tensor | None = None, log_decay: torch.Tensor | None = None,
        updates: torch.Tensor | None = None, begin: int = 0,
    ) -> torch.Tensor:
        """A state after a replay of the committed tokens from `begin` on, with their own or other updates."""
        given = (self.k if k is None else k, self.log_decay if log_decay is None else log_decay,
                 self.updates if updates is None else updates)  # fmt: skip
        for t in range(begin, self.count):
            state = add(state, *(x[t] for x in given))
        return state

    def carried(self, state: torch.Tensor) -> list[torch.Tensor]:
        """Another state after the committed tokens: computed, and also replayed if updates are kept."""
        return [self.fold(state), *((self.again(state),) if self.kept else ())]

    def undecayed(self, begin: int) -> torch.Tensor:
        """The right state without the decays of the tokens from `begin` on on the state before them."""
        before = self.after(begin)
        return self.right + before - fade(before, self.log_decay[begin : self.count].sum(0))

    def last(self, *, k: torch.Tensor | None = None, log_decay: torch.Tensor | None = None,
             beta: torch.Tensor | None = None) -> torch.Tensor:  # fmt: skip
        """The right state with another key, decay or gate of its last token."""
        t = self.count - 1
        return step(
            self.after(t), self.k[t] if k is None else k, self.v[t],
            self.log_decay[t] if log_decay is None else log_decay, self.beta[t] if beta is None else beta, self.recalls,
        )  # fmt: skip

    @cached_property
    def _kept(self) -> dict[int, torch.Tensor]:
        window = self.k.shape[0]
        wanted = {1, self.count - 1, self.count, self.count + 1, window, *(block(self.count, b) for b in BLOCKS)}
        state, kept = self.base, {0: self.base}
        for t in range(window):
            state = step(state, self.k[t], self.v[t], self.log_decay[t], self.beta[t], self.recalls)
            if window <= EVERY_COUNT_UP_TO or t + 1 in wanted:
                kept[t + 1] = state
        return kept


def block(count: int, size: int) -> int:
    """The first token of the last block."""
    return (count - 1) // size * size


def turned(state: torch.Tensor) -> list[torch.Tensor]:
    """In the other layout: memory [..., V, K] that is read as [..., K, V], and the other way round."""
    *more, rows, columns = state.shape
    there, back = state.mT.reshape(state.shape), state.reshape(*more, columns, rows).mT
    return [there] if rows == columns else [there, back]


def step(
    state: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor,
    recalls: bool = True,
) -> torch.Tensor:
    """Add one token to the state: forget, then write only what k does not already recall, or all without the rule.

    Shapes:  state [HV, K, V]   k [HV, K]   v [HV, V]   log_decay [HV] or [HV, K]   beta [HV]  ->  [HV, K, V]
    """
    faded = fade(state, log_decay)
    return write(faded, k, update_of(faded, k, v, beta, recalls))


def update(
    state: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor,
    recalls: bool = True,
) -> torch.Tensor:
    """The update [HV, V] that `step` adds along the key."""
    return update_of(fade(state, log_decay), k, v, beta, recalls)


def add(state: torch.Tensor, k: torch.Tensor, log_decay: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """Add a token with a known update to the state."""
    return write(fade(state, log_decay), k, update)


# -- the steps of the delta rule for one token; a catalogue of mistakes puts them together in other ways --------------
# Shapes as in `step`. More axes may come first: several calls at once.


def fade(state: torch.Tensor, log_decay: torch.Tensor) -> torch.Tensor:
    """S <- exp(log_decay) S. The decay is of each head [HV], or of each key channel [HV, K]."""
    return log_decay.exp()[(..., None) if log_decay.ndim == state.ndim - 1 else (..., None, None)] * state


def read(state: torch.Tensor, along: torch.Tensor) -> torch.Tensor:
    """S^T q of each head, for a query or a key [HV, K] -> [HV, V]."""
    return torch.matmul(along[..., None, :], state)[..., 0, :]


def update_of(
    faded: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, recalls: bool = True
) -> torch.Tensor:
    """u = beta (v - S^T k), or beta v without the delta rule"""
    return beta[..., None] * (v - read(faded, k) if recalls else v)


def write(faded: torch.Tensor, k: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """S <- S + k u^T"""
    return faded + k[..., :, None] * update[..., None, :]
