"""The model: embedding, layers, final norm, head. Memory is a value: a function takes it and returns a new one.

Leaves out: the draft head (`draft/`), and the choice of tokens to run (`speculative_rounds.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

from . import attention, gdn, lightning, mla, short_conv
from .attention import AttentionMemory
from .contract.answers import RequestState
from .contract.config import Block, ModelConfig
from .contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place, See, unseen
from .contract.recurrences import RECURRENCES, SHORT_CONV
from .gdn import GdnMemory
from .lightning import LightningMemory
from .mlp import mlp
from .norms import rms_norm
from .short_conv import ConvMemory
from .weights import LayerWeights, Weights, given


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
    empty = empty_memory(config, mixer, torch.float32)
    found = {each.name: getattr(state, COMPONENTS.get(each.name, each.name))[layer] for each in fields(empty)}
    return replace(empty, **{name: x if like is None else x.to(like) for name, x in found.items()})


def empty_memories(weights: Weights) -> tuple[LayerMemory, ...]:
    """`empty_memory` for every layer of the trunk, in the dtype and on the device of the weights."""
    dtype, device = weights.embedding.dtype, weights.embedding.device
    return tuple(empty_memory(weights.config, mixer, dtype, device) for mixer in weights.config.mixers)


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
        hidden, memory = layer(weights.config, layer_weights, index, stage, hidden, memory, positions, see)
        after.append(memory)
        answers.append(hidden)
    final = see(Place(stage, AFTER_LAYERS, "final"), rms_norm(hidden, weights.final_norm, weights.config.eps))
    return final, tuple(after), answers


def layer(
    config: ModelConfig, weights: LayerWeights, index: int, stage: str, hidden: torch.Tensor, memory: LayerMemory,
    positions: torch.Tensor, see: See = unseen, forms: Forms = MappingProxyType({}),
) -> tuple[torch.Tensor, LayerMemory]:
    """One layer over T consecutive tokens of one request, block by block. Row t sees the memory and the rows 0 .. t.

    forms: mixer -> the parts of it that run in another form, by the names that `mix` gives them
    A block with factors continues from the rows that it read, after their norm, times alpha, and not from `hidden`.
    Shapes:  hidden (T, D)   positions (T,)  ->  hidden (T, D), and the memory after the last row.
    """

    def at(component: str, tensor: torch.Tensor) -> torch.Tensor:
        return see(Place(stage, index, component), tensor)

    blocks, after = config.layers[index], config.mixers[index] in config.norm_after
    for number, block in enumerate(blocks):
        name, norm = ("normed", weights.input_norm) if block in MIXERS else ("post_normed", weights.post_norm)
        read = hidden if after else at(name, rms_norm(hidden, given(norm), config.eps))
        if block in MIXERS:
            made, memory = MIXERS[block].mix(
                config, weights.mixer, read, memory, positions, at, **forms.get(block, {}))
        else:
            assert weights.mlp is not None, "the layer has this block"
            made = at("mlp", mlp(config, weights.mlp, read))
        if after:
            made = at("mixer_normed" if block in MIXERS else "mlp_normed", rms_norm(made, given(norm), config.eps))
        factors = config.factors(block)
        total = hidden + made if factors is None else factors[0] * read + factors[1] * made
        hidden = at("hidden" if number == len(blocks) - 1 else "residual", total)
    return hidden, memory


def embed(weights: Weights, tokens: torch.Tensor, see: See = unseen, stage: str = "trunk") -> torch.Tensor:
    """tokens (T,) -> (T, D)."""
    return see(Place(stage, STAGE_LEVEL, "embedding"), weights.embedding[tokens])


def logits(weights: Weights, final: torch.Tensor, see: See = unseen, stage: str = "trunk") -> torch.Tensor:
    """final (M, D) -> (M, vocab); the draft head shares this matrix."""
    return see(Place(stage, AFTER_LAYERS, "logits"), final @ weights.head.T)


def pick(scores: torch.Tensor, see: See = unseen, stage: str = "trunk") -> torch.Tensor:
    """logits (M, vocab) -> the argmax of each row (M,) int64, the lowest index on a tie."""
    return see(Place(stage, AFTER_LAYERS, "pick"), scores.argmax(-1))
