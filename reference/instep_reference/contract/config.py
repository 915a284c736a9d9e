"""The model's configuration, read from a Hugging Face `config.json` and frozen.

Leaves out: weights (`checkpoint.py`) and everything that is not needed to compute text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Literal

from .block_drafter import BlockDrafter
from .config_fields import ROPE_OBJECTS
from .config_fields import Fields as _Fields
from .config_fields import bad as _bad
from .config_fields import experts_per_token as _experts_per_token
from .config_fields import limits_of as _limits_of
from .config_fields import mixers_of as _mixers_of
from .config_fields import multiple as _multiple
from .config_fields import only as _only
from .config_fields import positive as _positive
from .errors import BadInput
from .lfm2_config import LFM2, read_lfm2
from .minimax_config import MINIMAX, read_minimax
from .nemotron_config import NEMOTRON, read_nemotron
from .qwen4_config import QWEN4, PleShape, streams_and_embeddings
from .recurrences import KEPT_BY, PLE, RECURRENCES, WITH_FIXED_MEMORY, Axes, Recurrence

# A block of a layer is norm, mixer or MLP, residual. It is named by its mixer or MLP: a row of WITH_FIXED_MEMORY,
# "attention", "mla" (attention over latents), "nope" (attention without norms, positions and gates), "mlp" or "moe".
# PLE, an embedding of n-grams, comes before the mixer.
Block = str
MLPS = ("mlp", "moe")

DENSE_TYPES = ("qwen3_5",)
MOE_TYPES = ("qwen3_next", "qwen3_5_moe", QWEN4)
KIMI, BAILING = "kimi_linear", "bailing_hybrid"
LATENT_TYPES = (KIMI, BAILING)  # a recurrence with a decay per channel, latent attention, a sigmoid router
OLMO = "olmo_hybrid"
MODEL_TYPES = (*DENSE_TYPES, *MOE_TYPES, KIMI, OLMO, NEMOTRON, LFM2, BAILING, MINIMAX)
TEXT_SUFFIX = "_text"  # the text part of a multimodal file has the type qwen3_5_text: the same model
LINEAR, FULL = "linear_attention", "full_attention"  # in `layer_types`
INDEXED = "indexed_attention"  # the name of the latter in files of Qwen4-Exp that transformers wrote
OUTPUT_GATES: dict[str, Literal["silu", "sigmoid"]] = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}
# Names under which files state the number of MTP layers. Qwen3-Next's files state none:
# it follows from the names of the tensors (`checkpoint.py`).
MTP_FIELDS = ("mtp_num_hidden_layers", "num_mtp_layers", "num_nextn_predict_layers")
# Defaults of the Hugging Face classes for fields that real files omit.
ATTENTION_INTERVAL = 4
PARTIAL_ROTARY_FACTOR = 0.25
HEAD_DIM = 256
# Other names of fields of Ling's files, as transformers 5.24 maps them: the release has the first ones.
ALIASES = {
    "n_group": "num_expert_group", "norm_topk_prob": "moe_renormalize", "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts", "num_local_experts": "num_experts",
    "num_mtp_layers": "num_nextn_predict_layers",
}
# eps of the norm of a latent, whatever the model's is: the release and transformers leave the default of their norms
LATENT_EPS = 1e-6
OLMO_CONV_WIDTH = 4  # default of `OlmoHybridConfig`
OLMO_GATED_EPS = 1e-5  # eps of the gated norm of OLMo-Hybrid, whatever the model's is, for the same reason
MOST_LAYERS = (1 << 16) - 1  # below `place_names.AFTER_LAYERS`, which must sort after every layer


@dataclass(frozen=True)
class ModelConfig:
    """One alphabet of sizes: D = hidden, H/HV = key/value heads of a recurrence, K/V their widths, W = conv width.

    The draft head is described by `drafter()`, another frozen object; nothing can change this one.
    """

    model_type: str  # without the suffix _text
    vocab: int
    hidden: int  # D
    layers: tuple[tuple[Block, ...], ...]  # of each layer its blocks, in order; none: it is on another pipeline stage
    eps: float
    tied: bool
    # layers with a recurrence
    key_heads: int  # H
    value_heads: int  # HV
    key_dim: int  # K
    value_dim: int  # V
    conv_width: int  # W
    output_gate: Literal["silu", "sigmoid"]
    # attention
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    # MLP: a layer has experts if "moe" is among its blocks
    intermediate: int
    experts: int
    experts_per_token: int
    expert_intermediate: int
    shared_intermediate: int
    norm_topk: bool
    # draft head
    mtp_layers: int
    # a block drafter, from a separate file; None: none is in use
    block: BlockDrafter | None = None
    # KDA: the bound of the safe gate, in nats; None: the gate is a softplus
    decay_bound: float | None = None
    # latent attention: a key of head_dim channels ends in `shared_key` channels that all heads share. rotary_dim 0: it
    # has neither positions nor a gate; else the shared part of queries and keys turns, and each head has a gate
    latent: int = 0
    shared_key: int = 0
    value_width: int = 0
    # router: softmax, or sigmoid with a bias, over the best groups of experts
    router: Literal["softmax", "sigmoid"] = "softmax"
    expert_groups: int = 1
    groups_per_token: int = 1
    routed_scale: float = 1.0
    expert_limits: tuple[float, ...] = ()  # by layer, limits of a clamped SwiGLU in routed experts; 0, no entry: none
    shared_limits: tuple[float, ...] = ()  # the same in shared experts
    expert_latent: int = 0  # width of the rows that routed experts read and make; 0: they read rows of D, as the others
    centred_norms: bool = True  # whether a norm multiplies by 1 + w, where w is its stored weight
    attention_gate: bool = True  # whether q_proj also makes a gate for the output of attention
    row_norms: bool = False  # whether queries and keys are normed over all heads of a row, not head by head
    head_norms: bool = True  # whether queries and keys are normed at all
    # Block, alpha, beta: the residual stream after it is alpha times the rows that it read, after their norm, plus beta
    # times its result. Without an entry: the rows before their norm, plus its result.
    residual_factors: tuple[tuple[Block, float, float], ...] = ()
    norm_after: tuple[Block, ...] = ()  # mixers in whose layers the results of blocks are normed, not their inputs
    gated_norm_eps: float | None = None  # None: eps
    conv_bias: bool = False
    mlp_gate: bool = True  # whether an MLP, or an expert, is a SwiGLU; if not, a squared ReLU
    beta_bound: float = 1.0  # beta is this times a sigmoid; above 1 a state may turn against its own sign
    streams: int = 1  # S: residual rows per token. With several a block reads a mixture of them
    stream_rank: int = 0  # of the matrices that mix them
    ple: tuple[PleShape, ...] = ()  # the embeddings of n-grams, in the order of their layers
    most_positions: int | None = None  # tokens of a request up to which the layers are as described; None: any number

    @classmethod
    def from_file(cls, path: Path | str) -> ModelConfig:
        """Read a `config.json`; any fault in it is a `BadInput` that names the field."""
        return cls.from_dict(read_json(Path(path)))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelConfig:
        """Read decoded JSON; multimodal files are read at their `text_config`."""
        fields = _Fields(_text_part(data), data)
        return READERS.get(str(fields.get("model_type")), _read)(fields)

    @cached_property
    def mixers(self) -> tuple[Block, ...]:
        """The mixer of each layer; "" if it has none, or is on another pipeline stage."""
        return tuple(next((one for one in blocks if one not in (*MLPS, PLE)), "") for blocks in self.layers)

    @cached_property
    def recurrent(self) -> tuple[int, ...]:
        """The layers with a recurrence: they have a state."""
        return tuple(layer for layer, mixer in enumerate(self.mixers) if mixer in RECURRENCES)

    def keeping(self, component: str) -> tuple[int, ...]:
        """Return the layers one of whose blocks keeps a component of memory (`KEPT_BY`)."""
        return tuple(layer for layer, blocks in enumerate(self.layers)
                     if any(component in KEPT_BY.get(block, ()) for block in blocks))  # fmt: skip

    def ple_before(self, layer: int) -> PleShape:
        """Return the embedding of n-grams that precedes a layer's mixer."""
        return next(shape for shape in self.ple if shape.layer == layer)

    @cached_property
    def convolving(self) -> tuple[int, ...]:
        """The layers with a conv: they have a conv window."""
        return self.keeping("conv")

    @cached_property
    def attending(self) -> tuple[int, ...]:
        """The layers with attention: they have keys and values."""
        return tuple(layer for layer, mixer in enumerate(self.mixers) if mixer and mixer not in WITH_FIXED_MEMORY)

    @cached_property
    def recurrence(self) -> Recurrence:
        """The row of the model's recurrence: it has one kind, or else none, and then any row does."""
        found = [WITH_FIXED_MEMORY[mixer] for mixer in self.mixers if mixer in WITH_FIXED_MEMORY]
        return [*found, *RECURRENCES.values()][0]

    @property
    def low_rank(self) -> bool:
        """Whether z and a follow from z_low and a_low. Only model types of the row store their matrices so."""
        return self.model_type in self.recurrence.low_rank

    @cached_property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """The segments of a conv's channels, in order: (heads, channels of each)."""
        row = self.recurrence
        return tuple((heads, prod(width)) for heads, *width in (self.lengths(row.places[part]) for part in row.conv))

    def lengths(self, axes: Axes) -> tuple[int, ...]:
        """Return the lengths of axes of a recurrence, or of its memory."""
        sizes = {"H": self.key_heads, "HV": self.value_heads, "K": self.key_dim, "V": self.value_dim,
                 "D": self.hidden, "W-1": self.conv_width - 1, "QKV": 2 * self.key_dim + self.value_dim,
                 "HVV": self.value_heads * self.value_dim, "S": self.streams, "SD": self.streams * self.hidden,
                 **dict.fromkeys(("E", "N-1", "R"), 0)}  # fmt: skip
        for shape in self.ple[:1]:
            sizes |= {"E": shape.width, "N-1": shape.ngram - 1, "R": shape.reach}
        return tuple(sum(map(prod, self.segments)) if axis == "C" else sizes[axis] for axis in axes)

    def factors(self, block: Block) -> tuple[float, float] | None:
        """Return alpha and beta of the residual after a block; None: it has none."""
        return next(((alpha, beta) for name, alpha, beta in self.residual_factors if name == block), None)

    def limits(self, layer: int) -> tuple[float | None, float | None]:
        """Return the limits of a clamped SwiGLU in a layer's routed experts and in its shared one; None: no clamp."""
        routed, shared = (dict(enumerate(of)).get(layer) or None for of in (self.expert_limits, self.shared_limits))
        return routed, shared

    @property
    def core_eps(self) -> float:
        """The eps of the gated norm."""
        return self.eps if self.gated_norm_eps is None else self.gated_norm_eps

    @property
    def gate_bounds(self) -> dict[str, float]:
        """The bounds of a recurrence's gates that are stated, by the names of these fields."""
        decay = {} if self.decay_bound is None else {"decay_bound": self.decay_bound}
        return decay | ({} if self.beta_bound == 1.0 else {"beta_bound": self.beta_bound})

    @property
    def attention(self) -> Block:
        """The mixer of layers with attention."""
        return "mla" if self.latent else "nope" if self.model_type == NEMOTRON else "attention"

    @property
    def stored_rows(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(heads, channels) of a stored key and of a stored value. MLA: the shared part of a key, the latent."""
        own = self.kv_heads, self.head_dim
        return ((1, self.shared_key), (1, self.latent)) if self.latent else (own, own)

    def drafter(self) -> ModelConfig:
        """Describe the draft head as a model: an attention layer per MTP layer, with the trunk's MLP or MoE."""
        layers = ((self.attention, "moe" if self.experts else "mlp"),) * self.mtp_layers
        return replace(self, layers=layers, mtp_layers=0, block=None, expert_limits=(), shared_limits=())

    def block_model(self) -> ModelConfig:
        """Describe the block drafter as a model of attention layers."""
        block = self.block
        assert block is not None, "there is a block drafter"
        return replace(
            self, layers=(("attention", "mlp"),) * block.num_hidden_layers, mtp_layers=0, block=None,
            heads=block.num_attention_heads, kv_heads=block.num_key_value_heads, head_dim=block.head_dim,
            rotary_dim=block.rotary_dim, rope_theta=block.rope_theta, eps=block.rms_norm_eps,
            intermediate=block.intermediate_size, experts=0, experts_per_token=0, expert_intermediate=0,
            shared_intermediate=0, norm_topk=False, latent=0, router="softmax", centred_norms=True,
            attention_gate=True, row_norms=False, norm_after=(), mlp_gate=True)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file, or raise a `BadInput` that names the file."""
    try:
        data = json.loads(path.read_bytes())  # not msgspec, which refuses the Infinity in files of Nemotron-H
    except FileNotFoundError:
        raise BadInput(str(path), found="no such file", expected="a JSON file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(str(path), found=error, expected="a readable JSON file") from None
    if not isinstance(data, dict):
        raise BadInput(str(path), found=type(data).__name__, expected="a JSON object")
    return data


def states_mtp_layers(data: dict[str, Any]) -> bool:
    """Return whether the file itself states the number of MTP layers."""
    text = _text_part(data)
    return any(text.get(name) is not None for name in MTP_FIELDS)


def _text_part(data: dict[str, Any]) -> dict[str, Any]:
    text = data.get("text_config", data)
    if not isinstance(text, dict):
        raise BadInput("config.json: text_config", found=type(text).__name__, expected="an object")
    return text


def _read(f: _Fields) -> ModelConfig:
    model_type = _model_type(f)
    layers = f.whole("num_hidden_layers", most=MOST_LAYERS)
    experts = f.whole("num_experts", least=0) if model_type in MOE_TYPES else 0
    value_heads, key_heads = _multiple(f, "linear_num_value_heads", "linear_num_key_heads")
    heads, kv_heads = _multiple(f, "num_attention_heads", "num_key_value_heads")
    head_dim = f.whole("head_dim", default=HEAD_DIM)
    # Qwen3.5-MoE has experts in every layer, and no such fields
    dense_layers = range(layers) if not experts else _dense_layers(f, layers) if model_type == "qwen3_next" else ()
    mixers = _mixers(f, layers, _recurrent(model_type))
    config = ModelConfig(
        model_type=model_type,
        vocab=f.whole("vocab_size"),
        hidden=f.whole("hidden_size"),
        layers=tuple((mixer, "mlp" if layer in dense_layers else "moe") for layer, mixer in enumerate(mixers)),
        eps=f.positive("rms_norm_eps"),
        tied=f.flag("tie_word_embeddings", default=False),
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=f.whole("linear_key_head_dim"),
        value_dim=f.whole("linear_value_head_dim"),
        conv_width=f.whole("linear_conv_kernel_dim"),
        output_gate=_output_gate(f),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=_rotary_dim(f, head_dim),
        rope_theta=_positive("rope_theta", f.rope("rope_theta")),
        intermediate=f.whole("intermediate_size") if dense_layers else 0,
        experts=experts,
        experts_per_token=_experts_per_token(f, experts) if experts else 0,
        expert_intermediate=f.whole("moe_intermediate_size") if experts else 0,
        shared_intermediate=f.whole("shared_expert_intermediate_size") if experts else 0,
        # Qwen3.5-MoE has no such field and always renormalises
        norm_topk=f.flag("norm_topk_prob", default=True) if model_type == "qwen3_next" else bool(experts),
        mtp_layers=next(
            (f.whole(name, least=0, most=MOST_LAYERS) for name in MTP_FIELDS if f.get(name) is not None), 0),
    )
    if model_type != QWEN4:
        return config
    return replace(config, **streams_and_embeddings(f, config.layers, config.vocab, config.hidden))


def _model_type(f: _Fields) -> str:
    """Return the type without its suffix; refuse an unsupported type, or an unsupported variation of one."""
    model_type = str(f.get("model_type")).removesuffix(TEXT_SUFFIX)
    if model_type not in DENSE_TYPES + MOE_TYPES:
        raise _bad("model_type", f.get("model_type"), f"one of {', '.join(MODEL_TYPES)}")
    for name, value in (
        ("hidden_act", "silu"), ("attention_bias", False), ("attn_output_gate", True),
        ("mtp_use_dedicated_embeddings", False), ("use_sliding_window", False),
    ):
        _only(name, f.get(name), value)
    for name in MTP_FIELDS if model_type == QWEN4 else ():
        _only(name, f.get(name), 0)
    for name in ("rope_type", "type"):
        _only(name, f.rope(name), "default")
    return model_type


def _output_gate(f: _Fields) -> Literal["silu", "sigmoid"]:
    gate = f.get("output_gate_type") or "silu"
    if not isinstance(gate, str) or gate not in OUTPUT_GATES:
        raise _bad("output_gate_type", gate, f"one of {', '.join(OUTPUT_GATES)}")
    return OUTPUT_GATES[gate]


def _recurrent(model_type: str) -> Block:
    """Return the recurrence of a type's linear layers."""
    return next(row.name for row in WITH_FIXED_MEMORY.values() if model_type in row.types)


def _mixers(f: _Fields, layers: int, recurrent: Block, full: Block = "attention") -> tuple[Block, ...]:
    """Return the mixer of every layer. recurrent: that of a linear layer;  full: that of a layer with attention."""
    mixers, stated = {LINEAR: recurrent, FULL: full}, f.get("layer_types")
    if str(f.get("model_type")).startswith(QWEN4):
        mixers[INDEXED] = full
    if stated is None:
        interval = f.whole("full_attention_interval", default=ATTENTION_INTERVAL)
        stated = [LINEAR if (index + 1) % interval else FULL for index in range(layers)]
    return _mixers_of(stated, layers, mixers)


def _rotary_dim(f: _Fields, head_dim: int) -> int:
    stated = f.rope("partial_rotary_factor")
    usual = 1.0 if str(f.get("model_type")).startswith(QWEN4) else PARTIAL_ROTARY_FACTOR
    factor = usual if stated is None else _positive("partial_rotary_factor", stated)
    rotary_dim = int(head_dim * min(factor, 2.0))  # more than 1 is refused
    if rotary_dim < 2 or rotary_dim > head_dim or rotary_dim % 2:
        expected = f"an even number of channels, 2 to {head_dim}, of head_dim"
        raise _bad("partial_rotary_factor", f"{factor} ({rotary_dim} channels)", expected)
    return rotary_dim


def _dense_layers(f: _Fields, layers: int) -> tuple[int, ...]:
    """List the layers of a MoE model without experts: those listed, and those off the sparse step."""
    listed = f.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(type(index) is int and 0 <= index < layers for index in listed):
        raise _bad("mlp_only_layers", listed, f"a list of layer numbers under {layers}")
    step = f.whole("decoder_sparse_step", default=1)
    return tuple(index for index in range(layers) if index in listed or (index + 1) % step)


def _read_kimi(f: _Fields) -> ModelConfig:
    """Read a file of Kimi-Linear. Fields with which Kimi-K3 changes the layers of this type are refused.

    Mirrors: transformers 5.24 `KimiLinearConfig`, and `config.json` of Kimi-Linear-48B-A3B. The release does not
             renormalise the share of a single expert, transformers does: such a file is refused.
    """
    linear = _Fields(_object(f, "linear_attn_config"), {})
    for name, value in (
        ("hidden_act", "silu"), ("attention_bias", False), ("q_lora_rank", None), ("mla_use_nope", True),
        ("mla_use_output_gate", False), ("moe_router_activation_func", "sigmoid"), ("use_grouped_topk", True),
        ("moe_layer_freq", 1), ("num_nextn_predict_layers", 0), ("tie_word_embeddings", False),
        ("routed_expert_hidden_size", None), ("latent_moe_use_norm", False), ("attn_res_block_size", None),
    ):
        _only(name, f.get(name), value)
    for name, value in (("use_full_rank_gate", False), ("gate_lower_bound", None)):
        _only(f"linear_attn_config.{name}", linear.get(name), value)
    layers = f.whole("num_hidden_layers", most=MOST_LAYERS)
    dense = range(min(layers, f.whole("first_k_dense_replace", least=0, default=1)))
    return _with_latents(
        f, KIMI, _kimi_mixers(f, linear, layers), dense, (linear.whole("num_heads"), linear.whole("head_dim")),
        conv_width=linear.whole("short_conv_kernel_size"), groups=(1, 1), rotary_dim=0, rope_theta=1.0, mtp_layers=0,
    )


def _read_bailing(f: _Fields) -> ModelConfig:
    """Read a file of Ling 3. Fields that only other models of this type have are refused.

    Mirrors: transformers 5.24 `BailingHybridConfig`, and `bailing_moe_v3.py` of SGLang, which serves one MTP layer,
             without limits. It clamps the SwiGLU of experts in late layers; transformers does not. The older
             models of this type have lightning attention, and no `short_conv_kernel_size`.
    """
    f = _Fields(_by_one_name(f.text), f.top)
    for name, value in (
        ("hidden_act", "silu"), ("attention_bias", False), ("use_bias", False), ("use_qkv_bias", False),
        ("q_lora_rank", None), ("use_mla_nope", False), ("rope_interleave", True), ("no_kda_lora", True),
        ("gated_attention_proj_granularity_type", "head_wise"), ("score_function", "sigmoid"),
        ("scoring_func", "sigmoid"), ("moe_router_enable_expert_bias", True), ("topk_method", "noaux_tc"),
        ("mtp_use_kda", False), ("group_norm_size", 1), ("tie_word_embeddings", False),
    ):
        _only(name, f.get(name), value)
    for name in ("rope_type", "type"):
        _only(name, f.rope(name), "default")
    width = f.whole("moe_intermediate_size")
    _only("moe_shared_expert_intermediate_size", f.get("moe_shared_expert_intermediate_size"), width)
    layers = f.whole("num_hidden_layers", most=MOST_LAYERS)
    heads = f.whole("num_attention_heads"), f.whole("linear_head_dim", default=f.whole("head_dim", default=128))
    rotary = f.whole("qk_rope_head_dim")
    if rotary % 2:
        raise _bad("qk_rope_head_dim", rotary, "an even number of channels")
    stated = f.rope("rope_theta")
    dense = range(min(layers, f.whole("first_k_dense_replace", least=0, default=2)))
    model = _with_latents(
        f, BAILING, _bailing_mixers(f, layers), dense, heads, groups=(8, 4), rotary_dim=rotary,
        conv_width=f.whole("short_conv_kernel_size"),
        rope_theta=_positive("rope_theta", 6e6 if stated is None else stated),
        mtp_layers=f.whole("num_nextn_predict_layers", least=0, default=0, most=1), decay_bound=_decay_bound(f),
    )
    routed, shared = (_limits_of(f, f"{of}_swiglu_limit_list", model.layers) for of in ("expert", "share_expert"))
    return replace(model, expert_limits=routed, shared_limits=shared)


def _by_one_name(text: dict[str, Any]) -> dict[str, Any]:
    """Return the fields by one name each. A field that is stated under two names must have one value."""
    found = dict(text)
    for other, name in ALIASES.items():
        value = found.pop(other, None)
        if value is not None and found.setdefault(name, value) != value:
            raise _bad(other, value, f"{found[name]!r}, the value of {name}")
    return found


def _decay_bound(f: _Fields) -> float | None:
    """Return the bound of the safe gate; None if the gate is a softplus."""
    bound = f.get("kda_lower_bound")
    bound = RECURRENCES[_recurrent(BAILING)].bound if bound is None else bound
    if not f.flag("kda_safe_gate", default=True):
        return None
    if not isinstance(bound, int | float) or isinstance(bound, bool) or not -float("inf") < bound < 0:
        raise _bad("kda_lower_bound", bound, "a negative number")
    return float(bound)


def _bailing_mixers(f: _Fields, layers: int) -> tuple[Block, ...]:
    """Read the mixers of layers: `layer_types`, or else the last layer of every group has attention."""
    group = f.whole("layer_group_size", default=6)
    kinds = [FULL if (layer + 1) % group == 0 else LINEAR for layer in range(layers)]
    return _mixers(_Fields({"layer_types": kinds, **f.text}, f.top), layers, _recurrent(BAILING), "mla")


def _with_latents(
    f: _Fields, model_type: str, mixers: tuple[Block, ...], dense: range, recurrent: tuple[int, int], *,
    conv_width: int, groups: tuple[int, int], rotary_dim: int, rope_theta: float, mtp_layers: int,
    decay_bound: float | None = None,
) -> ModelConfig:
    """Read the fields that all LATENT_TYPES have: latents, and experts with a sigmoid router.

    dense: the layers without experts;  recurrent: heads of a recurrence, and their width;  groups: default number of
    groups of experts, and of those that serve a token
    """
    heads, experts = f.whole("num_attention_heads"), f.whole("num_experts")
    if f.get("num_key_value_heads") is not None:
        _only("num_key_value_heads", f.get("num_key_value_heads"), heads)
    chosen = _experts_per_token(f, experts, "num_experts_per_token")
    count = f.whole("num_expert_group", default=groups[0])
    if experts % count or experts // count < min(2, count):
        raise _bad("num_expert_group", count, f"a divisor of num_experts ({experts}), with at least two in a group")
    best = f.whole("topk_group", default=groups[1], most=count)
    if chosen > best * (experts // count):
        raise _bad("num_experts_per_token", chosen, f"at most {best * (experts // count)}, the experts of topk_group")
    norm_topk = f.flag("moe_renormalize", default=True)
    if norm_topk and chosen == 1:
        raise _bad("num_experts_per_token", 1, "at least 2 with moe_renormalize: engines differ in the share of one")
    shared_key, expert_width = f.whole("qk_rope_head_dim"), f.whole("moe_intermediate_size")
    types = ["dense" if layer in dense else "sparse" for layer in range(len(mixers))]
    _only("mlp_layer_types", f.get("mlp_layer_types"), types)
    return ModelConfig(
        model_type=model_type,
        vocab=f.whole("vocab_size"),
        hidden=f.whole("hidden_size"),
        layers=tuple((mixer, "mlp" if layer in dense else "moe") for layer, mixer in enumerate(mixers)),
        eps=f.positive("rms_norm_eps"),
        tied=False,
        key_heads=recurrent[0], value_heads=recurrent[0], key_dim=recurrent[1], value_dim=recurrent[1],
        conv_width=conv_width,
        output_gate="sigmoid",
        heads=heads, kv_heads=1, head_dim=f.whole("qk_nope_head_dim") + shared_key,
        rotary_dim=rotary_dim, rope_theta=rope_theta,
        intermediate=f.whole("intermediate_size") if dense else 0,
        experts=experts, experts_per_token=chosen, expert_intermediate=expert_width,
        shared_intermediate=expert_width * f.whole("num_shared_experts", default=None if model_type == KIMI else 1),
        norm_topk=norm_topk,
        mtp_layers=mtp_layers,
        decay_bound=decay_bound,
        latent=f.whole("kv_lora_rank"), shared_key=shared_key, value_width=f.whole("v_head_dim"),
        router="sigmoid", expert_groups=count, groups_per_token=best,
        routed_scale=f.positive("routed_scaling_factor"), centred_norms=False,
    )


def _object(f: _Fields, name: str) -> dict[str, Any]:
    found = f.get(name)
    if not isinstance(found, dict):
        raise _bad(name, found, "an object")
    return found


def _kimi_mixers(f: _Fields, linear: _Fields, layers: int) -> tuple[Block, ...]:
    """Read the mixers of layers. Two lists have the numbers of layers, from 1; `layer_types` must agree if stated."""
    recurrent = _recurrent(KIMI)
    lists: dict[str, Block] = {"kda_layers": recurrent, "full_attn_layers": "mla"}
    kinds: dict[int, Block] = {}
    for name, kind in lists.items():
        numbers = linear.get(name)
        if not isinstance(numbers, list) or not all(type(n) is int and 1 <= n <= layers for n in numbers):
            raise _bad(f"linear_attn_config.{name}", numbers, f"a list of layer numbers, 1 to {layers}")
        if twice := sorted(kinds.keys() & set(numbers)):
            raise _bad(f"linear_attn_config.{name}", twice, "layers that are not in kda_layers")
        kinds |= dict.fromkeys(numbers, kind)
    if missing := sorted({*range(1, layers + 1)} - kinds.keys()):
        raise _bad("linear_attn_config", f"no kind for layers {missing}", "every layer in one of its lists")
    types = ["linear_attention" if kinds[n] == recurrent else "full_attention" for n in range(1, layers + 1)]
    _only("layer_types", f.get("layer_types"), types)
    return tuple(kinds[n] for n in range(1, layers + 1))


def _read_olmo(f: _Fields) -> ModelConfig:
    """Read a file of OLMo-Hybrid: GDN with a beta of up to 2, and attention without gates and positions.

    Mirrors: transformers 5.24 `OlmoHybridConfig`, with its defaults. Positions are refused: the releases have none, and
             state so by a `rope_theta` of null. If the file is silent, transformers assumes a theta of 10000.
    """
    for name, value in (("hidden_act", "silu"), ("attention_bias", False), ("linear_use_gate", True)):
        _only(name, f.get(name), value)
    for name in MTP_FIELDS:
        _only(name, f.get(name), 0)
    stated = [part for part in (f.text, *map(f.get, ROPE_OBJECTS)) if isinstance(part, dict) and "rope_theta" in part]
    if not stated or f.rope("rope_theta") is not None:
        raise _bad("rope_theta", f.rope("rope_theta"), "null, in rope_parameters: attention without positions")
    layers, hidden = f.whole("num_hidden_layers", most=MOST_LAYERS), f.whole("hidden_size")
    heads = f.whole("num_attention_heads")
    if f.get("num_key_value_heads") is not None:
        _multiple(f, "num_attention_heads", "num_key_value_heads")
    if hidden % heads and f.get("head_dim") is None:
        raise _bad("num_attention_heads", heads, f"a divisor of hidden_size ({hidden})")
    key_heads = f.whole("linear_num_key_heads", default=heads)
    value_heads = f.whole("linear_num_value_heads", default=heads)
    if value_heads % key_heads:
        raise _bad("linear_num_value_heads", value_heads, f"a multiple of linear_num_key_heads ({key_heads})")
    key_dim = f.whole("linear_key_head_dim", default=3 * hidden // (4 * key_heads))
    mixers = _mixers(f, layers, _recurrent(OLMO))
    if f.get("layer_types") is None and "attention" not in mixers:
        mixers = (*mixers[:-1], "attention")
    return ModelConfig(
        model_type=OLMO,
        vocab=f.whole("vocab_size"),
        hidden=hidden,
        layers=tuple((mixer, "mlp") for mixer in mixers),
        eps=f.positive("rms_norm_eps"),
        tied=f.flag("tie_word_embeddings", default=False),
        key_heads=key_heads, value_heads=value_heads, key_dim=key_dim,
        value_dim=f.whole("linear_value_head_dim", default=2 * key_dim),
        conv_width=f.whole("linear_conv_kernel_dim", default=OLMO_CONV_WIDTH),
        output_gate="silu",
        heads=heads, kv_heads=f.whole("num_key_value_heads", default=heads),
        head_dim=f.whole("head_dim", default=hidden // heads),
        rotary_dim=0, rope_theta=1.0,
        intermediate=f.whole("intermediate_size"),
        experts=0, experts_per_token=0, expert_intermediate=0, shared_intermediate=0, norm_topk=False, mtp_layers=0,
        centred_norms=False, attention_gate=False, row_norms=True, norm_after=("attention",),
        gated_norm_eps=OLMO_GATED_EPS,
        beta_bound=2.0 if f.flag("linear_allow_neg_eigval", default=True) else 1.0,
    )


READERS: dict[str, Callable[[_Fields], ModelConfig]] = {
    KIMI: _read_kimi, BAILING: _read_bailing, OLMO: _read_olmo, NEMOTRON: lambda f: ModelConfig(**read_nemotron(f)),
    LFM2: lambda f: ModelConfig(**read_lfm2(f)), MINIMAX: lambda f: ModelConfig(**read_minimax(f)),
}
