"""What a drafter is: it keeps up with what was committed, and proposes what may come next.

Leaves out: every particular drafter (one file each), and the layer that all of them run (`mtp.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from instep_reference.contract.config import ModelConfig

from .. import weights as w
from ..batch import Batch, Who
from ..memory import Memory
from ..model.trunk import Head
from ..ops.base import Ops


@dataclass(frozen=True)
class Asked:
    """For whom one MTP layer picks a token in an extend of B requests; all int64 on the device.

    last [M]    the last rows of those requests
    slots [M]   where the pick is kept as a proposal; -1: it only fills a row of the next layer
    places [B]  which of the M each request is, -1: none of them. None: the M are the B, in this order
    known [B]   what stands behind the rows of those others (their prompt goes on), -1 for the M; None: nobody is other
    """

    last: torch.Tensor
    slots: torch.Tensor
    places: torch.Tensor | None = None
    known: torch.Tensor | None = None


# A head's own draft [B] of a step -> the one in use, forced or not, which now stands in the requests' windows.
Use = Callable[[torch.Tensor, int], torch.Tensor]


class Drafter(Protocol):
    """Ops and views only, like a layer: an extend and a draft are bodies that a graph may hold."""

    @property
    def layers(self) -> int:
        """How many MTP layers run in an extend."""
        ...

    def extend(
        self, ops: Ops, memory: Memory, batch: Batch, hidden: torch.Tensor, asked: Sequence[Asked], num_steps: int
    ) -> None:
        """Take in rows that became committed: hidden [N, D] are the target's final rows.

        Writes the draft KV of every row. Where a request's root is known, its proposals go into the slot table.
        `batch.tokens` are the tokens one place further on. asked: one per layer. `num_steps` is what is in force. It
        runs whatever the step count is, so the draft KV never falls behind.
        """
        ...

    def draft(self, ops: Ops, memory: Memory, who: Who, use: Use, num_steps: int) -> tuple[torch.Tensor, ...]:
        """The drafts in use, one [B] per step, then the drafter's own, one [B] per step; at least one step."""
        ...


# From the stored weights, the target's configuration (which stays as it is), the target's head, and the pools.
Make = Callable[[w.Stored, ModelConfig, Head, Memory], Drafter]
