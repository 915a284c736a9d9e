"""Mistakes of the delta rule between its steps: at the edge of a block, or in the read-out.

Kernels process a chunk in blocks of tokens and pass the state from one to the next. Leaves out: steps with the input of
another row or head (`inputs.py`), and another memory before the first step (`memory.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from instep_reference.gdn import GdnMemory

from ..checks.base import at_end
from ..checks.scene import step
from ..observe.layer_work import LayerWork
from .case import Case, Explanation

BLOCKS = (4, 8, 16, 32, 64)  # block sizes of chunked kernels, in tokens
SUMMED = (16, 32, 64, 128, 256)  # tokens after which a kernel's running sums restart
OVERFLOWS = -math.log(torch.finfo(torch.float32).max)
MOST = 1024  # tokens that are recomputed step by step at most

State = torch.Tensor
Edge = Callable[[State, State, torch.Tensor], State]  # before a block, after it, sum of its log decays -> next state
Read = Callable[[State, State], State]  # before a token, after it -> the state that its row is read from


class Tokens(NamedTuple):
    """q, k [n, HV, K]; v [n, HV, V]; log_decay, beta [n, HV]; state [HV, K, V] before the first, all in fp64."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor
    state: torch.Tensor

    def run(self, block: int = 0, edge: Edge | None = None, read: Read = lambda _, after: after) -> list[torch.Tensor]:
        """The read-out [n, HV, V], and the last state."""
        state = first = self.state
        rows = []
        for t in range(len(self.q)):
            before = state
            state = step(state, self.k[t], self.v[t], self.log_decay[t], self.beta[t])
            rows.append(torch.einsum("hk,hkv->hv", self.q[t], read(before, state)))
            if edge is not None and (t + 1) % block == 0:
                begin = t + 1 - block
                first = state = edge(first, state, self.log_decay[begin : t + 1].sum(0)[:, None, None])
        return [torch.stack(rows), state]


def recurrence(case: Case) -> Iterator[Explanation]:
    tokens = _tokens(case)
    if tokens is None:
        return
    which, count = 0 if case.component == "core" else 1, len(tokens.q)
    yield from _summed(tokens, which)
    if not case.found.isfinite().all():
        return  # no other mistake here gives infinite numbers
    for size in [size for size in BLOCKS if size < count]:
        for says, edge in EDGES:
            yield Explanation(says.format(size), tokens.run(size, edge)[which])
    for last in dict.fromkeys(count % size for size in BLOCKS):
        if 0 < last < count:  # for all tokens it would be no decay at all
            decay = tokens.log_decay.clone()
            decay[count - last :] = 0
            yield Explanation(f"lacks the decay of the {at_end(last)}",
                              tokens._replace(log_decay=decay).run()[which])  # fmt: skip
    if which == 0:
        yield Explanation("is read before its own token is added", tokens.run(read=lambda before, _: before)[0])
        for narrow in (torch.bfloat16, torch.float16):
            says = f"is read out of the state rounded to {str(narrow).removeprefix('torch.')}"
            yield Explanation(says, tokens.run(read=lambda _, after, to=narrow: after.to(to).to(after))[0])  # type: ignore[misc]


EDGES: tuple[tuple[str, Edge], ...] = (
    ("starts from zero at every block of {} tokens", lambda _, after, __: torch.zeros_like(after)),
    ("drops the state from before the block at the end of every block of {} tokens",
     lambda before, after, decay: after - decay.exp() * before),
    ("does not decay the state from before the block over a block of {} tokens",
     lambda before, after, decay: after + (1 - decay.exp()) * before),
)  # fmt: skip


def _summed(tokens: Tokens, which: int) -> Iterator[Explanation]:
    count = len(tokens.q)
    for size in dict.fromkeys((*[size for size in SUMMED if size < count], count)):
        behind = f" of {size} tokens each" * (size < count)
        yield Explanation(
            f"its decays are exp(G_t) exp(-G_t-1) of running sums G{behind}, which are not finite where a sum passes "
            f"{-OVERFLOWS:.1f}", tokens._replace(log_decay=_of_sums(tokens.log_decay, size)).run()[which])  # fmt: skip


def _of_sums(log_decay: torch.Tensor, size: int) -> torch.Tensor:
    """The log decays that fp32 gives from differences of running sums."""
    parts = []
    for begin in range(0, len(log_decay), size):
        sums = log_decay[begin : begin + size].float().cumsum(0)
        decay = sums.exp() * (-torch.nn.functional.pad(sums[:-1], (0, 0, 1, 0))).exp()
        parts.append(decay.to(log_decay).log())
    return torch.cat(parts)


def _tokens(case: Case) -> Tokens | None:
    work = None if case.piece is None else case.piece.work
    if case.component not in ("core", "state") or not isinstance(work, LayerWork) or work.parents is not None:
        return None  # rows of a tree are not consecutive steps
    own = [case.own(name) for name in ("q", "k", "v", "log_decay", "beta")]
    rows = [row for row in own if row is not None]
    assert case.piece is not None, "there is a work"
    if len(rows) < len(own) or len(rows[0]) > MOST or (case.component, case.piece.span.kind) == ("state", "commit"):
        return None  # T2d covers the states of windows
    q, k, v, log_decay, beta = rows
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q, k))
    nothing = torch.zeros(*k.shape[1:], v.shape[2], dtype=torch.float64)
    state = work.memory.state.to(nothing) if isinstance(work.memory, GdnMemory) else nothing
    return Tokens(q, k, v, log_decay, beta, state)
