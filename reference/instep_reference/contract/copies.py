"""Copies that an engine keeps of requests, and prefixes of them, as it may show them to whoever tests it.

Leaves out: the events that make and end them (`engine.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import torch

from .engine import RequestState

# What a kept copy is kept by, and its name or the request's. What went to the host is kept by an offload.
Copy = tuple[Literal["save", "preempt", "offload"], str]
BY = ("save", "preempt", "offload")


class Tracks(Protocol):
    """What an engine shows that tracks prefixes; asking changes nothing."""

    def prefix(self, name: str) -> RequestState:
        """The prefix that is tracked under a name, on the device or on the host."""
        ...


class ShowsCopies(Protocol):
    """What an engine under test may show beside its pools; asking changes nothing."""

    def copies(self) -> Mapping[Copy, Mapping[str, torch.Tensor]]:
        """Every copy that is kept, by its parts: the tensors themselves, under any names.

        Nobody writes into a copy while it is kept. One that `preempt` made is gone when the request has resumed or is
        over, one under a name (`save`, also of tracked prefixes) when it was evicted or moved. Whatever of it is the
        whole of a tensor's memory is given back then. Those of `offload` stand in host memory, in the same parts.
        """
        ...
