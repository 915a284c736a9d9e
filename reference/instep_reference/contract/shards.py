"""The parts of every tensor that a rank of a tensor-parallel engine holds: one declaration per tensor.

An axis is split by *segments*: q, k and v are three segments of the channels of a conv, and every rank has a part of
each. A part is a range of whole heads. Weights, pools, request states and named places follow the same declaration.
Leaves out: cutting and merging tensors (each side does that itself), and the collectives between ranks.

Mirrors: SGLang 0.5.9 and vLLM 0.11, `ColumnParallelLinear`, `RowParallelLinear`, `VocabParallelEmbedding`, and their
loaders of `in_proj_qkv` and `conv1d` for Qwen3-Next. These pad a vocabulary to a multiple of 64; here it is not padded.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

from msgspec import structs

from .answers import MEMORY_FACTS
from .block_drafter import PREFIX
from .config import BAILING, OLMO, ModelConfig
from .errors import BadInput
from .lfm2_config import LFM2
from .minimax_config import MINIMAX
from .nemotron_config import NEMOTRON
from .place_names import Place
from .qwen4_config import QWEN4


@dataclass(frozen=True)
class Segment:
    """A run of `heads` heads of `width` entries each. Every rank has equally many heads, in the order of the ranks.

    copied  if there are fewer heads than ranks, each head is held by several ranks in a row (KV heads)
    """

    heads: int
    width: int = 1
    copied: bool = False

    def fits(self, size: int) -> bool:
        """Return whether `size` ranks can share the heads equally."""
        return self.heads % size == 0 or (self.copied and size % self.heads == 0)

    def held(self, rank: int, size: int) -> range:
        """Return the heads that a rank holds."""
        if self.heads >= size:
            mine = self.heads // size
            return range(rank * mine, (rank + 1) * mine)
        first = rank * self.heads // size
        return range(first, first + 1)


@dataclass(frozen=True)
class Shard:
    """The segments of one axis of a tensor, in their order in memory; the other axes are whole on every rank."""

    axis: int
    segments: tuple[Segment, ...]

    def spans(self, rank: int, size: int) -> tuple[range, ...]:
        """Return the entries of the axis that a rank holds, one span per segment."""
        found, begin = [], 0
        for segment in self.segments:
            heads = segment.held(rank, size)
            found.append(range(begin + heads.start * segment.width, begin + heads.stop * segment.width))
            begin += segment.heads * segment.width
        return tuple(found)

    @property
    def length(self) -> int:
        """The length of the whole axis."""
        return sum(segment.heads * segment.width for segment in self.segments)

    def part(self, size: int) -> int:
        """Return the length of the axis on each of `size` ranks."""
        return sum(len(span) for span in self.spans(0, size))


COLUMNS, WHOLE = EXPERTS = "columns", "whole"  # the part of experts that a rank has: of each, or some experts
UNDECLARED = (BAILING, OLMO, NEMOTRON, LFM2, MINIMAX, QWEN4)  # model types whose tensors have no declared parts
EXPERT = re.compile(r"\.experts\.(\d+)\.")
LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def expert_of(config: ModelConfig, name: str, rank: int, size: int) -> tuple[range, int | None] | None:
    """The experts of a rank that has whole ones, and the expert of a stored tensor; None if it is of no expert.

    The number of the expert is None for a tensor of all experts, whose first axis counts them.
    """
    found = EXPERT.search(name)
    if found is None and ".experts." not in name:
        return None
    return Segment(config.experts).held(rank, size), None if found is None else int(found[1])


def weights(config: ModelConfig) -> Sequence[tuple[str, Shard]]:
    """The stored tensors that are split, by the end of their name; every other tensor is whole on every rank.

    By column: the rows of a matrix that makes heads. By row (`out_proj`, `o_proj`, `down_proj`): its columns, so that
    the results of the ranks are added. Experts are split by their columns (`expert_of`: whole ones).
    """
    queries, kv = Segment(config.heads, 2 * config.head_dim), Segment(config.kv_heads, config.head_dim, copied=True)
    ratio, gate = config.value_heads // config.key_heads, config.lengths(config.recurrence.gate)
    mlps = [("mlp", config.intermediate), ("mlp.shared_expert", config.shared_intermediate)]
    mlps += [(r"mlp.experts.\d+", config.expert_intermediate)]
    mlps += [("block_sparse_moe.shared_experts", config.shared_intermediate)]
    experts = Segment(config.expert_intermediate)
    return (
        ("embed_tokens.weight", Shard(0, (Segment(config.vocab),))),
        ("lm_head.weight", Shard(0, (Segment(config.vocab),))),
        ("linear_attn.in_proj_qkv.weight", _channels(config, 0)),
        ("linear_attn.conv1d.weight", _channels(config, 0)),
        # Stored per key head: [q | k | v | z] and [b | a].
        ("linear_attn.in_proj_qkvz.weight",
         Shard(0, (Segment(config.key_heads, 2 * config.key_dim + 2 * ratio * config.value_dim),))),
        ("linear_attn.in_proj_ba.weight", Shard(0, (Segment(config.key_heads, 2 * ratio),))),
        ("linear_attn.in_proj_z.weight", Shard(0, (Segment(config.value_heads, config.value_dim),))),
        *((f"linear_attn.{name}", Shard(0, (Segment(config.value_heads),))) for name in ("in_proj_b.weight", "A_log")),
        *((f"linear_attn.{name}", Shard(0, (Segment(config.value_heads, prod(gate[1:])),)))
          for name in ("in_proj_a.weight", "dt_bias")),
        ("linear_attn.out_proj.weight", Shard(1, (Segment(config.value_heads, config.value_dim),))),
        ("self_attn.q_proj.weight", Shard(0, (queries,))),
        ("self_attn.k_proj.weight", Shard(0, (kv,))),
        ("self_attn.v_proj.weight", Shard(0, (kv,))),
        ("self_attn.o_proj.weight", Shard(1, (Segment(config.heads, config.head_dim),))),
        ("mlp.experts.gate_up_proj", Shard(1, (experts, experts))),
        ("mlp.experts.down_proj", Shard(2, (experts,))),
        *((f"{at}.{name}.weight", Shard(axis, (Segment(width),)))
          for at, width in mlps for name, axis in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1))),
        *((rf"block_sparse_moe.experts.\d+.{name}.weight", Shard(axis, (experts,)))
          for name, axis in (("w1", 0), ("w3", 0), ("w2", 1))),
    )  # fmt: skip


def low_rank_weights(config: ModelConfig) -> Sequence[tuple[str, Shard]]:
    """As `weights`, of a layer whose gates have two matrices. The first of each is whole: its rows are no heads.

    Mirrors: vLLM (01a7e5d9) `KimiDeltaAttention`: `f_a_proj` and `g_a_proj` are replicated, `f_b_proj` and `g_b_proj`
             by column, `A_log` by its axis 2.
    """
    keys, values = (Segment(heads, width) for heads, width in (
        (config.key_heads, config.key_dim), (config.value_heads, config.value_dim)))  # fmt: skip
    decay = Segment(config.value_heads, prod(config.lengths(config.recurrence.gate)[1:]))
    first = {"q_proj.weight": keys, "k_proj.weight": keys, "v_proj.weight": values, "q_conv1d.weight": keys,
             "k_conv1d.weight": keys, "v_conv1d.weight": values, "f_b_proj.weight": decay, "dt_bias": decay,
             "g_b_proj.weight": values, "b_proj.weight": Segment(config.value_heads)}  # fmt: skip
    return (
        *((f"self_attn.{name}", Shard(0, (segment,))) for name, segment in first.items()),
        ("self_attn.A_log", Shard(2, (Segment(config.value_heads),))),
        ("self_attn.o_proj.weight", Shard(1, (values,))),
    )


def latent_weights(config: ModelConfig) -> Sequence[tuple[str, Shard]]:
    """As `weights`, of a layer with attention over latents: every rank has the latents, and expands its own heads.

    Mirrors: vLLM (01d99586) `KimiMLAAttention`: `kv_a_proj_with_mqa` is replicated, `kv_b_proj` by column.
    """
    expanded = config.head_dim - config.shared_key + config.value_width
    return (
        ("self_attn.q_proj.weight", Shard(0, (Segment(config.heads, config.head_dim),))),
        ("self_attn.kv_b_proj.weight", Shard(0, (Segment(config.heads, expanded),))),
        ("self_attn.o_proj.weight", Shard(1, (Segment(config.heads, config.value_width),))),
    )


def _mixer_weights(config: ModelConfig, name: str) -> Sequence[tuple[str, Shard]]:
    """The tensors of the mixer of this tensor's layer, if layers of several kinds use the same names."""
    layer = LAYER.search(name)
    if layer is None or not (config.latent or config.low_rank):
        return ()
    return (latent_weights if "mla" in config.layers[int(layer[1])] else low_rank_weights)(config)


def weight(config: ModelConfig, name: str) -> Shard | None:
    """Return the declaration of a stored tensor; None: it is whole on every rank.

    The tensors of a block drafter are split like those of its layers' kinds in the target, by its own heads.
    """
    if name.startswith(PREFIX) and config.block is not None:
        config = config.block_model()
    every = (*_mixer_weights(config, name), *weights(config))
    return next((shard for end, shard in every if re.search(rf"(^|\.){end}$", name)), None)


def rows(config: ModelConfig) -> Mapping[str, Shard]:
    """The named places whose rows are split, by component; axis 0 counts the rows."""
    queries, kv = Segment(config.heads, 1), Segment(config.kv_heads, 1, copied=True)
    first = {"C": _channels(config, 1), "H": Shard(1, (Segment(config.key_heads),)),
             "HV": Shard(1, (Segment(config.value_heads),))}  # fmt: skip
    return {
        **{component: first[axes[0]] for component, axes in config.recurrence.places.items() if axes[0] in first},
        **dict.fromkeys(("projected", "query", "attended", "opened"), Shard(1, (queries,))),
        **dict.fromkeys(("key_raw", "key", "value"), Shard(1, (kv,))),
    }


def row(config: ModelConfig, place: Place) -> Shard | None:
    """Return the declaration of a named place; None: its rows are whole on every rank.

    If there is a block drafter, its context is the only draft extend.
    """
    if config.block is not None and place.stage in ("block", "extend"):
        config = config.block_model()
    return rows(config).get(place.component)


def memory(config: ModelConfig) -> Mapping[str, Shard]:
    """The fields of a `RequestState` that are split; every other field is whole on every rank."""
    kv = Shard(1, (Segment(config.kv_heads, 1, copied=True),))
    first = {"C": _channels(config, 0), "H": Shard(0, (Segment(config.key_heads, 1),)),
             "HV": Shard(0, (Segment(config.value_heads, 1),))}  # fmt: skip
    return {
        **{name: first[facts.axes[0]] for name, facts in MEMORY_FACTS.items() if facts.axes and facts.axes[0] in first},
        **dict.fromkeys(("keys", "values", "draft_keys", "draft_values"), kv),
        **({} if config.block is None else dict.fromkeys(("block_keys", "block_values"), Shard(
            1, (Segment(config.block.num_key_value_heads, 1, copied=True),)))),
    }


def layers_of(layers: int, stages: int) -> tuple[range, ...]:
    """Return the layers of each pipeline stage: equally many, and one more on the first stages if some are left.

    The embedding is on the first stage. The final norm, the head and the drafter are on the last stage.
    """
    each, more = divmod(layers, stages)
    ends = [stage * each + min(stage, more) for stage in range(stages + 1)]
    return tuple(range(begin, end) for begin, end in pairwise(ends))


def config_of_stage(config: ModelConfig, stage: int, stages: int) -> ModelConfig:
    """Return the configuration of one pipeline stage. Its layers keep their numbers.

    Raises `BadInput` if there are more stages than layers.
    """
    layers = len(config.layers)
    if stages > layers:
        raise BadInput("--stages", found=stages, expected=f"at most {layers}, the layers of the model")
    own = layers_of(layers, stages)[stage]
    blocks = tuple(blocks if layer in own else () for layer, blocks in enumerate(config.layers))
    return replace(config, layers=blocks, mtp_layers=config.mtp_layers if stage == stages - 1 else 0)


def config_of(config: ModelConfig, size: int, experts: str = COLUMNS) -> ModelConfig:
    """Return the configuration of one of `size` ranks: its own heads and widths. The vocabulary stays whole.

    experts: one of EXPERTS. Raises `BadInput` if the ranks cannot share what the model has.
    """
    if config.model_type in UNDECLARED and size > 1:
        why = f"the parts of {config.model_type}'s tensors are not declared"
        raise BadInput("--ranks", found=size, expected=f"1: {why}")
    if experts == WHOLE and not config.experts:
        raise BadInput("--experts", found=f"{WHOLE}, and the model has no experts", expected=COLUMNS)
    shared = {
        "key heads (linear_num_key_heads)": Segment(config.key_heads),
        "value heads (linear_num_value_heads)": Segment(config.value_heads),
        "heads (num_attention_heads)": Segment(config.heads),
        "KV heads (num_key_value_heads)": Segment(config.kv_heads, copied=True),
        "tokens (vocab_size)": Segment(config.vocab),
        "columns of an MLP (intermediate_size)": Segment(config.intermediate),
        **({"experts (num_experts)": Segment(config.experts)} if experts == WHOLE else
           {"columns of an expert (moe_intermediate_size)": Segment(config.expert_intermediate)}),
        "columns of the shared expert (shared_expert_intermediate_size)": Segment(config.shared_intermediate),
    }
    block = config.block
    if block is not None:
        shared |= {
            "heads of the block drafter (num_attention_heads)": Segment(block.num_attention_heads),
            "KV heads of the block drafter (num_key_value_heads)": Segment(block.num_key_value_heads, copied=True),
            "columns of the block drafter's MLP (intermediate_size)": Segment(block.intermediate_size),
        }
        block = structs.replace(
            block, num_attention_heads=block.num_attention_heads // size,
            num_key_value_heads=max(1, block.num_key_value_heads // size),
            intermediate_size=block.intermediate_size // size)
    for what, segment in shared.items():
        if not segment.fits(size):
            more = " or a multiple of it" if segment.copied else ""
            raise BadInput("--ranks", found=size, expected=f"a divisor{more} of the model's {segment.heads} {what}")
    return replace(
        config, heads=config.heads // size, kv_heads=max(1, config.kv_heads // size),
        key_heads=config.key_heads // size, value_heads=config.value_heads // size,
        intermediate=config.intermediate // size,
        expert_intermediate=config.expert_intermediate // (1 if experts == WHOLE else size),
        shared_intermediate=config.shared_intermediate // size, block=block,
    )


def _channels(config: ModelConfig, axis: int) -> Shard:
    """The channels of the conv."""
    return Shard(axis, tuple(Segment(*segment) for segment in config.segments))
