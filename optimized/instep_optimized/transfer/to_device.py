"""Whole numbers from the host to the device: many lists in one transfer, without waiting.

`sent` makes new tensors; a `Landing` is memory that stays, and is written again and again. Leaves out: what the numbers
mean. The other direction is `to_host.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from .lane import lane

HOST = torch.device("cpu")
ALIGNED = 16  # bytes: where a tensor begins, as one of its own would. So a kernel sees the same alignment


def sent(lists: Sequence[Sequence[int]], device: torch.device) -> list[torch.Tensor]:
    """The lists as int64 tensors on the device, in one transfer.

    Every list starts at a multiple of ALIGNED bytes.
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


class Landing:
    """Tensors at fixed addresses on the device, for launches that are recorded once. All are written in one transfer.

    The transfer runs beside the launches, behind the last one that reads what stood there before. So where other
    launches came between, it is over before its own begins, and no kernel waits for it.

    said   what the next transfer writes, on the host;  tensors  the same on the device
    """

    def __init__(self, like: Sequence[torch.Tensor], device: torch.device) -> None:
        """like: what stands there first."""
        begins = [0, *accumulate(-(-one.numel() * one.element_size() // ALIGNED) * ALIGNED for one in like)]
        self._said = torch.zeros(begins[-1], dtype=torch.uint8)
        self._there = torch.zeros_like(self._said, device=device)
        self.said, self.tensors = ([_view(block, begin, one) for begin, one in zip(begins, like, strict=False)]
                                   for block in (self._said, self._there))  # fmt: skip
        for said, one in zip(self.said, like, strict=True):
            said.copy_(one)
        self._lane = lane(device, "in")
        self.done()
        self.send()

    def send(self) -> None:
        """Write `said`. What is launched from now on reads it; `said` may be changed at once."""
        now = self._said.pin_memory() if self._there.is_cuda else self._said.clone()
        self._lane.wait(self._lane.copy(self._there, now, behind=self._read))

    def done(self) -> None:
        """All launches that read what stands there are launched."""
        self._read = self._lane.now()


def _view(block: torch.Tensor, begin: int, like: torch.Tensor) -> torch.Tensor:
    return block[begin : begin + like.numel() * like.element_size()].view(like.dtype).view(like.shape)
