"""What a commit strategy is: a choice of addresses for the ops that touch a GDN layer's memory, and a table.

It is a pair: a keeper of states and a keeper of conv windows, each from its family's table. Leaves out: every
particular one (a file each) and all arithmetic: a keeper adds none of its own, so two of them cannot differ by a bit
unless an address is wrong. What a keeper knows of a request is a mark on the device (`marks.py`): `bind`, `ran` and
`commit` never read one on the host.
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

# What happens to one request in an event, as a table names it. "claim": it is given a slot.
Action = Literal["claim", "prefill", "verify", "decode", "draft", "commit", "release", "restore"]
ACTIONS: tuple[Action, ...] = ("claim", "prefill", "verify", "decode", "draft", "commit", "release", "restore")
# Region -> which units of it: the request's slot, its snapshot row, the pages on which the written positions stand,
# or all pages that it owns. Actions that are absent write nothing.
Which = Literal["slot", "row", "written", "owned"]
Table = Mapping[Action, Mapping[str, Which]]

_KV: Mapping[str, Which] = {"keys": "written", "values": "written"}
_DRAFT_KV: Mapping[str, Which] = {"draft_keys": "written", "draft_values": "written"}
# What every strategy shares: attention rolls back by forgetting, so a rejected entry stays as garbage.
PAGES: Table = {
    "prefill": {**_KV, **_DRAFT_KV}, "verify": _KV, "decode": {**_KV, **_DRAFT_KV}, "draft": _DRAFT_KV,
    "commit": _DRAFT_KV, "restore": {**_KV, **_DRAFT_KV},
    "release": {"keys": "owned", "values": "owned", "draft_keys": "owned", "draft_values": "owned"},
}


@dataclass(frozen=True)
class RequestWrites:
    """One request's part of an event, in units: its slot, its snapshot row, the pages of the positions it writes."""

    action: Action
    slot: int
    row: int = -1
    written: frozenset[int] = frozenset()
    owned: frozenset[int] = frozenset()

    def units(self, which: Which) -> frozenset[int]:
        return {
            "slot": frozenset((self.slot,)), "row": frozenset((self.row,)),
            "written": self.written, "owned": self.owned,
        }[which]


@dataclass(frozen=True)
class AcceptedWindows:
    """Verified requests that are committed together; all [B] int64 on the device, slot -1: idle.

    rows   their snapshot rows;  slots: their slots;  nodes: the node whose state becomes the request's
    lens   how many tokens become committed;  before: how many were, before the window
    """

    rows: torch.Tensor
    slots: torch.Tensor
    nodes: torch.Tensor
    lens: torch.Tensor
    before: torch.Tensor


def _nothing(ops: Ops) -> None:
    """Most keepers have nothing to do once a forward ran."""


@dataclass(frozen=True)
class BoundStrategy:
    """One keeper's side of one forward: the parts of a layer, and what follows after the last one."""

    parts: Callable[[int], tuple[Part, ...]]
    ran: Callable[[Ops], None] = _nothing


class CommitStrategy(Protocol):
    """Keeps one component, states or conv windows, for one window width; `may`: its table of what may change."""

    may: Table

    def bind(self, ops: Ops, batch: Batch) -> BoundStrategy:
        """Read the marks and choose addresses, once per forward, for all layers."""
        ...

    def commit(self, ops: Ops, accepted: AcceptedWindows) -> None:
        """Make the accepted nodes' memory the requests' own, in every layer."""
        ...

    def peek(self, ops: Ops, slot: int, length: int) -> dict[int, torch.Tensor]:
        """Layer -> a copy of what a request has after `length` tokens; zeros before the first. Changes nothing.

        Between verify and commit the memory belongs to nobody: then anything may come back.
        """
        ...

    def restore(self, slot: int, length: int, units: Mapping[int, torch.Tensor]) -> None:
        """The reverse: write the physical form, marks included."""
        ...

    def claim(self, slot: int) -> None:
        """A request was given this slot: write its marks, as whatever stood there is nobody's."""
        ...


@dataclass(frozen=True)
class StrategySpec:
    """A keeper by name: the pools it needs, and how it is made for a window width."""

    demands: Callable[[ModelConfig, Sizes], tuple[Demand, ...]]
    make: Callable[[ModelConfig, Sizes, Memory, int], CommitStrategy]


def changes(table: Table, writes: Iterable[RequestWrites]) -> dict[str, set[int]]:
    """Region -> units that these actions may write: the table, read for actual units."""
    found: dict[str, set[int]] = {}
    for one in writes:
        for region, which in table.get(one.action, {}).items():
            found.setdefault(region, set()).update(one.units(which))
    return found


def merged(*tables: Table) -> Table:
    """Tables of different regions as one."""
    return {action: {r: w for table in tables for r, w in table.get(action, {}).items()} for action in ACTIONS}


def printed(table: Table) -> str:
    """The table as text, one action a line, for a docstring."""
    return "\n".join(
        f"        {action:<8} " + ", ".join(f"{region} ({which})" for region, which in regions.items())
        for action, regions in table.items()
    )
