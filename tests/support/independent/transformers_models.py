"""`transformers` as an oracle: its models compute in the requested width and run as the reference does.

In fp64 its modules are compiled from their source under other names, with every cast to fp32 turned into one to fp64:
unchanged they compute in fp32 inside. Leaves out: tolerances and tables (`documentation/parity.py`).
"""

import importlib
import importlib.util
import json
import re
import sys
import tempfile
import types
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ..inputs.checkpoints import Kind

MODULES: dict[Kind, str] = {
    "dense": "qwen3_5", "next": "qwen3_next", "moe": "qwen3_5_moe", "kimi": "kimi_linear", "olmo": "olmo_hybrid",
    "nemotron": "nemotron_h", "lfm2": "lfm2", "ling": "bailing_hybrid", "minimax": "minimax",
    "qwen4": "qwen4_exp",
}
CLASSES: dict[Kind, str] = {
    "dense": "Qwen3_5ForCausalLM", "next": "Qwen3NextForCausalLM", "moe": "Qwen3_5MoeForCausalLM",
    "kimi": "KimiLinearForCausalLM", "olmo": "OlmoHybridForCausalLM", "nemotron": "NemotronHForCausalLM",
    "lfm2": "Lfm2ForCausalLM", "ling": "BailingHybridForCausalLM", "minimax": "MiniMaxForCausalLM",
    "qwen4": "Qwen4ExpForCausalLM",
}
# By model type, if it is not `norm`.
FINAL_NORM = {"lfm2": "embedding_norm", "nemotron_h": "norm_f", "qwen4_exp_text": "hyper_connection_mixer"}
CONV_WIDTHS = ("linear_conv_kernel_dim", "conv_kernel", "conv_L_cache")


@dataclass(frozen=True)
class Seen:
    """hidden: per layer [T, D]; final [T, D]; logits [T, vocab]; memory: name -> tensor, in our canonical layout."""

    hidden: tuple[torch.Tensor, ...]
    final: torch.Tensor
    logits: torch.Tensor
    memory: dict[str, torch.Tensor]


def load(directory: Path, kind: Kind, dtype: torch.dtype) -> Any:
    """The model of a directory, computing in `dtype` throughout, by torch alone."""
    from transformers.utils import logging  # here and below: not while all tests are collected, for it takes seconds

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    name = f"transformers.models.{MODULES[kind]}.modeling_{MODULES[kind]}"
    module = in_double(name) if dtype == torch.float64 else importlib.import_module(name)
    model = getattr(module, CLASSES[kind]).from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    _make_decays_in(model, dtype)
    if kind == "ling":
        _clamp(model, json.loads((directory / "config.json").read_text()))
    return model.eval()


def _clamp(model: Any, stated: dict[str, Any]) -> None:
    """Clamp the SwiGLU of experts in layers with a limit, which transformers 5.24 does not.

    Mirrors: `BailingMLP` of `bailing_moe_v3.py` in SGLang, and vLLM's, which agree.
    """
    names = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")
    routed, shared = (stated.get(name) or [0] * len(model.model.layers) for name in names)
    for number, layer in enumerate(model.model.layers):
        if routed[number]:
            layer.mlp.experts.forward = partial(_clamped_experts, layer.mlp.experts, routed[number])
        if shared[number]:
            layer.mlp.shared_experts.forward = partial(_clamped_expert, layer.mlp.shared_experts, shared[number])


def _clamped_experts(own: Any, limit: float, x: torch.Tensor, chosen: torch.Tensor, share: torch.Tensor) -> Any:
    """Run all experts on all rows, then sum those that serve a row. x [T, D]; chosen, share [T, k]"""
    gate, up = torch.einsum("td,eid->tei", x, own.gate_up_proj).chunk(2, -1)
    opened = torch.minimum(gate / (1 + torch.exp(-gate)), torch.full_like(gate, limit))
    made = torch.einsum("tei,edi->ted", opened * up.clamp(-limit, limit), own.down_proj)
    return (made.gather(1, chosen[..., None].expand(-1, -1, x.shape[-1])) * share[..., None]).sum(1)


def _clamped_expert(own: Any, limit: float, x: torch.Tensor) -> Any:
    gate, up = own.gate_proj(x), own.up_proj(x)
    opened = torch.minimum(gate / (1 + torch.exp(-gate)), torch.full_like(gate, limit))
    return own.down_proj(opened * up.clamp(-limit, limit))


def _make_decays_in(model: Any, dtype: torch.dtype) -> None:
    """Make the fixed decays of MiniMax in `dtype`. transformers makes them in torch's default one.

    They follow from the number of the head and of the layer, so no file needs them.
    """
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    for module in model.modules():
        if hasattr(module, "get_slope_rate"):
            module.slope_rate = module.get_slope_rate()
            module.query_decay, module.key_decay, module.diagonal_decay = module.decay_factors(module.slope_rate)
    torch.set_default_dtype(usual)


@torch.no_grad()
def run(model: Any, tokens: Sequence[int], parts: Sequence[int], cached: bool = True) -> Seen:
    """The tokens in parts of the given sizes, one after another on the model's cache."""
    layers, kind = model.model.layers, model.config.model_type
    rows: list[list[torch.Tensor]] = [[] for _ in range(len(layers) + 1)]
    hooks = [
        module.register_forward_hook(lambda _, __, out, kept=kept: kept.append(out[0]))
        for module, kept in zip([*layers, getattr(model.model, FINAL_NORM.get(kind, "norm"))], rows, strict=True)
    ]
    from transformers import DynamicCache

    own = kind == "minimax"  # its separate cache class takes the length from a layer that may have no keys
    past = sys.modules[type(model).__module__].MiniMaxCache() if own else DynamicCache(config=model.config)
    logits, begin = [], 0
    for size in parts:
        part = torch.tensor([tokens[begin : begin + size]])
        # mask, positions, cache: the cache has another name before transformers 5.24
        mask = _masks(begin, size, model.dtype) if own else None
        positions = torch.arange(begin, begin + size)[None] if own else None
        logits.append(model(part, mask, positions, past if cached else None, use_cache=cached).logits[0])
        begin += size
    for hook in hooks:
        hook.remove()
    *hidden, final = (torch.cat(kept) for kept in rows)
    return Seen(tuple(hidden), final, torch.cat(logits), _memory(past, model.config) if cached else {})


def rename_mtp_norm(directory: Path) -> None:
    """Rename the last norm of Ling's MTP layer: transformers 5.24 does not know its released name, and refuses a file
    without it.
    """
    file = directory / "model.safetensors"
    tensors = {name.replace(".final_layernorm.", ".post_norm."): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})


def _masks(begin: int, size: int, dtype: torch.dtype) -> dict[str, torch.Tensor | None]:
    """The masks of a part, by the names of layers: all rows before it, and its own up to each row."""
    later = torch.ones(size, begin + size, dtype=torch.bool).triu(begin + 1)
    mask = torch.zeros(size, begin + size, dtype=dtype).masked_fill(later, float("-inf"))
    return {"full_attention": mask[None, None], "linear_attention": None}


@torch.no_grad()
def run_head(model: Any, final: torch.Tensor, tokens: Sequence[int], chain: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The draft head on rows (final p, token p + 1), then `chain` times more on its own y and the greedy draft.

    -> y and logits, one row per row run. HF rotates row p at position p + 1.
    """
    model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
    model.config.mtp_mlp_layer_types = ["sparse"]  # of types whose configuration lists MLPs
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    head = MtpModel.from_pretrained(model)
    head.train(False)
    past = MtpCache(config=head.config)
    hidden, ids, position = final[None], torch.tensor([tokens]), 1
    ys, scores = [], []
    for _ in range(chain + 1):
        positions = torch.arange(position, position + ids.shape[1])[None]
        y = head.forward_layer(0, hidden, positions, past, input_ids=ids)
        ys.append(y[0])
        scores.append(model.lm_head(y)[0])
        position += ids.shape[1]
        hidden, ids = y[:, -1:], scores[-1][-1:].argmax(-1)[None]
    return torch.cat(ys), torch.cat(scores)


@torch.no_grad()
def run_head_of_two_blocks(
    directory: Path, dtype: torch.dtype, final: torch.Tensor, tokens: Sequence[int], chain: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`run_head` for Nemotron-H, whose MTP head transformers 5.24 does not compute.

    Its blocks and its last norm are a Nemotron-H of two layers, which reads a projection of the normed embedding and
    the normed hidden row. Mirrors: `nemotron_h_mtp.py` of SGLang 0.5.23, and of vLLM at 01ca2773.
    """
    stored, config = load_file(directory / "model.safetensors"), json.loads((directory / "config.json").read_text())
    pattern = {"hybrid_override_pattern": "*E", "layers_block_type": None, "num_nextn_predict_layers": 0}
    with tempfile.TemporaryDirectory() as temporary:
        Path(temporary, "config.json").write_text(json.dumps(
            {name: value for name, value in (config | pattern).items() if value is not None}))
        blocks = {name.replace("mtp.", "backbone."): x for name, x in stored.items()
                  if re.match(r"mtp\.layers\.\d\.(norm|mixer)\.", name)}  # fmt: skip
        last = {"backbone.norm_f.weight": stored["mtp.layers.1.final_layernorm.weight"]}
        shared = {name: stored[name] for name in ("backbone.embeddings.weight", "lm_head.weight")}
        save_file(blocks | last | shared, Path(temporary, "model.safetensors"), {"format": "pt"})
        model = load(Path(temporary), "nemotron", dtype)
    from transformers import DynamicCache

    enorm, hnorm = (type(model.model.norm_f)(len(final[0]), config["layer_norm_epsilon"]).to(dtype) for _ in range(2))
    enorm.weight.copy_(stored["mtp.layers.0.enorm.weight"])
    hnorm.weight.copy_(stored["mtp.layers.0.hnorm.weight"])
    past, project = DynamicCache(config=model.config), stored["mtp.layers.0.eh_proj.weight"].to(dtype)
    hidden, ids, ys, scores = final[None], torch.tensor([tokens]), [], []
    for _ in range(chain + 1):
        fused = torch.cat([enorm(model.model.get_input_embeddings()(ids)), hnorm(hidden)], dim=-1) @ project.T
        y = model.model(None, fused, None, past, use_cache=True).last_hidden_state
        ys.append(y[0])
        scores.append(model.lm_head(y)[0])
        hidden, ids = y[:, -1:], scores[-1][-1:].argmax(-1)[None]
    return torch.cat(ys), torch.cat(scores)


def _memory(past: Any, config: Any) -> dict[str, torch.Tensor]:
    memory = {}
    if config.model_type == "minimax":
        past.layers += [None] * (len(config.layer_types) - len(past.layers))
    for index, (kept, kind) in enumerate(zip(past.layers, config.layer_types, strict=True)):
        if config.model_type == "minimax" and kind == "linear_attention":
            memory[f"state {index}"] = past.linear_cache[index][0]
        elif kind in ("linear_attention", "conv"):
            window = kept.conv_states[0][0]
            width = next(filter(None, (getattr(config, name, None) for name in CONV_WIDTHS)))
            memory[f"conv {index}"] = window[:, window.shape[1] - width + 1 :]
            if index + 1 in (getattr(config, "ple_layer_ids", None) or ()):  # its tokens are kept as a third window
                reach = (config.ple_conv_kernel_size - 1) * config.ngram_size
                memory[f"ple_conv {index}"] = kept.conv_states[1][0][:, -reach:]
                memory[f"ngram {index}"] = kept.conv_states[2][0][1 - config.ngram_size :] + 1
            if kind == "linear_attention":
                state = kept.recurrent_states[0][0]
                mamba = config.model_type == "nemotron_h"
                memory[f"state {index}"] = state.mT if mamba else state  # Mamba2's is stored [HV, V, K]
        elif kind in ("full_attention", "indexed_attention"):
            keys, values = kept.keys, kept.values
            if hasattr(config, "kv_lora_rank"):  # its cache calls the latents keys
                keys, values = values, keys
            memory[f"keys {index}"] = keys[0].transpose(0, 1)
            memory[f"values {index}"] = values[0].transpose(0, 1)
    return memory


@cache
def in_double(name: str) -> types.ModuleType:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text().replace(".float()", ".double()")
    source = re.sub(r"torch\.float(32)?\b", "torch.float64", source)
    module = types.ModuleType(f"{name}_in_double")
    module.__file__, module.__package__ = spec.origin, name.rpartition(".")[0]
    sys.modules[module.__name__] = module
    exec(compile(source, spec.origin, "exec", dont_inherit=True), module.__dict__)
    return module
