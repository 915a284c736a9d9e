"""What a drafter is: a head that runs over rows of hidden states, writes its own KV, and picks tokens.

Leaves out: every particular drafter (one file each), and which rows it runs on (`extend.py`, `round.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from instep_reference.contract.config import ModelConfig

from .. import weights as w
from ..batch import Batch
from ..memory import Memory
from ..model.trunk import Head
from ..ops.base import Ops


class Drafter(Protocol):
    """Ops and views only, like a layer."""

    def rows(self, ops: Ops, hidden: torch.Tensor, batch: Batch, stage: str) -> torch.Tensor:
        """hidden [N, D]: the target's final rows (extend) or this head's own y (chain) -> y [N, D].

        Writes the draft KV of every row. `batch.tokens` are the tokens one place further on.
        """
        ...

    def pick(self, ops: Ops, y: torch.Tensor, stage: str) -> torch.Tensor:
        """y [M, D] -> the head's argmax [M] int64."""
        ...


# From the stored weights, the target's configuration (which stays as it is), the target's head, and the pools.
Make = Callable[[w.Stored, ModelConfig, Head, Memory], Drafter]
