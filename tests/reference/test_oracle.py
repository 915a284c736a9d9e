"""The reference agrees with `transformers`, an independent implementation: layers, logits, memory, draft head.

Leaves out: rounds of speculation, because transformers has no counterpart that keeps the state.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from documentation import parity, parity_table
from documentation.parity import CASES, DTYPES, HEADS, Case
from documentation.parity_table import ALLOWED
from instep_reference import attention, gdn, lightning, mla, mlp, short_conv, trunk
from instep_reference.attention import AttentionMemory
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.place_names import Place
from instep_reference.norms import L2_EPS, rms_norm
from instep_reference.weights import Weights
from support.independent.transformers_models import in_double
from support.inputs.checkpoints import Kind
from support.running.covering import WHOLE, few

pytestmark = [  # imports transformers
    pytest.mark.slow, pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]

NAMES = [case.name for case in (*CASES, *HEADS)]
# fp64 shows whether the formulas are the same; of fp32 `make test` has the first of each family, and trained models.
IN_FP32 = {name for index, name in enumerate(NAMES) if "trained" in name or name.split(",")[0] not in {
    before.split(",")[0] for before in NAMES[:index]}}  # fmt: skip
MARGIN = 1.0001  # one ten-thousandth more: far below anything that a norm over a layer would show in bf16


@pytest.fixture(scope="module")
def stored() -> dict[tuple[str, str], parity_table.Parity]:
    return {(row.configuration, row.width): row for row in parity_table.stored()}


@few(5)
@pytest.mark.parametrize(("name", "width"), [
    pytest.param(name, width, marks=() if width == "fp64" or name in IN_FP32 else WHOLE)
    for name in NAMES for width in DTYPES
])  # fmt: skip
def test_reference_agrees_with_transformers(
    name: str, width: str, stored: dict[tuple[str, str], parity_table.Parity]
) -> None:
    row = parity.parity(name, width)
    assert row.compared == stored[name, width].compared > 0, "measure anew: see documentation/parity.py"
    assert row.worst <= row.allowed, f"hidden {row.hidden:.1e}, logits {row.logits:.1e}, memory {row.memory}"


def test_safe_gate_agrees_with_transformers() -> None:
    """Ling's gate has a bound. Without it the gate is a softplus, also channel by channel."""
    heads, width = 3, 8
    modelling = in_double("transformers.models.bailing_hybrid.modeling_bailing_hybrid")
    a = torch.randn(4, heads, width, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for bound in (-5.0, None):
        gate = modelling.BailingHybridForgetGate(SimpleNamespace(
            linear_head_dim=width, linear_num_heads=heads, hidden_size=heads * width,
            kda_safe_gate=bound is not None, kda_lower_bound=bound)).double().requires_grad_(False)  # fmt: skip
        torch.nn.init.eye_(gate.f_proj.weight)
        for parameter in (gate.A_log, gate.dt_bias):
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(4))
        theirs, dt_bias = gate(a.flatten(1)[None])[0], gate.dt_bias.unflatten(0, (heads, width))
        error = (gdn.forget(a, gate.A_log, dt_bias, bound) - theirs).abs().max() / theirs.abs().max()
        assert float(error) <= ALLOWED["fp64"]
        assert float((gdn.forget(a, gate.A_log, dt_bias, -4.999) - theirs).abs().max()) > 100 * ALLOWED["fp64"]


@pytest.mark.parametrize("width", DTYPES)
def test_conv_of_width_1_agrees_with_transformers(width: str) -> None:
    row = parity._trunk(Case("conv width 1", "dense", {"linear_conv_kernel_dim": 1}), width)
    assert row.compared > 0 and row.worst <= row.allowed


def test_committed_table_covers_these_configurations(stored: dict[tuple[str, str], parity_table.Parity]) -> None:
    assert [*stored] == [(name, width) for name in NAMES for width in DTYPES]
    assert all(row.worst <= row.allowed for row in stored.values())


def _decay_of_one_head(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = trunk.advance

    def advance(weights: Weights, *args: object, **kwargs: object) -> object:
        layer = weights.layers[1]
        A_log = layer.mixer.A_log.clone()
        A_log[0] *= MARGIN
        wrong = replace(layer, mixer=replace(layer.mixer, A_log=A_log))
        layers = (weights.layers[0], wrong, *weights.layers[2:])
        return correct(replace(weights, layers=layers), *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(trunk, "advance", advance)


def _eps_of_l2_outside_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gdn, "l2_norm", lambda x: x / ((x * x).sum(-1, keepdim=True).sqrt() + L2_EPS))


def _positions_one_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary is relative: no logit changes, only the stored keys."""
    correct = attention.rotate
    monkeypatch.setattr(attention, "rotate", lambda x, positions, config: correct(x, positions + 1, config))


def _rotary_angles_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention.rotate
    monkeypatch.setattr(attention, "rotate", lambda x, positions, config: right(x.float(), positions, config).double())


def _a_row_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = trunk.rms_norm
    monkeypatch.setattr(trunk, "rms_norm", lambda x, weight, eps: correct(x.float(), weight, eps))


def _hidden_before_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(place: Place, x: torch.Tensor) -> torch.Tensor:
        return x.roll(x.shape[-1] // 2, -1) if place.component == "joined" else x

    monkeypatch.setattr(parity, "unseen", swapped)


def _latent_of_the_token_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys read the latent of their own token, values that of the token before."""
    correct = mla.expand

    def expand(config: ModelConfig, up: torch.Tensor, memory: AttentionMemory) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = correct(config, up, memory)
        return keys, values.roll(1, 0)

    monkeypatch.setattr(mla, "expand", expand)


def _latent_with_the_eps_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla, "LATENT_EPS", 1e-5)


def _decay_of_the_next_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = gdn.forget
    monkeypatch.setattr(gdn, "forget", lambda *args: correct(*args).roll(1, -1))


def _decay_of_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = gdn.forget
    monkeypatch.setattr(gdn, "forget", lambda *args: correct(*args).mean(-1, keepdim=True).expand_as(args[0]))


def _bias_in_the_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = mlp.route_by_sigmoid

    def route(config: ModelConfig, scores: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return correct(config, torch.logit(torch.sigmoid(scores) + (MARGIN - 1) * bias), bias)

    monkeypatch.setattr(mlp, "route_by_sigmoid", route)


def _groups_ranked_by_their_best_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of two is as good as its better expert: the second is sorted away before the sum."""
    correct = mlp.route_by_sigmoid

    def route(config: ModelConfig, scores: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ranks = (torch.sigmoid(scores) + bias).unflatten(-1, (config.expert_groups, -1))
        best = ranks.amax(-1).topk(config.groups_per_token).indices[..., None] == torch.arange(config.expert_groups)
        best = best.any(-2)[..., None].expand_as(ranks).flatten(-2)
        return correct(replace(config, expert_groups=1, groups_per_token=1), scores, bias.masked_fill(~best, -9.0))

    monkeypatch.setattr(mlp, "route_by_sigmoid", route)


def _beta_up_to_1(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_another(monkeypatch, beta_bound=1.0)


def _gated_norm_with_the_eps_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_another(monkeypatch, gated_norm_eps=None)


def _norms_before_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_another(monkeypatch, norm_after=())


def _with_another(monkeypatch: pytest.MonkeyPatch, **changed: object) -> None:
    correct = trunk.layer
    monkeypatch.setattr(trunk, "layer", lambda config, *args, **named: correct(
        replace(config, **changed), *args, **named))


def _heads_normed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def normed(x: torch.Tensor, weight: torch.Tensor, config: ModelConfig) -> torch.Tensor:
        return rms_norm(x, weight.reshape(x.shape[1:]), config.eps)

    monkeypatch.setattr(attention, "_normed", normed)


def _values_skip_less(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_other_mixers(monkeypatch, lambda mixer: replace(mixer, skip=mixer.skip / MARGIN))


def _conv_bias_of_the_channel_before(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_other_mixers(monkeypatch, lambda mixer: replace(mixer, conv_bias=mixer.conv_bias.roll(1)))


def _with_other_mixers(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    correct = gdn.mix
    monkeypatch.setattr(gdn, "mix", lambda config, weights, *args: correct(config, change(weights), *args))


def _groups_normed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = gdn.gated_group_norm
    monkeypatch.setattr(gdn, "gated_group_norm", lambda *args: correct(*args[:-1], 1))


def _steps_of_at_least_a_thousandth(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest memories of these models have shorter steps: a clamp as in transformers changes them."""
    clamped = SimpleNamespace(silu=F.silu, softplus=lambda x: F.softplus(x).clamp(min=1e-3))
    monkeypatch.setattr(gdn, "F", clamped)


def _sums_leave_latents_a_little_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_experts(monkeypatch, lambda weights: {"from_latent": weights.from_latent * MARGIN})


def _limit_of_the_shared_expert_a_little_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_experts(monkeypatch, lambda weights: {"shared": replace(
        weights.shared, limit=weights.shared.limit and weights.shared.limit * MARGIN)})


def _with_experts(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], dict[str, Any]]) -> None:
    correct = mlp.mixture
    monkeypatch.setattr(mlp, "mixture", lambda config, weights, x: correct(
        config, replace(weights, **change(weights)), x))


def _silu_after_a_short_conv(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = short_conv.causal_conv

    def convolve(x: torch.Tensor, weight: torch.Tensor, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mixed, after = correct(x, weight, window)
        return torch.nn.functional.silu(mixed), after

    monkeypatch.setattr(short_conv, "causal_conv", convolve)


def _window_without_its_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The window of the last token's x, and not of B * x: only the next part of a prompt shows it."""
    correct = short_conv.causal_conv

    def convolve(x: torch.Tensor, weight: torch.Tensor, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mixed, after = correct(x, weight, window)
        return mixed, torch.cat([after[:, :-1], after[:, -1:] * MARGIN], 1)

    monkeypatch.setattr(short_conv, "causal_conv", convolve)


def _norm_of_each_head(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = lightning.over_rms

    def normed(x: torch.Tensor, eps: float) -> torch.Tensor:
        return correct(x.unflatten(1, (4, -1)), eps).flatten(1)

    monkeypatch.setattr(lightning, "over_rms", normed)


def _decay_of_one_head_of_minimax(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = lightning.mix

    def mix(config: ModelConfig, weights: Any, *args: object) -> object:
        margins = torch.tensor([MARGIN, 1.0, 1.0, 1.0], dtype=weights.log_decay.dtype)
        return correct(config, replace(weights, log_decay=weights.log_decay * margins), *args)  # type: ignore[arg-type]

    monkeypatch.setattr(lightning, "mix", mix)


def _residual_before_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_another(monkeypatch, residual_factors=())


def _n_grams_added_a_little_stronger(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = trunk.per_layer_embedding.embed

    def embed(shape: Any, weights: Any, hidden: torch.Tensor, *args: Any, **forms: Any) -> tuple[Any, Any]:
        wide, memory = correct(shape, weights, hidden, *args, **forms)
        return torch.lerp(hidden, wide, MARGIN), memory

    monkeypatch.setattr(trunk.per_layer_embedding, "embed", embed)


def _strength_of_the_stream_before(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = trunk.add_to_streams
    monkeypatch.setattr(trunk, "add_to_streams", lambda hidden, made, strength: correct(
        hidden, made, strength.lerp(strength.roll(1, -1), MARGIN - 1)))


KINDS: tuple[Kind, ...] = ("kimi", "olmo", "nemotron", "lfm2", "minimax", "qwen4")
TRUNK, HEAD, KIMI, OLMO, NEMOTRON, LFM2, MINIMAX, QWEN4 = CASES[0].name, HEADS[0].name, *(
    next(case.name for case in CASES if case.kind == kind) for kind in KINDS)
NEMOTRON_HEAD = next(case.name for case in HEADS if case.kind == "nemotron")
LATENTS, CLAMPED = (next(case.name for case in CASES if case.overrides.get(field)) for field in (
    "moe_latent_size", "share_expert_swiglu_limit_list"))


@few(3)
@pytest.mark.parametrize(("plant", "name"), [
    (_decay_of_one_head, TRUNK), (_eps_of_l2_outside_the_root, TRUNK), (_positions_one_further, TRUNK),
    (_rotary_angles_in_fp32, TRUNK), (_a_row_in_fp32, TRUNK), (_hidden_before_embedding, HEAD),
    (_hidden_before_embedding, NEMOTRON_HEAD),
    (_latent_of_the_token_before, KIMI), (_latent_with_the_eps_of_the_model, KIMI), (_decay_of_the_next_channel, KIMI),
    (_decay_of_the_head, KIMI), (_bias_in_the_shares, KIMI), (_groups_ranked_by_their_best_expert, KIMI),
    (_beta_up_to_1, OLMO), (_gated_norm_with_the_eps_of_the_model, OLMO), (_norms_before_attention, OLMO),
    (_heads_normed_one_by_one, OLMO), (_values_skip_less, NEMOTRON), (_conv_bias_of_the_channel_before, NEMOTRON),
    (_groups_normed_together, NEMOTRON), (_steps_of_at_least_a_thousandth, NEMOTRON),
    (_sums_leave_latents_a_little_larger, LATENTS), (_limit_of_the_shared_expert_a_little_larger, CLAMPED),
    (_silu_after_a_short_conv, LFM2), (_window_without_its_gate, LFM2), (_norm_of_each_head, MINIMAX),
    (_decay_of_one_head_of_minimax, MINIMAX), (_residual_before_the_norm, MINIMAX),
    (_n_grams_added_a_little_stronger, QWEN4), (_strength_of_the_stream_before, QWEN4),
])
def test_a_slight_error_would_be_noticed(
    plant: Callable[[pytest.MonkeyPatch], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    row = parity.parity.__wrapped__(name, "fp64")
    assert row.worst > 100 * row.allowed
