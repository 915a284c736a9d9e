"""Whole numbers from the host to the device: many lists in one transfer, without waiting.

`sent` makes new tensors; `StaticInputs` are memory that stays, and is written again and again. Leaves out: what the
numbers mean. The other direction is `to_host.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from .copy_stream import copy_stream

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


class StaticInputs:
    """Tensors at fixed addresses on the device, for launches that are recorded once. All are written in one transfer.

    The transfer runs beside the launches, behind the last one that reads what stood there before. So where other
    launches came between, it is over before its own begins, and no kernel waits for it.

    staging   what the next transfer writes, on the host;  tensors   the same on the device
    """

    def __init__(self, like: Sequence[torch.Tensor], device: torch.device) -> None:
        """like: what stands there first."""
        begins = [0, *accumulate(-(-one.numel() * one.element_size() // ALIGNED) * ALIGNED for one in like)]
        self._staging = torch.zeros(begins[-1], dtype=torch.uint8)
        self._block = torch.zeros_like(self._staging, device=device)
        self.staging, self.tensors = ([_view(block, begin, one) for begin, one in zip(begins, like, strict=False)]
                                      for block in (self._staging, self._block))  # fmt: skip
        for staging, one in zip(self.staging, like, strict=True):
            staging.copy_(one)
        self._stream = copy_stream(self._block.device, "in")
        self.mark_read()
        self.upload()

    def upload(self) -> None:
        """Write `staging`. What is launched from now on reads it; `staging` may be changed at once."""
        now = self._staging.pin_memory() if self._block.is_cuda else self._staging.clone()  # a copy may run later
        self._stream.wait(self._stream.copy(self._block, now, behind=self._read))

    def mark_read(self) -> None:
        """All launches that read what stands there are launched."""
        self._read = self._stream.now()


def _view(block: torch.Tensor, begin: int, like: torch.Tensor) -> torch.Tensor:
    return block[begin : begin + like.numel() * like.element_size()].view(like.dtype).view(like.shape)
