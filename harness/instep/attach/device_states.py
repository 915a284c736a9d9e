"""Copies of recurrent states on a device, moved to the host by a thread that also writes them.

So the engine waits for neither the device nor the disk.
Leaves out: where an engine has its states (`sglang.py`, `vllm.py`), and which are written (`recorder.py`).
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

MOST_WAITING = 2  # writes whose states are still on the device


@dataclass
class States:
    """Copies of states: [layers, rows, ..]. Conv windows are [C, W-1] or [W-1, C], as the engine has them."""

    conv: torch.Tensor
    state: torch.Tensor

    def on_host(self) -> "States":
        """The same states on the host, after their event on the device. A separate stream copies them."""
        if not self.state.is_cuda:
            return self
        with torch.cuda.device(self.state.device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                moved = replace(self, **{one.name: moved_to_host(getattr(self, one.name)) for one in fields(self)})
            stream.synchronize()
        return moved

    def of(self, layer: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The conv window [C, W-1], oldest first, and the state. layer, row: places in the copies."""
        window = self.conv[layer, row]
        return window if window.shape[0] >= window.shape[1] else window.mT, self.state[layer, row]


def moved_to_host(part: Any) -> Any:
    """A tensor, or the tensors of a dict, on the host; anything else as it is."""
    if isinstance(part, dict):
        return {name: moved_to_host(one) for name, one in part.items()}
    return to_host(part) if isinstance(part, torch.Tensor) else part


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host that does not wait for the device: read it after an event or a synchronisation."""
    if not tensor.is_cuda:
        return tensor.detach().clone()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor.detach(), non_blocking=True)


def to_device(numbers: list[int], device: torch.device) -> torch.Tensor:
    """Indices on the device, without waiting for it."""
    return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)


class Writer:
    """A thread that writes, so that the engine does not wait for the disk. A failed write raises at the next call."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, "instep-attach")
        self.waiting: deque[Future[None]] = deque()

    def submit(self, write: Callable[..., None], *given: Any) -> None:
        """Write later, and wait now if too much is waiting."""
        while self.waiting and (len(self.waiting) >= MOST_WAITING or self.waiting[0].done()):
            self.waiting.popleft().result()
        self.waiting.append(self.thread.submit(write, *given))

    def finish(self) -> None:
        """Wait until everything is written."""
        while self.waiting:
            self.waiting.popleft().result()
