"""The `eagle` drafter: one MTP layer, run again for every draft on its own hidden rows.

Leaves out: which rows were committed (`round.py`, `mixed.py`). Ops only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from instep_reference.contract.config import ModelConfig

from .. import weights as w
from ..batch import Batch, Who, windows
from ..memory import Memory
from ..model.trunk import Head
from ..ops.base import Ops
from .base import Asked, Use
from .extend import propose, stage_of
from .mtp import MtpLayer


@dataclass(frozen=True)
class Eagle:
    """Draft 1 is the proposal of the last extend. Each further draft is one forward on the draft in use before it."""

    mtp: MtpLayer

    @classmethod
    def of(cls, stored: w.Stored, config: ModelConfig, head: Head, memory: Memory) -> Eagle:
        (mtp,) = MtpLayer.all(stored, config, head, memory)
        return cls(mtp)

    @property
    def layers(self) -> int:
        return 1

    def extend(
        self, ops: Ops, memory: Memory, batch: Batch, hidden: torch.Tensor, asked: Sequence[Asked], num_steps: int
    ) -> None:
        """One run of the MTP layer, whatever the step count."""
        y = self.mtp.rows(ops, hidden, batch, stage_of(0))
        propose(ops, memory.slot_table, self.mtp, 0, y, asked[0])

    def draft(self, ops: Ops, memory: Memory, who: Who, use: Use, num_steps: int) -> tuple[torch.Tensor, ...]:
        """Step i, from 1, runs draft i at position L - 1 + i, with the y of step i - 1; its KV rows are scratch.

        They are scratch: they lie behind the request's length, and an extend writes them before they are committed.
        """
        own = [ops.select(x=memory.slot_table.proposals[:, 0], index=who.slots)]
        drafts = [use(own[0], 0)]
        hidden = ops.select(x=memory.slot_table.proposed, index=who.slots)
        for step in range(1, num_steps):
            stage = f"chain.{step}"
            batch = windows(ops, memory, who, drafts[-1], "draft", 1, shift=step - 1)
            hidden = self.mtp.rows(ops, hidden, batch, stage)
            own.append(self.mtp.pick(ops, hidden, stage))
            drafts.append(use(own[-1], step))
        return (*drafts, *own)
