"""The model as calls of ops: one frozen object per layer, dispatched by kind.

Leaves out: arithmetic (`ops/`) and addresses (`commit/`, `packed_batch.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..draft.drafter_protocol import Drafter
    from ..memory import Memory
    from .trunk import Trunk


@dataclass(frozen=True)
class Model:
    """The target, the drafter if MTP layers run (None: events bring the drafts), and the memory that both run on."""

    trunk: Trunk
    drafter: Drafter | None
    memory: Memory
