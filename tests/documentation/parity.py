"""The parity table: the reference against `transformers`, worst relative error per configuration.

To measure all configurations again and write the file: `PYTHONPATH=reference:tests python -m documentation.parity`.
Leaves out: the oracle itself (`support/independent/transformers_models.py`) and the file (`parity_table.py`).
"""

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from documentation.parity_table import ALLOWED, Parity, store, table
from instep_reference import trunk
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.place_names import Place, unseen
from instep_reference.engine import TensorModel
from instep_reference.weights import Weights
from support.independent import transformers_models as oracle
from support.independent.transformers_models import Seen
from support.inputs.checkpoints import Kind, write

DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
TOKENS = 70  # more than one chunk of transformers' delta rule, which takes 64 at a time
# How the tokens come: sizes of the parts, one after another on the memory left by those before.
WAYS = {
    "prefill": (70,),
    "decode": (64, *(1,) * 6),
    "chunked prefill": (1, 2, 3, 64),
    "several on a state": (50, 7, 4, 9),
}
CHAIN = 3  # drafts after the first

# Kinds whose files have released names, or no MTP layers.
AS_RELEASED = ("kimi", "olmo", "nemotron", "lfm2", "ling", "minimax")
FULL, LINEAR, CONV = "full_attention", "linear_attention", "conv"


@dataclass(frozen=True)
class Case:
    """A configuration, named after its particularity."""

    name: str
    kind: Kind
    overrides: dict[str, Any]
    directory: Path | None = None  # a checkpoint that is there already; None: drawn from a seed


def _heads(key: int | None, value: int | None) -> dict[str, Any]:
    return {"linear_num_key_heads": key, "linear_num_value_heads": value}


def _layers(*types: str) -> dict[str, Any]:
    return {"num_hidden_layers": len(types), "layer_types": list(types), "full_attention_interval": None}


def _kimi_layers(kda: tuple[int, ...], mla: tuple[int, ...], **linear: int) -> dict[str, Any]:
    """The numbers of layers count from 1."""
    return {"num_hidden_layers": len(kda + mla),
            "linear_attn_config": {"kda_layers": [*kda], "full_attn_layers": [*mla], **linear}}  # fmt: skip


def _limits(routed: list[float | None] | None, shared: list[float] | None) -> dict[str, Any]:
    """Return the limits of a clamped SwiGLU, by layer."""
    return {"expert_swiglu_limit_list": routed, "share_expert_swiglu_limit_list": shared}


TINY = Path(__file__).resolve().parents[2] / "fixtures" / "tiny"
DRAWN: tuple[tuple[str, Kind, dict[str, Any]], ...] = (
    ("Qwen3.5, r = 2, K 8, V 16", "dense", {}),
    ("Qwen3.5, r = 1", "dense", _heads(3, 3)),
    ("Qwen3.5, r = 3, K 16, V 8", "dense", {
        **_heads(2, 6), "linear_key_head_dim": 16, "linear_value_head_dim": 8}),
    ("Qwen3.5, K = V, conv width 2", "dense", {"linear_value_head_dim": 8, "linear_conv_kernel_dim": 2}),
    ("Qwen3.5, tied embeddings", "dense", {"tie_word_embeddings": True}),
    ("Qwen3.5, irregular layers, attention first", "dense", _layers(FULL, LINEAR, LINEAR, FULL, LINEAR)),
    ("Qwen3.5, only GDN", "dense", _layers(LINEAR, LINEAR)),
    ("Qwen3.5, only attention", "dense", _layers(FULL, FULL)),
    ("Qwen3-Next, r = 2", "next", {}),
    ("Qwen3-Next, r = 1", "next", _heads(3, 3)),
    ("Qwen3-Next, r = 3, top-k not renormalised", "next", {**_heads(2, 6), "norm_topk_prob": False}),
    ("Qwen3-Next, a dense MLP among experts", "next", {"mlp_only_layers": [1]}),
    ("Qwen3-Next, irregular layers, tied", "next", {
        **_layers(FULL, LINEAR, FULL, LINEAR), "tie_word_embeddings": True}),
    ("Qwen3.5-MoE, r = 2", "moe", {}),
    ("Qwen3.5-MoE, r = 3, top 3 of 6, tied", "moe", {
        **_heads(2, 6), "num_experts": 6, "num_experts_per_tok": 3, "tie_word_embeddings": True}),
    ("Qwen3.5-MoE, attention first", "moe", _layers(FULL, LINEAR, LINEAR)),
    ("Kimi-Linear, KDA x 3 and MLA, experts in 2 groups", "kimi", {}),
    ("Kimi-Linear, MLA first, wide heads", "kimi", {
        **_kimi_layers(kda=(2, 4), mla=(1, 3), num_heads=2, head_dim=16)}),
    ("Kimi-Linear, one group, top 3, not renormalised", "kimi", {
        "num_expert_group": 1, "num_experts_per_token": 3, "moe_renormalize": False}),
    ("Kimi-Linear, 2 of 4 groups, two shared experts", "kimi", {
        "num_expert_group": 4, "topk_group": 2, "num_experts_per_token": 3, "num_shared_experts": 2}),
    ("Kimi-Linear, conv width 2", "kimi", {"linear_attn_config": {"short_conv_kernel_size": 2}}),
    ("Kimi-Linear, dense MLPs only", "kimi", {"first_k_dense_replace": 4}),
    ("Kimi-Linear, experts in every layer, scale 1", "kimi", {
        "first_k_dense_replace": 0, "routed_scaling_factor": 1.0}),
    ("Kimi-Linear, a narrow value, a wide shared key", "kimi", {"v_head_dim": 4, "qk_rope_head_dim": 10}),
    ("Kimi-Linear, only MLA", "kimi", _kimi_layers(kda=(), mla=(1, 2))),
    ("Kimi-Linear, one head of KDA, one of MLA", "kimi", {
        **_kimi_layers(kda=(1,), mla=(2,), num_heads=1), "num_attention_heads": 1, "num_key_value_heads": 1}),
    ("Kimi-Linear, top 1 of the experts, large eps", "kimi", {
        "num_experts_per_token": 1, "moe_renormalize": False, "rms_norm_eps": 0.1}),
    ("OLMo-Hybrid, beta up to 2, r = 2, K 8, V 16", "olmo", {}),
    ("OLMo-Hybrid, beta up to 1", "olmo", {"linear_allow_neg_eigval": False}),
    ("OLMo-Hybrid, r = 1, as many KV heads as heads", "olmo", {**_heads(3, 3), "num_key_value_heads": None}),
    ("OLMo-Hybrid, r = 3, K 16, V 8", "olmo", {
        **_heads(2, 6), "linear_key_head_dim": 16, "linear_value_head_dim": 8}),
    ("OLMo-Hybrid, conv width 2, K = V", "olmo", {"linear_conv_kernel_dim": 2, "linear_value_head_dim": 8}),
    ("OLMo-Hybrid, tied embeddings", "olmo", {"tie_word_embeddings": True}),
    ("OLMo-Hybrid, five layers, attention first", "olmo", _layers(FULL, LINEAR, LINEAR, FULL, LINEAR)),
    ("OLMo-Hybrid, every fourth layer with attention", "olmo", {"num_hidden_layers": 5, "layer_types": None}),
    ("OLMo-Hybrid, attention in the last of two layers", "olmo", {"layer_types": None}),
    ("OLMo-Hybrid, sizes from the heads of attention", "olmo", {
        **_heads(None, None), "linear_key_head_dim": None, "linear_value_head_dim": None}),
    ("OLMo-Hybrid, one head, large eps", "olmo", {
        **_heads(1, 1), "num_attention_heads": 1, "num_key_value_heads": 1, "rms_norm_eps": 0.1}),
    ("OLMo-Hybrid, one KV head of four, wide heads", "olmo", {"num_key_value_heads": 1, "hidden_size": 64}),
    ("Nemotron-H, Mamba2 x 2, MLP, attention, experts in 2 groups", "nemotron", {}),
    ("Nemotron-H, one group, prompts in chunks of 5, latents of experts", "nemotron", {
        "n_groups": 1, "chunk_size": 5, "moe_latent_size": 8}),
    ("Nemotron-H, as many groups as heads, conv width 2, latents wider than the rows", "nemotron", {
        "n_groups": 4, "conv_kernel": 2, "moe_latent_size": 40}),
    ("Nemotron-H, six heads of 8 in 3 groups, K 16, latents of one channel", "nemotron", {
        "mamba_num_heads": 6, "mamba_head_dim": 8, "n_groups": 3, "ssm_state_size": 16, "moe_latent_size": 1}),
    ("Nemotron-H, conv without bias", "nemotron", {"use_conv_bias": False}),
    ("Nemotron-H, attention first, two in a row", "nemotron", {"hybrid_override_pattern": "**M-"}),
    ("Nemotron-H, names of layers, latents as wide as the rows", "nemotron", {
        "hybrid_override_pattern": None, "moe_latent_size": 32,
        "layers_block_type": ["linear_attention", "linear_attention", "moe", "full_attention"]}),
    ("Nemotron-H, older names of layers", "nemotron", {"hybrid_override_pattern": None, "layers_block_type": [
        "mamba", "mlp", "attention"]}),
    ("Nemotron-H, top 4 of 6 experts, not renormalised", "nemotron", {
        "n_routed_experts": 6, "num_experts_per_tok": 4, "n_group": 1, "norm_topk_prob": False}),
    ("Nemotron-H, one KV head of four, large eps", "nemotron", {"num_key_value_heads": 1, "layer_norm_epsilon": 0.1}),
    ("Nemotron-H, one head", "nemotron", {
        "mamba_num_heads": 1, "n_groups": 1, "num_attention_heads": 1, "num_key_value_heads": 1}),
    ("Nemotron-H, MLPs and attention alone", "nemotron", {"hybrid_override_pattern": "*-*-"}),
    ("Nemotron-H, experts over latents", "nemotron", {"moe_latent_size": 12}),
    ("Nemotron-H, latents, top 3 of 6 in one group, scale 5, after each mixer", "nemotron", {
        "moe_latent_size": 8, "n_routed_experts": 6, "num_experts_per_tok": 3, "n_group": 1,
        "routed_scaling_factor": 5.0, "hybrid_override_pattern": "MEME*E"}),
    ("Nemotron-H, latents, one expert per token, not renormalised", "nemotron", {
        "moe_latent_size": 12, "num_experts_per_tok": 1, "norm_topk_prob": False}),
    ("Nemotron-H, latents, two of three groups, scale 1", "nemotron", {
        "moe_latent_size": 12, "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 3,
        "routed_scaling_factor": 1.0}),
    ("Nemotron-H, latents, experts first and last, large eps", "nemotron", {
        "moe_latent_size": 12, "hybrid_override_pattern": "E*ME", "layer_norm_epsilon": 0.1}),
    ("LFM2, conv x 3 and attention, conv width 3", "lfm2", {}),
    ("LFM2, attention first, conv width 4", "lfm2", {**_layers(FULL, CONV, CONV), "conv_L_cache": 4}),
    ("LFM2, conv width 2, one KV head", "lfm2", {"conv_L_cache": 2, "num_key_value_heads": 1}),
    ("LFM2, conv width 1, a KV head per head", "lfm2", {"conv_L_cache": 1, "num_key_value_heads": 4}),
    ("LFM2, only attention", "lfm2", _layers(FULL, FULL)),
    ("LFM2, attention twice in a row", "lfm2", _layers(CONV, FULL, FULL, CONV)),
    ("LFM2, untied embeddings, large eps", "lfm2", {"tie_word_embeddings": False, "norm_eps": 0.1}),
    ("LFM2, an MLP as wide as stated", "lfm2", {"block_auto_adjust_ff_dim": False}),
    ("LFM2, an MLP 1.3 times as wide, in units of 8", "lfm2", {
        "block_ffn_dim_multiplier": 1.3, "block_multiple_of": 8}),
    ("LFM2, narrow heads, small theta", "lfm2", {
        "num_attention_heads": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
    ("LFM2, one conv layer before attention", "lfm2", _layers(CONV, FULL)),
    ("Ling, KDA x 3 with a safe gate and MLA, experts in 2 groups", "ling", {}),
    ("Ling, MLA first, wide heads, bound -1, a clamped SwiGLU in late layers", "ling", {
        **_layers(FULL, LINEAR, FULL, LINEAR), "head_dim": 16, "kda_lower_bound": -1.0, **_limits(
            [0, 0, 0, 0.25], [0, 0, 0.5, 0.75])}),
    ("Ling, one group, top 3, not renormalised, clamped routed experts", "ling", {
        "n_group": 1, "topk_group": 1, "num_experts_per_tok": 3, "norm_topk_prob": False, **_limits(
            [None, 0.1, 0.2, 0.3], None)}),
    ("Ling, 2 of 4 groups, two shared experts, which are clamped", "ling", {
        "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "num_shared_experts": 2, **_limits(
            None, [0, 0.5, 0, 0.1])}),
    ("Ling, conv width 2, groups of two layers", "ling", {"short_conv_kernel_size": 2, "layer_group_size": 2}),
    ("Ling, a softplus gate, dense MLPs only", "ling", {"kda_safe_gate": False, "first_k_dense_replace": 4}),
    ("Ling, clamped experts in every layer, scale 1, bound -20", "ling", {
        "first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "kda_lower_bound": -20.0, **_limits(
            [0.2] * 4, [0.4] * 4)}),
    ("Ling, a narrow value, wide rotary keys, theta 100", "ling", {
        "v_head_dim": 4, "qk_rope_head_dim": 10, "rope_theta": 100.0}),
    ("Ling, only MLA", "ling", _layers(FULL, FULL)),
    ("Ling, one head, two rotary channels", "ling", {
        **_layers(LINEAR, FULL), "num_attention_heads": 1, "num_key_value_heads": 1, "qk_rope_head_dim": 2}),
    ("Ling, top 1 of the experts, large eps", "ling", {
        "num_experts_per_tok": 1, "norm_topk_prob": False, "rms_norm_eps": 0.1}),
    ("MiniMax, lightning x 3 and softmax attention", "minimax", {}),
    ("MiniMax, softmax attention first, in turn", "minimax", {"layer_types": None}),
    ("MiniMax, factors of 1, blocks of 5", "minimax", {"block_size": 5, **{
        f"{part}_attn_{which}_factor": None for part in ("full", "linear") for which in ("alpha", "beta")},
        "mlp_alpha_factor": None, "mlp_beta_factor": None}),
    ("MiniMax, blocks of 256, a KV head per head", "minimax", {"block_size": 256, "num_key_value_heads": 4}),
    ("MiniMax, heads wider than the hidden rows", "minimax", {"head_dim": 16}),
    ("MiniMax, six heads, one KV head", "minimax", {
        "num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 8}),
    ("MiniMax, one expert per token", "minimax", {"num_experts_per_tok": 1}),
    ("MiniMax, top 3 of 6 experts, tied embeddings", "minimax", {
        "num_local_experts": 6, "num_experts_per_tok": 3, "tie_word_embeddings": True}),
    ("MiniMax, two layers, large eps", "minimax", {**_layers(LINEAR, FULL), "rms_norm_eps": 0.1}),
    ("MiniMax, only softmax attention, small theta", "minimax", {
        **_layers(FULL, FULL), "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
    ("MiniMax, one head", "minimax", {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}),
    ("Qwen4-Exp, n-grams before two of three GDN layers, 4 streams", "qwen4", {}),
    ("Qwen4-Exp, 2 streams, n-grams up to 4, sigmoid gate", "qwen4", {
        "hc_count": 2, "ngram_size": 4, "heads_per_ngram": 1, "ple_embed_dim": 12, "output_gate_type": "sigmoid"}),
    ("Qwen4-Exp, pairs alone, three heads, 2 taps", "qwen4", {
        "ngram_size": 2, "heads_per_ngram": 3, "ple_embed_dim": 12, "ple_conv_kernel_size": 2}),
    ("Qwen4-Exp, no n-grams", "qwen4", {"ple_layer_ids": None}),
    ("Qwen4-Exp, n-grams before every GDN layer, another seed", "qwen4", {"ple_layer_ids": [1, 2, 3], "seed": 5}),
    ("Qwen4-Exp, attention first, r = 3, K 16, V 8", "qwen4", {
        **_layers(FULL, LINEAR, LINEAR), **_heads(2, 6), "linear_key_head_dim": 16, "linear_value_head_dim": 8,
        "ple_layer_ids": [2]}),
    ("Qwen4-Exp, an embedding as wide as the rows, large eps", "qwen4", {
        "ple_embed_dim": None, "rms_norm_eps": 0.1}),
    ("Qwen4-Exp, top 3 of 6 experts, not renormalised", "qwen4", {
        "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": False}),
    ("Qwen4-Exp, tied embeddings, many small tables in 4 parts", "qwen4", {
        "tie_word_embeddings": True, "ngram_vocab_size_base": 2, "split_ngram_parts": 4, "eos_token_id": [3, 5]}),
    ("Qwen4-Exp, three streams of rank 1, conv width 2", "qwen4", {
        "hc_count": 3, "hc_lowrank": 1, "linear_conv_kernel_dim": 2}),
    ("Qwen4-Exp, all channels of a head turn, one KV head", "qwen4", {
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "num_key_value_heads": 1}),
)
DRAWN_HEADS: tuple[tuple[str, Kind, dict[str, Any]], ...] = (
    ("MTP head, Qwen3.5", "dense", {}),
    ("MTP head, Qwen3.5, tied", "dense", {"tie_word_embeddings": True}),
    ("MTP head, Qwen3-Next", "next", {}),
    ("MTP head, Qwen3.5-MoE", "moe", {}),
    ("MTP head, Ling", "ling", {}),
    ("MTP head, Ling, one group, top 3, softplus gate, limits in the trunk", "ling", {
        "n_group": 1, "topk_group": 1, "num_experts_per_tok": 3, "kda_safe_gate": False, **_limits(
            [0, 0.2, 0.2, 0.2], [0, 0.4, 0.4, 0.4])}),
    ("MTP head, Nemotron-H, two layers of transformers", "nemotron", {"num_nextn_predict_layers": 1}),
    ("MTP head, Nemotron-H, top 3 of 6 in one group, one KV head", "nemotron", {
        "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E", "n_routed_experts": 6, "n_group": 1,
        "topk_group": 1, "num_experts_per_tok": 3, "num_key_value_heads": 1, "layer_norm_epsilon": 0.1}),
    ("MTP head, Nemotron-H, experts over latents, scale 5", "nemotron", {
        "num_nextn_predict_layers": 1, "moe_latent_size": 12, "routed_scaling_factor": 5.0}),
)
CASES = (*(Case(*drawn) for drawn in DRAWN), Case("fixtures/tiny, trained", "dense", {}, TINY))
HEADS = (*(Case(*drawn) for drawn in DRAWN_HEADS), Case("MTP head, fixtures/tiny, trained", "dense", {}, TINY))


@cache
def parity(name: str, width: str) -> Parity:
    """Measure a configuration by name; once per process."""
    for measure, cases in ((_trunk, CASES), (_head, HEADS)):
        for case in cases:
            if case.name == name:
                return measure(case, width)
    raise KeyError(name)


def everything() -> list[Parity]:
    return [parity(case.name, width) for case in (*CASES, *HEADS) for width in DTYPES]


def main() -> None:
    rows = everything()
    store(rows, {"torch": torch.__version__, "transformers": version("transformers")})
    print(table(rows))


def _trunk(case: Case, width: str) -> Parity:
    """Drawn weights go through `save_pretrained`: what the reference reads is what transformers wrote."""
    dtype = DTYPES[width]
    with tempfile.TemporaryDirectory() as temporary:
        drawn, saved = Path(temporary, "drawn"), case.directory or Path(temporary, "saved")
        # save_pretrained drops `mtp.*`, so there is no draft head in these
        headless = {} if case.kind in AS_RELEASED else {"mtp_num_hidden_layers": 0}
        source = case.directory or write(drawn, case.kind, **headless, **case.overrides)
        model = oracle.load(source, case.kind, dtype)
        if case.kind in AS_RELEASED:  # transformers 5.24 saves some of their tensors under other names
            saved = source
        elif case.directory is None:
            model.save_pretrained(saved)
        weights = Weights.of(Checkpoint.open(saved), dtype)
    tokens = _tokens(weights.config.vocab)
    cached = weights.config.attending  # HF's cache raises on GDN layers alone
    uncached = None if cached else oracle.run(model, tokens, (TOKENS,), cached=False)
    errors = [
        _errors(_run(weights, tokens, parts), uncached or oracle.run(model, tokens, parts)) for parts in WAYS.values()
    ]
    return _fold(case, width, errors)


def _head(case: Case, width: str) -> Parity:
    """Rows of y and logits over a prefill and a chain after it. Keys are not compared: HF rotates them one further."""
    dtype = DTYPES[width]
    with tempfile.TemporaryDirectory() as temporary:
        directory = case.directory or write(Path(temporary), case.kind, **case.overrides)
        weights = Weights.of(Checkpoint.open(directory), dtype)
        if case.kind == "ling":
            oracle.rename_mtp_norm(directory)
        tokens = _tokens(weights.config.vocab)
        final, _ = trunk.advance(weights, tokens[:-1], trunk.empty_memories(weights), 0)
        if case.kind == "nemotron":
            theirs = oracle.run_head_of_two_blocks(directory, dtype, final, tokens[1:], CHAIN)
        else:
            theirs = oracle.run_head(oracle.load(directory, case.kind, dtype), final, tokens[1:], CHAIN)
    ours = _run_head(weights, final, tokens[1:], CHAIN)
    y, logits = (_relative(mine, true) for mine, true in zip(ours, theirs, strict=True))
    return _fold(case, width, [{"hidden": y, "logits": logits}])


Error = tuple[float, int]  # the worst, over how many numbers


def _errors(ours: Seen, theirs: Seen) -> dict[str, Error]:
    pairs = {
        "hidden": [*zip(ours.hidden, theirs.hidden, strict=True), (ours.final, theirs.final)],
        "logits": [(ours.logits, theirs.logits)],
        "memory": [(ours.memory[name], tensor) for name, tensor in theirs.memory.items() if tensor.numel()],
    }
    return {what: _worst([_relative(*pair) for pair in both]) for what, both in pairs.items() if both}


def _relative(ours: torch.Tensor, theirs: torch.Tensor) -> Error:
    """The largest error of a tensor by its largest element: layers differ in scale, elements pass through zero."""
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    return float((ours - theirs).abs().max() / theirs.abs().max()), theirs.numel()


def _worst(errors: Sequence[Error]) -> Error:
    values = [value for value, _ in errors]
    # max() passes over a NaN that does not come first
    return math.nan if any(map(math.isnan, values)) else max(values), sum(count for _, count in errors)


def _fold(case: Case, width: str, errors: Sequence[dict[str, Error]]) -> Parity:
    by_part = {part: _worst([error[part] for error in errors]) for part in errors[0]}
    memory = by_part["memory"][0] if "memory" in by_part else None
    compared = sum(count for _, count in by_part.values())
    return Parity(case.name, width, by_part["hidden"][0], by_part["logits"][0], memory, ALLOWED[width], compared)


def _tokens(vocab: int) -> list[int]:
    return torch.randint(vocab, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()


def _run(weights: Weights, tokens: Sequence[int], parts: Sequence[int]) -> Seen:
    """The reference over the same parts, seen at the same places."""
    kept: dict[int, list[torch.Tensor]] = {}

    def see(place: Place, tensor: torch.Tensor) -> torch.Tensor:
        if place.component == "hidden":
            kept.setdefault(place.layer, []).append(tensor)
        return tensor

    memories, finals, begin = trunk.empty_memories(weights), [], 0
    for size in parts:
        final, memories = trunk.advance(weights, tokens[begin : begin + size], memories, begin, see)
        finals.append(final)
        begin += size
    final = torch.cat(finals)
    hidden = tuple(torch.cat(kept[layer]) for layer in sorted(kept))
    return Seen(hidden, final, trunk.logits(weights, final), _memory(memories))


def _memory(memories: Sequence[trunk.LayerMemory]) -> dict[str, torch.Tensor]:
    return {f"{name} {index}": tensor for index, memory in enumerate(memories)
            for name, tensor in trunk.components(memory).items()}  # fmt: skip


def _run_head(
    weights: Weights, final: torch.Tensor, tokens: Sequence[int], chain: int
) -> tuple[torch.Tensor, torch.Tensor]:
    model = TensorModel(weights)
    cache, hidden, ids, start = model.no_cache(), final, list(tokens), 0
    ys = []
    for _ in range(chain + 1):
        y, cache = model.head(0, ids, hidden, cache, start, "extend", unseen)
        ys.append(y)
        start += len(ids)
        hidden = y[-1:]
        ids = model.pick(hidden, "extend", unseen)
    rows = torch.cat(ys)
    return rows, trunk.logits(weights, rows)


if __name__ == "__main__":
    main()
