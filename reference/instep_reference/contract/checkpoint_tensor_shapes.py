"""The tensors that a checkpoint of a given configuration must hold, by name and shape.

Leaves out: reading them (`checkpoint.py`). Names are those of the Hugging Face text models:
`model.*`, `lm_head.weight`, `mtp.*`; those of a block drafter begin with `block.`. The files of some families have
other names for parts that all families have (`RELEASED`).
"""

from collections.abc import Container, Iterator
from math import prod

from .block_drafter import PREFIX
from .config import BAILING, KIMI, LATENT_TYPES, MLPS, OLMO, Block, ModelConfig
from .lfm2_config import LFM2
from .minimax_config import MINIMAX
from .nemotron_config import NEMOTRON
from .qwen4_config import PleShape
from .recurrences import PLE, RECURRENCES

Shapes = dict[str, tuple[int, ...]]
# Model type -> (our name of a part of the model, the name in the family's files). `checkpoint.py` uses our names.
RELEASED: dict[str, tuple[tuple[str, str], ...]] = {
    LFM2: (
        ("model.norm.", "model.embedding_norm."), (".input_layernorm.", ".operator_norm."),
        (".post_attention_layernorm.", ".ffn_norm."), (".self_attn.q_norm.", ".self_attn.q_layernorm."),
        (".self_attn.k_norm.", ".self_attn.k_layernorm."), (".self_attn.o_proj.", ".self_attn.out_proj."),
        (".mlp.gate_proj.", ".feed_forward.w1."), (".mlp.up_proj.", ".feed_forward.w3."),
        (".mlp.down_proj.", ".feed_forward.w2."),
    ),
    MINIMAX: (
        (".mlp.gate.", ".block_sparse_moe.gate."), (".mlp.experts.", ".block_sparse_moe.experts."),
        (".gate_proj.", ".w1."), (".up_proj.", ".w3."), (".down_proj.", ".w2."),
    ),
    BAILING: (
        ("model.embed_tokens.", "model.word_embeddings."), (".self_attn.", ".attention."),
        (".e_score_correction_bias", ".expert_bias"), ("mtp.fc.", "mtp.eh_proj."),
        ("mtp.pre_fc_norm_embedding.", "mtp.enorm."), ("mtp.pre_fc_norm_hidden.", "mtp.hnorm."),
        ("mtp.norm.", "mtp.final_layernorm."),
    ),
    # Its MTP layer is two layers of one block each, and has the head's own tensors in the first and the last one.
    # Mirrors: `nemotron_h_mtp.py` of SGLang 0.5.23, and of vLLM at 01ca2773
    NEMOTRON: (
        ("mtp.fc.", "mtp.layers.0.eh_proj."), ("mtp.pre_fc_norm_embedding.", "mtp.layers.0.enorm."),
        ("mtp.pre_fc_norm_hidden.", "mtp.layers.0.hnorm."), ("mtp.norm.", "mtp.layers.1.final_layernorm."),
        ("mtp.layers.0.mlp.", "mtp.layers.1."),
    ),
}
# Endings of tensors that some files have and that are not read: they follow from the configuration, or choose among
# tokens of which all are read (`ModelConfig.most_positions`).
DERIVED = (
    ".slope_rate", ".query_decay", ".key_decay", ".diagonal_decay", ".layer_multipliers", ".ngram_heads_vocab_sizes",
    ".ngram_heads_offsets", ".indexer.index_qk_proj.weight", ".indexer.q_layernorm.weight",
    ".indexer.k_layernorm.weight",
)


def released(config: ModelConfig | None, name: str) -> str:
    """Return the name of a tensor in the files of a family. None: of a block drafter."""
    for ours, theirs in RELEASED.get(config.model_type, ()) if config else ():
        name = name.replace(ours, theirs)
    return name if config is None or config.model_type != BAILING else _numbered(config, name)


def ours(config: ModelConfig | None, name: str) -> str:
    """Return our name of a tensor in the files of a family."""
    if config is not None and config.model_type == BAILING:
        name = name.replace(".attention.dense.", ".attention.o_proj.")
        for own, theirs in _of_mtp_layer(config):
            name = name.replace(theirs, own) if name.startswith(theirs) else name
    for mine, theirs in RELEASED.get(config.model_type, ()) if config else ():
        name = name.replace(theirs, mine)
    return name


def _numbered(config: ModelConfig, name: str) -> str:
    """The MTP layer of Ling has the number after the last layer's, and its attention an output named `dense`.

    Mirrors: `conversion_mapping` of transformers 5.24; `bailing_moe_nextn.py` and `bailing_moe_v3.py` of SGLang.
    """
    latent = ("mtp.", *(f"model.layers.{layer}." for layer in config.attending))
    if name.startswith(latent):
        name = name.replace(".attention.o_proj.", ".attention.dense.")
    for own, theirs in _of_mtp_layer(config):
        name = name.replace(own, theirs) if name.startswith(own) else name
    return name


def _of_mtp_layer(config: ModelConfig) -> tuple[tuple[str, str], ...]:
    """Our prefixes of the parts of an MTP layer of Ling, and the released ones."""
    at, parts = f"model.layers.{len(config.layers)}.", ("attention.", "mlp.", "input_layernorm.",
                                                        "post_attention_layernorm.")  # fmt: skip
    return (*((f"mtp.layers.0.{part}", at + part) for part in parts), ("mtp.", at))


class _Fused:
    """Contains every name, so that the experts of every layer count as stored fused, in one tensor."""

    def __contains__(self, name: object) -> bool:
        return True


FUSED = _Fused()  # for `stored` below: gives the fewest names that a checkpoint of a configuration can have


def expected_shapes(config: ModelConfig, stored: Container[str] = ()) -> Shapes:
    """Every tensor of the trunk and of the draft head.

    stored: the names that the file has. A layer whose `mlp.experts.gate_up_proj` is among them has fused experts; every
    other layer has one set of tensors per expert.
    """
    return dict(each_shape(config, stored))


def each_shape(config: ModelConfig, stored: Container[str] = ()) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) one by one: a configuration may state more experts than there is memory for their names."""
    D = config.hidden
    yield "model.embed_tokens.weight", (config.vocab, D)
    yield from _norm(config, "model.norm", last=True).items()
    if not config.tied:
        yield "lm_head.weight", (config.vocab, D)
    for index in range(len(config.layers)):
        yield from _layer(config, f"model.layers.{index}", index, stored)
    if config.mtp_layers:
        yield "mtp.fc.weight", (D, 2 * D)
        for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            yield f"mtp.{norm}.weight", (D,)
    drafter = config.drafter()
    for index in range(config.mtp_layers):
        yield from _layer(drafter, f"mtp.layers.{index}", index, stored)


def block_shapes(config: ModelConfig) -> Shapes:
    """Every tensor of the block drafter, if there is one: the names in its file, after `block.`."""
    if config.block is None:
        return {}
    D, block, model = config.hidden, config.block, config.block_model()
    shapes: Shapes = {f"{PREFIX}fc.weight": (D, len(block.target_layer_ids) * D)}
    shapes |= {f"{PREFIX}{norm}.weight": (D,) for norm in ("hidden_norm", "norm")}
    for index in range(block.num_hidden_layers):
        shapes |= dict(_layer(model, f"{PREFIX}layers.{index}", index, ()))
    return shapes


def layer_norms(config: ModelConfig, index: int) -> tuple[str, ...]:
    """Return the name of each block's norm in a layer, without `.weight`. An embedding of n-grams has none.

    With streams it is the name of the matrices that mix them in its place.
    """
    names = ("input_layernorm", "post_attention_layernorm")
    if config.streams > 1:
        names = ("attn_hyper_connection", "mlp_hyper_connection")
    if config.model_type == NEMOTRON:
        names = ("norm", "mlp.norm")
    elif config.mixers[index] in config.norm_after:
        names = ("post_attention_layernorm", "post_feedforward_layernorm")
    elif config.model_type == OLMO:
        names = ("attention_layer_norm", "feedforward_layer_norm")
    return names[: sum(block != PLE for block in config.layers[index])]


def prefix_of_block(config: ModelConfig, at: str, index: int, block: Block) -> str:
    """Return the prefix of a block's tensors in a layer of Nemotron-H. at: that of the layer

    A layer of the trunk is one block. That of its MTP head is two, of which the second one is the MLP.
    """
    return f"{at}.mlp.mixer" if block in MLPS and len(config.layers[index]) > 1 else f"{at}.mixer"


def _layer(
    config: ModelConfig, at: str, index: int, stored: Container[str]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    shapes: Shapes = {}
    for name in layer_norms(config, index):
        shapes |= _norm(config, f"{at}.{name}")
    if PLE in config.layers[index]:
        shapes |= _ple(config, f"{at}.ple", config.ple_before(index), stored)
    if config.model_type == NEMOTRON:
        yield from shapes.items()
        for block in config.layers[index]:
            yield from _nemotron(config, prefix_of_block(config, at, index, block), block)
        return
    if config.mixers[index] in RECURRENCES and config.recurrence.inputs == "projected":
        shapes |= _lightning(config, f"{at}.self_attn")
    elif index in config.recurrent:
        kda = config.model_type in LATENT_TYPES
        shapes |= _kda(config, f"{at}.self_attn") if kda else _gdn(config, f"{at}.linear_attn")
    elif index in config.convolving:
        shapes |= _short_conv(config, f"{at}.conv")
    else:
        shapes |= (_mla if config.latent else _attention)(config, f"{at}.self_attn")
    yield from shapes.items()
    if config.router == "sigmoid" and "moe" in config.layers[index]:
        yield from _sparse(config, at)
    elif "moe" in config.layers[index]:
        yield from _moe(config, f"{at}.mlp", fused=f"{at}.mlp.experts.gate_up_proj" in stored)
    else:
        yield from _mlp(config, config.hidden, config.intermediate, f"{at}.mlp").items()


def norm_name(config: ModelConfig, at: str) -> str:
    """Return the prefix of a norm, or of the matrices that mix streams in its place. at: our name of the norm"""
    return at.replace("model.norm", "model.hyper_connection_mixer") if config.streams > 1 else at


def _norm(config: ModelConfig, at: str, *, last: bool = False) -> Shapes:
    """A norm. With streams, the norm of each and the matrices that mix them; the last ones add nothing back."""
    if config.streams == 1:
        return {f"{at}.weight": (config.hidden,)}
    at, wide = norm_name(config, at), config.streams * config.hidden
    inject: Shapes = {} if last else {f"{at}.block_inject_weight.weight": (config.streams, wide)}
    return inject | {
        f"{at}.hc_norm.weight": (wide,), f"{at}.input_mix_weight_down.weight": (config.stream_rank, wide),
        f"{at}.input_mix_weight_up.weight": (wide, config.stream_rank),
    }


def ngram_tables(at: str, shape: PleShape, stored: Container[str]) -> Shapes:
    """The table of all heads, or the parts of it that a file stores one by one. at: prefix of the layer's PLE"""
    table, width = f"{at}.ple_embedding.ngram_embedding", shape.width // ((shape.ngram - 1) * shape.heads)
    if f"{table}.shard_0.weight" not in stored:
        return {f"{table}.weight": (shape.entries, width)}
    each = -(-shape.entries // shape.parts)
    begins = range(0, shape.entries, each)
    return {f"{table}.shard_{part}.weight": (min(each, shape.entries - begin), width)
            for part, begin in enumerate(begins)}  # fmt: skip


def _ple(config: ModelConfig, at: str, shape: PleShape, stored: Container[str]) -> Shapes:
    wide = config.streams * config.hidden
    return ngram_tables(at, shape, stored) | {
        f"{at}.key_proj.weight": (wide, shape.width), f"{at}.value_proj.weight": (config.hidden, shape.width),
        **{f"{at}.norm_{name}.weight": (wide,) for name in ("key", "query", "conv")},
        f"{at}.conv1d.weight": (wide, 1, shape.taps),
    }


def _nemotron(config: ModelConfig, at: str, block: Block) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors of a layer of Nemotron-H, which is one block alone."""
    D, HV, values = config.hidden, config.value_heads, config.value_heads * config.value_dim
    if block in RECURRENCES:
        (channels,) = config.lengths(("C",))
        yield f"{at}.in_proj.weight", (values + channels + HV, D)
        yield f"{at}.conv1d.weight", (channels, 1, config.conv_width)
        if config.conv_bias:
            yield f"{at}.conv1d.bias", (channels,)
        yield from ((f"{at}.{name}", (HV,)) for name in ("A_log", "dt_bias", "D"))
        yield f"{at}.norm.weight", (values,)
        yield f"{at}.out_proj.weight", (D, values)
    elif block == "moe":
        yield f"{at}.gate.weight", (config.experts, D)
        yield f"{at}.gate.e_score_correction_bias", (config.experts,)
        yield from _mlp(config, D, config.shared_intermediate, f"{at}.shared_experts").items()
        if config.expert_latent:
            yield f"{at}.fc1_latent_proj.weight", (config.expert_latent, D)
            yield f"{at}.fc2_latent_proj.weight", (D, config.expert_latent)
        for expert in range(config.experts):
            width = config.expert_latent or D
            yield from _mlp(config, width, config.expert_intermediate, f"{at}.experts.{expert}").items()
    elif block == "mlp":
        yield from _mlp(config, D, config.intermediate, at).items()
    else:
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{at}.{name}_proj.weight", (rows, D)
        yield f"{at}.o_proj.weight", (D, queries)


def _gdn(config: ModelConfig, at: str) -> Shapes:
    D, HV, gate = config.hidden, config.value_heads, prod(config.lengths(config.recurrence.gate))
    keys, values = config.key_heads * config.key_dim, config.value_heads * config.value_dim
    if config.model_type == "qwen3_next":
        projections: Shapes = {
            f"{at}.in_proj_qkvz.weight": (2 * keys + 2 * values, D), f"{at}.in_proj_ba.weight": (2 * HV, D)
        }
    elif config.model_type == OLMO:
        return _olmo(config, at)
    else:
        projections = {
            f"{at}.in_proj_qkv.weight": (2 * keys + values, D), f"{at}.in_proj_z.weight": (values, D),
            f"{at}.in_proj_b.weight": (HV, D), f"{at}.in_proj_a.weight": (gate, D),
        }
    return projections | {
        f"{at}.conv1d.weight": (2 * keys + values, 1, config.conv_width),
        f"{at}.A_log": (HV,),
        f"{at}.dt_bias": (gate,),
        f"{at}.norm.weight": (config.value_dim,),
        f"{at}.out_proj.weight": (D, values),
    }


def _olmo(config: ModelConfig, at: str) -> Shapes:
    D, HV = config.hidden, config.value_heads
    keys, values = config.key_heads * config.key_dim, HV * config.value_dim
    channels = {"q": keys, "k": keys, "v": values}
    rows = {**channels, "a": HV, "b": HV, "g": values}
    return {
        **{f"{at}.{name}_proj.weight": (count, D) for name, count in rows.items()},
        **{f"{at}.{name}_conv1d.weight": (count, 1, config.conv_width) for name, count in channels.items()},
        f"{at}.A_log": (HV,),
        f"{at}.dt_bias": (HV,),
        f"{at}.o_norm.weight": (config.value_dim,),
        f"{at}.o_proj.weight": (D, values),
    }


def _kda(config: ModelConfig, at: str) -> Shapes:
    D, keys, values = config.hidden, config.value_heads * config.key_dim, config.value_heads * config.value_dim
    channels = {"q": keys, "k": keys, "v": values}
    gates: Shapes = {
        f"{at}.A_log": (1, 1, config.value_heads, 1),
        f"{at}.f_a_proj.weight": (config.key_dim, D), f"{at}.f_b_proj.weight": (keys, config.key_dim),
        f"{at}.g_a_proj.weight": (config.value_dim, D), f"{at}.g_b_proj.weight": (values, config.value_dim),
    } if config.low_rank else {
        f"{at}.A_log": (config.value_heads,), f"{at}.f_proj.weight": (keys, D), f"{at}.g_proj.weight": (values, D),
    }  # fmt: skip
    return {
        **{f"{at}.{name}_proj.weight": (count, D) for name, count in channels.items()},
        **{f"{at}.{name}_conv1d.weight": (count, 1, config.conv_width) for name, count in channels.items()},
        **gates,
        f"{at}.dt_bias": (keys,),
        f"{at}.b_proj.weight": (config.value_heads, D),
        f"{at}.o_norm.weight": (config.value_dim,),
        f"{at}.o_proj.weight": (D, values),
    }


def _lightning(config: ModelConfig, at: str) -> Shapes:
    D, values = config.hidden, config.value_heads * config.value_dim
    return {
        f"{at}.qkv_proj.weight": (config.value_heads * (2 * config.key_dim + config.value_dim), D),
        f"{at}.output_gate.weight": (values, D), f"{at}.norm.weight": (values,), f"{at}.out_proj.weight": (D, values),
    }


def _short_conv(config: ModelConfig, at: str) -> Shapes:
    D = config.hidden
    return {
        f"{at}.in_proj.weight": (3 * D, D), f"{at}.conv.weight": (D, 1, config.conv_width),
        f"{at}.out_proj.weight": (D, D),
    }


def _mla(config: ModelConfig, at: str) -> Shapes:
    D, heads, shared = config.hidden, config.heads, config.shared_key
    gate: Shapes = {f"{at}.g_proj.weight": (heads, D)} if config.rotary_dim else {}
    return gate | {
        f"{at}.q_proj.weight": (heads * config.head_dim, D),
        f"{at}.kv_a_proj_with_mqa.weight": (config.latent + shared, D),
        f"{at}.kv_a_layernorm.weight": (config.latent,),
        f"{at}.kv_b_proj.weight": (heads * (config.head_dim - shared + config.value_width), config.latent),
        f"{at}.o_proj.weight": (D, heads * config.value_width),
    }


def _attention(config: ModelConfig, at: str) -> Shapes:
    D, queries, keys = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    norms: Shapes = {
        f"{at}.q_norm.weight": (queries if config.row_norms else config.head_dim,),
        f"{at}.k_norm.weight": (keys if config.row_norms else config.head_dim,),
    }
    return {
        f"{at}.q_proj.weight": ((1 + config.attention_gate) * queries, D),
        f"{at}.k_proj.weight": (keys, D),
        f"{at}.v_proj.weight": (keys, D),
        f"{at}.o_proj.weight": (D, queries),
        **(norms if config.head_norms else {}),
    }


def _mlp(config: ModelConfig, D: int, inner: int, at: str) -> Shapes:
    rows = {"gate": (inner, D), "up": (inner, D), "down": (D, inner)}
    return {f"{at}.{name}_proj.weight": shape for name, shape in rows.items() if config.mlp_gate or name != "gate"}


def _moe(config: ModelConfig, at: str, fused: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    D, inner = config.hidden, config.expert_intermediate
    shapes: Shapes = {f"{at}.gate.weight": (config.experts, D)}
    if config.shared_intermediate:
        shapes[f"{at}.shared_expert_gate.weight"] = (1, D)
        shapes |= _mlp(config, D, config.shared_intermediate, f"{at}.shared_expert")
    if fused:
        shapes[f"{at}.experts.gate_up_proj"] = (config.experts, 2 * inner, D)
        shapes[f"{at}.experts.down_proj"] = (config.experts, D, inner)
    yield from shapes.items()
    for expert in range(0 if fused else config.experts):
        yield from _mlp(config, D, inner, f"{at}.experts.{expert}").items()


def expert_names(config: ModelConfig, layer: str) -> tuple[str, tuple[str, str, str]]:
    """Return the prefix of a mixture with a sigmoid router, and the names of an expert's gate, up and down."""
    if config.model_type == KIMI:
        return f"{layer}.block_sparse_moe", ("w1", "w3", "w2")
    return f"{layer}.mlp", ("gate_proj", "up_proj", "down_proj")


def _sparse(config: ModelConfig, layer: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A mixture with a sigmoid router."""
    D, inner = config.hidden, config.expert_intermediate
    at, (gate, up, down) = expert_names(config, layer)
    yield f"{at}.gate.weight", (config.experts, D)
    yield f"{at}.gate.e_score_correction_bias", (config.experts,)
    yield from _mlp(config, D, config.shared_intermediate, f"{at}.shared_experts").items()
    for expert in range(config.experts):
        for name, shape in ((gate, (inner, D)), (up, (inner, D)), (down, (D, inner))):
            yield f"{at}.experts.{expert}.{name}.weight", shape
