"""Data-parallel groups: replicas with pools of their own, which share the vocabulary and serve each event together.

Leaves out: the engine of one replica (`replica_engine.py`), and its ops (`ops_of_group.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from instep_reference.contract.place_names import Place

from ..ranks import Comm


class Launch(NamedTuple):
    """The rows of one launch, as every replica knows them from the batch.

    own, most  of a body: requests of this replica, or 1 idle row, and of the replica with the most of them
    rows       of a forward with prefill chunks, which one replica has: by stage and component, its rows
    """

    own: int
    most: int
    rows: Mapping[tuple[str, str], int] | None = None

    def width(self, to: Place, rows: int) -> int:
        """Return to how many rows this replica's rows of a place are padded."""
        return rows // self.own * self.most if self.rows is None else self.rows[to.stage, to.component]


@dataclass
class Replica:
    """One replica of a group. comm: its rank is the number of the replica

    owners   request -> the replica that serves it
    launch   the launch that runs now
    padded   is shown the rows that pad this replica's rows of a place in a collective
    """

    comm: Comm
    owners: Mapping[str, int]
    launch: Launch = field(default=Launch(1, 1))
    padded: Callable[[Place, torch.Tensor], None] = lambda place, rows: None
