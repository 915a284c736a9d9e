"""The target: embedding, layers dispatched by their kind, final norm, head.

Leaves out: the layers (`gdn.py`, `attention.py`) and the draft head (`draft/`). Ops only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from instep_reference.contract.config import MLPS, Block, ModelConfig
from instep_reference.contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place
from instep_reference.contract.recurrences import PLE, RECURRENCES, SHORT_CONV

from .. import weights as w
from ..commit.strategy_pair import Mixes
from ..memory import Memory
from ..ops.family_op_protocols import StreamWeights
from ..ops.fused import head_pick
from ..ops.integer_op_protocols import TopkTokens
from ..ops.op_protocols import Ops
from ..packed_batch import Batch, TargetRows
from ..sampling_inputs import Drawing
from .attention import AttentionLayer, ProjectedAttentionLayer
from .gdn import GdnLayer
from .latent_attention import LatentLayer
from .lightning import LightningLayer
from .mlp import Half
from .per_layer_embedding import PerLayerEmbedding
from .residual import Residual
from .short_conv import ShortConvLayer

STAGE = "trunk"
Layer = Callable[[Ops, Residual, Batch, Mixes], Residual]


def _mixing(kind: type[GdnLayer | LightningLayer | ShortConvLayer]) -> Callable[..., Layer]:
    """Return the maker of layers whose mixer has the addresses of its memory from `bound`."""

    def make(stored: w.Stored, layer: int, config: ModelConfig, memory: Memory) -> Layer:
        mixer = kind.of(stored, f"model.layers.{layer}", layer, config)
        return lambda ops, hidden, batch, bound: mixer(ops, hidden, bound, STAGE)

    return make


def _attention(stored: w.Stored, layer: int, config: ModelConfig, memory: Memory) -> Layer:
    pools = memory.units("keys", layer), memory.units("values", layer)
    kind = ATTENDING[config.mixers[layer]]
    mixer = kind.of(stored, f"model.layers.{layer}", layer, config, *pools)
    return lambda ops, hidden, batch, bound: mixer(ops, hidden, batch, STAGE)


def _ple(stored: w.Stored, layer: int, config: ModelConfig, memory: Memory) -> Layer:
    ple = PerLayerEmbedding.of(stored, f"model.layers.{layer}", layer, config)
    then = LAYERS[config.mixers[layer]](stored, layer, config, memory)
    return lambda ops, hidden, batch, bound: then(
        ops, ple(ops, hidden, batch.tokens, bound, STAGE), batch, bound)


def _mlp(stored: w.Stored, layer: int, config: ModelConfig, memory: Memory) -> Layer:
    half = Half.of(stored, f"model.layers.{layer}", layer, config)
    return lambda ops, hidden, batch, bound: half.alone(ops, hidden, STAGE)


def _elsewhere(stored: w.Stored, layer: int, config: ModelConfig, memory: Memory) -> Layer:
    return lambda ops, hidden, batch, bound: hidden


ATTENDING: Mapping[Block, type[AttentionLayer | LatentLayer | ProjectedAttentionLayer]] = {
    "attention": AttentionLayer, "mla": LatentLayer, "nope": ProjectedAttentionLayer,
}
# By the first block of the layer.
LAYERS: Mapping[Block, Callable[[w.Stored, int, ModelConfig, Memory], Layer]] = {
    **{name: _mixing(LightningLayer if row.inputs == "projected" else GdnLayer) for name, row in RECURRENCES.items()},
    SHORT_CONV.name: _mixing(ShortConvLayer), **dict.fromkeys(ATTENDING, _attention), **dict.fromkeys(MLPS, _mlp),
    PLE: _ple, "": _elsewhere,
}


@dataclass(frozen=True)
class Head:
    """Embedding and lm_head of the target, which the draft head shares. streams: of the target"""

    embedding: torch.Tensor
    lm_head: torch.Tensor
    streams: int = 1

    @classmethod
    def of(cls, stored: w.Stored, config: ModelConfig) -> "Head":
        embedding = stored.take("model.embed_tokens.weight")
        return cls(embedding, embedding if config.tied else stored.take("lm_head.weight"), config.streams)

    def embed(self, ops: Ops, tokens: torch.Tensor, stage: str) -> torch.Tensor:
        to = Place(stage, STAGE_LEVEL, "embedding")
        if self.streams > 1:
            assert ops.embed_streams is not None, "checked when the engine was built"
            return ops.embed_streams(tokens=tokens, table=self.embedding, streams=self.streams, to=to)
        return ops.embed(tokens=tokens, table=self.embedding, to=to)

    def pick(self, ops: Ops, rows: torch.Tensor, stage: str) -> torch.Tensor:
        """Pick from rows [M, D] after the final norm -> argmax [M] int64."""
        places = (Place(stage, AFTER_LAYERS, "logits"), Place(stage, AFTER_LAYERS, "pick"))
        return head_pick(ops, x=rows, weight=self.lm_head, to=places)

    def best(self, ops: Ops, rows: torch.Tensor, stage: str, topk: int) -> TopkTokens:
        """Find the most probable tokens of each of the rows [M, D] after the final norm."""
        return ops.topk_tokens(logits=self._logits(ops, rows, stage), topk=topk)

    def draw(self, ops: Ops, rows: torch.Tensor, drawing: Drawing, stage: str) -> torch.Tensor:
        """Draw from rows [M, D] after the final norm -> choices [M] int64; the argmax if a request does not sample."""
        logits = self._logits(ops, rows, stage)
        return ops.draw(logits=logits, **drawing._asdict(), to=Place(stage, AFTER_LAYERS, "pick"))

    def _logits(self, ops: Ops, rows: torch.Tensor, stage: str) -> torch.Tensor:
        return ops.lm_head(x=rows, weight=self.lm_head, to=Place(stage, AFTER_LAYERS, "logits"))


@dataclass(frozen=True)
class Trunk:
    """The target, frozen. The op set, the batch and the addresses of memory are arguments of every call."""

    head: Head
    layers: tuple[Layer, ...]
    norm: torch.Tensor | StreamWeights
    eps: float
    read: tuple[int, ...] = ()  # layers whose rows a block drafter reads

    @classmethod
    def of(cls, stored: w.Stored, config: ModelConfig, memory: Memory) -> "Trunk":
        first = (next(iter(blocks), "") for blocks in config.layers)
        layers = tuple(LAYERS[block](stored, layer, config, memory) for layer, block in enumerate(first))
        read = () if config.block is None else config.block.target_layer_ids
        return cls(Head.of(stored, config), layers, stored.read("model.norm", config), config.eps, read)

    def __call__(self, ops: Ops, batch: Batch, bound: Mixes) -> TargetRows:
        """Run the target over the rows of a launch."""
        hidden, features = Residual(self.head.embed(ops, batch.tokens, STAGE)), None
        for number, layer in enumerate(self.layers):
            hidden = layer(ops, hidden, batch, bound)
            if number in self.read:
                hidden = hidden.summed(ops)
                features = hidden.x if features is None else ops.concat(
                    x=features, y=hidden.x, to=Place(STAGE, number, "features"))
        final = hidden.normed(ops, self.norm, self.eps, Place(STAGE, AFTER_LAYERS, "final")).normed
        return TargetRows(final, features)
