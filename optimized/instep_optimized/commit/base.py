"""What a commit strategy is: a choice of addresses for the ops that touch a GDN layer's memory, and a table.

Leaves out: every particular strategy (one file each) and all arithmetic: a strategy adds none of its own, so two of
them cannot differ by a bit unless an address is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from instep_reference.contract.config import ModelConfig

from ..batch import Batch
from ..layout import Part
from ..memory import Memory
from ..memory.budget import Sizes
from ..memory.pool import Demand
from ..ops.base import Ops

# What happens to one request in an event, as the table of a strategy names it.
Deed = Literal["prefill", "verify", "decode", "draft", "commit", "release", "restore"]
# Region -> which units of it: the request's slot, its snapshot row, the pages on which the written positions stand,
# or all pages that it owns.
Table = Mapping[Deed, Mapping[str, Literal["slot", "row", "written", "owned"]]]

KV: Mapping[str, Literal["written"]] = {"keys": "written", "values": "written"}
DRAFT_KV: Mapping[str, Literal["written"]] = {"draft_keys": "written", "draft_values": "written"}


@dataclass(frozen=True)
class Touch:
    """One request's part of an event, in units: its slot, its snapshot row, the pages of the positions it writes."""

    deed: Deed
    slot: int
    row: int = -1
    written: frozenset[int] = frozenset()
    owned: frozenset[int] = frozenset()

    def units(self, which: Literal["slot", "row", "written", "owned"]) -> frozenset[int]:
        return {
            "slot": frozenset((self.slot,)), "row": frozenset((self.row,)),
            "written": self.written, "owned": self.owned,
        }[which]


@dataclass(frozen=True)
class Landing:
    """Verified requests that are committed together; all [B] int64 on the device.

    rows   their snapshot rows;  slots: their slots;  nodes: the node whose state becomes the request's
    """

    rows: torch.Tensor
    slots: torch.Tensor
    nodes: torch.Tensor


@dataclass(frozen=True)
class Strategy:
    """A strategy by name: the pools that it needs beside every engine's own, and how it is made for a window width."""

    demands: Callable[[ModelConfig, Sizes], tuple[Demand, ...]]
    make: Callable[[Memory, int], Commit]


class Commit(Protocol):
    """A strategy for one window width; `may` is its table of what an event may change."""

    may: Table

    def conv(self, layer: int, batch: Batch) -> tuple[Part, ...]:
        """Addresses of the conv windows that a forward reads and writes in this layer."""
        ...

    def state(self, layer: int, batch: Batch) -> tuple[Part, ...]:
        """The same for the recurrent states."""
        ...

    def commit(self, ops: Ops, landing: Landing) -> None:
        """Make the accepted nodes' states the requests' own, in every layer."""
        ...


def changes(table: Table, touches: Iterable[Touch]) -> dict[str, set[int]]:
    """Region -> units that these deeds may write: the table, read for actual units."""
    found: dict[str, set[int]] = {}
    for touch in touches:
        for region, which in table[touch.deed].items():
            found.setdefault(region, set()).update(touch.units(which))
    return found


def printed(table: Table) -> str:
    """The table as text, one deed a line, for a strategy's docstring."""
    return "\n".join(
        f"        {deed:<8} " + ", ".join(f"{region} ({which})" for region, which in regions.items())
        for deed, regions in table.items()
    )
