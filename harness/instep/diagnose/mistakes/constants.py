"""Formulas that are almost right: another eps, w instead of 1 + w, a scale or gate missing or applied twice.

Most of these change the right result by a factor that follows from the op's inputs; the others are other weights or
another configuration in the reference's op. Leaves out: changed inputs (`wrong_inputs.py`), positions
(`rotary_and_visible_positions.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional as F

from instep_reference.weights import GdnWeights

from .finding_case import Case, Explanation
from .wrong_weights import layer_of, with_mixer

LOG2E = 1.4426950408889634


def constants(case: Case) -> Iterator[Explanation]:
    if case.piece is None:
        return
    family = FORMULAS.get(case.component)
    if family is not None:
        yield from family(case)


def _q(case: Case) -> Iterator[Explanation]:
    scale = case.weights.config.key_dim**-0.5
    yield Explanation("lacks the scale K^-1/2", case.right / scale)
    yield Explanation("has the scale K^-1/2 twice", case.right * scale)


def _k(case: Case) -> Iterator[Explanation]:
    yield Explanation("has the scale K^-1/2, which is q's", case.right * case.weights.config.key_dim**-0.5)


def _log_decay(case: Case) -> Iterator[Explanation]:
    a, layer = case.own("a"), layer_of(case)
    if a is None or layer is None or not isinstance(layer.mixer, GdnWeights):
        return
    stored = layer.mixer.A_log.reshape(-1, *(1,) * (a.ndim - 2))  # of each head, also if there are channels
    rate, x = stored.exp(), a + layer.mixer.dt_bias.reshape(a.shape[1:])
    yield Explanation("is made with a sigmoid, not with a softplus", -rate * torch.sigmoid(x))
    yield Explanation("is made without softplus", -rate * x)
    yield Explanation("is made without dt_bias", -rate * F.softplus(a))
    yield Explanation("is made without A_log", -F.softplus(x))
    yield Explanation("is made with A_log itself, not with its exponential", -stored * F.softplus(x))
    yield Explanation("is the decay itself, not its logarithm", case.right.exp())
    yield Explanation("is in powers of 2, not of e", case.right * LOG2E)


def _beta(case: Case) -> Iterator[Explanation]:
    b = case.own("b")
    if b is None:
        return
    yield Explanation("is made with a softplus, not with a sigmoid", F.softplus(b))
    yield Explanation("is b itself, without its sigmoid", b)
    yield Explanation("is 1 for all tokens", torch.ones_like(b))
    yield Explanation("is the square of the right value", case.right.square())
    yield Explanation("is 1 - beta", 1 - case.right)


def _mixed(case: Case) -> Iterator[Explanation]:
    layer = layer_of(case)
    if layer is None or not isinstance(layer.mixer, GdnWeights):
        return
    conv = layer.mixer.conv
    yield from with_mixer(case, "is convolved with the taps in the opposite order", layer, conv=conv.flip(1))
    yield from with_mixer(case, "is convolved with the taps of the channel before", layer, conv=conv.roll(1, 0))
    yield from with_mixer(case, "is convolved with the taps of the channel after", layer, conv=conv.roll(-1, 0))
    for tap in range(conv.shape[1]):
        without = conv.clone()
        without[:, tap] = 0
        yield from with_mixer(case, f"is convolved without tap {tap}", layer, conv=without)


def _gated(case: Case) -> Iterator[Explanation]:
    z, silu = case.own("z"), case.weights.config.output_gate == "silu"
    if z is None:
        return
    opening = F.silu(z) if silu else torch.sigmoid(z)
    bare = torch.where(opening == 0, 0.0, case.right / opening)
    other = torch.sigmoid(z) if silu else F.silu(z)
    yield Explanation("is not gated by z", bare)
    yield Explanation(f"is gated by {'a sigmoid' if silu else 'silu'} of z, not by "
                      f"{'silu' if silu else 'a sigmoid'}", bare * other)  # fmt: skip
    yield Explanation("is gated by z itself", bare * z)
    yield Explanation("is gated twice", case.right * opening)


def _attended(case: Case) -> Iterator[Explanation]:
    query, width = case.own("query"), case.weights.config.head_dim
    if query is None:
        return
    for says, factor in (
        ("the scores are not scaled by head_dim^-1/2", width**0.5), ("the scores are scaled twice", width**-0.5),
        ("the softmax is in powers of 2, not of e", 1 / LOG2E), ("the softmax takes log2(e) twice", LOG2E),
    ):
        yield from case.made(says, {"query": factor * query})


def _opened(case: Case) -> Iterator[Explanation]:
    attended, projected = case.own("attended"), case.own("projected")
    if attended is None or projected is None:
        return
    queries, gate = projected.unbind(2)
    yield Explanation("is not gated", attended)
    yield Explanation("is gated by silu of the gate, not by a sigmoid", attended * F.silu(gate))
    yield Explanation("is gated by the gate itself", attended * gate)
    yield Explanation("is gated by the query's half of the projection", attended * torch.sigmoid(queries))
    yield Explanation("is gated twice", case.right * torch.sigmoid(gate))


def _joined(case: Case) -> Iterator[Explanation]:
    yield Explanation("is joined with the hidden row first", case.right.roll(case.right.shape[-1] // 2, -1))


def _sum(case: Case) -> Iterator[Explanation]:
    """residual = hidden + mixer, hidden = residual + mlp: without the first, or with the second twice."""
    added = case.own("mixer" if case.component == "residual" else "mlp")
    if added is not None:
        yield Explanation("lacks the residual", added)
        yield Explanation("lacks what the layer adds", case.right - added)


FORMULAS: dict[str, Callable[[Case], Iterator[Explanation]]] = {
    "q": _q, "k": _k, "log_decay": _log_decay, "beta": _beta, "mixed": _mixed, "gated": _gated,
    "attended": _attended, "opened": _opened, "joined": _joined, "residual": _sum, "hidden": _sum,
}  # fmt: skip
