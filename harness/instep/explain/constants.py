"""A formula that is almost the right one: another eps, 1 + w read as w, a scale or a gate left out or applied twice.

Most of these change the right result by a factor that follows from the op's inputs; the rest are other weights or
another configuration in the reference's own op. Leaves out: changed inputs (`inputs.py`), positions (`positions.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F

from instep_reference.contract.place import AFTER_LAYERS, STAGE_LEVEL
from instep_reference.norms import L2_EPS
from instep_reference.weights import GdnWeights, LayerWeights, MoeWeights, Weights

from ..observe.layer_work import LayerWork
from .case import Case, Explanation

LOG2E = 1.4426950408889634


def constants(case: Case) -> Iterator[Explanation]:
    if case.piece is None:
        return
    yield from _norm(case)
    yield from _narrow_product(case)
    family = FORMULAS.get(case.component)
    if family is not None:
        yield from family(case)


# Norms: what is found differs from what is right by a factor for each row.


def _norm(case: Case) -> Iterator[Explanation]:
    x, weight, one = norm_input(case), _norm_weight(case), case.component not in ("gated", "q", "k")
    if x is None:
        return
    l2 = case.component in ("q", "k")
    squares, eps = (x.square().sum(-1) if l2 else x.square().mean(-1)), L2_EPS if l2 else case.weights.config.eps
    right, size = (squares + eps).sqrt(), x.shape[-1]

    def by(says: str, denominator: torch.Tensor) -> Explanation:
        factor = (right / denominator).reshape(*right.shape, *(1,) * (case.right.dim() - right.dim()))
        return Explanation(says, case.right * factor)

    yield by("is normed with 10 times the eps", (squares + 10 * eps).sqrt())
    yield by("is normed with a tenth of the eps", (squares + eps / 10).sqrt())
    yield by("is normed without eps", squares.sqrt())
    yield by("is normed with eps outside the root", squares.sqrt() + eps)
    yield by("is not normed at all", torch.ones_like(right))
    if l2:
        yield by("is normed with eps on the mean of the squares, not on their sum", (squares + size * eps).sqrt())
        yield by("is normed by the mean of the squares, not by their sum", (squares / size + eps).sqrt())
        yield by("is normed by the sum of the squares, without the root", squares + eps)
    else:
        yield by("is normed by the sum of the squares, not by their mean", (squares * size + eps).sqrt())
        yield by("is normed by the mean of the squares, without the root", squares + eps)
    if weight is not None:
        used, name = (1 + weight, "1 + w") if one else (weight, "w")
        for says, scale in (("w", weight), ("1 + w", 1 + weight), ("no weight", torch.ones_like(weight))):
            if says != name:
                yield from _reweighted(case, f"is scaled with {says}, not with {name}", scale, used)
        for narrow in (torch.bfloat16, torch.float16):
            normed = x / right[..., None] if right.dim() < x.dim() else x / right
            parts = torch.where(normed == 0, 0.0, normed.to(narrow).to(normed) / normed)
            if parts.shape == case.right.shape:
                says = f"is rounded to {str(narrow).removeprefix('torch.')} before its weight"
                yield Explanation(says, case.right * parts)


def _reweighted(case: Case, says: str, other: torch.Tensor, used: torch.Tensor) -> Iterator[Explanation]:
    if case.right.shape[-1] == len(used) and case.component not in ("query", "key"):
        yield Explanation(says, case.right * torch.where(used == 0, 1.0, other / used))


def norm_input(case: Case) -> torch.Tensor | None:
    """What the norm that ends in this place reads: [rows, .., normed axis]."""
    config, work, place = case.weights.config, case.piece and case.piece.work, case.finding.place
    if case.component in ("q", "k"):
        mixed = case.own("mixed")
        if mixed is None:
            return None
        width = config.key_heads * config.key_dim
        begin = width * (case.component == "k")
        return mixed[:, begin : begin + width].reshape(-1, config.key_heads, config.key_dim)
    if case.component == "gated":
        return case.own("core")
    if case.component == "query":
        projected = case.own("projected")
        return None if projected is None else projected[:, :, 0]
    if case.component == "key":
        return case.own("key_raw")
    if place.layer == STAGE_LEVEL:
        return case.own("embedding") if case.component == "normed" else None
    if case.component == "normed" and isinstance(work, LayerWork):
        return work.hidden.to("cpu", torch.float64)
    if case.component == "post_normed":
        return case.own("residual")
    return _before_final(case) if case.component == "final" else None


def _before_final(case: Case) -> torch.Tensor | None:
    last = max((p.layer for p in case.pieces if p.stage == case.finding.place.stage and p.layer < AFTER_LAYERS),
               default=None)  # fmt: skip
    for piece in case.pieces if last is not None else ():
        if (piece.stage, piece.layer, piece.request) == (case.finding.place.stage, last, case.finding.request):
            hidden = piece.own.get(piece.place("hidden"))
            return None if hidden is None else hidden.to("cpu", torch.float64)
    return None


def _norm_weight(case: Case) -> torch.Tensor | None:
    weights, place = case.weights, case.finding.place
    layer, draft = _layer(case), weights.draft
    if case.component == "final" and place.stage == "trunk":
        return weights.final_norm
    if draft is not None and (case.component == "final" or place.layer == STAGE_LEVEL):
        return draft.norm if case.component == "final" else draft.norm_embedding
    if layer is None:
        return None
    if case.component == "gated" and isinstance(layer.mixer, GdnWeights):
        return layer.mixer.norm
    return {"normed": layer.input_norm, "post_normed": layer.post_norm}.get(case.component)


# Products: component -> what is multiplied
PRODUCTS = {
    **dict.fromkeys(("qkv", "z", "b", "a", "projected", "key_raw", "value"), ("normed",)),
    "mixer": ("gated", "opened"), "mlp": ("post_normed",), "fused": ("joined",),
}  # fmt: skip


def _narrow_product(case: Case) -> Iterator[Explanation]:
    """Weights rounded, alone and with the rows: what units of 16 bits multiply; and its result in 16 bits too."""
    for name in PRODUCTS.get(case.component, ()):
        rows = case.own(name)
        for narrow in (torch.bfloat16, torch.float16) if rows is not None else ():
            assert rows is not None
            said, weights = str(narrow).removeprefix("torch."), _narrowed(case.weights, case, narrow)
            for what, changes in (("its weight", {}), ("both operands", {name: rows.to(narrow).to(rows)})):
                wrong = case.again(changes, weights=weights)
                if wrong is not None:
                    yield Explanation(f"is multiplied with {what} rounded to {said}", wrong)
                    yield Explanation(f"is multiplied with {what} rounded to {said}, and so is the result",
                                      wrong.to(case.found.dtype).to(narrow).to(wrong))  # fmt: skip


def _narrowed(weights: Weights, case: Case, narrow: torch.dtype) -> Weights:
    """The weights of this place's layer, or of the head, each rounded."""

    def rounded(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return part.to(narrow).to(part)
        if isinstance(part, tuple):
            return tuple(map(rounded, part))
        if is_dataclass(part) and not isinstance(part, type):
            return replace(part, **{each.name: rounded(getattr(part, each.name)) for each in fields(part)})
        return part

    layer, draft = _layer(case), weights.draft
    if layer is not None:
        return _in_place(weights, case, rounded(layer))
    return weights if draft is None else replace(weights, draft=replace(draft, fc=rounded(draft.fc)))


# Formulas of single places


def _q(case: Case) -> Iterator[Explanation]:
    scale = case.weights.config.key_dim**-0.5
    yield Explanation("lacks the scale K^-1/2", case.right / scale)
    yield Explanation("has the scale K^-1/2 twice", case.right * scale)


def _k(case: Case) -> Iterator[Explanation]:
    yield Explanation("has the scale K^-1/2, which is q's", case.right * case.weights.config.key_dim**-0.5)


def _log_decay(case: Case) -> Iterator[Explanation]:
    a, layer = case.own("a"), _layer(case)
    if a is None or layer is None or not isinstance(layer.mixer, GdnWeights):
        return
    rate, x = layer.mixer.A_log.exp(), a + layer.mixer.dt_bias
    yield Explanation("is made with a sigmoid, not with a softplus", -rate * torch.sigmoid(x))
    yield Explanation("is made without softplus", -rate * x)
    yield Explanation("is made without dt_bias", -rate * F.softplus(a))
    yield Explanation("is made without A_log", -F.softplus(x))
    yield Explanation("is made with A_log itself, not with its exponential", -layer.mixer.A_log * F.softplus(x))
    yield Explanation("is the decay itself, not its logarithm", case.right.exp())
    yield Explanation("is in powers of 2, not of e", case.right * LOG2E)


def _beta(case: Case) -> Iterator[Explanation]:
    b = case.own("b")
    if b is None:
        return
    yield Explanation("is made with a softplus, not with a sigmoid", F.softplus(b))
    yield Explanation("is b itself, without its sigmoid", b)
    yield Explanation("is 1 for all tokens", torch.ones_like(b))
    yield Explanation("is the square of what is right", case.right.square())
    yield Explanation("is 1 - beta", 1 - case.right)


def _mixed(case: Case) -> Iterator[Explanation]:
    layer = _layer(case)
    if layer is None or not isinstance(layer.mixer, GdnWeights):
        return
    conv = layer.mixer.conv
    yield from _with_mixer(case, "is convolved with the taps in the opposite order", layer, conv=conv.flip(1))
    yield from _with_mixer(case, "is convolved with the taps of the channel before", layer, conv=conv.roll(1, 0))
    yield from _with_mixer(case, "is convolved with the taps of the channel behind", layer, conv=conv.roll(-1, 0))
    for tap in range(conv.shape[1]):
        without = conv.clone()
        without[:, tap] = 0
        yield from _with_mixer(case, f"is convolved without tap {tap}", layer, conv=without)


def _gated(case: Case) -> Iterator[Explanation]:
    z, silu = case.own("z"), case.weights.config.output_gate == "silu"
    if z is None:
        return
    opening = F.silu(z) if silu else torch.sigmoid(z)
    bare = torch.where(opening == 0, 0.0, case.right / opening)
    other = torch.sigmoid(z) if silu else F.silu(z)
    yield Explanation("is not gated: z plays no part", bare)
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
        wrong = case.again({"query": factor * query})
        if wrong is not None:
            yield Explanation(says, wrong)


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


def _mlp(case: Case) -> Iterator[Explanation]:
    layer = _layer(case)
    if layer is None or not isinstance(layer.mlp, MoeWeights):
        return
    config, mlp = case.weights.config, layer.mlp
    zero = replace(mlp.shared, down=torch.zeros_like(mlp.shared.down))
    yield from _with_layer(case, "lacks the shared expert", mlp=replace(mlp, shared=zero))
    for other, says in ((config.experts_per_token - 1, "one expert too few"),
                        (config.experts_per_token + 1, "one expert too many")):  # fmt: skip
        if 0 < other <= config.experts:
            yield from _weighed(case, f"takes {says}", replace(case.weights, config=replace(
                config, experts_per_token=other)))  # fmt: skip
    says = "are not renormalised" if config.norm_topk else "are renormalised, and should not be"
    yield from _weighed(case, f"the shares of its experts {says}", replace(case.weights, config=replace(
        config, norm_topk=not config.norm_topk)))  # fmt: skip


FORMULAS: dict[str, Callable[[Case], Iterator[Explanation]]] = {
    "q": _q, "k": _k, "log_decay": _log_decay, "beta": _beta, "mixed": _mixed, "gated": _gated,
    "attended": _attended, "opened": _opened, "joined": _joined, "residual": _sum, "hidden": _sum, "mlp": _mlp,
}  # fmt: skip


# Other weights


def _layer(case: Case) -> LayerWeights | None:
    weights, place = case.weights, case.finding.place
    layers = weights.layers if place.stage == "trunk" else weights.draft.layers if weights.draft else ()
    return layers[place.layer] if 0 <= place.layer < len(layers) else None


def _with_mixer(case: Case, says: str, layer: LayerWeights, **changed: Any) -> Iterator[Explanation]:
    yield from _with_layer(case, says, mixer=replace(layer.mixer, **changed))


def _with_layer(case: Case, says: str, **changed: Any) -> Iterator[Explanation]:
    layer = _layer(case)
    if layer is not None:
        yield from _weighed(case, says, _in_place(case.weights, case, replace(layer, **changed)))


def _in_place(weights: Weights, case: Case, layer: LayerWeights) -> Weights:
    """With another layer where the finding is."""
    draft, place = weights.draft, case.finding.place

    def put(layers: tuple[LayerWeights, ...]) -> tuple[LayerWeights, ...]:
        return tuple(layer if at == place.layer else one for at, one in enumerate(layers))

    if place.stage == "trunk" or draft is None:
        return replace(weights, layers=put(weights.layers))
    return replace(weights, draft=replace(draft, layers=put(draft.layers)))


def _weighed(case: Case, says: str, weights: Weights) -> Iterator[Explanation]:
    wrong = case.again(weights=weights)
    if wrong is not None:
        yield Explanation(says, wrong)
