"""The drafter protocol: a drafter follows the committed tokens, and proposes the next ones.

Leaves out: every particular drafter (one file each), and the layer that all of them run (`mtp.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from instep_reference.contract.config import ModelConfig

from .. import weights as w
from ..memory import Memory
from ..model.trunk import Head
from ..ops.integer_op_protocols import GrownTree, TreePlan
from ..ops.op_protocols import Ops
from ..packed_batch import Batch, Who


@dataclass(frozen=True)
class PickRows:
    """The M of the B requests of an extend for which one MTP layer picks a token; all int64 on the device.

    last [M]    the last packed row of each of these requests
    slots [M]   the slot in which the pick is kept as a proposal; -1: the pick only fills a row of the next layer
    places [B]  the number of each request among the M; -1: it gets no pick. None: M is B, in the same order
    known [B]   for a request without a pick, whose prompt continues: the prompt token after its rows. -1 for the M.
                None: every request gets a pick
    """

    last: torch.Tensor
    slots: torch.Tensor
    places: torch.Tensor | None = None
    known: torch.Tensor | None = None


# (the head's own draft [B], its step) -> the draft in use [B], forced or not. Also writes it into the windows.
Use = Callable[[torch.Tensor, int], torch.Tensor]


class Drafter(Protocol):
    """Ops and views only, like a layer: an extend and a draft are bodies that a graph may hold."""

    @property
    def layers(self) -> int:
        """Number of MTP layers that run in an extend; 0 for a block drafter."""
        ...

    @property
    def at_once(self) -> bool:
        """Whether a draft runs the root and all drafts of a window in one launch."""
        ...

    def extend(
        self, ops: Ops, memory: Memory, batch: Batch, hidden: torch.Tensor, asked: Sequence[PickRows], num_steps: int
    ) -> None:
        """Take in rows that became committed: hidden [N, D] are the target's final rows, or [N, nD] its features.

        Writes the draft KV of every row. If a request's root is known, its proposals go into the slot table.

        batch.tokens  for the row at position p the token at position p + 1
        asked         one per MTP layer
        num_steps     the step count in force. An extend runs even when it is 0, so the draft KV is never too short
        """
        ...

    def draft(
        self, ops: Ops, memory: Memory, who: Who, use: Use, num_steps: int, runs: Sequence[torch.Tensor] = ()
    ) -> tuple[torch.Tensor, ...]:
        """Return the drafts in use, one [B] per step, then the drafter's own, one [B] per step; at least one step.

        runs: for each step [B], 1 if a request has a draft at it, else 0; empty: all have all
        """
        ...

    def draft_tree(
        self, ops: Ops, memory: Memory, who: Who, use: Use, plan: TreePlan, behind: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Do `draft` for trees, one [B] per node after the root.

        plan    the shapes of the windows [B, T]
        behind  [B, T]: for every node but the root the index of its parent in a flattened table [B, T]; -1 after a
        window's
                end
        """
        ...


@runtime_checkable
class GrowsTrees(Protocol):
    """A drafter that chooses the shapes of trees itself."""

    def grow(self, ops: Ops, memory: Memory, who: Who, num_steps: int, topk: int, nodes: int) -> GrownTree:
        """Grow windows of at most `nodes` nodes (`contract/grown_draft_tree.py`). Writes only scratch rows of draft KV.

        who: every request has `topk` packed rows
        """
        ...


def column(ops: Ops, table: torch.Tensor, number: int) -> torch.Tensor:
    """Take one column of integers [B, T] as contiguous memory, as ops require for slots and indices [B]."""
    return ops.choose(own=table[:, number], forced=table[:, number])


# From the stored weights, the target's configuration (which stays as it is), the target's head, and the pools.
Make = Callable[[w.Stored, ModelConfig, Head, Memory], Drafter]
