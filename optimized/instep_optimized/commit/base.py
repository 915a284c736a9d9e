"""Commit strategies: each chooses addresses for the ops that touch a GDN layer's memory, and has a table of writes.

The table lists what each event may change. An engine has two strategies (`strategy_pair.py`): one for the recurrent
states and one for the conv windows. A strategy does no arithmetic, so two strategies differ by a bit only if an address
is wrong. If an external strategy needs arithmetic (a fold, a scatter), that is an op, too (`StrategySpec.ops`). The
knowledge of a strategy about a request, apart from its memory, is at most one integer on the device, the mark
(`slot_marks.py`). `bind`, `ran` and `commit` never read a mark on the host. Leaves out: every particular strategy (one
file each).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from instep_reference.contract.config import ModelConfig

from ..memory import Memory
from ..memory.budget import Component, Sizes
from ..memory.pool import Demand
from ..memory.tiled_units import Copied
from ..memory_addresses import Part
from ..ops.op_protocols import Ops
from ..packed_batch import Batch

# Actions on one request in an event: the rows of a table. "claim": the request is given a slot.
Action = Literal["claim", "prefill", "verify", "decode", "draft", "commit", "release", "restore"]
ACTIONS: tuple[Action, ...] = ("claim", "prefill", "verify", "decode", "draft", "commit", "release", "restore")
# Which units of a region an action writes: the request's slot, its snapshot row, its request row, the pages of the
# positions that are written, or all pages that the request owns.
Which = Literal["slot", "row", "request", "written", "owned"]
# Action -> region -> which units; an absent action writes nothing. Scales are written with their region.
Table = Mapping[Action, Mapping[str, Which]]

_KV: Mapping[str, Which] = {"keys": "written", "values": "written"}
_DRAFT_KV: Mapping[str, Which] = {
    "draft_keys": "written", "draft_values": "written", "block_keys": "written", "block_values": "written",
}
# The KV pages, which are the same for every strategy. Attention needs no rollback: a rejected entry comes after the
# request's length, where it is not read, and the next window overwrites it. For a tree the commit moves the accepted
# entries together.
PAGES: Table = {
    "prefill": {**_KV, **_DRAFT_KV}, "verify": _KV, "decode": {**_KV, **_DRAFT_KV}, "draft": _DRAFT_KV,
    "commit": _DRAFT_KV, "restore": {**_KV, **_DRAFT_KV},
    "release": dict.fromkeys({**_KV, **_DRAFT_KV}, "owned"),
}
PAGES_OF_TREES: Table = {**PAGES, "commit": {**_KV, **_DRAFT_KV}}


@dataclass(frozen=True)
class RequestWrites:
    """An event's action on one request, and the units that it may write: slot, snapshot row, request row, pages.

    slot: -1 if the action concerns pages alone
    written: the pages of the positions that are written;  owned: all pages of the request
    request_row: -1 if no pool of the engine has units by request row
    """

    action: Action
    slot: int
    row: int = -1
    written: frozenset[int] = frozenset()
    owned: frozenset[int] = frozenset()
    request_row: int = -1

    def units(self, which: Which) -> frozenset[int]:
        return {
            "slot": frozenset((self.slot,)), "row": frozenset((self.row,)), "request": frozenset((self.request_row,)),
            "written": self.written, "owned": self.owned,
        }[which]


@dataclass(frozen=True)
class AcceptedWindows:
    """Verified windows that are committed together; all [B] int64 on the device, slot -1: idle.

    rows   their snapshot rows;  slots: their slots;  nodes: the last accepted node, whose state becomes the request's
    lens   how many tokens become committed;  before: how many were committed before the window
    path   [B, T], if windows may be trees: the accepted nodes, root first, -1 padded. None: chains, whose accepted
           nodes are 0, 1, ..
    """

    rows: torch.Tensor
    slots: torch.Tensor
    nodes: torch.Tensor
    lens: torch.Tensor
    before: torch.Tensor
    path: torch.Tensor | None = None


def _nothing(ops: Ops) -> None:
    """Do nothing: the default of `BoundStrategy.ran`, since most strategies have no work after a forward."""


@dataclass(frozen=True)
class BoundStrategy:
    """A strategy bound to one forward.

    parts  layer -> the parts that the layer's `conv` or `gdn` op receives
    ran    called once, after the last layer
    """

    parts: Callable[[int], tuple[Part, ...]]
    ran: Callable[[Ops], None] = _nothing


class CommitStrategy(Protocol):
    """Keeps one component, states or conv windows, for one window width. `may`: the table of what may change."""

    may: Table

    def bind(self, ops: Ops, batch: Batch) -> BoundStrategy:
        """Read the marks and choose the addresses, once per forward for all layers together."""
        ...

    def commit(self, ops: Ops, accepted: AcceptedWindows) -> None:
        """Make the memory after the accepted nodes the requests' own memory, in every layer."""
        ...

    def peek(self, ops: Ops, slot: int, length: int) -> Mapping[int, Copied]:
        """Return layer -> a copy of the request's unit after `length` tokens; zeros if `length` is 0. Changes nothing.

        Between a verify and its commit the memory belongs to no request. A copy that is made then may hold anything.
        """
        ...

    def peek_node(self, ops: Ops, slot: int, length: int, row: int, node: int) -> Mapping[int, Copied]:
        """Do `peek`, but after an accepted node of the window that was committed last: for tracked prefixes.

        length  how many tokens that is;  row: the request's batch row in the verify
        """
        ...

    def restore(self, slot: int, length: int, units: Mapping[int, Copied]) -> None:
        """Reverse `peek`: write `units` in this strategy's physical form, and set the mark."""
        ...

    def claim(self, slot: int) -> None:
        """Write the mark of a slot that a request has claimed. The old mark belongs to no request any more."""
        ...


@dataclass(frozen=True)
class StrategySpec:
    """Definition of a named strategy.

    demands    the pools it needs;  make: how it is made for a window width
    component  what it keeps: recurrent states (a name for `--strategy`), or conv windows (a name for `--conv`)
    ops        its arithmetic, if it has any: name -> an op. It calls them as `ops.own[name](...)`, by keywords alone;
               `pool` is the memory that such an op writes. An op set may have another form of it (`Ops.own`)
    """

    demands: Callable[[ModelConfig, Sizes], tuple[Demand, ...]]
    make: Callable[[ModelConfig, Sizes, Memory, int], CommitStrategy]
    component: Component = "state"
    ops: Mapping[str, Callable[..., Any]] = field(default_factory=dict, hash=False)


def changes(table: Table, writes: Iterable[RequestWrites]) -> dict[str, set[int]]:
    """Look up region -> the units that these requests may write in the table."""
    found: dict[str, set[int]] = {}
    for one in writes:
        for region, which in table.get(one.action, {}).items():
            found.setdefault(region, set()).update(one.units(which) - {-1})
    return found


def merged(*tables: Table) -> Table:
    """Merge several tables into one; no region occurs in two of them."""
    return {action: {r: w for table in tables for r, w in table.get(action, {}).items()} for action in ACTIONS}


def printed(table: Table) -> str:
    """Print the table as text, one action a line, for a docstring."""
    return "\n".join(
        f"        {action:<8} " + ", ".join(f"{region} ({which})" for region, which in regions.items())
        for action, regions in table.items()
    )
