"""Mistakes in norms: the found rows differ from the right ones by a factor per row, or by the weight.

Leaves out: an eps that is fitted to the finding (`fitted_constants.py`).
"""

from collections.abc import Iterator

import torch

from instep_reference.contract.config import LATENT_EPS
from instep_reference.contract.place_names import AFTER_LAYERS, STAGE_LEVEL
from instep_reference.norms import L2_EPS
from instep_reference.weights import AttentionWeights, GdnWeights, LatentWeights, LightningWeights, Norm

from ...watch.rows_by_request import row_spans
from .finding_case import NARROW, Case, Explanation, rounded
from .wrong_weights import layer_of, mixer_of, with_mixer

# Component -> the only component that its norm reads, unchanged, for all rows of the batch.
PACKED = {"gated": "core", "post_normed": "residual", "key": "key_raw"}


def norms(case: Case) -> Iterator[Explanation]:
    if case.piece is None:
        return
    x, weight = norm_input(case), _norm_weight(case)
    if x is None:
        return
    config = case.weights.config
    if config.row_norms and case.component in ("query", "key"):
        yield from _of_rows(case, x, config.eps)
        return
    if case.component in ("query", "key") and not case.weights.config.head_norms:
        sizes = (x.square().mean(-1, keepdim=True) + case.weights.config.eps).sqrt()
        yield Explanation("is normed, and this model type norms no queries and keys", case.right / sizes)
        return
    l2 = case.component in ("q", "k")
    squares, eps = (x.square().sum(-1) if l2 else x.square().mean(-1)), eps_of(case)
    right, size = (squares + eps).sqrt(), x.shape[-1]

    def by(says: str, denominator: torch.Tensor) -> Explanation:
        factor = right.reshape(*right.shape, *(1,) * (denominator.dim() - right.dim())) / denominator
        return Explanation(says, (case.right.reshape(*factor.shape, -1) * factor[..., None]).reshape(case.right.shape))

    yield by("is normed with 10 times the eps", (squares + 10 * eps).sqrt())
    yield by("is normed with a tenth of the eps", (squares + eps / 10).sqrt())
    yield by("is normed without eps", squares.sqrt())
    if case.component in ("value", "gated") and config.eps != eps:
        yield by("is normed with the eps of the other norms", (squares + config.eps).sqrt())
    yield by("is normed with eps outside the root", squares.sqrt() + eps)
    yield by("is not normed at all", torch.ones_like(right))
    if l2:
        yield by("is normed with eps on the mean of the squares, not on their sum", (squares + size * eps).sqrt())
        yield by("is normed by the mean of the squares, not by their sum", (squares / size + eps).sqrt())
        yield by("is normed by the sum of the squares, without the root", squares + eps)
    else:
        yield by("is normed by the sum of the squares, not by their mean", (squares * size + eps).sqrt())
        yield by("is normed by the mean of the squares, without the root", squares + eps)
    for says, other in _of_other_columns(case, x):
        yield by(f"is normed {says}", (other * (size if l2 else 1) + eps).sqrt())
    for says, other in _neighbours(case, x, right, eps):
        yield by(f"is normed with the root mean square of {says}", other)
    if case.component in ("query", "key"):
        yield from _before_turning(case)
    if weight is not None:
        used = weight if case.component == "gated" else 1 + weight
        stored, name = (weight, "1 + w") if config.centred_norms and case.component != "gated" else (used, "w")
        for says, scale in (("w", stored), ("1 + w", 1 + stored), ("no weight", torch.ones_like(stored))):
            if says != name:
                yield from _reweighted(case, f"is scaled with {says}, not with {name}", scale, used)
        for says, theirs in _weights_of_others(case):
            yield from _reweighted(case, f"is scaled with {says}", 1 + theirs, used)
        for said, narrow in NARROW.items():
            normed = x / right[..., None]
            parts = torch.where(normed == 0, 1.0, rounded(normed, narrow) / normed)
            yield Explanation(f"is rounded to {said} before its weight", case.right * parts.reshape(case.right.shape))


def _of_other_columns(case: Case, x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Mean squares over other columns than those that the norm takes together."""
    if x.dim() > 2 and x.shape[1] > 1:
        yield "over all heads of a row, not head by head", x.square().mean((1, 2))[:, None].expand(x.shape[:2])
    elif case.component == "gated" and (core := case.own("core")) is not None:
        yield "head by head, not over all heads of a row", core.square().mean(-1)
    elif case.component == "value" and (raw := case.own("key_raw")) is not None:
        yield "over the latent and the shared key together", raw.square().mean(-1)


def _weights_of_others(case: Case) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of the layer's other norm of rows of the same width; of the draft head's last norm, the trunk's."""
    layer, place, weights = layer_of(case), case.finding.place, case.weights
    first, second = ("normed", "mixer_normed"), ("post_normed", "mlp_normed")
    if layer is not None and case.component in (*first, *second):
        other = layer.post_norm if case.component in first else layer.input_norm
        if isinstance(other, torch.Tensor):
            yield "the weight of the layer's other norm", other
    if weights.draft is not None and place.layer == STAGE_LEVEL:
        yield "the weight of the norm of the hidden row", weights.draft.norm_hidden
    if case.component == "final" and place.stage != "trunk" and isinstance(weights.final_norm, torch.Tensor):
        yield "the weight of the trunk's last norm", weights.final_norm


def _of_rows(case: Case, x: torch.Tensor, eps: float) -> Iterator[Explanation]:
    """Norms over all heads of a row: x [rows, heads, head_dim] of queries or keys."""
    mixer = mixer_of(case)
    if not isinstance(mixer, AttentionWeights):
        return
    weight = 1 + (mixer.query_norm if case.component == "query" else mixer.key_norm).reshape(x.shape[1:])
    squares = x.square().mean((1, 2), keepdim=True)
    rows, heads = (squares + eps).sqrt(), (x.square().mean(-1, keepdim=True) + eps).sqrt()
    yield Explanation("is normed head by head, not over all heads of a row", x / heads * weight)
    yield Explanation("is not normed at all", x)
    yield Explanation("is normed without a weight", x / rows)
    yield Explanation("is scaled with 1 + w, not with w", x / rows * (1 + weight))
    yield Explanation("is scaled with the weights of the first head", x / rows * weight[:1])
    for step, says in ((1, "before"), (-1, "after")):
        yield Explanation(f"is scaled with the weights of the head {says}", x / rows * weight.roll(step, 0))
        yield Explanation(f"is normed with the root mean square of the row {says}", x / rows.roll(step, 0) * weight)
    yield Explanation("is scaled with weights read as [head_dim, heads]",
                      x / rows * weight.flatten().reshape(x.shape[2], x.shape[1]).T)  # fmt: skip
    yield Explanation("is normed by the sum of the squares, not by their mean",
                      x / (squares * x.shape[1:].numel() + eps).sqrt() * weight)  # fmt: skip
    for says, other in (("10 times the eps", 10 * eps), ("a tenth of the eps", eps / 10), ("no eps", 0.0)):
        yield Explanation(f"is normed with {says}", x / (squares + other).sqrt() * weight)


def _neighbours(
    case: Case, x: torch.Tensor, right: torch.Tensor, eps: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """The norms of another row of the packed batch or of another head, if the rows of the batch are known."""
    packed = PACKED.get(case.component)
    spans = [] if packed is None else row_spans(case.context, case.finding.place.stage)
    mine = next((span for span in spans if span.request == case.finding.request), None)
    rows = case.context.subject.places.get(case.finding.place._replace(component=packed or ""))
    if mine is not None and rows is not None and len(rows) >= mine.begin + mine.count == mine.begin + len(x):
        rows = rows.to("cpu", torch.float64).flatten(x.dim() - 1)  # one row, if all heads are normed together
        sizes = (rows.square().mean(-1) + eps).sqrt()
        for step, says in ((1, "the row before it"), (-1, "the row after it")):
            yield says, sizes.roll(step, 0)[mine.begin : mine.begin + mine.count]
    if len(x) > 1:
        yield "the first row", right[:1].expand(right.shape)
    if right.dim() > 1:
        for step, says in ((1, "the head before it"), (-1, "the head after it")):
            yield says, right.roll(step, 1)


def _before_turning(case: Case) -> Iterator[Explanation]:
    """Wrong weights of the norms of queries and keys, which are rotated after the norm."""
    mixer, name = mixer_of(case), f"{case.component}_norm"
    if isinstance(mixer, AttentionWeights):
        weight = getattr(mixer, name)
        for says, other in (("w", weight - 1), ("no weight", torch.zeros_like(weight))):
            yield from with_mixer(case, f"is scaled with {says}, not with 1 + w", **{name: other})


def _reweighted(case: Case, says: str, other: torch.Tensor, used: torch.Tensor) -> Iterator[Explanation]:
    if case.right.shape[-1] == len(used):
        yield Explanation(says, case.right * torch.where(used == 0, 1.0, other / used))


def eps_of(case: Case) -> float:
    """The eps of the norm whose result is at this place."""
    config = case.weights.config
    return {"q": L2_EPS, "k": L2_EPS, "value": LATENT_EPS, "gated": config.core_eps}.get(case.component, config.eps)


def norm_input(case: Case) -> torch.Tensor | None:
    """The input [rows, .., normed axis] of the norm whose result is at this place."""
    config, place = case.weights.config, case.finding.place
    if config.recurrence.inputs == "selective" and case.component in ("q", "k", "gated", "query", "key"):
        return None  # they are not normed, or group by group (`selective_states.py`)
    if case.component in ("q", "k"):
        mixed = case.own("mixed")
        if mixed is None:
            return None
        width = config.key_heads * config.key_dim
        begin = width * (case.component == "k")
        return mixed[:, begin : begin + width].reshape(-1, config.key_heads, config.key_dim)
    if case.component == "gated":
        core = case.own("core")
        return core.flatten(1) if core is not None and config.recurrence.norm == "row" else core
    if case.component == "value":
        raw = case.own("key_raw") if config.latent else None
        return None if raw is None else raw[..., : config.latent]
    if config.latent and case.component in ("query", "key"):
        return None
    if case.component == "query":
        projected = case.own("projected")
        return None if projected is None else projected[:, :, 0]
    if case.component == "key":
        return case.own("key_raw")
    if place.layer == STAGE_LEVEL:
        return case.own("embedding") if case.component == "normed" else None
    if case.component == "post_normed" and (residual := case.own("residual")) is not None:
        return residual
    if case.component in ("normed", "post_normed"):
        return case.hidden
    if case.component in ("mixer_normed", "mlp_normed"):
        return case.own(case.component.removesuffix("_normed"))
    return _before_final(case) if case.component == "final" else None


def _before_final(case: Case) -> torch.Tensor | None:
    place, request = case.finding.place, case.finding.request
    layers = [piece for piece in case.pieces
              if (piece.stage, piece.request) == (place.stage, request) and piece.layer < AFTER_LAYERS]  # fmt: skip
    last = max(layers, key=lambda piece: piece.layer, default=None)
    hidden = None if last is None else last.own.get(last.place("hidden"))
    return None if hidden is None else hidden.to("cpu", torch.float64)


def _norm_weight(case: Case) -> torch.Tensor | None:
    weights, place = case.weights, case.finding.place
    layer, draft = layer_of(case), weights.draft
    if case.component == "final" and place.stage == "trunk":
        return _plain(weights.final_norm)
    if draft is not None and (case.component == "final" or place.layer == STAGE_LEVEL):
        return draft.norm if case.component == "final" else draft.norm_embedding
    if layer is None:
        return None
    if case.component == "gated" and isinstance(layer.mixer, GdnWeights | LightningWeights):
        return layer.mixer.norm
    if case.component == "value" and isinstance(layer.mixer, LatentWeights):
        return layer.mixer.latent_norm
    return _plain({"normed": layer.input_norm, "post_normed": layer.post_norm, "mixer_normed": layer.input_norm,
                   "mlp_normed": layer.post_norm}.get(case.component))  # fmt: skip


def _plain(norm: Norm | None) -> torch.Tensor | None:
    """The weight of a norm; None if streams are mixed in its place."""
    return norm if isinstance(norm, torch.Tensor) else None
