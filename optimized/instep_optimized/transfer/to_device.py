"""Integers from the host to the device: many lists in one transfer, without waiting.

`sent` makes new tensors; `StaticInputs` are memory that stays, and is written again and again. Leaves out: the meaning
of the numbers. The other direction is `to_host.py`.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch

from .copy_stream import copy_stream

HOST = torch.device("cpu")
ALIGNED = 16  # bytes: alignment of a tensor in the block, as of a separate tensor, so that a kernel sees no difference


def sent(lists: Sequence[Sequence[int]], device: torch.device) -> list[torch.Tensor]:
    """Send the lists as int64 tensors to the device, in one transfer.

    Every list starts at a multiple of ALIGNED bytes.
    Example: lists of 3 and 2 numbers are sent as 3 numbers, one 0, and 2 numbers.
    """
    flat: list[int] = []
    begins = []
    for numbers in lists:
        begins.append(len(flat))
        flat += [*numbers, *[0] * (len(numbers) % 2)]  # two int64 are 16 bytes
    # A copy to a GPU is asynchronous only from pinned memory.
    block = torch.tensor(flat, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    return [block[begin : begin + len(numbers)] for begin, numbers in zip(begins, lists, strict=True)]


def ints(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """Send one list as an int64 tensor to the device."""
    return sent([numbers], device)[0]


class StaticInputs:
    """Tensors at fixed addresses on the device, for launches that are recorded once. All are written in one transfer.

    The transfer runs alongside the launches, after the last launch that reads the previous contents. So if other
    launches come in between, it finishes before its own launch begins, and no kernel waits for it.

    staging   contents of the next transfer, on the host;  tensors   the same on the device
    """

    def __init__(self, like: Sequence[torch.Tensor], device: torch.device) -> None:
        """like: the first contents."""
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
        """Write `staging`. Later launches read it; `staging` may be changed at once."""
        now = self._staging.pin_memory() if self._block.is_cuda else self._staging.clone()  # a copy may run later
        self._stream.wait(self._stream.copy(self._block, now, behind=self._read))

    def mark_read(self) -> None:
        """Mark that all launches which read the contents have been issued."""
        self._read = self._stream.now()


def _view(block: torch.Tensor, begin: int, like: torch.Tensor) -> torch.Tensor:
    return block[begin : begin + like.numel() * like.element_size()].view(like.dtype).view(like.shape)
