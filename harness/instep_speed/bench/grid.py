"""The axes of the grids: batches, windows, heads, and how states are stored.

Leaves out: which axes a kind has.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from instep_reference.contract.errors import BadInput

from .bench_types import At, Size

BATCHES = {"tiny": (1, 2), "default": (1, 8, 32, 64, 128), "full": (1, 2, 4, 8, 16, 32, 64, 128)}
WINDOWS = {"tiny": (3,), "default": (4, 8, 2), "full": (1, 2, 3, 4, 5, 6, 7, 8)}
HEADS = {"tiny": (4,), "default": (32, 64, 16), "full": (16, 24, 32, 48, 64)}
STATES = {"tiny": ("float32",), "default": ("float32", "bfloat16"), "full": ("float32", "bfloat16")}


def batches_and_heads(size: Size, few: tuple[int, ...] = (), **more: tuple[Any, ...]) -> Iterator[At]:
    """Yield cells of batch, the axes of `more`, heads and state.

    The default grid varies one axis at a time in addition to the batch.
    few: the batches for which the default grid varies the other axes; by default all
    """
    axes: dict[str, tuple[Any, ...]] = {**more, "heads": HEADS[size], "state": STATES[size]}
    rest = list(product(*axes.values()))
    if size == "default":
        first = rest[0]
        rest = [one for one in rest if sum(x != y for x, y in zip(one, first, strict=True)) <= 1]
    for values in rest:
        for batch in few if few and size == "default" and values != rest[0] else BATCHES[size]:
            yield {"batch": batch, **dict(zip(axes, values, strict=True))}


def state_dtype(at: At) -> torch.dtype:
    found = getattr(torch, at["state"])
    if not isinstance(found, torch.dtype):
        raise BadInput("state", found=at["state"], expected="a dtype")
    return found
