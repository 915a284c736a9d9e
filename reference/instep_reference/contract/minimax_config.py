"""The configuration of MiniMax, lightning attention and softmax attention with experts, from its `config.json`.

Leaves out: what the fields mean (`config.ModelConfig`).
"""

from __future__ import annotations

from typing import Any

from .config_fields import Fields, bad, experts_per_token, multiple, only, positive
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
    heads, kv_heads = multiple(f, "num_attention_heads", "num_key_value_heads")
    if hidden % heads and f.get("head_dim") is None:
        raise bad("num_attention_heads", heads, f"a divisor of hidden_size ({hidden})")
    head_dim = f.whole("head_dim", default=hidden // heads)
    if head_dim % 2:
        raise bad("head_dim", head_dim, "an even number: rotary turns pairs of channels")
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
    if not isinstance(stated, list) or len(stated) != layers:
        found = f"{len(stated)} entries" if isinstance(stated, list) else stated
        raise bad("layer_types", found, f"a list of {layers} entries (num_hidden_layers)")
    for index, kind in enumerate(stated):
        if not isinstance(kind, str) or kind not in LAYERS:
            raise bad(f"layer_types[{index}]", kind, f"one of {', '.join(LAYERS)}")
    return tuple(LAYERS[kind] for kind in stated)
