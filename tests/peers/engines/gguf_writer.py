"""A checkpoint of the `qwen3_5_text` family as a GGUF file for llama.cpp, everything in fp32.

    PYTHONPATH=tests python -m peers.engines.gguf_writer DIR FILE.gguf        needs the package gguf

Differs from the checkpoint: value heads in tiled order (head j of every key head, then j + 1, ...) where ggml repeats
them; -exp(A_log) in place of A_log; 1 + w for every norm but the gated one. Leaves out: tokenizers. The vocabulary is
one token a byte, with one merge that no text reaches, for a list of merges may not be empty.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}  # fmt: skip
HEAD = {
    "fc": "nextn.eh_proj", "pre_fc_norm_embedding": "nextn.enorm", "pre_fc_norm_hidden": "nextn.hnorm",
    "norm": "nextn.shared_head_norm",
}  # fmt: skip
NORMAL = 1  # the type of a token that is text
TOP = {"embed_tokens": "token_embd", "norm": "output_norm"}


def write(directory: Path, file: Path) -> None:
    import gguf  # only to write: what is written can be asked without it

    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "qwen35")
    _describe(writer, config)
    for name, tensor in load_file(directory / "model.safetensors").items():
        writer.add_tensor(named(name, config), converted(name, tensor.float(), config).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def named(name: str, config: dict[str, Any]) -> str:
    """The name in the file. The draft head is one more block, and its own tensors are that block's `nextn`."""
    stem, _, kind = name.removeprefix("model.").rpartition(".")
    if stem == "lm_head":
        return "output.weight"
    if stem.startswith("mtp.layers."):
        stem = f"layers.{config['num_hidden_layers']}.{stem.removeprefix('mtp.layers.0.')}"
    elif stem.startswith("mtp."):
        return f"blk.{config['num_hidden_layers']}.{HEAD[stem.removeprefix('mtp.')]}.weight"
    if not stem.startswith("layers."):
        return f"{TOP[stem]}.weight"
    _, layer, inner = stem.split(".", 2)
    if kind == "A_log":
        return f"blk.{layer}.ssm_a"
    return f"blk.{layer}.ssm_dt.bias" if kind == "dt_bias" else f"blk.{layer}.{LAYER[inner]}.weight"


def converted(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    keys, width = config["linear_num_key_heads"], config["linear_value_head_dim"]
    before_values = 2 * keys * config["linear_key_head_dim"]
    if "conv1d" in name:
        tensor = tensor[:, 0]
    if "in_proj_qkv" in name or "conv1d" in name:
        return torch.cat([tensor[:before_values], tiled(tensor[before_values:], keys, width)])
    if "in_proj_z" in name:
        return tiled(tensor, keys, width)
    if "out_proj" in name:
        return tiled(tensor.T, keys, width).T
    if name.endswith(("in_proj_a.weight", "in_proj_b.weight", "dt_bias")):
        return tiled(tensor, keys, 1)
    if name.endswith("A_log"):
        return tiled(-tensor.exp(), keys, 1)
    return 1 + tensor if "norm" in name and "linear_attn.norm" not in name else tensor


def tiled(x: torch.Tensor, keys: int, width: int) -> torch.Tensor:
    """Value heads of `width` rows each, from grouped by key head to tiled."""
    return x.unflatten(0, (keys, -1, width)).transpose(0, 1).flatten(0, 2)


def grouped(x: torch.Tensor, keys: int) -> torch.Tensor:
    """The way back, for one row per value head."""
    return x.unflatten(0, (-1, keys)).transpose(0, 1).flatten(0, 1)


def _describe(writer: Any, config: dict[str, Any]) -> None:
    rope = config["rope_parameters"]
    head = config["head_dim"]
    writer.add_block_count(config["num_hidden_layers"] + config["mtp_num_hidden_layers"])
    writer.add_nextn_predict_layers(config["mtp_num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head * rope["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])
    writer.add_full_attention_interval(config["full_attention_interval"])
    tokens = [f"<{n:02x}>" for n in range(config["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([NORMAL] * len(tokens))
    writer.add_token_merges([f"{tokens[0]} {tokens[1]}"])
    writer.add_add_bos_token(False)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
