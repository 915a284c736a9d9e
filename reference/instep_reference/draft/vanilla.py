"""Vanilla: one MTP layer per draft. All layers run inside extend, layer i on the accepted tokens shifted by i more.

The draft event only passes on the proposals of extend. Leaves out: the computation of a head (`Model.head`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..contract.errors import Unsupported
from ..contract.place_names import See
from ..model_interface import Cache, Memory, Model, Rows
from .drafter_protocol import Asked, Proposed


@dataclass(frozen=True)
class Vanilla:
    """Layer i, from 0, combines the hidden row of position p with the token at position p + 1 + i.

    chained  layer i takes the y of layer i - 1 while i < num_steps; layers from num_steps on take the target's rows.
             If not chained, every layer takes the target's rows
    Each layer has a separate stage (extend, extend.1, ..), so that its results have different places.
    All layers run in every extend, so that every cache is as long as the target's memory whatever the step count.

    Tokens after the root are not known yet. While the prompt is unfinished, tokens after its end are not known
    either. The layers then use the picks of the layers before. So the last i rows that layer i takes in may be made
    from guesses, and they are never recomputed. The memory of these layers therefore depends on where chunks and rounds
    ended (and, if chained, on the step count). Nothing else in a request's state does.
    """

    chained: bool = True

    def begin(self, model: Model[Rows, Memory, Cache]) -> Proposed[Rows, Cache]:
        return Proposed(tuple(model.no_cache() for _ in range(model.config.mtp_layers)))

    def extend(
        self, model: Model[Rows, Memory, Cache], before: Proposed[Rows, Cache], hidden: Rows, count: int,
        following: Sequence[int], rooted: bool, start: int, num_steps: int, see: See,
    ) -> Proposed[Rows, Cache]:
        tokens, fed, heads, caches = list(following), hidden, [], []
        for layer, cache in enumerate(before.caches):
            stage = f"extend.{layer}" if layer else "extend"
            y, cache = model.head(layer, tokens[layer : layer + count], fed, cache, start, stage, see)
            if len(tokens) == layer + count and (rooted or layer + 1 < len(before.caches)):
                tokens += model.pick(model.last(y), stage, see)
            fed = y if self.chained and layer + 1 < num_steps else hidden
            heads.append(y)
            caches.append(cache)
        if not rooted:
            return Proposed(tuple(caches))
        return Proposed(tuple(caches), tuple(tokens[count:]), model.last(heads[0]))

    def draft(
        self, model: Model[Rows, Memory, Cache], proposed: Proposed[Rows, Cache], tokens: Sequence[int],
        asked: Asked, see: See,
    ) -> tuple[list[int], list[int]]:
        count = asked.num_steps if asked.parents is None else len(asked.parents)
        if asked.parents is not None and tuple(asked.parents) != tuple(range(count)):
            raise Unsupported("vanilla drafting proposes chains only: a tree has no separate layer per branch")
        if count > len(proposed.proposals):
            raise Unsupported(f"{count} steps with {len(proposed.proposals)} MTP layers, one per step")
        own = list(proposed.proposals[:count])
        return (own if asked.picks is None else list(asked.picks)), own
