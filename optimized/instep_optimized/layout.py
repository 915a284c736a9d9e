"""Addresses: which unit of which pool an op reads or writes.

Leaves out: allocation (`memory/pool.py`). A pool's physical layout is nothing but its strides: every op
sees a state as [HV, K, V] and a `VK` pool is the transposed view of its [HV, V, K] memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

StateLayout = Literal["VK", "KV"]


@dataclass(frozen=True)
class Address:
    """Units of a pool, one per request of a part.

    pool    [units, ...] or, with positions, [units, positions, ...]; strides are the pool's own
    units   [B] int64; -1: skip this request, read zeros, write nothing
    column  [B] int64, the position within the unit, or None: the unit has no positions, or
            (for `each`) position t of the window goes to column t
    """

    pool: torch.Tensor
    units: torch.Tensor
    column: torch.Tensor | None = None


@dataclass(frozen=True)
class Part:
    """Some requests of a packed batch whose memory moves the same way.

    form    "chunk": a prefill chunk, chunked products; "window": token by token (verify and decode)
    begin   [B] int64, first packed row of each request
    count   [B] int64, its number of rows (0: none)
    most    the largest count, on the host
    read    where the memory before the first row stands
    fresh   [B] bool: nothing came before; `read` must not be read, zeros are meant
    store   where the memory after the last row goes; None: nowhere
    each    where the memory after every row t goes (column t); None: nowhere
    """

    form: Literal["chunk", "window"]
    begin: torch.Tensor
    count: torch.Tensor
    most: int
    read: Address
    fresh: torch.Tensor
    store: Address | None = None
    each: Address | None = None


@dataclass(frozen=True)
class Pages:
    """Paged KV of one layer, and where each request's positions stand in it.

    keys, values  [pages, page_size, kv_heads, head_dim], strides the pool's own
    table         [B, width] int64 page ids in order, -1 padded
    begin, count  [B] int64: the packed query rows of each request
    before        [B] int64: positions in memory before the first of these rows;
                  row j of request b sees positions 0 .. before[b] + j
    most          the largest count, on the host
    reach         the largest before + count, on the host
    """

    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    begin: torch.Tensor
    count: torch.Tensor
    before: torch.Tensor
    most: int
    reach: int
