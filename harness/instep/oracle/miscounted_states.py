"""States that a miscounted step may have left for the next step.

Leaves out: the other wrong states (`checks/wrong_state_bank.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from instep_reference import gdn

from ..finding_problem import NamedMistake, WrongContent
from .recomputation import again, fold
from .states_with_folded_tokens import PreviousStep, Run

MOST_LOST = 8  # tokens of a ring that may be lacking
FROM_ZERO = NamedMistake("from-zero", "was started from zero: everything before these tokens is lost")
LOST = NamedMistake("previous-step-lost", "lacks the tokens of the previous step")
TWICE = NamedMistake("previous-step-twice", "counts the tokens of the previous step twice")
IN_PART = NamedMistake("previous-step-in-part",
                  "was continued from the state after {} token{} of the previous step; {} tokens were {}")
LATER_WINDOW = NamedMistake("later-window", "was continued with the conv window of {} token{} later")
STALE = NamedMistake("stale-prompt", "was continued from the state of {} token{} before")
LACKS_OLDEST = NamedMistake("oldest-of-a-ring-lost", "lacks the {} of the {} tokens that a ring held")


def handed_over(
    base: torch.Tensor, previous: PreviousStep
) -> Iterator[tuple[WrongContent, Callable[[], torch.Tensor]]]:
    """Wrong states that a miscounted step may have left instead of `base`: the mistake, and the state."""
    tokens = previous.tokens
    if tokens is None:
        return
    count = len(tokens.of("k"))
    yield TWICE.known(), partial(_folded, tokens, base, range(count))
    if previous.verb == "accepted":
        yield TWICE.known(), partial(again, tokens, base)
    for some in range(1, count):
        known = IN_PART.known(some, "s" * (some > 1), count, previous.verb)
        yield known, partial(_folded, tokens, previous.base, range(some))


def lacking_oldest(base: torch.Tensor, recent: Sequence[Run]) -> Iterator[tuple[WrongContent, torch.Tensor]]:
    """States [HV, K, V] without the oldest tokens of a ring, for every number of tokens that it may have held.

    The state before a token follows from the state after it, because a step of the delta rule can be undone.
    """
    if not recent:
        return
    k, v, log_decay, gates, updates = joined(recent)
    held, state, recalls = len(k), base, recent[0].recalls
    for t in reversed(range(held)):
        state = _undone(state, k[t], v[t], log_decay[t], gates[t], recalls)
        for lost in range(1, min(held - t, MOST_LOST + 1)):
            rest = slice(t + lost, None)
            known = LACKS_OLDEST.known("oldest" if lost == 1 else f"{lost} oldest", held - t)
            key, value, decay, gate, written = (
                x[None, rest] for x in (k, v, gdn.by_channel(log_decay, v), gates[..., None], updates))
            computed = gdn.left_by(key, value, decay, gate * recalls, gate, state[None])[0]
            replayed = gdn.absorb(key, decay, written, state[None])[0]
            yield from ((known, found) for found in (computed, replayed) if torch.isfinite(found).all())


def stale(base: torch.Tensor, last: Run) -> Iterator[tuple[WrongContent, torch.Tensor]]:
    """States [HV, K, V] that lack the last tokens of a prompt's chunk. A kept prefix may lack those in a ring."""
    k, v, log_decay, gates, _ = joined([last])
    state = base
    for lost, t in enumerate(reversed(range(len(k))), 1):
        state = _undone(state, k[t], v[t], log_decay[t], gates[t], last.recalls)
        if torch.isfinite(state).all():
            yield STALE.known(lost, "s" * (lost > 1)), state


def joined(recent: Sequence[Run]) -> tuple[torch.Tensor, ...]:
    """k [n, HV, K], v [n, HV, V], log_decay, write gate [n, HV] and updates [n, HV, V] of all tokens.

    k is that of the value head which reads it.
    """
    k, v, log_decay, gates, updates = (
        torch.cat(parts) for parts in zip(*((*run.folded(), run.of("update")) for run in recent), strict=True))
    return k.repeat_interleave(v.shape[1] // k.shape[1], dim=1), v, log_decay, gates, updates


def _undone(
    state: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, recalls: bool
) -> torch.Tensor:
    """The state before a token, from the one after it. recalls: by the delta rule; if not, beta k k^T is 0.

        S_after = (1 - beta k k^T) e^g S + beta k v^T, and (1 - beta k k^T)^-1 = 1 + beta / (1 - beta k^T k) k k^T

    Shapes:  state [HV, K, V]   k [HV, K]   v [HV, V]   log_decay [HV] or [HV, K]   beta [HV]  ->  [HV, K, V]
    """
    rest = state - beta[:, None, None] * k[:, :, None] * v[:, None, :]
    share = recalls * beta / (1 - beta * k.square().sum(-1) * recalls)
    recalled = torch.einsum("hk,hkv->hv", k, rest)
    decay = gdn.by_channel(log_decay, v).exp()[..., None]
    return (rest + share[:, None, None] * k[:, :, None] * recalled[:, None, :]) / decay


def _folded(tokens: Run, base: torch.Tensor, nodes: Sequence[int]) -> torch.Tensor:
    return fold(tokens, base, nodes, read=False)[0]
