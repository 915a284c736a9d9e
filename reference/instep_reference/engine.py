"""The reference engine: the rounds of `speculative_rounds.py` over the model of `trunk.py`, in plain tensors.

Memories are values: they are never written in place, so no request can change the memory of another. Leaves out: speed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from . import trunk
from .acceptance import block_sampled
from .attention import AttentionMemory
from .contract.adaptive_controller_file import AdaptiveFile
from .contract.capacity import Capacity
from .contract.config import ModelConfig
from .contract.controllers import Controlled
from .contract.engine import Path, RequestState
from .contract.place_names import AFTER_LAYERS, Place, See, unseen
from .draft import Drafter, block_rows, drafter, head
from .sampling import Drawing, drawn, most_probable, probabilities
from .speculative_rounds import Rounds
from .weights import Weights

Memories = tuple[trunk.LayerMemory, ...]


@dataclass(frozen=True)
class TensorModel:
    """The model of a checkpoint, as `Model` describes it. Rows are tensors [rows, D].

    If a block drafter reads n layers of the target, the target's rows are [rows, (1 + n) D]: the final rows first.
    """

    weights: Weights

    @property
    def config(self) -> ModelConfig:
        return self.weights.config

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    def nothing(self) -> Memories:
        return trunk.empty_memories(self.weights)

    def no_cache(self) -> AttentionMemory:
        like = self.weights.embedding
        memory = trunk.empty_memory(self.config, self.config.attention, like.dtype, self.device)
        return cast(AttentionMemory, memory)

    def advance(
        self, tokens: Sequence[int], memory: Memories, start: int, see: See
    ) -> tuple[torch.Tensor, Memories]:
        block = self.config.block
        if block is None:
            return trunk.advance(self.weights, tokens, memory, start, see)
        final, after, answers = trunk.advance_with_answers(self.weights, tokens, memory, start, see)
        return torch.cat([final, block_rows.features(answers, block.target_layer_ids, see)], -1), after

    def head(
        self, layer: int, tokens: Sequence[int], hidden: torch.Tensor, cache: AttentionMemory, start: int,
        stage: str, see: See,
    ) -> tuple[torch.Tensor, AttentionMemory]:
        return head.rows(self.weights, layer, tokens, hidden, cache, start, stage, see)

    def block_caches(self) -> tuple[AttentionMemory, ...]:
        if self.config.block is None:
            return ()
        empty = trunk.empty_memory(self.config.block_model(), "attention", self.weights.embedding.dtype, self.device)
        return (cast(AttentionMemory, empty),) * self.config.block.num_hidden_layers

    def context(
        self, rows: torch.Tensor, caches: Sequence[AttentionMemory], start: int, see: See
    ) -> tuple[AttentionMemory, ...]:
        return block_rows.context(self.weights, rows[:, self.config.hidden :], caches, start, see)

    def block(
        self, tokens: Sequence[int], caches: Sequence[AttentionMemory], start: int, see: See
    ) -> torch.Tensor:
        return block_rows.rows(self.weights, tokens, caches, start, see)

    def final(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows after the final norm alone."""
        return rows[:, : self.config.hidden]

    def until(self, cache: AttentionMemory, count: int) -> AttentionMemory:
        return AttentionMemory(cache.keys[:count], cache.values[:count])

    def pick(self, rows: torch.Tensor, stage: str, see: See) -> list[int]:
        scores = trunk.logits(self.weights, self.final(rows), see, stage)
        return [int(token) for token in trunk.pick(scores, see, stage)]

    def best(self, rows: torch.Tensor, count: int, stage: str, see: See) -> list[list[tuple[int, float]]]:
        return most_probable(trunk.logits(self.weights, self.final(rows), see, stage), count)

    def draw(self, rows: torch.Tensor, drawing: Drawing, stage: str, see: See) -> list[int]:
        said = drawn(trunk.logits(self.weights, self.final(rows), see, stage), drawing)
        return [int(token) for token in see(Place(stage, AFTER_LAYERS, "pick"), torch.tensor(said, device=self.device))]

    def accept_block(self, rows: torch.Tensor, drawing: Drawing, cap: int) -> Path:
        probs = probabilities(trunk.logits(self.weights, self.final(rows), unseen, "trunk"), drawing.sampling)
        uniforms = probs.new_tensor([[*drawing.at_nodes, drawing.final]])
        block, most = (torch.tensor([given], device=self.device) for given in (list(drawing.tokens), cap))
        correct_len, bonus = block_sampled(block, probs[None], uniforms[:, :-1], uniforms[:, -1], most)
        return Path(tuple(range(1, 1 + int(correct_len))), int(bonus))

    def last(self, rows: torch.Tensor, count: int = 1) -> torch.Tensor:
        return rows[-count:]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts))

    def logical(
        self, length: int, root: int | None, proposal: int | None, hidden: torch.Tensor | None,
        memory: Memories, caches: Sequence[AttentionMemory], tail: torch.Tensor | None = None,
    ) -> RequestState:
        held: dict[str, Any] = {name: {} for name in ("conv", "state", "keys", "values")}
        for layer, kept in enumerate(memory):
            for name, tensor in trunk.components(kept).items():
                held.setdefault(name, {})[layer] = tensor.clone()
        drafts, blocks = (caches, ()) if self.config.block is None else ((), caches)
        return RequestState(
            length=length, root=root, proposal=proposal,
            proposal_hidden=None if hidden is None else hidden[0].clone(),
            **held,
            draft_keys={layer: kept.keys.clone() for layer, kept in enumerate(drafts)},
            draft_values={layer: kept.values.clone() for layer, kept in enumerate(drafts)},
            block_keys={layer: kept.keys.clone() for layer, kept in enumerate(blocks)},
            block_values={layer: kept.values.clone() for layer, kept in enumerate(blocks)},
            tail={} if tail is None else {AFTER_LAYERS: self.final(tail).clone()},
        )


class ReferenceEngine(Rounds[torch.Tensor, Memories, AttentionMemory]):
    """The definition of an engine's behaviour, in the dtype of the weights.

    mode        which drafter, by name
    draft_with  a drafter to use instead, for example an `External` with a block drafter
    room        only its `topk` and `num_draft_tokens` matter, for trees that the drafter grows; None: it grows none
    """

    def __init__(
        self, weights: Weights, *, num_steps: int, adaptive: AdaptiveFile | None = None,
        controlled: Controlled | None = None, lag: int = 0, mode: str = "eagle", see: See = unseen,
        draft_with: Drafter | None = None, room: Capacity | None = None,
    ) -> None:
        chosen = drafter(weights.config, mode) if draft_with is None else draft_with
        super().__init__(
            TensorModel(weights), chosen, num_steps=num_steps, adaptive=adaptive, controlled=controlled, lag=lag,
            see=see, room=room)
