"""The memory budget: what every pool must hold, in bytes, and what fits.

Pools are made from demands, and the budget counts demands. Both must take the widest window over all candidates
(`build.all_demands`); the check `capacity` compares the two. Leaves out: allocation (`pool.py`), and which pools a
commit strategy demands (`commit/`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from instep_reference.contract.answers import MEMORY_FACTS
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.declared_rounding import Blocked, Storage, scaled
from instep_reference.contract.engine import Capacity
from instep_reference.contract.errors import BadInput, Unsupported
from instep_reference.contract.pool_meaning import Meaning, Positions

from ..memory_addresses import KEPT, OWN, Keeps, StateLayout
from ..ops.op_protocols import Types
from ..sampling_inputs import NUMBERS
from .component_cells import cells
from .pool import Demand
from .slot_table import FEATURES, LAYER, NAMES, NODES, PARENTS, TAIL
from .slots import check_order
from .tiled_units import SCALES

Component = str  # of `MEMORY`, in the form "block": what a layer with a recurrence keeps of a request
GATES = ("decay", "log_decay", "beta")  # entries of a ring that have one part
RING, LOW = "ring_", "_low"  # the name of every ring pool begins with RING; a pool of low parts ends with LOW
FRESH = torch.bool.itemsize  # per slot that can be claimed, in addition to the pools: `Memory.none_fresh`
# Meaning of a position in a line of the slot table, for the fields that have positions.
BOARD_POSITIONS = {
    "table": Positions("page"), "window": Positions("choice"), "picks": Positions("node"), "final": Positions("node"),
    FEATURES: Positions("node"),
}
PER_NODE = ("window", "picks", "final")  # of them, those with a column per node


@dataclass(frozen=True)
class Sizes:
    """The inputs of the demands, in addition to the model.

    types     storage dtypes
    layout    physical order of a state block
    capacity  slots, pages, page size
    widest    tokens of the widest window: the largest step count + 1, or the most nodes of a tree
    keeps     what a ring keeps of a token
    snapshot_layout  physical order of a snapshot of a state; None: as `layout`
    scratch   index of snapshots: the row in the batch, or the row of the request
    """

    types: Types
    layout: StateLayout
    capacity: Capacity
    widest: int
    keeps: Keeps = "update"
    snapshot_layout: StateLayout | None = None
    scratch: Literal["row", "request"] = "row"

    @property
    def transposed(self) -> bool:
        """Whether a state block's last two axes are exchanged in memory."""
        return self.layout == "VK"


def check_room(capacity: Capacity, widest: int) -> None:
    """Refuse a capacity in which no window could run, before anything is allocated."""
    check_order("capacity.slots", capacity.slots)
    check_order("capacity.pages", capacity.pages)
    if capacity.page_size < 1:
        raise BadInput("capacity.page_size", found=capacity.page_size, expected="at least 1")
    if widest > min(capacity.max_tokens, capacity.request_positions, capacity.total_positions):
        raise BadInput("capacity", found=capacity, expected=f"room for a window of {widest} tokens")
    if capacity.request_positions > capacity.total_positions:
        raise BadInput(
            "capacity.max_positions", found=capacity.max_positions,
            expected=f"at most {capacity.total_positions}, what all pages hold",
        )


def must_fill_pitch(wanted: tuple[Demand, ...]) -> None:
    """Refuse units that are not contiguous even without red zones. A mark is one number: no kernel indexes it."""
    for demand in wanted:
        if len(demand.shape) > 1 and demand.pitch(guarded=False) != demand.packed:
            raise Unsupported(f"packed pools: {demand.packed} elements, a unit of {demand.name}, are padded")


def demands(config: ModelConfig, sizes: Sizes) -> tuple[Demand, ...]:
    """The pools of every engine, whatever the strategy: KV pages of target and draft layers, and the slot table."""
    capacity, pages = sizes.capacity, max(sizes.capacity.pages) + 1
    kept = _kv("", config, config.attending, capacity.page_size, pages, sizes.types.kv)
    if config.mtp_layers:
        drafter = config.drafter()
        kept += _kv("draft_", drafter, drafter.attending, capacity.page_size, pages, sizes.types.kv)
    if config.block is not None:
        drafter = config.block_model()
        kept += _kv("block_", drafter, drafter.attending, capacity.page_size, pages, sizes.types.kv)
    return (*with_scales(kept), *_board(config, sizes))


def with_scales(wanted: Iterable[Demand]) -> tuple[Demand, ...]:
    """Return the demands, each pool in tiles followed by a pool for its scales, with the same units."""
    pools = list[Demand]()
    for demand in wanted:
        pools.append(demand)
        if demand.tiles is not None and scaled(demand.tiles):
            pools.append(replace(demand, name=demand.name + SCALES, shape=demand.tiles.grid(*demand.shape),
                                 dtype=torch.float32, transposed=False, tiles=None))  # fmt: skip
    return tuple(pools)


def _board(config: ModelConfig, sizes: Sizes) -> Iterator[Demand]:
    """The fields of the slot table, one line per slot each; `SlotTable` defines their contents."""
    widest, drafts, whole, hidden = sizes.widest, max(1, config.mtp_layers), torch.int64, sizes.types.hidden
    read = 0 if config.block is None else len(config.block.target_layer_ids)
    lines: dict[str, tuple[tuple[int, ...], torch.dtype]] = dict(
        length=((1,), whole), sampling=((NUMBERS,), torch.float32), table=((sizes.capacity.request_pages,), whole),
        window=((widest,), whole), picks=((widest,), whole), final=((widest, config.hidden), hidden),
        proposals=((drafts,), whole), proposed=((config.hidden,), hidden), parents=((widest,), whole),
        # All rows of a window may come in at once, and a prefix may end with the first of them.
        tail=((widest + drafts - 1, config.hidden), hidden),
        features=((widest, config.hidden * read), hidden), nodes=((1,), whole),
    )
    trees, tracked = sizes.capacity.trees, sizes.capacity.track_interval is not None
    for name in (*NAMES, *(PARENTS,) * trees, *(TAIL,) * (tracked and drafts > 1),
                 *(FEATURES,) * (config.block is not None), *(NODES,) * sizes.capacity.device_widths):
        shape, dtype = lines[name]
        # If windows may be trees, every one is written to its last column, whatever its own number of nodes.
        positions = None if trees and name in PER_NODE else BOARD_POSITIONS.get(name)
        means = Meaning("length", positions=positions)
        yield Demand(name, "slot", (LAYER,), max(sizes.capacity.slots) + 1, shape, dtype, means=means)


def units(component: Component, config: ModelConfig, sizes: Sizes) -> Demand:
    """A conv window [C, W-1], a state [HV, K, V], or another block, per slot and layer that keeps it.

    Only states and numbers of tokens have a dtype of their own. Every other block has that of conv windows.
    """
    state = component == "state"
    dtype, tiles = _stored(sizes.types.state) if state else (sizes.types.conv, None)
    if MEMORY_FACTS[component].whole:
        dtype = torch.int64
    return Demand(
        component, "slot", config.keeping(component), max(sizes.capacity.slots) + 1,
        config.lengths(MEMORY_FACTS[component].axes), dtype, transposed=state and sizes.transposed,
        means=Meaning(component), tiles=tiles,
    )


def positions(component: Component, config: ModelConfig, sizes: Sizes) -> Demand:
    """A conv window or a state per slot, GDN layer and position of the widest window."""
    one = units(component, config, sizes)
    return replace(one, shape=(sizes.widest, *one.shape), means=Meaning(component, positions=Positions("column")))


def snapshots(component: Component, config: ModelConfig, sizes: Sizes) -> Demand:
    """As `positions`, but by batch row or request row. There are at most as many as slots to claim."""
    each = positions(component, config, replace(sizes, layout=sizes.snapshot_layout or sizes.layout))
    first = int(sizes.scratch == "request")  # no request has row 0
    return replace(each, name=f"snapshot_{component}", by=sizes.scratch, units=first + len(sizes.capacity.slots))


def widened(config: ModelConfig, sizes: Sizes) -> Demand:
    """Lines [C, W-1 + widest-1] by slot: the conv windows of all positions of the widest window, which overlap."""
    one = units("conv", config, sizes)
    channels, history = one.shape
    line = Meaning("conv", positions=Positions("input", axis=2))
    return replace(one, shape=(channels, history + sizes.widest - 1), means=line)


def ring_pools(keeps: Keeps) -> tuple[str, ...]:
    """The names of a ring's pools, in the order of the fields of `Updates` or `Inputs`."""
    return tuple(RING + name for name in KEPT[keeps]._fields)


def rings(config: ModelConfig, sizes: Sizes, size: int, own: int) -> tuple[Demand, ...]:
    """The pools of a ring: `size` entries per slot and layer, but `own` entries in the pool of updates (or values).

    Without a state in any layer they have no units.

    A ring of updates is stored in the dtype in which the recurrence computes, so that no bit is lost. A ring of inputs
    is stored in the dtype in which the delta rule consumes them. Keys and updates of a split ring have two parts of
    16 bits each, in separate pools.
    """
    row = config.recurrence
    axes = {**row.places, "decay": row.gate}
    width = sizes.types.consumed if sizes.keeps == "inputs" else sizes.types.recurrence
    part = sizes.types.ring or width  # the dtype of a part of a key or an update
    plain = replace(units("state", config, sizes), dtype=width, transposed=False, tiles=None)
    return tuple(
        replace(plain, name=RING + name, means=_entries(name), dtype=width if name in GATES else part,
                shape=(own if name in OWN else size, *config.lengths(axes.get(name.removesuffix(LOW), ()))))
        for name in KEPT[sizes.keeps]._fields
    )


def _entries(name: str) -> Meaning:
    """Meaning of an entry. A ring holds pending tokens and a new window, so it needs room for two windows.

    The pool of updates (or values) needs room for one: a program reads its old entry before it writes the new one.
    """
    keeps = "" if name.endswith(LOW) else name
    return Meaning("state", positions=Positions("entry", windows=1 if name in OWN else 2), keeps=keeps)


def mark(name: str, sizes: Sizes) -> Demand:
    """One integer per slot, which a strategy keeps on the device (`commit/slot_marks.py`)."""
    return Demand(name, "slot", (0,), max(sizes.capacity.slots) + 1, (1,), torch.int64, means=Meaning("length"))


def bytes_per(wanted: tuple[Demand, ...], *, guarded: bool) -> dict[str, int]:
    """Count the bytes of one more unit, over all layers, by kind of unit.

    slot  a slot without its rings;  ring: the rings of one slot;  row: a snapshot row;  page: a KV page;  request: a
          request row
    A request has one slot, its rings, one row, one request row, and as many pages as its tokens need.
    """
    costs = {"slot": 0, "ring": 0, "row": 0, "page": 0, "request": 0}
    for demand in wanted:
        kind = "ring" if demand.name.startswith(RING) else demand.by
        costs[kind] += len(demand.layers) * demand.pitch(guarded) * demand.dtype.itemsize
    return costs


def contents(demand: Demand) -> int:
    """Count the bytes of the units of a pool over all layers, without red zones and padding."""
    return len(demand.layers) * demand.units * demand.packed * demand.dtype.itemsize


def bytes_of(requests: int, tokens: int, page_size: int, wanted: tuple[Demand, ...], *, guarded: bool) -> int:
    """Count the bytes of all pools of an engine for `requests` requests of `tokens` tokens, exactly.

    A request has a slot, rings, a snapshot row, a request row, `FRESH` and its pages. The reserved slot, the reserved
    request row, the reserved page and the two ends of every pool exist even without a request.
    """
    costs = bytes_per(wanted, guarded=guarded)
    ends = sum(2 * demand.pitch(guarded) * demand.dtype.itemsize for demand in wanted)
    slot = costs["slot"] + costs["ring"] + costs["request"]
    each = slot + costs["row"] + FRESH + -(-tokens // page_size) * costs["page"]
    return ends + slot + costs["page"] + requests * each


def prefix_bytes(config: ModelConfig, sizes: Sizes, tokens: int) -> int:
    """Count the bytes of a tracked prefix of `tokens` tokens: copies of the request's memory (`saved_states.read`)."""
    stored = replace(sizes, types=sizes.types._replace(state=sizes.types.kept or sizes.types.state))
    final = config.hidden * sizes.types.hidden.itemsize if tokens else 0
    return final + sum(count(name, config, stored, tokens) for name, count in BUDGETS.items())


def _block_bytes(component: Component, config: ModelConfig, sizes: Sizes, tokens: int) -> int:
    return sum(len(demand.layers) * demand.packed * demand.dtype.itemsize
               for demand in with_scales([units(component, config, sizes)]))  # fmt: skip


def _row_bytes(component: Component, config: ModelConfig, sizes: Sizes, tokens: int) -> int:
    less, total = component.startswith("draft_"), 0
    for demand in demands(config, sizes):
        if demand.by == "page" and demand.component == component:
            rows = sum(max(0, tokens - less * (1 + layer)) for layer in range(len(demand.layers)))
            total += rows * demand.packed * demand.dtype.itemsize // demand.shape[0]
    return total


def _last_bytes(component: Component, config: ModelConfig, sizes: Sizes, tokens: int) -> int:
    """Count the rows before the final one, which every prefix has."""
    return max(0, min(tokens, config.mtp_layers) - 1) * config.hidden * sizes.types.hidden.itemsize


BUDGETS = cells(block=_block_bytes, rows=_row_bytes, last=_last_bytes)


def requests_that_fit(total: int, tokens: int, page_size: int, wanted: tuple[Demand, ...], *, guarded: bool) -> int:
    """Return how many requests of `tokens` tokens fit in `total` bytes."""
    none, one = (bytes_of(requests, tokens, page_size, wanted, guarded=guarded) for requests in (0, 1))
    return max(0, (total - none) // (one - none)) if one > none else 0


def conv_window(config: ModelConfig) -> tuple[int, ...]:
    """[C, W-1]: all segments of a layer's channels go through one conv."""
    return *config.lengths(("C",)), config.conv_width - 1


def state_block(config: ModelConfig) -> tuple[int, ...]:
    """[HV, K, V]."""
    return config.lengths(config.recurrence.state)


def _kv(
    prefix: str, config: ModelConfig, layers: tuple[int, ...], page_size: int, pages: int, storage: Storage
) -> list[Demand]:
    dtype, tiles = _stored(storage)
    means = {name: Meaning(name, bool(prefix), Positions("token"), block=prefix == "block_")
             for name in ("keys", "values")}
    return [Demand(prefix + name, "page", layers, pages, (page_size, *row), dtype, tiles=tiles, means=means[name])
            for name, row in zip(means, config.stored_rows, strict=True)]


def _stored(storage: Storage) -> tuple[torch.dtype, Blocked | None]:
    return (storage.dtype, storage) if isinstance(storage, Blocked) else (storage, None)
