"""Stored tensors become the reference's own weights: projections unpacked, one object per expert, one dtype for all.

Casting a stored bf16 or fp32 to fp64 is exact. Leaves out: reading and verifying (`contract.checkpoint`).
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from .contract.checkpoint import Checkpoint
from .contract.checkpoint_tensor_shapes import expert_names, layer_norms, ngram_tables, norm_name, prefix_of_block
from .contract.config import LATENT_TYPES, MLPS, OLMO, ModelConfig
from .contract.nemotron_config import NEMOTRON
from .contract.recurrences import PLE

Get = Callable[[str], torch.Tensor]
Limits = tuple[float | None, float | None]  # of a clamped SwiGLU: of routed experts, of the shared one
Part = TypeVar("Part")


def given(part: Part | None) -> Part:
    """Return a part of a layer that its blocks have."""
    assert part is not None, "the layer has this block"
    return part


@dataclass(frozen=True)
class GdnWeights:
    """qkv [C, D], z [HV*V, D], b, a [HV, D]; conv [C, W]; A_log, dt_bias [HV]; norm [V]; out [D, HV*V].

    Mamba2: no b; norm [HV*V]; conv_bias [C], if there is one; skip [HV].

    With a decay per channel: a [HV*K, .], dt_bias [HV*K]. With two matrices in turn before z and a, the first are
    z_low [V, D] and a_low [K, D].
    """

    qkv: torch.Tensor
    z: torch.Tensor
    b: torch.Tensor | None
    a: torch.Tensor
    conv: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    out: torch.Tensor
    z_low: torch.Tensor | None = None
    a_low: torch.Tensor | None = None
    conv_bias: torch.Tensor | None = None
    skip: torch.Tensor | None = None


@dataclass(frozen=True)
class LightningWeights:
    """Lightning attention: qkv [HV*(2K + V), D], per head q, k, v; z [HV*V, D]; log_decay [HV], which no file stores;

    norm [HV*V]; out [D, HV*V].
    """

    qkv: torch.Tensor
    z: torch.Tensor
    log_decay: torch.Tensor
    norm: torch.Tensor
    out: torch.Tensor


@dataclass(frozen=True)
class ShortConvWeights:
    """gates and x in one matrix, inputs [3D, D]: B, C, x; conv [D, W]; out [D, D]."""

    inputs: torch.Tensor
    conv: torch.Tensor
    out: torch.Tensor


@dataclass(frozen=True)
class LatentWeights:
    """Weights of a latent attention layer (MLA); R: width of a latent, S: of the part of a key that heads share.

    query [heads*head_dim, D]; down [R + S, D]; latent_norm [R]; up [heads*(head_dim - S + value_width), R], per head
    key then value; out [D, heads*value_width]. With positions: query [heads*(head_dim + 1), D], per head query then
    gate, and channels of the S parts in the order of `attention.rotate`.
    """

    query: torch.Tensor
    down: torch.Tensor
    latent_norm: torch.Tensor
    up: torch.Tensor
    out: torch.Tensor


@dataclass(frozen=True)
class AttentionWeights:
    """Weights of a full attention layer.

    query_gate [heads*2*head_dim, D], per head query then gate, or without gates [heads*head_dim, D]; key, value
    [kv_heads*head_dim, D]; query_norm, key_norm [head_dim], or of all heads, or
    empty: there is no norm; out [D, heads*head_dim].
    """

    query_gate: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    query_norm: torch.Tensor
    key_norm: torch.Tensor
    out: torch.Tensor


@dataclass(frozen=True)
class NopeWeights:
    """query [heads*head_dim, D]; key, value [kv_heads*head_dim, D]; out [D, heads*head_dim]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor


@dataclass(frozen=True)
class MlpWeights:
    """gate, up [I, D]; down [D, I]. gate None: a squared ReLU of up. limit: of a clamped SwiGLU; None: no clamp"""

    gate: torch.Tensor | None
    up: torch.Tensor
    down: torch.Tensor
    limit: float | None = None


@dataclass(frozen=True)
class MoeWeights:
    """router [E, D]; experts, E of them; the shared expert, of width 0 if there is none, and its gate [1, D], if it
    has one; bias [E], of a sigmoid router; to_latent [L, D] and from_latent [D, L], around routed experts of width L.
    """

    router: torch.Tensor
    experts: tuple[MlpWeights, ...]
    shared: MlpWeights
    shared_gate: torch.Tensor | None
    bias: torch.Tensor | None = None
    to_latent: torch.Tensor | None = None
    from_latent: torch.Tensor | None = None


MixerWeights = GdnWeights | LightningWeights | ShortConvWeights | AttentionWeights | LatentWeights | NopeWeights


@dataclass(frozen=True)
class PleWeights:
    """table [sum of sizes or more, E / heads in all]; key [S*D, E], value [D, E]; conv [S*D, W]; norms [S*D], 0 is 1.

    E: width of the embeddings of all heads side by side
    """

    table: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    conv: torch.Tensor
    key_norm: torch.Tensor
    query_norm: torch.Tensor
    conv_norm: torch.Tensor


@dataclass(frozen=True)
class StreamWeights:
    """Weights by which a block reads and writes S streams: norm [S*D]; down [R, S*D], up [S*D, R]; inject [S, S*D].

    inject: None after the last layer, which only reads
    """

    norm: torch.Tensor
    down: torch.Tensor
    up: torch.Tensor
    inject: torch.Tensor | None


Norm = torch.Tensor | StreamWeights


@dataclass(frozen=True)
class LayerWeights:
    """input_norm, post_norm [D], or with streams their weights; the token mixer; the MLP; the embedding of n-grams.

    None: the layer has no such block, or no norm of it.
    """

    input_norm: Norm | None
    mixer: MixerWeights | None
    post_norm: Norm | None
    mlp: MlpWeights | MoeWeights | None
    ple: PleWeights | None = None


@dataclass(frozen=True)
class DraftWeights:
    """fc [D, 2D]; norm_embedding, norm_hidden, norm [D]; the MTP layers, as `config.drafter()` describes them."""

    fc: torch.Tensor
    norm_embedding: torch.Tensor
    norm_hidden: torch.Tensor
    norm: torch.Tensor
    layers: tuple[LayerWeights, ...]


@dataclass(frozen=True)
class BlockWeights:
    """A block drafter that reads n layers: fc [D, nD]; hidden_norm, norm [D]; layers of `config.block_model()`."""

    fc: torch.Tensor
    hidden_norm: torch.Tensor
    norm: torch.Tensor
    layers: tuple[LayerWeights, ...]


@dataclass(frozen=True)
class Weights:
    """embedding, head [vocab, D] (one tensor when tied); final_norm [D], or of streams; the layers; the draft head.

    block: the block drafter, if any
    """

    config: ModelConfig
    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Norm
    head: torch.Tensor
    draft: DraftWeights | None
    block: BlockWeights | None = None

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"
    ) -> Weights:
        """All tensors of a checkpoint in one dtype on one device."""
        config = checkpoint.config

        def get(name: str) -> torch.Tensor:
            return checkpoint.tensors[name].to(device=device, dtype=dtype)

        embedding = get("model.embed_tokens.weight")
        return cls(
            config=config,
            embedding=embedding,
            layers=_layers(config, "model", checkpoint, get),
            final_norm=read_of(config, "model.norm", get, last=True),
            head=embedding if config.tied else get("lm_head.weight"),
            draft=_draft(config, checkpoint, get) if config.mtp_layers else None,
            block=_block(config, checkpoint, get) if config.block else None,
        )


def _draft(config: ModelConfig, checkpoint: Checkpoint, get: Get) -> DraftWeights:
    return DraftWeights(
        fc=get("mtp.fc.weight"),
        norm_embedding=norm_of(config, "mtp.pre_fc_norm_embedding", get),
        norm_hidden=norm_of(config, "mtp.pre_fc_norm_hidden", get),
        norm=norm_of(config, "mtp.norm", get),
        layers=_layers(config.drafter(), "mtp", checkpoint, get),
    )


def _block(config: ModelConfig, checkpoint: Checkpoint, get: Get) -> BlockWeights:
    return BlockWeights(
        fc=get("block.fc.weight"),
        hidden_norm=get("block.hidden_norm.weight"),
        norm=get("block.norm.weight"),
        layers=_layers(config.block_model(), "block", checkpoint, get),
    )


def _layers(config: ModelConfig, root: str, checkpoint: Checkpoint, get: Get) -> tuple[LayerWeights, ...]:
    every = range(len(config.layers))
    return tuple(layer_of(config, f"{root}.layers.{index}", index, checkpoint.tensors, get) for index in every)


def layer_of(config: ModelConfig, at: str, index: int, stored: Container[str], get: Get) -> LayerWeights:
    """Load one layer. at: prefix of the names of its tensors; stored: all names there are."""
    mixer, norms = None, dict[bool, Norm]()
    mlp: MlpWeights | MoeWeights | None = None
    blocks = [block for block in config.layers[index] if block != PLE]
    for block, name in zip(blocks, layer_norms(config, index), strict=True):
        norms[block in MLPS] = read_of(config, f"{at}.{name}", get)
        if block in MLPS and config.model_type == NEMOTRON:
            mlp = (_ungated if block == "moe" else _mlp)(config, prefix_of_block(config, at, index, block), get)
        elif block == "moe":
            mlp = _moe(config, at, stored, get, config.limits(index))
        elif block == "mlp":
            mlp = _mlp(config, f"{at}.mlp", get)
        else:
            mixer = _mixer(config, index, at, get)
    ple = _ple(config, index, f"{at}.ple", stored, get) if PLE in config.layers[index] else None
    return LayerWeights(norms.get(False), mixer, norms.get(True), mlp, ple)


def read_of(config: ModelConfig, at: str, get: Get, *, last: bool = False) -> Norm:
    """Load a norm, or with streams the weights by which a block reads them. last: nothing is added back."""
    if config.streams == 1:
        return norm_of(config, at, get)
    at = norm_name(config, at)
    parts = ("hc_norm", "input_mix_weight_down", "input_mix_weight_up")
    norm, down, up = (get(f"{at}.{name}.weight") for name in parts)
    return StreamWeights(norm, down, up, None if last else get(f"{at}.block_inject_weight.weight"))


def _ple(config: ModelConfig, index: int, at: str, stored: Container[str], get: Get) -> PleWeights:
    tables = ngram_tables(at, config.ple_before(index), stored)
    key, value = (get(f"{at}.{name}_proj.weight") for name in ("key", "value"))
    norms = (get(f"{at}.norm_{name}.weight") for name in ("key", "query", "conv"))
    return PleWeights(torch.cat([*map(get, tables)]), key, value, get(f"{at}.conv1d.weight").squeeze(1), *norms)


def norm_of(config: ModelConfig, at: str, get: Get) -> torch.Tensor:
    """Load w of a norm that multiplies by 1 + w. Some families store the factor itself."""
    stored = get(f"{at}.weight")
    return stored if config.centred_norms else stored - 1


def _mixer(config: ModelConfig, index: int, at: str, get: Get) -> MixerWeights:
    if config.model_type == NEMOTRON:
        return _mamba2(config, f"{at}.mixer", get) if index in config.recurrent else _nope(f"{at}.mixer", get)
    if index in config.recurrent and config.recurrence.inputs == "projected":
        return _lightning(config, index, f"{at}.self_attn", get)
    if index in config.recurrent:
        if config.model_type in LATENT_TYPES:
            return _kda(config, at, get)
        return _olmo(at, get) if config.model_type == OLMO else _gdn(config, f"{at}.linear_attn", get)
    if index in config.convolving:
        conv = get(f"{at}.conv.conv.weight").squeeze(1)
        return ShortConvWeights(get(f"{at}.conv.in_proj.weight"), conv, get(f"{at}.conv.out_proj.weight"))
    return _mla(config, f"{at}.self_attn", get) if config.latent else _attention(config, f"{at}.self_attn", get)


def _gdn(config: ModelConfig, at: str, get: Get) -> GdnWeights:
    unpack = _interleaved if config.model_type == "qwen3_next" else _separate
    qkv, z, b, a = unpack(config, at, get)
    return GdnWeights(
        qkv=qkv, z=z, b=b, a=a,
        conv=get(f"{at}.conv1d.weight").squeeze(1),
        A_log=get(f"{at}.A_log"),
        dt_bias=get(f"{at}.dt_bias"),
        norm=get(f"{at}.norm.weight"),
        out=get(f"{at}.out_proj.weight"),
    )


def _separate(config: ModelConfig, at: str, get: Get) -> tuple[torch.Tensor, ...]:
    """Qwen3.5: qkv, z, b and a are four stored matrices."""
    return tuple(get(f"{at}.in_proj_{name}.weight") for name in ("qkv", "z", "b", "a"))


def _interleaved(config: ModelConfig, at: str, get: Get) -> tuple[torch.Tensor, ...]:
    """Collect rows over the heads: Qwen3-Next stores them per key head, [q K | k K | v rV | z rV] and [b r | a r].

    Mirrors: transformers `Qwen3NextGatedDeltaNet.fix_query_key_value_ordering`, done to the weights instead.
    """
    r = config.value_heads // config.key_heads
    K, V = config.key_dim, config.value_dim
    per_head = get(f"{at}.in_proj_qkvz.weight").reshape(config.key_heads, -1, config.hidden)
    q, k, v, z = (part.flatten(0, 1) for part in torch.split(per_head, [K, K, r * V, r * V], dim=1))
    gates = get(f"{at}.in_proj_ba.weight").reshape(config.key_heads, -1, config.hidden)
    b, a = (part.flatten(0, 1) for part in torch.split(gates, [r, r], dim=1))
    return torch.cat([q, k, v]), z, b, a


def _kda(config: ModelConfig, layer: str, get: Get) -> GdnWeights:
    """Load a KDA layer. Its projections and convs of q, k and v are stored one by one."""
    at, low = f"{layer}.self_attn", config.low_rank
    z, a = ("g_b_proj", "f_b_proj") if low else ("g_proj", "f_proj")
    return GdnWeights(
        qkv=torch.cat([get(f"{at}.{name}_proj.weight") for name in "qkv"]),
        z=get(f"{at}.{z}.weight"), b=get(f"{at}.b_proj.weight"), a=get(f"{at}.{a}.weight"),
        conv=torch.cat([get(f"{at}.{name}_conv1d.weight") for name in "qkv"]).squeeze(1),
        A_log=get(f"{at}.A_log").flatten(),
        dt_bias=get(f"{at}.dt_bias"),
        norm=get(f"{at}.o_norm.weight"),
        out=get(f"{at}.o_proj.weight"),
        z_low=get(f"{at}.g_a_proj.weight") if low else None, a_low=get(f"{at}.f_a_proj.weight") if low else None,
    )


def _olmo(layer: str, get: Get) -> GdnWeights:
    """Load a GDN layer of OLMo-Hybrid. Its projections and convs of q, k and v are stored one by one."""
    at = f"{layer}.linear_attn"
    return GdnWeights(
        qkv=torch.cat([get(f"{at}.{name}_proj.weight") for name in "qkv"]),
        z=get(f"{at}.g_proj.weight"), b=get(f"{at}.b_proj.weight"), a=get(f"{at}.a_proj.weight"),
        conv=torch.cat([get(f"{at}.{name}_conv1d.weight") for name in "qkv"]).squeeze(1),
        A_log=get(f"{at}.A_log"),
        dt_bias=get(f"{at}.dt_bias"),
        norm=get(f"{at}.o_norm.weight"),
        out=get(f"{at}.o_proj.weight"),
    )


def _mamba2(config: ModelConfig, at: str, get: Get) -> GdnWeights:
    """Load a Mamba2 layer. One stored matrix makes z, then x, B and C, then dt."""
    values, channels = config.value_heads * config.value_dim, config.lengths(("C",))[0]
    z, qkv, a = torch.split(get(f"{at}.in_proj.weight"), [values, channels, config.value_heads])
    return GdnWeights(
        qkv=qkv, z=z, b=None, a=a,
        conv=get(f"{at}.conv1d.weight").squeeze(1),
        A_log=get(f"{at}.A_log"),
        dt_bias=get(f"{at}.dt_bias"),
        norm=get(f"{at}.norm.weight"),
        out=get(f"{at}.out_proj.weight"),
        conv_bias=get(f"{at}.conv1d.bias") if config.conv_bias else None,
        skip=get(f"{at}.D"),
    )


def _nope(at: str, get: Get) -> NopeWeights:
    return NopeWeights(*(get(f"{at}.{name}_proj.weight") for name in "qkvo"))


def _no_mlp(router: torch.Tensor) -> MlpWeights:
    none = router[:0]
    return MlpWeights(none, none, none.T)


def _lightning(config: ModelConfig, index: int, at: str, get: Get) -> LightningWeights:
    qkv = get(f"{at}.qkv_proj.weight")
    return LightningWeights(
        qkv=qkv, z=get(f"{at}.output_gate.weight"),
        log_decay=qkv.new_tensor(fixed_decay(config.value_heads, index, len(config.layers))),
        norm=get(f"{at}.norm.weight"), out=get(f"{at}.out_proj.weight"),
    )


def fixed_decay(heads: int, layer: int, layers: int) -> list[float]:
    """Return the logarithm of the decay of each head, in nats, which its number and its layer's decide.

        -2^(-8 (h + 1) / heads) (1 - layer / (layers - 1 + 1e-5) + 1e-5)

    Mirrors: transformers 5.24 `MiniMaxLightningAttention.get_slope_rate`, which returns the negative.
    """
    share = 1 - layer / (layers - 1 + 1e-5) + 1e-5
    return [-(2.0 ** (-8 * (head + 1) / heads)) * share for head in range(heads)]


def _mla(config: ModelConfig, at: str, get: Get) -> LatentWeights:
    query, down = get(f"{at}.q_proj.weight"), get(f"{at}.kv_a_proj_with_mqa.weight")
    if config.rotary_dim:
        query = _pairs_apart(config, query.reshape(config.heads, config.head_dim, -1))
        query = torch.cat([query, get(f"{at}.g_proj.weight")[:, None]], 1).flatten(0, 1)
        down = _pairs_apart(config, down)
    return LatentWeights(
        query=query,
        down=down,
        latent_norm=norm_of(config, f"{at}.kv_a_layernorm", get),
        up=get(f"{at}.kv_b_proj.weight"),
        out=get(f"{at}.o_proj.weight"),
    )


def _pairs_apart(config: ModelConfig, rows: torch.Tensor) -> torch.Tensor:
    """Put the last `rotary_dim` rows [.., rows, D] in the order of `attention.rotate`: the first of each pair first.

    Mirrors: transformers 5.24 `apply_rotary_pos_emb_interleave`, done to the weights instead.
    """
    own = rows.shape[-2] - config.rotary_dim
    return torch.cat([rows[..., :own, :], rows[..., own::2, :], rows[..., own + 1 :: 2, :]], dim=-2)


def _attention(config: ModelConfig, at: str, get: Get) -> AttentionWeights:
    none = get(f"{at}.q_proj.weight").new_empty(0)
    norms = [norm_of(config, f"{at}.{name}_norm", get) if config.head_norms else none for name in "qk"]
    return AttentionWeights(
        query_gate=get(f"{at}.q_proj.weight"),
        key=get(f"{at}.k_proj.weight"),
        value=get(f"{at}.v_proj.weight"),
        query_norm=norms[0], key_norm=norms[1],
        out=get(f"{at}.o_proj.weight"),
    )


def _mlp(config: ModelConfig, at: str, get: Get) -> MlpWeights:
    gate = get(f"{at}.gate_proj.weight") if config.mlp_gate else None
    return MlpWeights(gate, get(f"{at}.up_proj.weight"), get(f"{at}.down_proj.weight"))


def _of_matrices(matrices: list[torch.Tensor], limit: float | None) -> MlpWeights:
    gate, up, down = matrices
    return MlpWeights(gate, up, down, limit)


def _ungated(config: ModelConfig, at: str, get: Get) -> MoeWeights:
    """Load experts without gates, their sigmoid router, and the projections around them if they read latents."""
    latent = config.expert_latent > 0
    return MoeWeights(
        router=get(f"{at}.gate.weight"),
        experts=tuple(_mlp(config, f"{at}.experts.{expert}", get) for expert in range(config.experts)),
        shared=_mlp(config, f"{at}.shared_experts", get), shared_gate=None,
        bias=get(f"{at}.gate.e_score_correction_bias"),
        to_latent=get(f"{at}.fc1_latent_proj.weight") if latent else None,
        from_latent=get(f"{at}.fc2_latent_proj.weight") if latent else None,
    )


def _sparse(config: ModelConfig, layer: str, get: Get, limits: Limits) -> MoeWeights:
    at, names = expert_names(config, layer)
    return MoeWeights(
        router=get(f"{at}.gate.weight"),
        experts=tuple(_of_matrices([get(f"{at}.experts.{expert}.{name}.weight") for name in names], limits[0])
                      for expert in range(config.experts)),
        shared=replace(_mlp(config, f"{at}.shared_experts", get), limit=limits[1]), shared_gate=None,
        bias=get(f"{at}.gate.e_score_correction_bias"),
    )  # fmt: skip


def _moe(config: ModelConfig, layer: str, stored: Container[str], get: Get, limits: Limits) -> MoeWeights:
    if config.router == "sigmoid":
        return _sparse(config, layer, get, limits)
    at = f"{layer}.mlp"
    fused, router = f"{at}.experts.gate_up_proj" in stored, get(f"{at}.gate.weight")
    return MoeWeights(
        router=router,
        experts=_fused(at, get) if fused else tuple(
            _mlp(config, f"{at}.experts.{expert}", get) for expert in range(config.experts)),
        shared=_mlp(config, f"{at}.shared_expert", get) if config.shared_intermediate else _no_mlp(router),
        shared_gate=get(f"{at}.shared_expert_gate.weight") if config.shared_intermediate else None,
    )


def _fused(at: str, get: Get) -> tuple[MlpWeights, ...]:
    """gate_up_proj [E, 2I, D] holds the gate half first; down_proj [E, D, I]."""
    gate, up = get(f"{at}.experts.gate_up_proj").chunk(2, dim=1)
    return tuple(MlpWeights(*parts) for parts in zip(gate, up, get(f"{at}.experts.down_proj"), strict=True))
