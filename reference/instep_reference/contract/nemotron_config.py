"""The configuration of Nemotron-H, whose layers are one block each, from its `config.json`.

Leaves out: what the fields mean (`config.ModelConfig`).
"""

from typing import Any

from .config_fields import Fields, bad, experts_per_token, multiple, only
from .recurrences import RECURRENCES

NEMOTRON = "nemotron_h"
INFINITY = float("inf")  # in files also {"__float__": "Infinity"}, as transformers 5 writes it


def read_nemotron(f: Fields) -> dict[str, Any]:
    """Read a file of Nemotron-H: every layer is one block. Experts may read latents (Nemotron 3 Super).

    Its MTP layer is two blocks, attention and experts. One is served, as in SGLang and vLLM.
    Mirrors: transformers 5.24 `NemotronHConfig`, with its defaults; the releases state a pattern of letters.
    """
    for name, value in (
        ("attention_bias", False), ("mlp_bias", False), ("use_bias", False), ("mamba_proj_bias", False),
        ("mamba_hidden_act", "silu"), ("mlp_hidden_act", "relu2"), ("residual_in_fp32", False),
        ("sliding_window", None),
        ("tie_word_embeddings", False), ("n_shared_experts", 1),
    ):
        only(name, f.get(name), value)
    if f.get("time_step_limit") not in (None, [0.0, INFINITY], [0.0, {"__float__": "Infinity"}]):
        raise bad("time_step_limit", f.get("time_step_limit"), "[0.0, Infinity]: steps are not clamped")
    blocks, mtp_layers = _blocks(f), f.whole("num_nextn_predict_layers", least=0, default=0, most=1)
    if mtp_layers and (stated := _blocks(f, *OF_MTP, default=["attention", "moe"])) != ("nope", "moe"):
        raise bad(" or ".join(OF_MTP), stated, "attention, then experts (*E)")
    value_heads, groups = multiple(f, "mamba_num_heads", "n_groups")
    heads, kv_heads = multiple(f, "num_attention_heads", "num_key_value_heads")
    experts = f.whole("n_routed_experts") if "moe" in blocks or mtp_layers else 0
    routing = _routing(f, experts) if experts else {"experts_per_token": 0, "norm_topk": False}
    return dict(
        model_type=NEMOTRON,
        vocab=f.whole("vocab_size"),
        hidden=f.whole("hidden_size"),
        layers=tuple((block,) for block in blocks),
        eps=f.positive("layer_norm_epsilon"),
        tied=False,
        key_heads=groups, value_heads=value_heads, key_dim=f.whole("ssm_state_size"),
        value_dim=f.whole("mamba_head_dim"), conv_width=f.whole("conv_kernel"), output_gate="silu",
        conv_bias=f.flag("use_conv_bias", default=True),
        heads=heads, kv_heads=kv_heads, head_dim=_head_dim(f), rotary_dim=0, rope_theta=1.0,
        intermediate=f.whole("intermediate_size") if "mlp" in blocks else 0,
        experts=experts,
        expert_intermediate=f.whole("moe_intermediate_size") if experts else 0,
        shared_intermediate=f.whole("moe_shared_expert_intermediate_size") if experts else 0,
        expert_latent=f.whole("moe_latent_size") if experts and f.get("moe_latent_size") is not None else 0,
        mtp_layers=mtp_layers, centred_norms=False, attention_gate=False, mlp_gate=False, **routing,
    )


BLOCKS: dict[str, str] = {
    **dict.fromkeys(("M", "linear_attention", "mamba"), next(
        row.name for row in RECURRENCES.values() if NEMOTRON in row.types)),
    **dict.fromkeys(("*", "full_attention", "attention"), "nope"),
    **dict.fromkeys(("-", "mlp"), "mlp"), **dict.fromkeys(("E", "moe"), "moe"),
}  # by the letter of the pattern, and by today's and the older name


OF_TRUNK = ("layers_block_type", "hybrid_override_pattern")  # fields with names, and with letters
OF_MTP = ("mtp_layers_block_type", "mtp_hybrid_override_pattern")


def _blocks(
    f: Fields, names: str = OF_TRUNK[0], letters: str = OF_TRUNK[1], default: list[str] | None = None
) -> tuple[str, ...]:
    """Read the block of every layer, from a list of names or a pattern of letters. default: if neither is stated."""
    listed, pattern = f.get(names), f.get(letters)
    if pattern is None and listed is None:
        listed = default
    name, stated = (letters, pattern) if listed is None else (names, listed)
    if not isinstance(stated, str if listed is None else list) or not stated:
        raise bad(name, stated, "a pattern such as M-M*ME" if listed is None else "a list of names")
    for index, kind in enumerate(stated):
        if not isinstance(kind, str) or kind not in BLOCKS:
            raise bad(f"{name}[{index}]", kind, f"one of {', '.join(BLOCKS)}")
    count = f.get("num_hidden_layers") if names == OF_TRUNK[0] else None
    if count is not None and count != len(stated):
        raise bad("num_hidden_layers", count, f"{len(stated)}, the length of {name}")
    return tuple(BLOCKS[kind] for kind in stated)


def _head_dim(f: Fields) -> int:
    """Read the width of a head of attention, under the name of today or of the first releases."""
    older = f.get("attention_head_dim")
    width = f.whole("head_dim", default=older)
    only("attention_head_dim", older, width)
    return width


def _routing(f: Fields, experts: int) -> dict[str, Any]:
    groups, chosen = f.whole("n_group", default=1), experts_per_token(f, experts)
    if experts % groups or experts // groups < 2:
        raise bad("n_group", groups, f"a divisor of n_routed_experts ({experts}), with at least two in a group")
    best = f.whole("topk_group", default=1, most=groups)
    if chosen > best * (experts // groups):
        raise bad("num_experts_per_tok", chosen, f"at most {best * (experts // groups)}, the experts of topk_group")
    return {
        "experts_per_token": chosen, "norm_topk": f.flag("norm_topk_prob", default=True), "router": "sigmoid",
        "expert_groups": groups, "groups_per_token": best, "routed_scale": f.positive("routed_scaling_factor"),
    }
