"""Whole numbers on their way from the host to the device: sent together, and nobody waits for them.

Leaves out: what they mean to whom. The way back is `to_host.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def sent(lists: Sequence[Sequence[int]], device: torch.device) -> list[torch.Tensor]:
    """int64 tensors on the device, all of them in one transfer.

    Every list starts on 16 bytes, as an allocation of its own would: a kernel sees the same alignment either way.
    """
    flat: list[int] = []
    begins = []
    for numbers in lists:
        begins.append(len(flat))
        flat += [*numbers, *[0] * (len(numbers) % 2)]
    block = torch.tensor(flat, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    return [block[begin : begin + len(numbers)] for begin, numbers in zip(begins, lists, strict=True)]


def ints(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """One list."""
    return sent([numbers], device)[0]
