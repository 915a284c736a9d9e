"""The memory budget: what every pool must hold, in bytes, and what fits.

Leaves out: allocation (`pool.py`), and what a commit strategy needs beside it (`commit/`). Pools are made from these
very demands, so a budget and its pools cannot disagree about the widest window: both take it from `widest`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from instep_reference.contract.config import LayerKind, ModelConfig
from instep_reference.contract.engine import Capacity
from instep_reference.contract.errors import BadInput

from ..layout import StateLayout
from ..ops.base import Types
from .pool import Demand
from .slots import check_order


@dataclass(frozen=True)
class Sizes:
    """What demands depend on beside the model: storage dtypes, layout, room, and the widest window (max steps + 1)."""

    types: Types
    layout: StateLayout
    capacity: Capacity
    widest: int

    @property
    def transposed(self) -> bool:
        """Whether a state block's last two axes are exchanged in memory."""
        return self.layout == "VK"


def check_room(capacity: Capacity, widest: int) -> None:
    """Refuse a room in which nothing could run, before anything is allocated."""
    check_order("capacity.slots", capacity.slots)
    check_order("capacity.pages", capacity.pages)
    if capacity.page_size < 1:
        raise BadInput("capacity.page_size", found=capacity.page_size, expected="at least 1")
    if widest > min(capacity.max_tokens, capacity.page_size * len(capacity.pages)):
        raise BadInput("capacity", found=capacity, expected=f"room for a window of {widest} tokens")


def demands(config: ModelConfig, sizes: Sizes) -> tuple[Demand, ...]:
    """What every strategy has: the slots' conv windows and states, and KV pages of target and draft layers."""
    capacity, types = sizes.capacity, sizes.types
    slots, pages = max(capacity.slots) + 1, max(capacity.pages) + 1
    gdn, attention = of_kind(config, "gdn"), of_kind(config, "attention")
    kept = [
        Demand("conv", "slot", gdn, slots, conv_window(config), types.conv),
        Demand("state", "slot", gdn, slots, state_block(config), types.state, transposed=sizes.transposed),
        *_kv("", config, attention, capacity.page_size, pages, types.kv),
    ]
    if config.mtp_layers:
        drafter = config.drafter()
        kept += _kv("draft_", drafter, of_kind(drafter, "attention"), capacity.page_size, pages, types.kv)
    return tuple(kept)


def bytes_per(wanted: tuple[Demand, ...], *, guarded: bool) -> dict[str, int]:
    """What one more unit costs, over all layers: per slot, per snapshot row, per KV page."""
    costs = {"slot": 0, "row": 0, "page": 0}
    for demand in wanted:
        costs[demand.by] += len(demand.layers) * demand.pitch(guarded) * demand.dtype.itemsize
    return costs


def requests_that_fit(total: int, tokens: int, page_size: int, wanted: tuple[Demand, ...], *, guarded: bool) -> int:
    """How many requests of `tokens` tokens fit in `total` bytes, each with its slot, its snapshot row and its pages.

    The reserved slot and page and the ends of every pool are paid for first.
    """
    costs = bytes_per(wanted, guarded=guarded)
    ends = sum(2 * demand.pitch(guarded) * demand.dtype.itemsize for demand in wanted)
    each = costs["slot"] + costs["row"] + -(-tokens // page_size) * costs["page"]
    left = total - ends - costs["slot"] - costs["page"]
    return max(0, left // each) if each else 0


def of_kind(config: ModelConfig, kind: LayerKind) -> tuple[int, ...]:
    """The layers of one kind, in order."""
    return tuple(layer for layer, found in enumerate(config.layer_kinds) if found == kind)


def conv_window(config: ModelConfig) -> tuple[int, int]:
    """[C, W-1], C = 2HK + HV*V: queries, keys and values go through one conv."""
    channels = 2 * config.key_heads * config.key_dim + config.value_heads * config.value_dim
    return channels, config.conv_width - 1


def state_block(config: ModelConfig) -> tuple[int, int, int]:
    """[HV, K, V]."""
    return config.value_heads, config.key_dim, config.value_dim


def _kv(
    prefix: str, config: ModelConfig, layers: tuple[int, ...], page_size: int, pages: int, dtype: torch.dtype
) -> list[Demand]:
    shape = (page_size, config.kv_heads, config.head_dim)
    return [Demand(prefix + name, "page", layers, pages, shape, dtype) for name in ("keys", "values")]
