"""Launches as engines make them: rows are views of the conv's output, and a request pads the batch.

Leaves out: the kernels.
"""

from dataclasses import replace
from typing import Any

import torch

from instep.adapters.pooled import Launch

ROWS = ("q", "k", "v", "a", "b")


def mixed(x: Launch, order: str = "qkv") -> torch.Tensor:
    """The conv's output [M, C], whose segments have this order."""
    return torch.cat([getattr(x, name).flatten(1) for name in order], dim=1)


def split(x: Launch, order: str = "qkv") -> dict[str, torch.Tensor]:
    """Views q, k, v [M, heads, width] of it, which are not contiguous if there are several rows."""
    widths = [getattr(x, name)[0].numel() for name in order]
    return {name: rows.view(len(rows), *getattr(x, name).shape[1:])
            for name, rows in zip(order, torch.split(mixed(x, order), widths, dim=1), strict=True)}  # fmt: skip


def padded(x: Launch, idle: int) -> Launch:
    """The launch with one more request, as a graph pads a batch: its unit is `idle`, its rows are the last request's.

    A kernel must write nothing for it. The core of its rows is after that of all others.
    """
    length = int(x.cu_seqlens[-1] - x.cu_seqlens[-2])

    def more(given: Any, value: int) -> Any:
        return None if given is None else torch.cat([given, torch.full_like(given[:1], value)])

    rows = {name: torch.cat([given, given[-length:]]) for name in ROWS if (given := getattr(x, name)) is not None}
    return replace(
        x, **rows, cu_seqlens=torch.cat([x.cu_seqlens, x.cu_seqlens[-1:] + length]), index=more(x.index, idle),
        rows=more(x.rows, -1), blocks=more(x.blocks, idle), column=more(x.column, 0),
    )  # fmt: skip
