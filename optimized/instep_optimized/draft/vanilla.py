"""The `vanilla` drafter: one MTP layer per draft; all layers run in extend on the accepted tokens, shifted further.

Leaves out: any forward in the draft event, which only passes on the proposals of extend. Ops only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from instep_reference.contract.config import ModelConfig
from instep_reference.contract.errors import Unsupported

from .. import weights as w
from ..memory import Memory
from ..model.trunk import Head
from ..ops.integer_op_protocols import TreePlan
from ..ops.op_protocols import Ops
from ..packed_batch import Batch, Who
from .drafter_protocol import PickRows, Use
from .mtp import MtpLayer
from .proposal_after_extend import propose, stage_of

NO_TREES = "vanilla drafting proposes chains only: a tree has no separate layer per branch"


@dataclass(frozen=True)
class Vanilla:
    """Layer i, from 0, combines the hidden row of position p with the token at position p + 1 + i.

    A token after the root is not known yet, and neither is the root while the prompt is unfinished. The layer then uses
    the pick of the previous layer instead. Example: the root is known, at position L; for the last row, L - 1, layer 0
    takes the root, and layer 1 takes the pick of layer 0.

    chained  layer i takes the y of layer i - 1 while i < num_steps; layers from num_steps on take the target's rows.
             If not chained, every layer takes the target's rows
    """

    mtp: tuple[MtpLayer, ...]
    chained: bool = True
    at_once: ClassVar[bool] = False

    @classmethod
    def of(cls, stored: w.Stored, config: ModelConfig, head: Head, memory: Memory) -> "Vanilla":
        return cls(MtpLayer.all(stored, config, head, memory))

    @property
    def layers(self) -> int:
        return len(self.mtp)

    def extend(
        self, ops: Ops, memory: Memory, batch: Batch, hidden: torch.Tensor, asked: Sequence[PickRows], num_steps: int
    ) -> None:
        """Run every layer whatever the step count, so that the KV of all layers is as long as the target's.

        A layer takes the result of the previous layer directly. None of it is kept after this extend, so a graph has no
        buffer for it that could become stale.
        """
        fed = hidden
        for number, (layer, whom) in enumerate(zip(self.mtp, asked, strict=True)):
            y = layer.rows(ops, fed, batch, stage_of(number))
            picks = propose(ops, memory.slot_table, layer, number, y, whom)
            if number + 1 < self.layers:
                behind = _behind(ops, picks, whom)
                tokens = ops.shift(tokens=batch.tokens, begin=batch.begin, count=batch.count, behind=behind)
                batch = replace(batch, tokens=tokens)
            fed = y if self.chained and number + 1 < num_steps else hidden

    def draft(
        self, ops: Ops, memory: Memory, who: Who, use: Use, num_steps: int, runs: Sequence[torch.Tensor] = ()
    ) -> tuple[torch.Tensor, ...]:
        """Return the proposals of the last extend. A forced draft changes no later draft: all were made before."""
        own = [ops.select(x=memory.slot_table.proposals[:, step], index=who.slots) for step in range(num_steps)]
        return (*(use(draft, step) for step, draft in enumerate(own)), *own)

    def draft_tree(
        self, ops: Ops, memory: Memory, who: Who, use: Use, plan: TreePlan, behind: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        raise Unsupported(NO_TREES)


def _behind(ops: Ops, picks: torch.Tensor, whom: PickRows) -> torch.Tensor:
    """[B]: the token after each request's rows, for the last row of the next layer: picked, or of its prompt."""
    if whom.places is None or whom.known is None:
        return picks
    if not len(picks):
        return whom.known
    return ops.choose(own=ops.select(x=picks, index=whom.places), forced=whom.known)
