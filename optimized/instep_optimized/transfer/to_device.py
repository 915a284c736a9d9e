"""Whole numbers from the host to the device: many lists in one transfer, without waiting.

Leaves out: what the numbers mean. The other direction is `to_host.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def sent(lists: Sequence[Sequence[int]], device: torch.device) -> list[torch.Tensor]:
    """The lists as int64 tensors on the device, in one transfer.

    Every list starts at a multiple of 16 bytes, as a tensor of its own would. So a kernel sees the same alignment.
    Example: lists of 3 and 2 numbers are sent as 3 numbers, one 0, and 2 numbers.
    """
    flat: list[int] = []
    begins = []
    for numbers in lists:
        begins.append(len(flat))
        flat += [*numbers, *[0] * (len(numbers) % 2)]  # two int64 are 16 bytes
    # Only from pinned memory is a copy to a GPU asynchronous.
    block = torch.tensor(flat, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    return [block[begin : begin + len(numbers)] for begin, numbers in zip(begins, lists, strict=True)]


def ints(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """One list as an int64 tensor on the device."""
    return sent([numbers], device)[0]
