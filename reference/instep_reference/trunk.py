"""The model: embedding, layers, final norm, head. Memory is a value: a function takes it and returns a new one.

Leaves out: the draft head (`draft/`), and the choice of tokens to run (`speculative_rounds.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

from . import attention, gdn, lightning, mla, per_layer_embedding, short_conv
from .attention import AttentionMemory
from .contract.answers import RequestState
from .contract.config import Block, ModelConfig
from .contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place, See, unseen
from .contract.recurrences import PLE, RECURRENCES, SHORT_CONV
from .gdn import GdnMemory
from .lightning import LightningMemory
from .mlp import mlp
from .norms import rms_norm
from .per_layer_embedding import PleMemory, add_to_streams, read_streams
from .short_conv import ConvMemory
from .weights import LayerWeights, Norm, StreamWeights, Weights, given


@dataclass(frozen=True)
class NoMemory:
    """The memory of a layer that is an MLP alone."""


WithState = GdnMemory | LightningMemory
LayerMemory = WithState | ConvMemory | AttentionMemory | NoMemory

# The mixers by the block that they are: each module has `mix` and `empty`.
MIXERS: Mapping[Block, Any] = {
    **{name: lightning if row.inputs == "projected" else gdn for name, row in RECURRENCES.items()},
    SHORT_CONV.name: short_conv, "attention": attention, "mla": mla,
    "nope": SimpleNamespace(mix=attention.mix_as_projected, empty=attention.empty),
}
Forms = Mapping[Block, Mapping[str, Any]]


def empty_memory(
    config: ModelConfig, mixer: Block, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> LayerMemory:
    """Return the memory of a layer with this mixer before the first token. mixer: "" if it has none."""
    memory: LayerMemory = MIXERS[mixer].empty(config, dtype, device) if mixer else NoMemory()
    return memory


def layer_memory(
    config: ModelConfig, index: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> LayerMemory:
    """Return the memory of all blocks of a layer before the first token. index: of the layer in the configuration"""
    memory = empty_memory(config, config.mixers[index], dtype, device)
    if PLE not in config.layers[index]:
        return memory
    assert isinstance(memory, GdnMemory), "an embedding of n-grams precedes such a layer alone"
    own = per_layer_embedding.empty(config.ple_before(index), config.hidden, dtype, device)
    return PleMemory(**vars(memory), **own)


# Fields of a layer's memory that have another name than their component of a request's memory.
COMPONENTS = {"window": "conv"}


def components(memory: LayerMemory) -> dict[str, torch.Tensor]:
    """Return what a layer keeps, by its component (`MEMORY`)."""
    return {COMPONENTS.get(each.name, each.name): getattr(memory, each.name) for each in fields(memory)}


def memory_of(
    config: ModelConfig, mixer: Block, state: RequestState, layer: int, like: torch.Tensor | None = None
) -> LayerMemory:
    """Return a copy of the memory that a state has of a layer with this mixer.

    like: its dtype and device; None: as in the state
    """
    kind = PleMemory if layer in state.ngram else type(empty_memory(config, mixer, torch.float32))
    found = {each.name: getattr(state, COMPONENTS.get(each.name, each.name))[layer] for each in fields(kind)}
    return kind(**{name: x if like is None else as_like(x, like) for name, x in found.items()})


def as_like(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a part of a memory in the dtype of `like`, and on its device. Numbers of tokens stay integers."""
    return x.to(like) if x.is_floating_point() else x.to(like.device)


def empty_memories(weights: Weights) -> tuple[LayerMemory, ...]:
    """`empty_memory` for every layer of the trunk, in the dtype and on the device of the weights."""
    dtype, device = weights.embedding.dtype, weights.embedding.device
    return tuple(layer_memory(weights.config, index, dtype, device) for index in range(len(weights.config.layers)))


def advance(
    weights: Weights, tokens: Sequence[int] | torch.Tensor, memories: Sequence[LayerMemory], positions_start: int,
    see: See = unseen, stage: str = "trunk",
) -> tuple[torch.Tensor, tuple[LayerMemory, ...]]:
    """Run T consecutive tokens of one request, the first at position `positions_start`.

    Shapes:  tokens (T,)  ->  rows after the final norm (T, D), and every layer's memory with the T tokens in it.
    """
    final, after, _ = advance_with_answers(weights, tokens, memories, positions_start, see, stage)
    return final, after


def advance_with_answers(
    weights: Weights, tokens: Sequence[int] | torch.Tensor, memories: Sequence[LayerMemory], positions_start: int,
    see: See = unseen, stage: str = "trunk",
) -> tuple[torch.Tensor, tuple[LayerMemory, ...], list[torch.Tensor]]:
    """Do `advance`, and also return the rows after every layer, (T, D) each."""
    ids = torch.as_tensor(tokens, dtype=torch.int64, device=weights.embedding.device)
    positions = positions_start + torch.arange(len(ids), device=ids.device)
    hidden = embed(weights, ids, see, stage)
    after, answers = [], []
    for index, (layer_weights, memory) in enumerate(zip(weights.layers, memories, strict=True)):
        hidden, memory = layer(weights.config, layer_weights, index, stage, hidden, memory, positions, see, tokens=ids)
        after.append(memory)
        answers.append(hidden)
    final, _ = read(weights.config, weights.final_norm, hidden)
    return see(Place(stage, AFTER_LAYERS, "final"), final), tuple(after), answers


def read(config: ModelConfig, norm: Norm | None, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the rows that a block reads (T, D): normed, or a mixture of the streams, and then their strengths (T, S).

    Shapes:  hidden (T, D), or (T, SD) with streams
    """
    assert norm is not None, "the layer has this block"
    if isinstance(norm, StreamWeights):
        return read_streams(norm, hidden, config.streams, config.eps)
    return rms_norm(hidden, norm, config.eps), None


def layer(
    config: ModelConfig, weights: LayerWeights, index: int, stage: str, hidden: torch.Tensor, memory: LayerMemory,
    positions: torch.Tensor, see: See = unseen, forms: Forms = MappingProxyType({}), tokens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, LayerMemory]:
    """One layer over T consecutive tokens of one request, block by block. Row t sees the memory and the rows 0 .. t.

    forms: mixer -> the parts of it that run in another form, by the names that `mix` gives them
    tokens: of the rows (T,), for an embedding of n-grams
    A block with factors continues from the rows that it read, after their norm, times alpha, and not from `hidden`.
    Shapes:  hidden (T, D), with streams (T, SD)   positions (T,)  ->  hidden, and the memory after the last row.
    """

    def at(component: str, tensor: torch.Tensor) -> torch.Tensor:
        return see(Place(stage, index, component), tensor)

    blocks, after = config.layers[index], config.mixers[index] in config.norm_after
    for number, block in enumerate(blocks):
        if block == PLE:
            assert isinstance(memory, PleMemory) and tokens is not None, "the layer has this block"
            hidden, memory = per_layer_embedding.embed(
                config.ple_before(index), given(weights.ple), hidden, tokens, memory, config.eps, at,
                **forms.get(block, {}))
            continue
        name, norm = ("", weights.input_norm) if block in MIXERS else ("post_", weights.post_norm)
        rows, strength = (hidden, None) if after else read(config, norm, hidden)
        if not after:
            rows = at(f"{name}normed", rows)
        if strength is not None:
            strength = at(f"{name}strength", strength)
        if block in MIXERS:
            made, kept = MIXERS[block].mix(
                config, weights.mixer, rows, memory, positions, at, **forms.get(block, {}))
            memory = replace(memory, **vars(kept))
        else:
            assert weights.mlp is not None, "the layer has this block"
            made = at("mlp", mlp(config, weights.mlp, rows))
        if after:
            made, _ = read(config, norm, made)
            made = at("mixer_normed" if block in MIXERS else "mlp_normed", made)
        factors = config.factors(block)
        if strength is not None:
            total = add_to_streams(hidden, made, strength)
        else:
            total = hidden + made if factors is None else factors[0] * rows + factors[1] * made
        hidden = at("hidden" if number == len(blocks) - 1 else "residual", total)
    return hidden, memory


def embed(weights: Weights, tokens: torch.Tensor, see: See = unseen, stage: str = "trunk") -> torch.Tensor:
    """tokens (T,) -> (T, D); with streams (T, SD), the same row for each."""
    return see(Place(stage, STAGE_LEVEL, "embedding"), weights.embedding[tokens].repeat(1, weights.config.streams))


def logits(weights: Weights, final: torch.Tensor, see: See = unseen, stage: str = "trunk") -> torch.Tensor:
    """final (M, D) -> (M, vocab); the draft head shares this matrix."""
    return see(Place(stage, AFTER_LAYERS, "logits"), final @ weights.head.T)


def pick(scores: torch.Tensor, see: See = unseen, stage: str = "trunk") -> torch.Tensor:
    """logits (M, vocab) -> the argmax of each row (M,) int64, the lowest index on a tie."""
    return see(Place(stage, AFTER_LAYERS, "pick"), scores.argmax(-1))
