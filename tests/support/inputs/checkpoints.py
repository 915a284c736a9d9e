"""Small random checkpoints in the Hugging Face format, made from a seed at test time.

Leaves out: training (`fixtures/tiny`). Their heads remember from a few to hundreds of tokens.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from safetensors.torch import save_file

from instep_reference.contract.block_drafter import FOLDER, PREFIX, BlockDrafter
from instep_reference.contract.checkpoint_tensor_shapes import FUSED, block_shapes, expected_shapes, released
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.qwen4_config import QWEN4

Kind = Literal["dense", "next", "moe", "kimi", "olmo", "nemotron", "lfm2", "ling", "minimax", "qwen4"]

MODEL_TYPES: dict[Kind, str] = {
    "dense": "qwen3_5_text", "next": "qwen3_next", "moe": "qwen3_5_moe_text", "kimi": "kimi_linear",
    "olmo": "olmo_hybrid", "nemotron": "nemotron_h", "lfm2": "lfm2",
    "ling": "bailing_hybrid", "minimax": "minimax", "qwen4": "qwen4_exp_text",
}
ARCHITECTURES: dict[Kind, str] = {
    "dense": "Qwen3_5ForCausalLM", "next": "Qwen3NextForCausalLM", "moe": "Qwen3_5MoeForCausalLM",
    "kimi": "KimiLinearForCausalLM", "olmo": "OlmoHybridForCausalLM", "nemotron": "NemotronHForCausalLM",
    "lfm2": "Lfm2ForCausalLM", "ling": "BailingMoeV3ForCausalLM", "minimax": "MiniMaxForCausalLM",
    "qwen4": "Qwen4ExpForCausalLM",
}
TWO_LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "full_attention_interval": 2}  # one of GDN, one of attention
# e^g when a is 0, spread over the heads: from forgetting in a token or two to remembering ten thousand.
SHORTEST, LONGEST = 1 - 0.3, 1 - 0.9999
# As released files have it.
WIDE = ("A_log", "mixer.norm.weight", "mixer.D", "linear_attn.norm.weight", "self_attn.dt_bias",
        "e_score_correction_bias")  # fmt: skip


def config_of(kind: Kind = "dense", **overrides: Any) -> dict[str, Any]:
    """A `config.json` as a dictionary; overrides bear Hugging Face names. K != V and HV = 2H unless overridden.

    kimi: overrides of `linear_attn_config` are merged into it
    """
    if kind in FAMILIES:
        return FAMILIES[kind](**overrides)
    if kind == "olmo":  # GDN and attention in turn; no separate head, no rotary
        overrides = {
            "full_attention_interval": None, "mtp_num_hidden_layers": None, "pad_token_id": 0, "eos_token_id": 0,
            "head_dim": None, "linear_allow_neg_eigval": True, "num_hidden_layers": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
            "layer_types": ["linear_attention", "full_attention"], **overrides}  # fmt: skip
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": MODEL_TYPES[kind],
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "mtp_num_hidden_layers": 1,
        "intermediate_size": 48,
    }
    if kind not in ("dense", "olmo"):
        config |= {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
        }
    config |= overrides
    return {name: value for name, value in config.items() if value is not None}


def _kimi(*, linear_attn_config: dict[str, Any] | None = None, **overrides: Any) -> dict[str, Any]:
    """Three layers of KDA and one of MLA. The first has a dense MLP, the others experts in two groups."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES["kimi"]], "model_type": MODEL_TYPES["kimi"], "vocab_size": 64,
        "hidden_size": 32, "num_hidden_layers": 4, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": False, "model_max_length": 4096, "pad_token_id": 0,
        "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 12, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4, "v_head_dim": 16, "mla_use_nope": True,
        "intermediate_size": 48, "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_experts": 8,
        "num_experts_per_token": 2, "moe_intermediate_size": 16, "num_shared_experts": 1, "num_expert_group": 2,
        "topk_group": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": 2.446, "num_nextn_predict_layers": 0, **overrides,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 4, "head_dim": 8,
            "short_conv_kernel_size": 4, **(linear_attn_config or {})},
    }  # fmt: skip
    return {name: value for name, value in config.items() if value is not None}


def _nemotron(**overrides: Any) -> dict[str, Any]:
    """Two Mamba2 layers, an MLP, an attention layer and one of experts: each layer is one block."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES["nemotron"]], "model_type": MODEL_TYPES["nemotron"], "vocab_size": 64,
        "hidden_size": 32, "hybrid_override_pattern": "M-M*E", "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False, "max_position_embeddings": 4096, "pad_token_id": 0,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8, "conv_kernel": 4,
        "use_conv_bias": True, "chunk_size": 16, "time_step_min": 0.0, "mamba_hidden_act": "silu",
        "intermediate_size": 48, "mlp_hidden_act": "relu2", "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 24, "n_shared_experts": 1, "n_group": 2,
        "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, **overrides,
    }  # fmt: skip
    return {name: value for name, value in config.items() if value is not None}


def _lfm2(**overrides: Any) -> dict[str, Any]:
    """Three layers with a short convolution, one with attention. The width of an MLP is derived: 48 from 64."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES["lfm2"]], "model_type": MODEL_TYPES["lfm2"], "vocab_size": 64,
        "hidden_size": 32, "num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"],
        "norm_eps": 1e-5, "tie_word_embeddings": True, "max_position_embeddings": 4096, "pad_token_id": 0,
        "num_attention_heads": 4, "num_key_value_heads": 2, "conv_L_cache": 3, "conv_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "intermediate_size": 64,
        "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 16, **overrides,
    }  # fmt: skip
    return {name: value for name, value in config.items() if value is not None}


def _ling(**overrides: Any) -> dict[str, Any]:
    """Three layers of KDA with a safe gate and one of MLA, by the release's names. The first has a dense MLP."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES["ling"]], "model_type": MODEL_TYPES["ling"], "vocab_size": 64,
        "hidden_size": 32, "num_hidden_layers": 4, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "tie_word_embeddings": False, "max_position_embeddings": 4096, "pad_token_id": 0,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "layer_group_size": 4,
        "kv_lora_rank": 12, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 16,
        "rope_theta": 6000000, "rope_interleave": True, "use_mla_nope": False,
        "gated_attention_proj_granularity_type": "head_wise", "no_kda_lora": True, "kda_safe_gate": True,
        "kda_lower_bound": -5.0, "short_conv_kernel_size": 4, "intermediate_size": 48, "first_k_dense_replace": 1,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16, "num_shared_experts": 1, "n_group": 2, "topk_group": 1,
        "norm_topk_prob": True, "score_function": "sigmoid", "moe_router_enable_expert_bias": True,
        "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1, "mtp_use_kda": False, **overrides,
    }  # fmt: skip
    return {name: value for name, value in config.items() if value is not None}


def _minimax(**overrides: Any) -> dict[str, Any]:
    """Two layers with lightning attention, one with softmax attention, one more with lightning attention."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES["minimax"]], "model_type": MODEL_TYPES["minimax"], "vocab_size": 64,
        "hidden_size": 32, "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "max_position_embeddings": 4096, "hidden_act": "silu",
        "num_attention_heads": 4, "num_key_value_heads": 2, "block_size": 16, "num_local_experts": 4,
        "num_experts_per_tok": 2, "intermediate_size": 16, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e6},
        "full_attn_alpha_factor": 3.5, "full_attn_beta_factor": 1.25, "linear_attn_alpha_factor": 3.0,
        "linear_attn_beta_factor": 0.75, "mlp_alpha_factor": 2.5, "mlp_beta_factor": 1.5, **overrides,
    }  # fmt: skip
    return {name: value for name, value in config.items() if value is not None}


def _qwen4(**overrides: Any) -> dict[str, Any]:
    """Three layers of GDN and one of attention, four streams, embeddings of n-grams before the first and the third."""
    return config_of(
        "moe", **{"architectures": [ARCHITECTURES["qwen4"]], "model_type": MODEL_TYPES["qwen4"],
        "mtp_num_hidden_layers": None, "hc_count": 4, "hc_lowrank": 6, "ple_layer_ids": [1, 3], "ple_embed_dim": 16,
        "ple_conv_kernel_size": 4, "ngram_size": 3, "heads_per_ngram": 2, "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 3, "seed": 1234, "eos_token_id": 7,
        "pad_token_id": 0, "indexer_n_heads": 1, "indexer_kv_heads": 1, "indexer_head_dim": 16,
        "indexer_budget": 4096, "indexer_compress_ratio": 4, "norm_topk_prob": True, **overrides})  # fmt: skip


FAMILIES: dict[Kind, Callable[..., dict[str, Any]]] = {
    "kimi": _kimi, "nemotron": _nemotron, "lfm2": _lfm2, "ling": _ling, "minimax": _minimax, "qwen4": _qwen4,
}


def write(
    directory: Path, kind: Kind = "dense", seed: int = 0, *, dtype: torch.dtype = torch.float32,
    fused: bool | None = None, **overrides: Any,
) -> Path:
    """Write `config.json` and `model.safetensors`; tensors of WIDE are fp32 whatever `dtype` is.

    fused: experts as one tensor per layer (Qwen3.5's way, and the default there) or one by one (Qwen3-Next's).
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = config_of(kind, **overrides)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    tensors = draw(ModelConfig.from_dict(config), seed, dtype, fused)
    if kind == "nemotron":
        tensors = {_of_release(name): tensor for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def _of_release(name: str) -> str:
    """Return the name of a tensor of Nemotron-H in its releases."""
    name = name.replace("model.embed_tokens.", "model.embeddings.").replace("model.norm.", "model.norm_f.")
    return re.sub(r"^model\.", "backbone.", name)


def write_block(directory: Path, seed: int = 1, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """Add a block drafter to the model of this directory: three layers of 2 heads, which reads its first two layers."""
    target = ModelConfig.from_file(directory / "config.json")
    fields = {
        "model_type": "block_drafter", "vocab_size": target.vocab, "hidden_size": target.hidden,
        "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "intermediate_size": 24, "rms_norm_eps": 1e-5, "rope_theta": 100.0, "partial_rotary_factor": 0.5,
        "target_layer_ids": [0, 1], "mask_token_id": 5, **overrides,
    }  # fmt: skip
    folder, generator = directory / FOLDER, torch.Generator().manual_seed(seed)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    block = msgspec.convert(fields, BlockDrafter)
    shapes = block_shapes(replace(target, block=block))
    tensors = {name.removeprefix(PREFIX): _draw(name, shape, generator).to(dtype) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return directory


def draw(
    config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32, fused: bool | None = None
) -> dict[str, torch.Tensor]:
    """Every tensor of a configuration, from a seed, under the names in the family's files."""
    generator = torch.Generator().manual_seed(seed)
    fuse = config.model_type in ("qwen3_5_moe", QWEN4) if fused is None else fused
    shapes = expected_shapes(config, stored=FUSED if fuse else ())
    tensors = {}
    for name, shape in shapes.items():
        kept = torch.float32 if name.endswith(WIDE) else dtype
        centre = 0 if config.centred_norms or "norm" not in name.split(".")[-2] else 1  # of the factor that is stored
        tensors[released(config, name)] = (centre + _draw(name, shape, generator)).to(kept)
    return tensors


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator, dtype=torch.float32)
    if name.endswith("A_log"):
        return 0.5 * noise
    if name.endswith("mixer.D") or name.endswith("conv1d.bias"):
        return noise
    if name.endswith("self_attn.dt_bias"):  # some channels of KDA keep less than e^-5, the bound of some safe gates
        return _dt_bias(shape[0]) + 0.2 * noise + 6.0 * (torch.arange(shape[0]) % 11 == 0)
    if name.endswith("dt_bias"):
        return _dt_bias(shape[0]) + 0.2 * noise
    if name.endswith("e_score_correction_bias"):  # most sums of a share and a bias are negative
        return noise / math.sqrt(shape[-1]) - 1
    if name.endswith("linear_attn.norm.weight"):
        return 1 + 0.2 * noise
    if "norm" in name.split(".")[-2]:
        return 0.2 * noise
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        return 0.6 * noise
    if "embed_tokens" in name:
        return noise
    return noise / math.sqrt(shape[-1])


def _dt_bias(heads: int) -> torch.Tensor:
    """softplus(dt_bias) = -log(e^g), with 1 - e^g spread geometrically from the shortest to the longest memory."""
    lost = torch.logspace(math.log10(SHORTEST), math.log10(LONGEST), heads)
    return torch.log(torch.expm1(-torch.log1p(-lost)))
