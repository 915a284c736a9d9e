"""The names that both sides use for the results of a step and for the memory that it writes.

`See` is the only hook. A recorder copies the tensor, a graft returns another tensor, a rounding casts there and back,
and `unseen` returns its argument. Leaves out: all use of the hook.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import torch

# Results of a layer, and its memory where it is written, in data-flow order; this is the order of findings.
# Rows are packed in batch order, N in all: one row per token of the event. Memory has the form of a request's logical
# state.
COMPONENTS: tuple[str, ...] = (
    "embedding",  # [N, D]   stage level: token embedding. With S residual streams, here and in hidden and residual
                  #          [N, SD]: one row after another
    # embedding of n-grams, before the mixer of a layer (Qwen4-Exp)
    "ngrams",     # [N, E]   rows of the tables that the n-grams are hashed to
    "ngram",      # [N-1]    memory: the last tokens, each plus one
    "ple_key",    # [N, SD]  their projection, compared with the streams
    "ple_value",  # [N, D]   their other projection
    "ple_written",  # [N, SD] the value, gated for each stream
    "ple_normed",  # [N, SD] norm of it: the input of the conv
    "ple_mixed",  # [N, SD]  after conv and silu
    "ple_conv",   # [SD, R]  memory, oldest first
    "ple_made",   # [N, SD]  ple_written + ple_mixed
    "ple",        # [N, SD]  hidden + ple_made
    "normed",     # [N, D]   input norm of the layer, or a mixture of the normed streams; at stage level, draft only:
                  #          norm(embedding)
    "strength",   # [N, S]   with streams: how strongly the mixer's result is added to each
    # layer with a short convolution
    "in_gate",    # [N, D]   B, which multiplies x before the conv
    "out_gate",   # [N, D]   C, which multiplies the conv's output
    "x",          # [N, D]
    # GDN layer; of a short convolution only qkv, mixed (without silu), conv and gated, [N, D]
    "qkv",        # [N, C]   conv input, channels q (H*K), k (H*K), v (HV*V); of a short convolution B * x
    "z_low",      # [N, V]   KDA only: the projection before z
    "z",          # [N, HV, V]
    "b",          # [N, HV]
    "a_low",      # [N, K]   KDA only: the projection before a
    "a",          # [N, HV]; KDA: [N, HV, K]
    "mixed",      # [N, C]   after conv and silu
    "conv",       # [C, W-1]  memory, oldest first
    "q",          # [N, H, K]  l2-normalised and scaled by K ** -0.5
    "k",          # [N, H, K]  l2-normalised
    "v",          # [N, HV, V]
    "log_decay",  # [N, HV]; KDA: [N, HV, K]
    "beta",       # [N, HV]
    "write",      # [N, HV]  the write gate where there is no delta rule (Mamba2: the step dt); then there is no beta
    "core",       # [N, HV, V] the read-out of the state
    "update",     # [N, HV, V] what each token adds to the state along its key; engines that keep it show it (gdn.py)
    "state",      # [HV, K, V]  memory
    "skip",       # [N, HV, V] Mamba2 only: core + D v
    "gated",      # [N, HV, V] gated norm of core
    # attention layer; of latent attention (MLA) only these: key_raw [N, 1, R] (a latent before its norm), query
    # [N, heads, head_dim], key [N, 1, S] (its shared part), value [N, 1, R] (the latent), keys, values, and
    # attended [N, heads, value_width]. If it has positions, also projected [N, heads, head_dim + 1] (per head query,
    # then gate) and opened, and key_raw is [N, 1, R + S] (the shared part before it turns comes last)
    "projected",  # [N, heads, 2, head_dim] q_proj: per head query, then gate; [N, heads, 1, head_dim] without gates
    "key_raw",    # [N, kv_heads, head_dim] k_proj
    "query",      # [N, heads, head_dim] normed and rotated
    "key",        # [N, kv_heads, head_dim] normed and rotated: what the KV pool holds
    "value",      # [N, kv_heads, head_dim]
    "keys",       # [L, kv_heads, head_dim]  memory
    "values",     # [L, kv_heads, head_dim]  memory
    "attended",   # [N, heads, head_dim] before the gate
    "opened",     # [N, heads, head_dim] times sigmoid(gate), if there are gates
    # both kinds
    "mixer",      # [N, D]   out_proj or o_proj
    "mixer_normed",  # [N, D]  in layers that norm results: norm(mixer); they have no normed and no post_normed
    "residual",   # [N, D]   hidden + mixer, or + mixer_normed
    "post_normed",  # [N, D]  norm before the MLP; at stage level, draft only: norm(hidden)
    "post_strength",  # [N, S] with streams: the same of the MLP's result
    "joined",     # [N, 2D]  stage level, draft only: [norm(embedding) | norm(hidden)], embedding first
    "fused",      # [N, D]   stage level, draft only: fc(joined), the head's first hidden row; of a block drafter
                  #          fc(features)
    "context",    # [N, D]   stage level, block drafter only: norm(fused), which keys and values are computed from
    "mlp",        # [N, D]
    "mlp_normed",  # [N, D]  in layers that norm results: norm(mlp)
    "hidden",     # [N, D]   residual + mlp, or + mlp_normed: the layer's answer
    "features",   # [N, nD]  block drafter only: the answers of the layers that it reads, up to this one, side by side
    # stage level, after the last layer
    "final",      # [N, D]   after the final norm (mtp.norm in the draft): what the head reads
    "tail",       # [.., D]  memory: final rows of the last tokens, if prefixes are tracked (`RequestState`)
    "logits",     # [requested rows, vocab]
    "pick",       # [requested rows] int64: argmax of logits
    "root",       # int, of a request's logical state; so is
    "length",     # int
)

# Stages of an event in order. "trunk" is the target; "extend" the draft extend (prefill, decode and
# commit run it); "extend.i" its MTP layer i, i from 1, if a drafter runs several there; "chain.i" the
# i-th forward of a draft chain, i from 1 (draft 1 comes from extend). "block" is the forward of a block drafter, whose
# layers also take in the committed tokens in the stage "extend".
STAGES: tuple[str, ...] = ("trunk", "extend", "chain", "block")

STAGE_LEVEL = -1  # `layer` of a place before layer 0
AFTER_LAYERS = 1 << 16  # `layer` of a place after the last layer: sorts after every layer


class Place(NamedTuple):
    """One named tensor of one event: (stage, layer, component)."""

    stage: str
    layer: int
    component: str

    def order(self) -> tuple[int, int, int, int]:
        """Return the position in the data flow of an event. Findings are sorted by it."""
        stage, _, step = self.stage.partition(".")
        return STAGES.index(stage), int(step or 0), self.layer, COMPONENTS.index(self.component)

    def __str__(self) -> str:
        at = {STAGE_LEVEL: "", AFTER_LAYERS: ""}.get(self.layer, f"layer {self.layer} ")
        return f"{self.stage} {at}{self.component}"


def draft_stage(layer: int) -> str:
    """Return the stage in which MTP layer `layer` takes in the committed tokens."""
    return f"extend.{layer}" if layer else "extend"


def memory_place(name: str, layer: int) -> Place:
    """Return the place of a layer's memory, by its field: "state", "keys"; for an MTP layer "draft_keys", ..

    A block drafter takes in the committed tokens in one stage, whatever its layer.
    """
    if name.startswith("block_"):
        return Place("extend", layer, name.removeprefix("block_"))
    if name.startswith("draft_"):
        return Place(draft_stage(layer), layer, name.removeprefix("draft_"))
    return Place("trunk", layer, name)


See: TypeAlias = "Callable[[Place, torch.Tensor], torch.Tensor]"
At: TypeAlias = "Callable[[str, torch.Tensor], torch.Tensor]"  # the same with stage and layer filled in


def unseen(place: Place, tensor: torch.Tensor) -> torch.Tensor:
    """Do nothing: the default hook."""
    return tensor
