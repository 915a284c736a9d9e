"""The file of a commit strategy that no product file names: `snapshot` with a pool of another name.

It is written as for `instep_optimized/commit`: tests import it, or copy it there. Leaves out: the computation.
"""

from dataclasses import replace
from typing import Any

from instep_optimized.commit.base import StrategySpec, Table
from instep_optimized.commit.snapshot import Snapshot
from instep_optimized.memory.budget import snapshots, units

NAME = "put_by"  # of the pool of states by batch row
RENAMED: Table = {
    deed: {NAME if region.startswith("snapshot") else region: which for region, which in table.items()}
    for deed, table in Snapshot.may.items()
}


class PutBy(Snapshot):
    """The rows of its windows are in a pool with another name."""

    may = RENAMED
    narrower = 0  # columns that its pool lacks

    def __init__(self, config: Any, sizes: Any, memory: Any, width: int) -> None:
        super().__init__(config, sizes, _Renamed(memory), width)

    @classmethod
    def demands(cls, config: Any, sizes: Any) -> Any:
        rows = snapshots("state", config, replace(sizes, widest=sizes.widest - cls.narrower))
        return units("state", config, sizes), replace(rows, name=NAME)


class _Renamed:
    def __init__(self, memory: Any) -> None:
        self.memory = memory

    def __getitem__(self, name: str) -> Any:
        return self.memory[NAME if name.startswith("snapshot") else name]

    def units(self, name: str, layer: int) -> Any:
        return self.memory.units(NAME if name.startswith("snapshot") else name, layer)

    def layers(self, name: str) -> Any:
        return self.memory.layers(name)


PUT_BY = StrategySpec(PutBy.demands, PutBy)
