"""Stored tensors in the form of the ops: those with one input are concatenated, and each is cast once.

Leaves out: reading files (the contract's checkpoint) and every use of a weight.

Everything is cast to the activation dtype, except A_log, dt_bias and the gated norm: these stay in fp32 at least. They
are consumed in fp32, so a cast to 16 bits would be an undeclared rounding point.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from instep_reference.contract.block_drafter import PREFIX
from instep_reference.contract.checkpoint_tensor_shapes import (
    expert_names,
    ngram_tables,
    norm_name,
    prefix_of_block,
)
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.qwen4_config import PleShape

from .ops.family_op_protocols import Hashes, StreamWeights
from .ops.op_protocols import ExpertWeights


@dataclass(frozen=True)
class GdnWeights:
    """inputs [C + HV*V + HV + HV, D]: qkv, z, b, a; conv [C, W]; A_log, dt_bias [HV]; norm [V]; out [D, HV*V].

    With a decay per channel: HV*K rows of a, dt_bias [HV, K]. If z and a are of low rank, inputs are qkv, z_low, b and
    a_low, and the second matrices are z [HV*V, V] and a [HV*K, K].
    Mamba2: no b among the inputs; norm [HV*V]; conv_bias [C], if there is one; skip [HV].
    """

    inputs: torch.Tensor
    conv: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    out: torch.Tensor
    z: torch.Tensor | None = None
    a: torch.Tensor | None = None
    conv_bias: torch.Tensor | None = None
    skip: torch.Tensor | None = None


@dataclass(frozen=True)
class LightningWeights:
    """inputs [HV*(2K + V) + HV*V, D]: per head q, k, v, then z; log_decay [HV], in nats; norm [HV*V]; out [D, HV*V]."""

    inputs: torch.Tensor
    log_decay: torch.Tensor
    norm: torch.Tensor
    out: torch.Tensor


@dataclass(frozen=True)
class ShortConvWeights:
    """inputs [3D, D]: the gate B of the conv's input, the gate C of its output, x; conv [D, W]; out [D, D]."""

    inputs: torch.Tensor
    conv: torch.Tensor
    out: torch.Tensor


@dataclass(frozen=True)
class LatentWeights:
    """inputs: latent [R, D], query [heads*head_dim, D], shared part of the key [S, D]; norm [R] of the latent;

    with positions: [heads*(head_dim + 1), D], per head query then gate, then latent and shared part [R + S, D];
    up [heads*(head_dim - S + value_width), R], per head key then value; o [D, heads*value_width].
    """

    inputs: torch.Tensor
    norm: torch.Tensor
    up: torch.Tensor
    o: torch.Tensor


@dataclass(frozen=True)
class AttentionWeights:
    """inputs: q [heads*2*head_dim, D], per head query then gate, k, v [kv_heads*head_dim, D]; norms [head_dim]; o.

    Without gates q is [heads*head_dim, D]. A norm of all heads of a row is [heads, head_dim].
    Empty norms: there are none.
    """

    inputs: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    o: torch.Tensor


@dataclass(frozen=True)
class ProjectedWeights:
    """inputs: q [heads*head_dim, D], k, v [kv_heads*head_dim, D]; o [D, heads*head_dim]."""

    inputs: torch.Tensor
    o: torch.Tensor


@dataclass(frozen=True)
class DenseWeights:
    """gate_up [2I, D], gate half first; down [D, I]. Without gates up alone [I, D]."""

    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class PleWeights:
    """inputs [S*D + D, E]: of the key, of the value; conv [S*D, W]; norms [S*D]; tables, one after another."""

    tables: torch.Tensor
    hashes: Hashes
    inputs: torch.Tensor
    key_norm: torch.Tensor
    query_norm: torch.Tensor
    conv_norm: torch.Tensor
    conv: torch.Tensor


@dataclass(frozen=True)
class DraftWeights:
    """fc [D, 2D]; the norms [D] of the embedding, of the hidden row, and before the head."""

    fc: torch.Tensor
    embedding_norm: torch.Tensor
    hidden_norm: torch.Tensor
    norm: torch.Tensor


@dataclass(frozen=True)
class BlockWeights:
    """A block drafter that reads n layers: fc [D, nD]; the norms [D] of the context, and before the head."""

    fc: torch.Tensor
    hidden_norm: torch.Tensor
    norm: torch.Tensor


@dataclass(frozen=True)
class Stored:
    """The checkpoint's tensors, taken by name and cast on the way to the device."""

    tensors: Mapping[str, torch.Tensor]
    dtype: torch.dtype
    device: torch.device

    def take(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.tensors[name].to(device=self.device, dtype=dtype or self.dtype).contiguous()

    def wide(self, name: str) -> torch.Tensor:
        """The tensor in fp32, or in fp64 if activations are fp64."""
        return self.take(name, torch.promote_types(torch.float32, self.dtype))

    def norm(self, name: str, config: ModelConfig) -> torch.Tensor:
        """The weight of a norm that multiplies by 1 + weight: a stored factor, minus 1 in at least fp32."""
        return self.take(name) if config.centred_norms else self.wide(name) - 1

    def read(self, name: str, config: ModelConfig) -> torch.Tensor | StreamWeights:
        """The weight of a norm before a block, by its name; with streams, the matrices that mix them in its place."""
        if config.streams == 1:
            return self.norm(f"{name}.weight", config)
        at = norm_name(config, name)
        norm, down, up = (self.take(f"{at}.{part}.weight")
                          for part in ("hc_norm", "input_mix_weight_down", "input_mix_weight_up"))  # fmt: skip
        inject = f"{at}.block_inject_weight.weight"
        return StreamWeights(norm, down, up, self.take(inject) if self.has(inject) else None, config.streams)

    def has(self, name: str) -> bool:
        return name in self.tensors


def gdn(stored: Stored, prefix: str, config: ModelConfig) -> GdnWeights:
    at = f"{prefix}.linear_attn"
    if stored.has(f"{at}.in_proj_qkvz.weight"):
        inputs = _unpacked(stored, at, config)
    else:
        inputs = tuple(stored.take(f"{at}.in_proj_{name}.weight") for name in ("qkv", "z", "b", "a"))
    return GdnWeights(
        torch.cat(inputs),
        conv=stored.take(f"{at}.conv1d.weight").squeeze(1),
        A_log=stored.wide(f"{at}.A_log"),
        dt_bias=stored.wide(f"{at}.dt_bias").view(config.lengths(config.recurrence.gate)),
        norm=stored.wide(f"{at}.norm.weight"),
        out=stored.take(f"{at}.out_proj.weight"),
    )


def kda(stored: Stored, prefix: str, config: ModelConfig) -> GdnWeights:
    at, low = f"{prefix}.self_attn", config.low_rank
    gates = ("g_a_proj", "b_proj", "f_a_proj") if low else ("g_proj", "b_proj", "f_proj")
    names = ("q_proj", "k_proj", "v_proj", *gates)
    return GdnWeights(
        torch.cat([stored.take(f"{at}.{name}.weight") for name in names]),
        conv=torch.cat([stored.take(f"{at}.{name}_conv1d.weight") for name in "qkv"]).squeeze(1),
        A_log=stored.wide(f"{at}.A_log").view(config.value_heads),
        dt_bias=stored.wide(f"{at}.dt_bias").view(config.value_heads, config.key_dim),
        norm=stored.wide(f"{at}.o_norm.weight"),
        out=stored.take(f"{at}.o_proj.weight"),
        z=stored.take(f"{at}.g_b_proj.weight") if low else None,
        a=stored.take(f"{at}.f_b_proj.weight") if low else None,
    )


def olmo(stored: Stored, prefix: str, config: ModelConfig) -> GdnWeights:
    at = f"{prefix}.linear_attn"
    return GdnWeights(
        torch.cat([stored.take(f"{at}.{name}_proj.weight") for name in "qkvgba"]),
        conv=_convs(stored, at),
        A_log=stored.wide(f"{at}.A_log"),
        dt_bias=stored.wide(f"{at}.dt_bias"),
        norm=stored.wide(f"{at}.o_norm.weight"),
        out=stored.take(f"{at}.o_proj.weight"),
    )


def lightning(stored: Stored, prefix: str, layer: int, config: ModelConfig) -> LightningWeights:
    at, heads = f"{prefix}.self_attn", config.value_heads
    # The slopes of ALiBi, from 2^(-8/heads) down to 2^-8, and smaller from layer to layer: in the last one almost zero.
    power = torch.arange(1, heads + 1, dtype=torch.float64) * (-8 / heads)
    depth = 1 + 1e-5 - layer / (len(config.layers) - 1 + 1e-5)
    norm = stored.wide(f"{at}.norm.weight")
    return LightningWeights(
        torch.cat([stored.take(f"{at}.{name}.weight") for name in ("qkv_proj", "output_gate")]),
        log_decay=(-depth * torch.exp2(power)).to(norm), norm=norm, out=stored.take(f"{at}.out_proj.weight"),
    )


def per_layer_embedding(stored: Stored, prefix: str, layer: int, config: ModelConfig) -> PleWeights:
    at, shape = f"{prefix}.ple", config.ple_before(layer)
    tables = torch.cat([stored.take(name) for name in ngram_tables(at, shape, stored.tensors)])
    inputs = torch.cat([stored.take(f"{at}.{name}_proj.weight") for name in ("key", "value")])
    return PleWeights(
        tables, Hashes(multipliers(shape), shape.sizes, shape.heads, shape.eos), inputs,
        key_norm=stored.take(f"{at}.norm_key.weight"), query_norm=stored.take(f"{at}.norm_query.weight"),
        conv_norm=stored.take(f"{at}.norm_conv.weight"), conv=stored.take(f"{at}.conv1d.weight").squeeze(1),
    )


def multipliers(shape: PleShape) -> tuple[int, ...]:
    """Draw one odd number per place of an n-gram with SplitMix64, small enough that no product leaves 63 bits."""
    step, full = 0x9E3779B97F4A7C15, (1 << 64) - 1
    most, start = max(1, (2**63 - 1) // shape.vocab // 2), shape.seed + 10007 * shape.index
    found = []
    for place in range(shape.ngram):
        # The generator's state before a number is `step` more for each place; one more is added as it is drawn.
        bits = (start + step * (place + 2)) & full
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            bits = ((bits ^ (bits >> shift)) * factor) & full
        found.append(2 * ((bits ^ (bits >> 31)) % most) + 1)
    return tuple(found)


def short_conv(stored: Stored, prefix: str) -> ShortConvWeights:
    inputs, conv, out = (stored.take(f"{prefix}.conv.{name}.weight") for name in ("in_proj", "conv", "out_proj"))
    return ShortConvWeights(inputs, conv.squeeze(1), out)


def _convs(stored: Stored, at: str) -> torch.Tensor:
    """Concatenate the convs of q, k and v, [C, W]."""
    each = [stored.take(f"{at}.{name}_conv1d.weight") for name in ("q", "k", "v")]
    return torch.cat(each).squeeze(1)


def mamba2(stored: Stored, prefix: str, config: ModelConfig) -> GdnWeights:
    at, values = f"{prefix}.mixer", config.value_heads * config.value_dim
    z, qkv, a = torch.split(
        stored.take(f"{at}.in_proj.weight"), [values, *config.lengths(("C",)), config.value_heads])
    return GdnWeights(
        torch.cat([qkv, z, a]),
        conv=stored.take(f"{at}.conv1d.weight").squeeze(1),
        A_log=stored.wide(f"{at}.A_log"),
        dt_bias=stored.wide(f"{at}.dt_bias"),
        norm=stored.wide(f"{at}.norm.weight"),
        out=stored.take(f"{at}.out_proj.weight"),
        conv_bias=stored.take(f"{at}.conv1d.bias") if config.conv_bias else None,
        skip=stored.wide(f"{at}.D"),
    )


def projected(stored: Stored, prefix: str) -> ProjectedWeights:
    at = f"{prefix}.mixer"
    inputs = torch.cat([stored.take(f"{at}.{name}_proj.weight") for name in "qkv"])
    return ProjectedWeights(inputs, stored.take(f"{at}.o_proj.weight"))


def latent(stored: Stored, prefix: str, config: ModelConfig) -> LatentWeights:
    at = f"{prefix}.self_attn"
    down, shared = torch.split(stored.take(f"{at}.kv_a_proj_with_mqa.weight"), [config.latent, config.shared_key])
    query = stored.take(f"{at}.q_proj.weight")
    inputs = [down, query, shared]
    if config.rotary_dim:  # stored in pairs, which the op wants in halves
        halves = [*range(0, config.rotary_dim, 2), *range(1, config.rotary_dim, 2)]
        own = config.head_dim - config.rotary_dim
        heads = query.view(config.heads, config.head_dim, -1)[:, [*range(own), *(own + turned for turned in halves)]]
        heads = torch.cat([heads, stored.take(f"{at}.g_proj.weight")[:, None]], dim=1)
        inputs = [heads.flatten(0, 1), down, shared[halves]]
    return LatentWeights(
        torch.cat(inputs),
        stored.norm(f"{at}.kv_a_layernorm.weight", config),
        *(stored.take(f"{at}.{name}.weight") for name in ("kv_b_proj", "o_proj")),
    )


def attention(stored: Stored, prefix: str, config: ModelConfig) -> AttentionWeights:
    at = f"{prefix}.self_attn"
    inputs = torch.cat([stored.take(f"{at}.{name}_proj.weight") for name in "qkv"])
    q_norm, k_norm = (stored.norm(f"{at}.{name}.weight", config) if config.head_norms else inputs.new_empty(0)
                      for name in ("q_norm", "k_norm"))  # fmt: skip
    if config.row_norms:
        q_norm, k_norm = (x.view(-1, config.head_dim) for x in (q_norm, k_norm))
    return AttentionWeights(inputs, q_norm, k_norm, stored.take(f"{at}.o_proj.weight"))


def mlp(stored: Stored, prefix: str, layer: int, config: ModelConfig) -> DenseWeights | ExpertWeights:
    at = f"{prefix}.mlp"
    if not config.mlp_gate:
        return _ungated(stored, prefix_of_block(config, prefix, layer, config.layers[layer][-1]), layer, config)
    if "moe" not in config.layers[layer]:
        return DenseWeights(_gate_up(stored, at), stored.take(f"{at}.down_proj.weight"))
    if config.router == "sigmoid":
        return _sparse(stored, prefix, layer, config)
    shared = f"{at}.shared_expert"
    with_shared = stored.has(f"{shared}.down_proj.weight")
    gate_up, down = _experts(stored, f"{at}.experts", config.experts)
    return ExpertWeights(
        router=stored.take(f"{at}.gate.weight"),
        gate_up=gate_up,
        down=down,
        shared_gate_up=_gate_up(stored, shared) if with_shared else None,
        shared_down=stored.take(f"{shared}.down_proj.weight") if with_shared else None,
        shared_gate=stored.take(f"{at}.shared_expert_gate.weight") if with_shared else None,
    )


def _sparse(stored: Stored, prefix: str, layer: int, config: ModelConfig) -> ExpertWeights:
    """Load experts with a sigmoid router."""
    at, names = expert_names(config, prefix)
    limit, shared_limit = config.limits(layer)
    gate, up, down = (
        torch.stack([stored.take(f"{at}.experts.{expert}.{name}.weight") for expert in range(config.experts)])
        for name in names)
    return ExpertWeights(
        router=stored.take(f"{at}.gate.weight"),
        gate_up=torch.cat([gate, up], dim=1),
        down=down,
        shared_gate_up=_gate_up(stored, f"{at}.shared_experts"),
        shared_down=stored.take(f"{at}.shared_experts.down_proj.weight"),
        shared_gate=None,
        router_bias=stored.wide(f"{at}.gate.e_score_correction_bias"),
        groups=config.expert_groups, groups_per_token=config.groups_per_token, scale=config.routed_scale,
        limit=limit, shared_limit=shared_limit,
    )


def _ungated(stored: Stored, at: str, layer: int, config: ModelConfig) -> DenseWeights | ExpertWeights:
    """Load an MLP with a squared ReLU, or a sigmoid router and experts with squared ReLUs."""
    if "moe" not in config.layers[layer]:
        return DenseWeights(*(stored.take(f"{at}.{name}_proj.weight") for name in ("up", "down")))
    up, down = (torch.stack([stored.take(f"{at}.experts.{expert}.{name}_proj.weight")
                             for expert in range(config.experts)]) for name in ("up", "down"))  # fmt: skip
    bias, latent = f"{at}.gate.e_score_correction_bias", config.expert_latent > 0
    to_latent, from_latent = (
        stored.take(f"{at}.{name}_latent_proj.weight") if latent else None for name in ("fc1", "fc2"))
    return ExpertWeights(
        router=stored.take(f"{at}.gate.weight"), gate_up=up, down=down,
        shared_gate_up=stored.take(f"{at}.shared_experts.up_proj.weight"),
        shared_down=stored.take(f"{at}.shared_experts.down_proj.weight"), shared_gate=None,
        router_bias=stored.wide(bias), groups=config.expert_groups, groups_per_token=config.groups_per_token,
        scale=config.routed_scale, gated=False, to_latent=to_latent, from_latent=from_latent,
    )


def draft(stored: Stored, config: ModelConfig) -> DraftWeights:
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    return DraftWeights(stored.take("mtp.fc.weight"), *(stored.norm(f"mtp.{name}.weight", config) for name in norms))


def block(stored: Stored) -> BlockWeights:
    return BlockWeights(*(stored.take(f"{PREFIX}{name}.weight") for name in ("fc", "hidden_norm", "norm")))


def _unpacked(stored: Stored, at: str, config: ModelConfig) -> tuple[torch.Tensor, ...]:
    """Unpack Qwen3-Next's interleaving per key head: [q K | k K | v rV | z rV] and [b r | a r], r = HV / H."""
    heads, width, per_head = config.key_heads, config.key_dim, config.value_heads // config.key_heads
    values = per_head * config.value_dim
    qkvz = stored.take(f"{at}.in_proj_qkvz.weight").view(heads, -1, config.hidden)
    q, k, v, z = (x.flatten(0, 1) for x in torch.split(qkvz, [width, width, values, values], dim=1))
    ba = stored.take(f"{at}.in_proj_ba.weight").view(heads, -1, config.hidden)
    b, a = (x.flatten(0, 1) for x in torch.split(ba, [per_head, per_head], dim=1))
    return q, k, v, z, b, a


def _gate_up(stored: Stored, at: str) -> torch.Tensor:
    return torch.cat([stored.take(f"{at}.gate_proj.weight"), stored.take(f"{at}.up_proj.weight")])


def _experts(stored: Stored, at: str, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Load (gate_up, down) of all experts. Some files store them fused, others one by one."""
    if stored.has(f"{at}.gate_up_proj"):
        return stored.take(f"{at}.gate_up_proj"), stored.take(f"{at}.down_proj")
    gate_up = [_gate_up(stored, f"{at}.{expert}") for expert in range(experts)]
    down = [stored.take(f"{at}.{expert}.down_proj.weight") for expert in range(experts)]
    return torch.stack(gate_up), torch.stack(down)
