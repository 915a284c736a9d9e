"""The rows of a launch as device tensors, packed in batch order. Lengths and pages are looked up on the device.

Leaves out: which memory an op reads or writes for them (`commit/`), and the model (`model/`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch

from instep_reference.contract.engine import Committed

from .memory import Memory
from .memory.tiled_units import Units
from .memory_addresses import Address, Pages, Part, Ring
from .ops.integer_op_protocols import RowPlacement, TreePlan
from .ops.op_protocols import Ops
from .transfer.to_device import sent

Kind = Literal["prefill", "verify", "decode", "draft"]
COLUMNS = 5  # integers that the host sends per request (`_columns`)
FORWARD_KINDS: tuple[Kind, ...] = ("prefill", "verify", "decode")


@dataclass(frozen=True)
class Who:
    """The requests of a launch, [B] int64 each on the device, in batch order.

    slots  the slot of each, -1: an idle row that pads a bucket;  rows: its row in the batch of the verify
    begin  its first packed row;  count: how many packed rows it has
    """

    slots: torch.Tensor
    rows: torch.Tensor
    begin: torch.Tensor
    count: torch.Tensor


@dataclass(frozen=True)
class Span:
    """One request's rows of a launch, as the host plans them. row: of a verify window, its number in the batch."""

    request: str
    kind: Kind
    count: int
    row: int = -1
    fresh: bool = False


@dataclass(frozen=True)
class Nodes:
    """Packed rows [N] that are nodes of trees. Values in rows that no request covers are not used.

    parents    as in `Part`; None: rows of the draft head, which has no state memory
    depth      as in `PlaceRows`;  ancestors: as in `Pages`
    most       maximum number of nodes of a window;  lead: number of places between a row and its token
    """

    parents: torch.Tensor | None
    depth: torch.Tensor
    ancestors: torch.Tensor
    most: int
    lead: int = 0


@dataclass(frozen=True)
class Group:
    """The requests of one kind in a launch: their state memory moves in the same way. All [B], in batch order.

    begin, count, slots, rows  as in `Who`;  most: the largest count, on the host
    before  committed tokens before the first row;  fresh [B] bool: whether the request has no tokens yet
    parents [N] of windows that are trees: as in `Part`
    """

    kind: Kind
    begin: torch.Tensor
    count: torch.Tensor
    most: int
    slots: torch.Tensor
    rows: torch.Tensor
    before: torch.Tensor
    fresh: torch.Tensor
    parents: torch.Tensor | None = None

    def part(
        self, read: Address, *, store: Address | None = None, per_row: Address | None = None, ring: Ring | None = None,
        settled: Address | None = None,
    ) -> Part:
        """Build this group's part of an op call, with the addresses that a strategy chose."""
        form: Literal["chunk", "window"] = "chunk" if self.kind == "prefill" else "window"
        return Part(
            form, self.begin, self.count, self.most, read, self.fresh, store, per_row, ring, settled,
            parents=self.parents, before=self.before,
        )


@dataclass(frozen=True)
class Batch:
    """A packed launch of N rows for B requests. Names as in `Pages`, `RowPlacement` and `Part`.

    tokens, positions, locations [N];  slots, begin, count, before, last [B];  table: pages of all slots; all int64
    nodes: the rows of trees; None: every row continues the row before it; full: as in `Pages`
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    locations: torch.Tensor
    slots: torch.Tensor
    begin: torch.Tensor
    count: torch.Tensor
    before: torch.Tensor
    last: torch.Tensor
    table: torch.Tensor
    most: int
    groups: tuple[Group, ...]
    nodes: Nodes | None = None
    full: bool = False

    def pages(self, keys: Units, values: Units) -> Pages:
        """Return the paged KV of one layer for these rows."""
        ancestors, nodes = (None, 0) if self.nodes is None else (self.nodes.ancestors, self.nodes.most)
        return Pages(
            keys.pool, values.pool, self.table, self.slots, self.begin, self.count, self.before, most=self.most,
            ancestors=ancestors, nodes=nodes, key_scales=keys.scales, value_scales=values.scales, full=self.full,
        )


class TargetRows(NamedTuple):
    """Rows of a forward of the target: final [N, D], after its final norm.

    features [N, nD]: if a block drafter reads n layers, the rows after each of them, side by side; else None
    """

    final: torch.Tensor
    features: torch.Tensor | None = None

    @property
    def fed(self) -> torch.Tensor:
        """Return the rows that the drafter takes in."""
        return self.final if self.features is None else self.features


def windows(
    ops: Ops, memory: Memory, who: Who, tokens: torch.Tensor, kind: Kind, width: int, shift: int = 0,
    nodes: Nodes | None = None,
) -> Batch:
    """Build a launch of `width` packed rows per request; the first `who.count` of them are used. Ops and views only.

    shift: the first row is at position length + shift of its request (a chain of drafts runs ahead of the length).
    """
    placed = _placed(ops, memory, who, tokens, shift, nodes)
    # Rows of the draft head have no state memory, so their launch has no group.
    group = Group(
        kind, who.begin, placed.count, width, who.slots, who.rows, placed.before, memory.none_fresh[: len(who.slots)],
        None if nodes is None else nodes.parents,
    )
    return _batch(memory, who, tokens, placed, width, (group,) if kind in FORWARD_KINDS else (), nodes)


def windows_beside_decodes(
    ops: Ops, memory: Memory, who: Who, slots: tuple[torch.Tensor, torch.Tensor], tokens: torch.Tensor, width: int,
    nodes: Nodes | None,
) -> Batch:
    """Build a launch of `width` packed rows per request, of which a decode uses the first. Ops and views only.

    slots: of requests with a window, and of requests that decode, [B] each; -1: the request is of the other kind
    nodes: of the windows
    """
    verified, decoded = (replace(who, slots=own) for own in slots)
    groups = (
        *windows(ops, memory, verified, tokens, "verify", width, nodes=nodes).groups,
        *windows(ops, memory, decoded, tokens, "decode", 1).groups,
    )
    # The whole launch last: a watcher takes the last placed rows for the covered ones.
    return replace(windows(ops, memory, who, tokens, "verify", width, nodes=nodes), groups=groups)


def plan_of(ops: Ops, memory: Memory, slots: torch.Tensor, count: torch.Tensor) -> TreePlan:
    """Derive the tree plan of this round's windows [B], with `count` nodes each."""
    parents = memory.slot_table.parents
    assert parents is not None, "there are windows that may be trees"
    return ops.plan_tree(parents=ops.select(x=parents, index=slots), slots=slots, count=count)


def parents_of(ops: Ops, memory: Memory, slots: torch.Tensor, width: int) -> torch.Tensor | None:
    """[B, width]: the parent of each node of the windows in the slot table; None: they are chains."""
    parents = memory.slot_table.parents
    return None if parents is None or width == 1 else ops.select(x=parents[:, :width], index=slots)


def nodes_of(ops: Ops, memory: Memory, slots: torch.Tensor, count: torch.Tensor) -> Nodes | None:
    """Return the packed rows of windows that all have a row for every column; None: windows are chains."""
    if memory.slot_table.parents is None:
        return None
    plan = plan_of(ops, memory, slots, count)
    return Nodes(plan.before.flatten(), plan.depth.flatten(), plan.ancestors.flatten(), plan.depth.shape[1])


def pack(ops: Ops, memory: Memory, spans: Sequence[Span], tokens: torch.Tensor) -> Batch:
    """Build a launch of spans, packed in their order; kinds may be mixed in any order."""
    begins = begins_of(spans)
    kinds = [kind for kind in FORWARD_KINDS if any(span.kind == kind for span in spans)]
    mine = [[(begin, span) for begin, span in zip(begins, spans, strict=True) if span.kind == kind] for kind in kinds]
    lists = [_columns(list(zip(begins, spans, strict=True)), memory), *(_columns(members, memory) for members in mine)]
    # One transfer to the device: first the columns of all requests, then those of each kind.
    flat = sent([column for columns in lists for column in columns], tokens.device)
    (*whole, _), *parts = (flat[begin : begin + COLUMNS] for begin in range(0, len(flat), COLUMNS))
    who = Who(*whole)
    groups = tuple(
        Group(
            kind, begin, count, max(span.count for _, span in members), slots, rows,
            ops.select(x=memory.slot_table.length, index=slots), fresh.bool(),
        )
        for kind, members, (slots, rows, begin, count, fresh) in zip(kinds, mine, parts, strict=True)
    )
    nodes = _nodes_among(ops, memory, spans, groups) if memory.slot_table.parents is not None else None
    if nodes is not None:
        groups = tuple(replace(group, parents=nodes.parents) if group.kind == "verify" else group for group in groups)
    placed = _placed(ops, memory, who, tokens, 0, nodes)
    return _batch(memory, who, tokens, placed, max(span.count for span in spans), groups, nodes, full=True)


def padded(
    ops: Ops, memory: Memory, who: Who, tokens: torch.Tensor, nodes: Nodes | None, most: int
) -> Batch:
    """Build a launch of spans with padding rows, whose places only the device knows. Ops and views only.

    It has no groups: no op of the launch reads or writes states.
    """
    return _batch(memory, who, tokens, _placed(ops, memory, who, tokens, 0, nodes), most, (), nodes)


def _nodes_among(ops: Ops, memory: Memory, spans: Sequence[Span], groups: Sequence[Group]) -> Nodes | None:
    """Return the windows of a launch with rows of other kinds, which are chains: these have a depth, but no bits."""
    group = next((group for group in groups if group.kind == "verify"), None)
    if group is None:
        return None
    plan = plan_of(ops, memory, group.slots, group.count)
    return picked_nodes(ops, plan, *sent(node_rows(spans, plan.depth.shape[1]), group.slots.device))


def node_rows(spans: Sequence[Span], width: int) -> list[list[int]]:
    """Return for every packed row its place in the plan [B, width] of all windows, or -1; its depth in a chain, or -1.
    """
    number = iter(range(len(spans)))
    at = [(span, next(number) * width if span.kind == "verify" else -1) for span in spans]
    return [
        [begin + row if begin >= 0 else -1 for span, begin in at for row in range(span.count)],
        [row if begin < 0 else -1 for span, begin in at for row in range(span.count)],
    ]


def picked_nodes(ops: Ops, plan: TreePlan, index: torch.Tensor, chained: torch.Tensor) -> Nodes:
    """Look up packed rows in a plan of trees. index, chained [N]: as `node_rows` lists them."""
    before, depth, ancestors = (
        ops.select(x=x.flatten(), index=index) for x in (plan.before, plan.depth, plan.ancestors)
    )
    return Nodes(before, ops.choose(own=depth, forced=chained), ancestors, plan.depth.shape[1])


def begins_of(spans: Sequence[Span]) -> list[int]:
    """Return the first packed row of every span."""
    return [0, *accumulate(span.count for span in spans)][: len(spans)]


def _placed(
    ops: Ops, memory: Memory, who: Who, tokens: torch.Tensor, shift: int, nodes: Nodes | None
) -> RowPlacement:
    deep: dict[str, Any] = {} if nodes is None else {"depth": nodes.depth, "lead": nodes.lead}
    return ops.place_rows(
        slots=who.slots, begin=who.begin, count=who.count, rows=len(tokens), length=memory.slot_table.length,
        table=memory.slot_table.table, page_size=memory.pages.size, shift=shift, **deep,
    )


def _batch(
    memory: Memory, who: Who, tokens: torch.Tensor, placed: RowPlacement, most: int, groups: tuple[Group, ...],
    nodes: Nodes | None, full: bool = False,
) -> Batch:
    return Batch(
        tokens=tokens, positions=placed.positions, locations=placed.locations, slots=who.slots, begin=who.begin,
        count=placed.count, before=placed.before, last=placed.last, table=memory.slot_table.table, most=most,
        groups=groups, nodes=nodes, full=full,
    )


def _columns(members: Sequence[tuple[int, Span]], memory: Memory) -> tuple[list[int], ...]:
    """COLUMNS lists with one number per request: the fields of `Who` in their order, then whether it is fresh."""
    return (
        [memory.slots.of(span.request) for _, span in members],
        [span.row for _, span in members],
        [begin for begin, _ in members],
        [span.count for _, span in members],
        [int(span.fresh) for _, span in members],
    )


def empty_commit(device: torch.device) -> Committed:
    """Return the answer to a commit without requests."""
    none = torch.empty(0, dtype=torch.int64, device=device)
    return Committed(none, none, none.view(0, 0), none, none, none, none)
