"""The ring of a part: which kept tokens are run again, read one at a time, and rows kept for later.

Leaves out: what is made of a token; numbers and labels share this. Places where nothing was kept are never read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...layout import Part, Ring


class Token(NamedTuple):
    """What one token of n requests puts into their memories: k [n, H, K], v [n, HV, V], log_decay, beta [n, HV]."""

    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor


def owed(part: Part) -> torch.Tensor:
    """[B] how many tokens each request runs again: none without a ring, if fresh, or if its `read` unit is -1."""
    ring = part.ring
    if ring is None:
        return torch.zeros_like(part.count)
    returning = (ring.units >= 0) & (part.read.units >= 0) & ~part.fresh
    return ring.pending.clamp(0, ring.size) * returning


def recalled(ring: Ring, requests: torch.Tensor, age: int | torch.Tensor) -> Token:
    """The `age`-th pending token of these requests (numbers in the part); `age` is one for all, or one of each."""
    units, entries = ring.units[requests], (ring.begin[requests] + age) % ring.size
    return Token(*(pool[units, entries % pool.shape[1]] for pool in (ring.k, ring.v, ring.log_decay, ring.beta)))


def keep(ring: Ring | None, requests: torch.Tensor, row: int, token: Token) -> None:
    """Keep row `row` of these requests, bit by bit."""
    if ring is None:
        return
    units, first = ring.units[requests], ring.keep[requests]
    wanted = (units >= 0) & (first >= 0)
    entries = (first[wanted] + row) % ring.size
    for pool, x in zip((ring.k, ring.v, ring.log_decay, ring.beta), token, strict=True):
        pool[units[wanted], entries % pool.shape[1]] = x[wanted].to(pool.dtype)
