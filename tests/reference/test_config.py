"""`config.json` becomes a frozen configuration, or one line that names the field.

Leaves out: weights.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from instep_reference.contract.config import ModelConfig
from instep_reference.contract.errors import BadInput
from support.checkpoints import config_of


def test_a_dense_file_is_read() -> None:
    config = ModelConfig.from_dict(config_of("dense"))
    assert config.model_type == "qwen3_5"
    assert config.layer_kinds == ("gdn", "gdn", "gdn", "attention")
    assert (config.key_heads, config.value_heads, config.key_dim, config.value_dim) == (2, 4, 8, 16)
    assert (config.head_dim, config.rotary_dim, config.rope_theta) == (16, 4, 1e7)
    assert (config.experts, config.dense_layers, config.mtp_layers) == (0, (), 1)


def test_a_multimodal_file_is_read_at_its_text_config() -> None:
    text = config_of("moe", tie_word_embeddings=None)
    whole = {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {}, "tie_word_embeddings": True}
    config = ModelConfig.from_dict(whole)
    assert config == dataclasses.replace(ModelConfig.from_dict(text), tied=True)
    assert config.model_type == "qwen3_5_moe"


def test_rope_theta_is_read_from_either_place_and_never_invented() -> None:
    rope = {"rope_parameters": None, "partial_rotary_factor": 0.5}
    config = ModelConfig.from_dict(config_of("dense", rope_theta=5e6, **rope))
    assert (config.rope_theta, config.rotary_dim) == (5e6, 8)
    with pytest.raises(BadInput, match="rope_theta"):
        ModelConfig.from_dict(config_of("dense", **rope))


def test_layer_types_go_before_the_interval() -> None:
    types = ["full_attention", "linear_attention", "linear_attention"]
    config = ModelConfig.from_dict(config_of("dense", num_hidden_layers=3, layer_types=types))
    assert config.layer_kinds == ("attention", "gdn", "gdn")
    every_second = ModelConfig.from_dict(config_of("dense", full_attention_interval=2))
    assert every_second.layer_kinds == ("gdn", "attention", "gdn", "attention")


def test_layers_without_experts_are_listed_or_passed_over_by_the_step() -> None:
    assert ModelConfig.from_dict(config_of("next", mlp_only_layers=[2])).dense_layers == (2,)
    assert ModelConfig.from_dict(config_of("next", decoder_sparse_step=2)).dense_layers == (0, 2)


def test_only_qwen3_next_may_leave_shares_as_they_are() -> None:
    assert not ModelConfig.from_dict(config_of("next", norm_topk_prob=False)).norm_topk
    assert ModelConfig.from_dict(config_of("moe", norm_topk_prob=False)).norm_topk


def test_the_drafter_is_another_object_and_leaves_this_one_alone() -> None:
    config = ModelConfig.from_dict(config_of("next", mlp_only_layers=[0], mtp_num_hidden_layers=2))
    before = dataclasses.asdict(config)
    drafter = config.drafter()
    assert drafter.layer_kinds == ("attention", "attention")
    assert (drafter.dense_layers, drafter.mtp_layers, drafter.experts) == ((), 0, config.experts)
    assert dataclasses.asdict(config) == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.layer_kinds = ()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "llama"),
        ("model_type", None),
        ("hidden_size", None),
        ("hidden_size", 0),
        ("vocab_size", "many"),
        ("vocab_size", True),
        ("num_hidden_layers", 0),
        ("rms_norm_eps", -1e-6),
        ("linear_key_head_dim", 0),
        ("linear_value_head_dim", 0),
        ("linear_conv_kernel_dim", 0),
        ("linear_num_value_heads", 3),
        ("num_attention_heads", 3),
        ("layer_types", ["linear_attention"]),
        ("layer_types", ["linear_attention"] * 3 + ["sliding_attention"]),
        ("layer_types", "full_attention"),
        ("head_dim", 2),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("attn_output_gate", False),
        ("output_gate_type", "tanh"),
        ("tie_word_embeddings", 1),
        ("mtp_num_hidden_layers", -1),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e7}),
        ("text_config", 7),
    ],
)
def test_an_impossible_value_is_refused_by_name(field: str, value: Any) -> None:
    named = {"head_dim": "partial_rotary_factor", "rope_parameters": "rope_type"}.get(field, field)
    with pytest.raises(BadInput, match=named):
        ModelConfig.from_dict(config_of("dense", **{field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_experts", None), ("num_experts_per_tok", 5), ("num_experts_per_tok", 0), ("moe_intermediate_size", None),
        ("mlp_only_layers", [9]), ("decoder_sparse_step", 0),
    ],
)
def test_an_impossible_mixture_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(BadInput, match=field):
        ModelConfig.from_dict(config_of("next", **{field: value}))


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"model_type": "qwen3_5"'])
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
