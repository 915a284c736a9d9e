"""Eagle: one MTP layer, run once per draft; it takes its own hidden row of the previous step.

Leaves out: the computation of a head (`Model.head`). So the same steps draft with tensors and with labels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from ..contract.place_names import See
from ..model_interface import Cache, Memory, Model, Rows
from .drafter_protocol import Asked, Proposed
from .grow_draft_tree import ROOT, Growing


@dataclass(frozen=True)
class Step(Generic[Rows, Cache]):
    """The head after it has read a node: its pick for a child, its row y, its cache, and the depth of the child."""

    pick: int
    hidden: Rows
    cache: Cache
    depth: int


class Eagle:
    """Extend proposes draft 1. For draft i + 1 the head runs on draft i, with the y of the previous step.

    In a tree the head runs once at every node that has a child, and continues from its parent's step.
    """

    def begin(self, model: Model[Rows, Memory, Cache]) -> Proposed[Rows, Cache]:
        return Proposed((model.no_cache(),))

    def extend(
        self, model: Model[Rows, Memory, Cache], before: Proposed[Rows, Cache], hidden: Rows, count: int,
        following: Sequence[int], rooted: bool, start: int, num_steps: int, see: See,
    ) -> Proposed[Rows, Cache]:
        y, cache = model.head(0, following[:count], hidden, before.caches[0], start, "extend", see)
        if not rooted:
            return Proposed((cache,))
        last = model.last(y)
        return Proposed((cache,), tuple(model.pick(last, "extend", see)), last)

    def draft(
        self, model: Model[Rows, Memory, Cache], proposed: Proposed[Rows, Cache], tokens: Sequence[int],
        asked: Asked, see: See,
    ) -> tuple[list[int], list[int]]:
        assert proposed.hidden is not None, "nothing is drafted before the root is known"
        root = len(tokens) - 1
        parents = tuple(range(asked.num_steps)) if asked.parents is None else asked.parents
        steps = {0: Step(proposed.proposals[0], proposed.hidden, proposed.caches[0], 0)}
        drafts: list[int] = []
        own: list[int] = []
        for number, parent in enumerate(parents):
            if parent not in steps:
                before = steps[parents[parent - 1]]
                steps[parent] = _step(model, parent, drafts[parent - 1], before, root, see)
            own.append(steps[parent].pick)
            drafts.append(own[-1] if asked.picks is None else asked.picks[number])
        return drafts, own

    def grow(
        self, model: Model[Rows, Memory, Cache], proposed: Proposed[Rows, Cache], tokens: Sequence[int],
        num_steps: int, topk: int, drafts: int, see: See,
    ) -> tuple[list[int], list[int]]:
        """In step i run the head on the beams of step i - 1, each with its parent's row y and after its cache."""
        assert proposed.hidden is not None, "nothing is drafted before the root is known"
        growing, position = Growing(topk), len(tokens) - 1
        after = {ROOT: (proposed.hidden, proposed.caches[0])}
        growing.step(model.best(proposed.hidden, topk, "chain.0", see))
        for number in range(1, num_steps):
            stage, ys = f"chain.{number}", []
            for beam in growing.beams[-1]:
                grown = growing.candidates[beam]
                y, cache = after[grown.parent]
                after[beam] = model.head(0, (grown.token,), y, cache, position + number - 1, stage, see)
                ys.append(after[beam][0])
            growing.step(model.best(model.join(ys), topk, stage, see))
        return growing.tree(drafts)


def _step(
    model: Model[Rows, Memory, Cache], node: int, token: int, before: Step[Rows, Cache], root: int, see: See
) -> Step[Rows, Cache]:
    """Run the head on the node's token. Row p combines the hidden row of position p with the token at p + 1."""
    stage = f"chain.{node}"
    y, cache = model.head(0, (token,), before.hidden, before.cache, root + before.depth, stage, see)
    return Step(model.pick(y, stage, see)[0], y, cache, before.depth + 1)
