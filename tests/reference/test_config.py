"""Reading `config.json`: a frozen configuration, or one line that names the field.

Leaves out: weights.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from instep_reference.contract.config import ALIASES, MOST_LAYERS, ModelConfig
from instep_reference.contract.errors import BadInput
from instep_reference.contract.place_names import AFTER_LAYERS
from support.inputs.checkpoints import Kind, config_of


def test_a_dense_file_is_read() -> None:
    config = ModelConfig.from_dict(config_of("dense"))
    assert config.model_type == "qwen3_5"
    assert config.mixers == (*["gdn"] * 3, "attention")
    assert (config.key_heads, config.value_heads, config.key_dim, config.value_dim) == (2, 4, 8, 16)
    assert (config.head_dim, config.rotary_dim, config.rope_theta) == (16, 4, 1e7)
    assert (config.experts, {mlp for _, mlp in config.layers}, config.mtp_layers) == (0, {"mlp"}, 1)


def test_a_multimodal_file_is_read_at_its_text_config() -> None:
    text = config_of("moe", tie_word_embeddings=None)
    whole = {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {}, "tie_word_embeddings": True}
    config = ModelConfig.from_dict(whole)
    assert config == dataclasses.replace(ModelConfig.from_dict(text), tied=True)
    assert config.model_type == "qwen3_5_moe"


def test_rope_theta_is_read_from_either_place_and_has_no_default() -> None:
    rope = {"rope_parameters": None, "partial_rotary_factor": 0.5}
    config = ModelConfig.from_dict(config_of("dense", rope_theta=5e6, **rope))
    assert (config.rope_theta, config.rotary_dim) == (5e6, 8)
    with pytest.raises(BadInput, match="rope_theta"):
        ModelConfig.from_dict(config_of("dense", **rope))


def test_a_rotary_value_that_is_stated_twice_must_agree() -> None:
    twice = config_of("dense", rope_theta=1e7, partial_rotary_factor=0.25, rope_scaling={"type": "default"})
    assert ModelConfig.from_dict(twice) == ModelConfig.from_dict(config_of("dense"))
    for name, value in (("rope_theta", 1e4), ("partial_rotary_factor", 0.5)):
        with pytest.raises(BadInput, match=rf"{name}: found .*rope_parameters\.{name}"):
            ModelConfig.from_dict(config_of("dense", **{name: value}))


def test_missing_field_has_the_default_of_its_class() -> None:
    config = ModelConfig.from_dict(config_of(
        "next", head_dim=None, full_attention_interval=None, norm_topk_prob=None, output_gate_type=None,
        mlp_only_layers=None, decoder_sparse_step=None, mtp_num_hidden_layers=None, tie_word_embeddings=None,
        rope_parameters={"rope_theta": 1e7},
    ))
    assert (config.head_dim, config.rotary_dim) == (256, 64)
    assert config.mixers == (*["gdn"] * 3, "attention")
    assert (config.norm_topk, config.output_gate, config.tied) == (True, "silu", False)
    assert ({mlp for _, mlp in config.layers}, config.mtp_layers) == ({"moe"}, 0)


@pytest.mark.parametrize(("stated", "gate"), [("silu", "silu"), ("swish", "silu"), ("sigmoid", "sigmoid")])
def test_output_gate_is_read_from_all_its_names(stated: str, gate: str) -> None:
    assert ModelConfig.from_dict(config_of("dense", output_gate_type=stated)).output_gate == gate


def test_place_after_the_last_layer_sorts_after_every_layer() -> None:
    assert MOST_LAYERS < AFTER_LAYERS


def test_layer_types_take_precedence_over_the_interval() -> None:
    types = ["full_attention", "linear_attention", "linear_attention"]
    config = ModelConfig.from_dict(config_of("dense", num_hidden_layers=3, layer_types=types))
    assert config.mixers == ("attention", "gdn", "gdn")
    every_second = ModelConfig.from_dict(config_of("dense", full_attention_interval=2))
    assert every_second.mixers == ("gdn", "attention", "gdn", "attention")


def dense(data: dict[str, Any]) -> list[int]:
    """The layers without experts."""
    return [layer for layer, blocks in enumerate(ModelConfig.from_dict(data).layers) if "mlp" in blocks]


def test_layers_without_experts_follow_the_list_and_the_step() -> None:
    assert dense(config_of("next", mlp_only_layers=[2])) == [2]
    assert dense(config_of("next", decoder_sparse_step=2)) == [0, 2]


def test_only_qwen3_next_has_layers_without_experts() -> None:
    """Qwen3.5-MoE's classes know no such fields and build experts everywhere."""
    assert dense(config_of("moe", mlp_only_layers=[2], decoder_sparse_step=2)) == []


def test_only_qwen3_next_may_skip_renormalisation() -> None:
    assert not ModelConfig.from_dict(config_of("next", norm_topk_prob=False)).norm_topk
    assert ModelConfig.from_dict(config_of("moe", norm_topk_prob=False)).norm_topk


def test_drafter_configuration_is_a_separate_object() -> None:
    config = ModelConfig.from_dict(config_of("next", mlp_only_layers=[0], mtp_num_hidden_layers=2))
    before = dataclasses.asdict(config)
    drafter = config.drafter()
    assert drafter.mixers == ("attention", "attention")
    assert ({mlp for _, mlp in drafter.layers}, drafter.mtp_layers, drafter.experts) == ({"moe"}, 0, config.experts)
    assert dataclasses.asdict(config) == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.layers = ()  # type: ignore[misc]


def test_a_file_of_kimi_linear_is_read() -> None:
    """Its lists of layers count from 1. A key ends in channels without positions that all heads share."""
    config = ModelConfig.from_dict(config_of("kimi"))
    assert config.layers == (("kda", "mlp"), ("kda", "moe"), ("kda", "moe"), ("mla", "moe"))
    assert (config.recurrent, config.attending, config.mtp_layers) == ((0, 1, 2), (3,), 0)
    assert (config.key_heads, config.value_heads, config.key_dim, config.value_dim) == (4, 4, 8, 8)
    assert (config.head_dim, config.value_width, config.stored_rows) == (12, 16, ((1, 4), (1, 12)))
    assert (config.router, config.routed_scale) == ("sigmoid", 2.446)
    assert (config.expert_groups, config.groups_per_token) == (2, 1)
    types = {"layer_types": ["linear_attention"] * 3 + ["full_attention"],
             "mlp_layer_types": ["dense"] + ["sparse"] * 3}  # fmt: skip
    assert ModelConfig.from_dict(config_of("kimi", **types)) == config


def test_a_file_of_olmo_hybrid_is_read() -> None:
    config = ModelConfig.from_dict(config_of("olmo"))
    assert config.layers == (("gdn", "mlp"), ("attention", "mlp"))
    assert (config.beta_bound, config.eps, config.core_eps) == (2.0, 1e-6, 1e-5)
    assert (config.head_dim, config.rotary_dim, config.attention_gate) == (8, 0, False)
    assert config.norm_after == ("attention",)
    silent = {"layer_types": None, "num_hidden_layers": 4, "linear_num_key_heads": None, "linear_num_value_heads": None,
              "linear_key_head_dim": None, "linear_value_head_dim": None, "linear_conv_kernel_dim": None,
              "num_key_value_heads": None, "linear_allow_neg_eigval": None}  # fmt: skip
    config = ModelConfig.from_dict(config_of("olmo", **silent))
    assert config.mixers == ("gdn", "gdn", "gdn", "attention")
    assert (config.key_heads, config.value_heads, config.key_dim, config.value_dim) == (4, 4, 6, 12)
    assert (config.conv_width, config.kv_heads, config.beta_bound) == (4, 4, 2.0)
    one = ModelConfig.from_dict(config_of("olmo", linear_allow_neg_eigval=False))
    assert one.beta_bound == 1.0


def test_a_file_of_lfm2_is_read() -> None:
    """The width of an MLP is two thirds of the stated one, rounded up to a multiple. Older files list attention."""
    config = ModelConfig.from_dict(config_of("lfm2"))
    assert config.mixers == ("short_conv", "short_conv", "attention", "short_conv")
    assert (config.convolving, config.recurrent, config.attending) == ((0, 1, 3), (), (2,))
    assert (config.lengths(("C",)), config.segments, config.conv_width) == ((32,), ((32, 1),), 3)
    assert (config.head_dim, config.rotary_dim, config.intermediate, config.tied) == (8, 8, 48, True)
    assert not config.attention_gate and not config.centred_norms
    older = {"layer_types": None, "full_attn_idxs": [2], "intermediate_size": None, "block_ff_dim": 64,
             "tie_word_embeddings": None, "tie_embedding": True, "rope_parameters": None,
             "rope_theta": 1e6}  # fmt: skip
    assert ModelConfig.from_dict(config_of("lfm2", **older)) == config
    stated = ModelConfig.from_dict(config_of("lfm2", block_auto_adjust_ff_dim=False, tie_embedding=False))
    assert (stated.intermediate, stated.tied) == (64, False)


def test_a_file_of_ling_is_read_under_either_names_of_its_fields() -> None:
    """Those of the release, and those under which transformers 5.24 writes the same fields."""
    config = ModelConfig.from_dict(config_of("ling"))
    assert config.layers == (("kda", "mlp"), ("kda", "moe"), ("kda", "moe"), ("mla", "moe"))
    assert (config.drafter().layers, config.decay_bound, config.mtp_layers) == ((("mla", "moe"),), -5.0, 1)
    assert (config.head_dim, config.rotary_dim, config.rope_theta, config.low_rank) == (12, 4, 6e6, False)
    assert (config.expert_groups, config.groups_per_token, config.shared_intermediate) == (2, 1, 16)
    written = {ALIASES.get(name, name): value for name, value in config_of("ling").items()}
    assert ModelConfig.from_dict(written | {"head_dim": 4, "linear_head_dim": 8}) == config
    assert ModelConfig.from_dict(config_of("ling", kda_lower_bound=None)).decay_bound == -5.0
    assert ModelConfig.from_dict(config_of("ling", kda_safe_gate=False)).decay_bound is None
    for stated in (None, [0, 0, 0, 0], [0.0, None]):
        assert ModelConfig.from_dict(config_of("ling", expert_swiglu_limit_list=stated)) == config
    clamped = ModelConfig.from_dict(config_of(
        "ling", expert_swiglu_limit_list=[0, 0, None, 4], share_expert_swiglu_limit_list=[0, 0, 5.0, 7.0]))
    assert [clamped.limits(layer) for layer in range(4)] == [(None, None), (None, None), (None, 5.0), (4.0, 7.0)]
    assert clamped.drafter() == config.drafter(), "the MTP layer has no limits"


def test_a_file_of_minimax_is_read() -> None:
    config = ModelConfig.from_dict(config_of("minimax"))
    assert config.mixers == ("lightning", "lightning", "attention", "lightning")
    assert (config.recurrent, config.convolving, config.attending) == ((0, 1, 3), (), (2,))
    assert (config.key_heads, config.value_heads, config.key_dim, config.value_dim) == (4, 4, 8, 8)
    assert (config.eps, config.core_eps, config.head_norms, config.norm_topk) == (1e-5, 1e-6, False, True)
    assert [config.factors(block) for block in ("lightning", "attention", "moe", "mlp")] == [
        (3.0, 0.75), (3.5, 1.25), (2.5, 1.5), None]
    silent = {"layer_types": None, "mlp_alpha_factor": None, "num_local_experts": None, "num_experts": 4}
    config = ModelConfig.from_dict(config_of("minimax", **silent))
    assert config.mixers == ("attention", "lightning") * 2
    assert (config.factors("moe"), config.experts) == ((1.0, 1.5), 4)


def test_a_file_of_qwen4_exp_is_read() -> None:
    config = ModelConfig.from_dict(config_of("qwen4"))
    assert config.layers == (("ple", "gdn", "moe"), ("gdn", "moe"), ("ple", "gdn", "moe"), ("attention", "moe"))
    assert config.mixers == ("gdn", "gdn", "gdn", "attention")
    assert (config.keeping("ngram"), config.convolving, config.streams, config.stream_rank) == ((0, 2), (0, 1, 2), 4, 6)
    assert [(shape.layer, shape.index, shape.sizes) for shape in config.ple] == [
        (0, 0, (53, 59, 61, 67)), (2, 1, (71, 73, 79, 83))]
    assert config.lengths(("SD", "R", "N-1", "E")) == (128, 9, 2, 16) and config.ple_before(2).entries == 312
    assert (config.most_positions, config.mtp_layers, config.norm_topk) == (4096, 0, True)
    indexer = dict.fromkeys(("indexer_n_heads", "indexer_kv_heads", "indexer_budget", "indexer_compress_ratio"))
    without = config_of(
        "qwen4", ple_layer_ids=None, indexer_head_dim=None, rope_parameters={"rope_theta": 1e4}, **indexer)
    config = ModelConfig.from_dict({"model_type": "qwen4_exp", "text_config": without})
    assert (config.ple, config.most_positions, config.rotary_dim) == ((), None, config.head_dim)


@pytest.mark.parametrize("content", [
    b"", b"{", b"[1]", b"\xff\xfe", pytest.param(b'{"a":' * 100_000, id="too deep"), b'{"model_type": "qwen3_5"',
])
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=r"config\.json"):
        ModelConfig.from_file(path)


def test_a_file_is_read_from_its_path(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(BadInput, match="no such file"):
        ModelConfig.from_file(path)
    path.write_text(json.dumps(config_of("dense")))
    assert ModelConfig.from_file(path) == ModelConfig.from_dict(config_of("dense"))


def test_a_file_of_nemotron_h_is_read() -> None:
    """Each layer is one block. A pattern of letters, names and older names state the same."""
    config = ModelConfig.from_dict(config_of("nemotron"))
    assert config.layers == (("mamba2",), ("mlp",), ("mamba2",), ("nope",), ("moe",))
    assert (config.recurrent, config.attending, config.mtp_layers) == ((0, 2), (3,), 0)
    assert (config.key_heads, config.value_heads, config.key_dim, config.value_dim) == (2, 4, 8, 16)
    assert config.segments == ((4, 16), (2, 8), (2, 8)), "x, B, C"
    assert (config.conv_bias, config.mlp_gate, config.router) == (True, False, "sigmoid")
    for names in (["linear_attention", "mlp", "linear_attention", "full_attention", "moe"],
                  ["mamba", "mlp", "mamba", "attention", "moe"]):
        named = config_of("nemotron", hybrid_override_pattern=None, layers_block_type=names, num_hidden_layers=5)
        assert ModelConfig.from_dict(named) == config
    assert config.drafter().layers == ()
    for stated in ({}, {"mtp_hybrid_override_pattern": "*E"}, {"mtp_layers_block_type": ["full_attention", "moe"]}):
        heads = ModelConfig.from_dict(config_of("nemotron", num_nextn_predict_layers=1, **stated))
        assert heads.drafter().layers == (("nope", "moe"),)
    for pattern, latent in (("M-M*E", 12), ("M*", 0)):
        stated = config_of("nemotron", moe_latent_size=12, hybrid_override_pattern=pattern)
        assert ModelConfig.from_dict(stated).expert_latent == latent


def test_a_file_of_nemotron_h_states_infinity_and_an_older_name(tmp_path: Path) -> None:
    """As released: a bare Infinity is no JSON. transformers 5 writes an object in its place."""
    path, config = tmp_path / "config.json", ModelConfig.from_dict(config_of("nemotron"))
    for limit in (float("inf"), {"__float__": "Infinity"}):
        path.write_text(json.dumps(config_of("nemotron", time_step_limit=[0.0, limit])))
        assert ModelConfig.from_file(path) == config
    assert ModelConfig.from_dict(config_of("nemotron", head_dim=None, attention_head_dim=16)) == config


# The kind of file -> a field -> values that are refused. "FIELD: NAME": the message has this name.
REFUSED: dict[Kind, dict[str, list[Any]]] = {
    "dense": {
        "model_type": ["llama", None], "hidden_size": [None, 0], "vocab_size": ["many", True], "rms_norm_eps": [-1e-6],
        "num_hidden_layers": [0, 1 << 16, 10**12], "mtp_num_hidden_layers": [-1, 10**12], "linear_key_head_dim": [0],
        "linear_value_head_dim": [0], "linear_conv_kernel_dim": [0], "linear_num_value_heads": [3],
        "num_attention_heads": [3], "hidden_act": ["gelu"], "attention_bias": [True], "attn_output_gate": [False],
        "layer_types": [["linear_attention"], ["linear_attention"] * 3 + ["sliding_attention"], "full_attention"],
        "head_dim: partial_rotary_factor": [2], "output_gate_type": ["tanh", ["silu"]], "tie_word_embeddings": [1],
        "text_config": [7], "rope_parameters": [7], "rope_scaling: type": [{"type": "yarn", "factor": 4.0}],
        "rope_parameters: rope_type": [{"rope_type": "yarn", "rope_theta": 1e7}],
    },
    "next": {
        "num_experts": [None], "num_experts_per_tok": [5, 0], "moe_intermediate_size": [None],
        "mlp_only_layers": [[9], [True]], "decoder_sparse_step": [0],
    },
    "kimi": {
        "q_lora_rank": [8], "mla_use_nope": [False], "moe_router_activation_func": ["softmax"], "moe_layer_freq": [2],
        "num_nextn_predict_layers": [1], "tie_word_embeddings": [True], "mla_use_output_gate": [True],
        "routed_expert_hidden_size": [8], "attn_res_block_size": [2], "hidden_act": ["situ"],
        "num_key_value_heads": [2], "num_expert_group": [3, 8], "topk_group": [3, 0],
        "num_experts_per_token": [5, 9, 1], "kv_lora_rank": [None, 0], "layer_types": [["full_attention"] * 4],
        "mlp_layer_types": [["sparse"] * 4], "num_shared_experts": [0],
        "linear_attn_config.kda_layers: linear_attn_config": [[1, 2]],
        "linear_attn_config.kda_layers": [[1, 2, 3, 5], "all"],
        "linear_attn_config.full_attn_layers: linear_attn_config": [[3, 4]],
        "linear_attn_config.gate_lower_bound": [-5.0], "linear_attn_config.use_full_rank_gate": [True],
    },
    "olmo": {
        "rope_parameters: rope_theta": [{"rope_type": "default", "rope_theta": 5e5}, None], "attention_bias": [True],
        "num_nextn_predict_layers": [1], "hidden_act": ["gelu"], "num_attention_heads": [5],
        "num_key_value_heads: num_attention_heads": [3], "linear_num_value_heads": [3],
        "linear_allow_neg_eigval": [2.0], "linear_use_gate": [False],
        "layer_types": [["sliding_attention", "full_attention"]],
    },
    "lfm2": {
        "conv_bias": [True], "layer_types": [["conv"], ["conv", "linear_attention", "conv", "conv"]],
        "norm_eps": [None], "conv_L_cache": [0], "num_attention_heads": [3, 5], "head_dim": [7],
        "intermediate_size": [0], "block_multiple_of": [0], "block_ffn_dim_multiplier": [-1.0],
        "full_attn_idxs": [[4], "all", None], "rope_parameters: rope_type": [{"rope_type": "yarn", "rope_theta": 1e6}],
    },
    "ling": {
        "q_lora_rank": [8], "use_mla_nope": [True], "rope_interleave": [False], "no_kda_lora": [False],
        "gated_attention_proj_granularity_type": ["element_wise"], "score_function": ["softmax"],
        "mtp_use_kda": [True], "moe_router_enable_expert_bias": [False], "hidden_act": ["gelu"],
        "moe_shared_expert_intermediate_size": [24],
        "expert_swiglu_limit_list": [[0, 0, 4.0], [4.0, 0, 0, 0], [0, 0, 0, -1], [0, 0, 0, True]],
        "share_expert_swiglu_limit_list": [[0, 0, 0, 0, 5.0], 5.0, [0, 0, 0, "5"]],
        "short_conv_kernel_size": [None, 0], "kda_lower_bound": [0.0, 5.0, "low", float("-inf")],
        "kda_safe_gate": [1], "num_nextn_predict_layers": [2], "num_mtp_layers": [0], "qk_rope_head_dim": [3],
        "rope_theta": [0], "layer_types": [["linear_attention"]], "mlp_layer_types": [["sparse"] * 4],
        "topk_group": [3], "rope_scaling: rope_type": [{"rope_type": "yarn", "rope_theta": 6000000}],
    },
    "minimax": {
        "sliding_window": [8], "hidden_act": ["gelu"], "rotary_dim": [4], "partial_rotary_factor": [0.5],
        "layer_types": [["full_attention"], ["conv"] * 4], "num_attention_heads": [3], "head_dim": [7],
        "num_local_experts": [0], "num_experts_per_tok": [5], "mlp_alpha_factor": [-1.0],
        "rope_parameters: rope_type": [{"rope_type": "yarn", "rope_theta": 1e6}],
    },
    "qwen4": {
        "max_position_embeddings": [4100], "indexer_budget": [4095], "indexer_kv_heads": [2], "hc_count": [1],
        "ple_layer_ids": [[4], [0], 1], "ple_embed_dim": [6], "ngram_size": [1], "eos_token_id": [[], 64],
        "mtp_num_hidden_layers": [1], "ple_conv_kernel_size": [1],
        "layer_types": [["linear_attention", "sparse_attention"] * 2],
    },
    "nemotron": {
        "hybrid_override_pattern": [None, "", "MX", ["M"]], "layers_block_type": ["M*", [], ["conv"]],
        "num_hidden_layers": [4], "mamba_num_heads": [3, None], "mlp_hidden_act": ["silu"],
        "moe_latent_size": [0, "8"], "num_nextn_predict_layers": [2, -1], "tie_word_embeddings": [True],
        "use_bias": [True], "n_group": [3, 8], "time_step_limit": [[0.001, 0.1], {}], "attention_head_dim": [8],
        "mlp_bias": [True], "num_experts_per_tok": [9, 5], "n_shared_experts": [2], "ssm_state_size": [0],
        "mtp_hybrid_override_pattern": ["*E*E", "ME"], "mtp_layers_block_type": [["moe"], []],
        "n_routed_experts": [None],
    },
}
OF_AN_MTP_LAYER = {"num_nextn_predict_layers": 1, "hybrid_override_pattern": "M*"}
TOGETHER: dict[tuple[Kind, str], dict[str, Any]] = {  # with these other fields
    ("olmo", "num_attention_heads"): {"num_key_value_heads": None}, ("lfm2", "full_attn_idxs"): {"layer_types": None},
    **{("nemotron", field): OF_AN_MTP_LAYER
       for field in ("mtp_hybrid_override_pattern", "mtp_layers_block_type", "n_routed_experts")},
}  # fmt: skip


@pytest.mark.parametrize(("kind", "field", "value"), [
    (kind, field, value) for kind, fields in REFUSED.items() for field, values in fields.items() for value in values
])  # fmt: skip
def test_a_value_that_a_file_cannot_have_is_refused_by_name(kind: Kind, field: str, value: Any) -> None:
    field, _, name = field.partition(": ")
    outer, _, inner = field.partition(".")
    given = {**TOGETHER.get((kind, field), {}), outer: {inner: value} if inner else value}
    with pytest.raises(BadInput, match=name or field):
        ModelConfig.from_dict(config_of(kind, **given))
