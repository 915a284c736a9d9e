"""The configuration of MiniMax, lightning attention and softmax attention with experts, from its `config.json`.

Leaves out: what the fields mean (`config.ModelConfig`).
"""

from typing import Any

from .config_fields import Fields, experts_per_token, mixers_of, only, positive, turning_heads
from .recurrences import RECURRENCES

MINIMAX = "minimax"
ROW = next(row.name for row in RECURRENCES.values() if MINIMAX in row.types)
LAYERS = {"linear_attention": ROW, "full_attention": "attention"}  # by the names in `layer_types`
NORM_EPS, THETA = 1e-6, 1e6  # defaults of `MiniMaxRMSNorm`, which norms the read-out, and of `MiniMaxConfig`


def read_minimax(f: Fields) -> dict[str, Any]:
    """Read a file of MiniMax. Every layer has experts. Its residual stream is the norm's result, times a factor.

    Mirrors: transformers 5.24 `MiniMaxConfig` and `MiniMaxDecoderLayer`. Positions turn all channels of a head, as in
             transformers. Files with a partial rotation are refused.
    """
    for name, value in (("hidden_act", "silu"), ("sliding_window", None), ("attention_bias", False)):
        only(name, f.get(name), value)
    for name in ("rope_type", "type"):
        only(name, f.rope(name), "default")
    hidden = f.whole("hidden_size")
    heads, kv_heads, head_dim = turning_heads(f, hidden)
    only("rotary_dim", f.get("rotary_dim"), head_dim)
    only("partial_rotary_factor", f.rope("partial_rotary_factor"), 1.0)
    name = "num_local_experts" if f.get("num_experts") is None else "num_experts"
    experts, theta, layers = f.whole(name), f.rope("rope_theta"), _mixers(f)
    return dict(
        model_type=MINIMAX,
        vocab=f.whole("vocab_size"),
        hidden=hidden,
        layers=tuple((mixer, "moe") for mixer in layers),
        eps=f.positive("rms_norm_eps"),
        tied=f.flag("tie_word_embeddings", default=False),
        key_heads=heads, value_heads=heads, key_dim=head_dim, value_dim=head_dim, conv_width=1,
        output_gate="sigmoid", gated_norm_eps=NORM_EPS,
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, rotary_dim=head_dim,
        rope_theta=THETA if theta is None else positive("rope_theta", theta),
        intermediate=0, experts=experts, experts_per_token=experts_per_token(f, experts),
        expert_intermediate=f.whole("intermediate_size"), shared_intermediate=0, norm_topk=True, mtp_layers=0,
        centred_norms=False, attention_gate=False, head_norms=False,
        residual_factors=tuple((block, *(_factor(f, f"{part}_{which}_factor") for which in ("alpha", "beta")))
                               for block, part in PARTS.items()),
    )  # fmt: skip


PARTS = {ROW: "linear_attn", "attention": "full_attn", "moe": "mlp"}  # the beginnings of the names of their factors


def _factor(f: Fields, name: str) -> float:
    value = f.get(name)
    return 1.0 if value is None else positive(name, value)


def _mixers(f: Fields) -> tuple[str, ...]:
    """Read the mixers of layers. By default every second one has lightning attention, the first one softmax."""
    layers, stated = f.whole("num_hidden_layers"), f.get("layer_types")
    if stated is None:
        stated = ["linear_attention" if index % 2 else "full_attention" for index in range(layers)]
    return mixers_of(stated, layers, LAYERS)
