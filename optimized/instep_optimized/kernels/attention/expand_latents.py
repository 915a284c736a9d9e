"""Attention over stored latents: keys and values are expanded per head, and the kernels of `dispatch.py` read them.

The expanded pages are in fp32 and have the numbers of the stored ones, so a call takes room for the whole pool.
Leaves out: queries that are multiplied by the expansion instead (the absorbed form).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch.nn.functional import pad

from instep_reference.contract.config import ModelConfig
from instep_reference.contract.place_names import Place

from ...memory_addresses import Pages
from ..device.pool_address import Pool
from ..device.tile_dot_fp32 import dot
from ..runtime import INTERPRETED, ceil_div, launch, power_of_2, tile
from . import dispatch
from .dispatch import CHUNK, COMPILED, PART, PARTS, SMALLEST_DOT, Division, read, shape_of

# Positions, channels of heads and channels of latents of a tile. They do not depend on the rows of a launch.
POSITIONS, COLUMNS, INNER = 32, tile(64, 256), tile(32, 64)


def attend_latents(*, query: torch.Tensor, pages: Pages, up: torch.Tensor, to: Place) -> torch.Tensor:
    """Implement `AttendLatents`: as `attend` does, with fp32 keys, values, queries and weights, and one cast."""

    def attend(rows: torch.Tensor, wide: Pages, channels: int) -> torch.Tensor:
        return read(rows, wide, shape_of(CHUNK, rows), shape_of(PARTS, rows), PART, alone=False, channels=channels)

    return over_expanded(query, pages, up, attend)


def over_expanded(
    query: torch.Tensor, pages: Pages, up: torch.Tensor, attend: Callable[[torch.Tensor, Pages, int], torch.Tensor]
) -> torch.Tensor:
    """Expand the positions that these requests see, and read them with `attend`  ->  [N, heads, V] as query.

    attend: (query, pages, channels of a key) -> rows; all have as many channels as the wider of a key and a value
    """
    rows, heads, head_dim = query.shape
    width = pages.expanded(query, up)[2]
    if not pages.most:
        return query.new_zeros(rows, heads, width)
    wider = max(head_dim, width)
    own = head_dim - pages.keys.shape[3]
    size, latent = pages.keys.shape[1], pages.values.shape[3]
    held = pages.table.shape[1] * size
    keys, values = (query.new_empty(len(pages.keys), size, heads, wider, dtype=torch.float32) for _ in range(2))
    positions = min(POSITIONS, power_of_2(held))
    columns = min(COLUMNS, max(power_of_2(up.shape[0]), SMALLEST_DOT))
    launch(
        _expand, (ceil_div(held, positions), ceil_div(up.shape[0], columns), pages.slots.numel()),
        Pool.of(pages.keys, pages.key_scales), Pool.of(pages.values, pages.value_scales), up, *up.stride(),
        pages.table, *pages.table.stride(), held, pages.slots, pages.count, pages.before, pages.nodes,
        keys, values, heads, own, head_dim, width, wider, latent,
        PT=positions, CT=columns, RT=min(INNER, max(power_of_2(latent), SMALLEST_DOT)),
        ST=power_of_2(wider - own), PAGE=size, WIDEN=INTERPRETED, ORDERED=INTERPRETED,
    )  # fmt: skip
    expanded = replace(pages, keys=keys, values=values, key_scales=None, value_scales=None)
    found = attend(pad(query.float(), (0, wider - head_dim)), expanded, head_dim)
    return found[..., :width].to(query.dtype).contiguous()


def scratch(
    config: ModelConfig, element: int, requests: int, positions: int, page_size: int, nodes: int,
    of: Division = COMPILED,
) -> int:
    """`dispatch.scratch`, which reads the expanded pages of latents, and these pages."""
    if not config.latent:
        return dispatch.scratch(config, element, requests, positions, page_size, nodes, of)
    wider = max(config.head_dim, config.value_width)
    heads = replace(config, kv_heads=config.heads, head_dim=wider)
    pages = requests * ceil_div(positions, page_size) + 1
    expanded = 2 * 4 * pages * page_size * config.heads * wider
    return expanded + dispatch.scratch(heads, 4, requests, positions, page_size, nodes, of)


@triton.jit(do_not_specialize=["held", "nodes"])
def _expand(
    keys, values, up, up_row, up_column, table, table_row, table_column, held, slots, rows, before, nodes,
    to_keys, to_values, heads, own, head_dim, width, wider, latent,
    PT: tl.constexpr, CT: tl.constexpr, RT: tl.constexpr, ST: tl.constexpr, PAGE: tl.constexpr, WIDEN: tl.constexpr,
    ORDERED: tl.constexpr,
):  # fmt: skip
    """Expand PT positions of one request, CT rows of `up`. Grid (tiles of positions, tiles of rows of `up`, B).

    A position is a separate sum in the order of the latent's channels, so its bits depend on its latent alone. The
    first programs also copy the part of the key that heads share; zeros follow it.
    """
    request = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + request)
    count = tl.maximum(tl.load(rows + request), nodes)
    reach = tl.minimum(tl.load(before + request) + count, held)
    first = tl.program_id(0).to(tl.int64) * PT
    if (slot < 0) | (first >= reach) | (tl.load(rows + request) == 0):
        return
    at = first + tl.arange(0, PT)
    page = tl.load(table + slot * table_row + at // PAGE * table_column, mask=at < reach, other=-1)
    here, entry = page >= 0, at % PAGE
    c = tl.program_id(1) * CT + tl.arange(0, CT)
    each = own + width
    source = values.at + (page * values.per_page + entry * values.per_entry)[:, None]
    total = tl.zeros((PT, CT), tl.float32)
    for start in range(0, latent, RT):
        r = start + tl.arange(0, RT)
        row = tl.load(source + r[None, :], mask=here[:, None] & (r < latent)[None, :], other=0.0).to(tl.float32)
        if values.scales is not None:
            row = row * tl.load(values.scales + page * values.scales_per_page + entry, mask=here, other=0.0)[:, None]
        weight = tl.load(up + (c * up_row)[:, None] + (r * up_column)[None, :],
                         mask=(c < heads * each)[:, None] & (r < latent)[None, :], other=0.0)  # fmt: skip
        total += dot(row, tl.trans(weight.to(tl.float32)), WIDEN, ORDERED)
    head, channel = c // each, c % each
    goal = (page * PAGE + entry)[:, None] * (heads * wider) + (head * wider)[None, :]
    inside, of_key = here[:, None] & (c < heads * each)[None, :], (channel < own)[None, :]
    tl.store(to_keys + goal + channel[None, :], total, mask=inside & of_key)
    tl.store(to_values + goal + (channel - own)[None, :], total, mask=inside & ~of_key)
    if tl.program_id(1) == 0:
        s = tl.arange(0, ST)
        there = here[:, None] & (own + s < head_dim)[None, :]
        shared = tl.load(keys.at + (page * keys.per_page + entry * keys.per_entry)[:, None] + s[None, :],
                         mask=there, other=0.0).to(tl.float32)  # fmt: skip
        if keys.scales is not None:
            scale = tl.load(keys.scales + page * keys.scales_per_page + entry, mask=here, other=0.0)
            shared = shared * scale[:, None]
        for h in range(heads):
            spot = (page * PAGE + entry)[:, None] * (heads * wider) + (h * wider + own + s)[None, :]
            tl.store(to_keys + spot, shared, mask=here[:, None] & (own + s < wider)[None, :])
