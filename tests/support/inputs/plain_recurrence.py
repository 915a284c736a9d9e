"""The recurrence of a GDN layer token by token, and scenes of a few tokens, for second computations of wrong states.

Leaves out: mistakes (`checks/wrong_state_bank.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from instep.checks.wrong_state_inputs import Scene

Tensor = torch.Tensor


@dataclass
class Tokens:
    """Tokens of the recurrence: S <- diag(a) S, then S <- S + k u^T with u = b (v - S^T k), or u = b v.

    k, a [T, HV, K]   v [T, HV, V]   b [T, HV]
    """

    k: Tensor
    v: Tensor
    log: Tensor
    b: Tensor
    recalls: bool

    def but(self, **changed: Tensor) -> "Tokens":
        return replace(self, **changed)

    def faded(self, state: Tensor, t: int) -> Tensor:
        log = self.log[t] if self.log.dim() == 3 else self.log[t][:, None].expand(self.k[t].shape)
        return torch.diag_embed(log.exp()) @ state

    def update(self, state: Tensor, t: int) -> Tensor:
        known = torch.einsum("hkv,hk->hv", self.faded(state, t), self.k[t]) if self.recalls else 0.0
        return torch.einsum("h,hv->hv", self.b[t], self.v[t] - known)

    def run(self, state: Tensor, begin: int, end: int, updates: Sequence[Tensor] | Tensor | None = None) -> Tensor:
        for t in range(begin, end):
            u = self.update(state, t) if updates is None else updates[t]
            state = self.faded(state, t) + torch.einsum("hk,hv->hkv", self.k[t], u)
        return state


def tokens_of(of: Scene) -> Tokens:
    return Tokens(of.k, of.v, of.log_decay, of.beta, of.recalls)


def counted(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1


def scene(width: int, count: int, heads: int, keys: int, values: int, *, channels: bool = False, **more: Any) -> Scene:
    of = Scene(
        drawn(1, heads, keys, values),
        drawn(2, width, heads, keys) / keys,
        drawn(3, width, heads, values),
        -drawn(4, *(width, heads, keys)[: 2 + channels]) / 2,
        drawn(5, width, heads) / 2,
        count,
        "accepted",
        None,
        [],
    )
    return replace(of, **more)


def check(found: Sequence[tuple[str, Tensor]], due: Sequence[tuple[str, Tensor]]) -> None:
    assert [says for says, _ in found] == [says for says, _ in due]
    wrong = [says for (says, one), (_, other) in zip(found, due, strict=True)
             if not torch.allclose(one, other, rtol=1e-9, atol=1e-15)]  # fmt: skip
    assert not wrong
