"""The `eagle` drafter: one MTP layer, run again for every draft on its own hidden rows.

Leaves out: which rows were committed (`round_for_step_count.py`, `forwards.py`). Ops only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from instep_reference.contract.config import ModelConfig

from .. import weights as w
from ..memory import Memory
from ..model.trunk import Head
from ..ops.integer_op_protocols import Beams, GrownTree, TreePlan
from ..ops.op_protocols import Ops
from ..packed_batch import Batch, Nodes, Who, windows
from .drafter_protocol import PickRows, Use, column
from .mtp import MtpLayer
from .proposal_after_extend import propose, stage_of


@dataclass(frozen=True)
class Eagle:
    """Draft 1 is the proposal of the last extend. Each further draft is one forward on the previous draft in use."""

    mtp: MtpLayer
    at_once: ClassVar[bool] = False

    @classmethod
    def of(cls, stored: w.Stored, config: ModelConfig, head: Head, memory: Memory) -> "Eagle":
        (mtp,) = MtpLayer.all(stored, config, head, memory)
        return cls(mtp)

    @property
    def layers(self) -> int:
        return 1

    def extend(
        self, ops: Ops, memory: Memory, batch: Batch, hidden: torch.Tensor, asked: Sequence[PickRows], num_steps: int
    ) -> None:
        """Run the MTP layer once, whatever the step count."""
        y = self.mtp.rows(ops, hidden, batch, stage_of(0))
        propose(ops, memory.slot_table, self.mtp, 0, y, asked[0])

    def draft(
        self, ops: Ops, memory: Memory, who: Who, use: Use, num_steps: int, runs: Sequence[torch.Tensor] = ()
    ) -> tuple[torch.Tensor, ...]:
        """Run draft i at position L - 1 + i in step i, from 1, with the y of step i - 1; its KV rows are scratch.

        They come after the request's length, and an extend writes them again before they are committed.
        """
        own = [ops.select(x=memory.slot_table.proposals[:, 0], index=who.slots)]
        drafts = [use(own[0], 0)]
        hidden = ops.select(x=memory.slot_table.proposed, index=who.slots)
        for step in range(1, num_steps):
            stage = f"chain.{step}"
            who = replace(who, count=runs[step]) if runs else who
            batch = windows(ops, memory, who, drafts[-1], "draft", 1, shift=step - 1)
            hidden = self.mtp.rows(ops, hidden, batch, stage)
            own.append(self.mtp.pick(ops, hidden, stage))
            drafts.append(use(own[-1], step))
        return (*drafts, *own)

    def draft_tree(
        self, ops: Ops, memory: Memory, who: Who, use: Use, plan: TreePlan, behind: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Draft node by node: each draft is a pick at its parent; then the head runs on it, with its parent's y.

        A request whose node has no child has an idle row there. The results of the head stay in the slot table, by
        node, because a child may come much later. The row of node n is at place L - 1 + n, and has the position of its
        depth. The head runs T - 2 times, whatever the shapes, so that a graph can hold the runs. Batches of chains use
        `draft`.
        """
        table, width = memory.slot_table, plan.depth.shape[1]
        pick = ops.select(x=table.proposals[:, 0], index=who.slots)
        y, at = ops.select(x=table.proposed, index=who.slots), who.slots
        own, drafts = [], []
        for node in range(1, width):
            ops.store_rows(rows=pick, pool=table.picks[:, node - 1 : node], locations=at)
            ops.store_rows(rows=y, pool=table.final[:, node - 1 : node], locations=at)
            parent = column(ops, behind, node)
            # [B * T]: the head's results at all nodes, one request after the other.
            picks, rows = (ops.select(x=x, index=who.slots).flatten(0, 1) for x in (table.picks, table.final))
            own.append(ops.select(x=picks, index=parent))
            drafts.append(use(own[-1], node - 1))
            if node < width - 1:
                stage, at = f"chain.{node}", column(ops, plan.inner, node)
                nodes = Nodes(None, plan.depth[:, node], plan.ancestors[:, node], width, lead=1)
                step = replace(who, slots=at)
                batch = windows(ops, memory, step, drafts[-1], "draft", 1, shift=node - 1, nodes=nodes)
                y = self.mtp.rows(ops, ops.select(x=rows, index=parent), batch, stage)
                pick = self.mtp.pick(ops, y, stage)
        return (*drafts, *own)

    def grow(self, ops: Ops, memory: Memory, who: Who, num_steps: int, topk: int, nodes: int) -> GrownTree:
        """Grow step by step: the head runs on the beams of the previous step, `topk` rows per request in one launch.

        The row of beam b of step i is at place L + (i - 1) * topk + b, as in a tree whose root is at L - 1. It sees the
        rows of its ancestors, and has the position of its depth.
        """
        beams: Beams | None = None
        y = ops.select(x=memory.slot_table.proposed, index=who.slots)
        for step in range(num_steps):
            stage = f"chain.{step}"
            if beams is not None:
                rows = Nodes(None, beams.depth, beams.ancestors, 1 + (num_steps - 1) * topk, lead=1)
                batch = windows(ops, memory, who, beams.next, "draft", topk, shift=(step - 1) * topk, nodes=rows)
                y = self.mtp.rows(ops, ops.select(x=y, index=beams.rows), batch, stage)
            tokens, log_probs = self.mtp.head.best(ops, y, stage, topk)
            beams = ops.select_beams(
                tokens=tokens, log_probs=log_probs, before=beams, step=step + 1, num_steps=num_steps)
        assert beams is not None, "there is a step"
        return ops.build_tree(tokens=beams.tokens, parents=beams.parents, scores=beams.scores, nodes=nodes)
