"""Copies that an engine keeps of requests, and prefixes of them, as it may show them to a test.

Leaves out: the events that make and end them (`engine.py`).
"""

from collections.abc import Mapping
from typing import Literal, Protocol

import torch

from .engine import RequestState

# The kind of a copy, and its name or the request's. Copies on the host are of the kind offload.
Copy = tuple[Literal["save", "preempt", "offload"], str]
BY = ("save", "preempt", "offload")


class Tracks(Protocol):
    """Inspection of an engine that tracks prefixes; a call changes nothing."""

    def prefix(self, name: str) -> RequestState:
        """Return the prefix that is tracked under a name, on the device or on the host."""
        ...

    def track_slots(self) -> Mapping[str, int]:
        """Return the name of every prefix on the device -> its track slot; empty without `Capacity.tracked`."""
        ...


class ShowsCopies(Protocol):
    """Inspection of copies that an engine under test keeps in addition to its pools; a call changes nothing."""

    def copies(self) -> Mapping[Copy, Mapping[str, torch.Tensor]]:
        """Return every copy that is kept, by its parts: the tensors themselves, under any names.

        A copy is not written while it is kept. A copy that `preempt` made is gone when the request has resumed or is
        over; a named copy (`save`, also of tracked prefixes) is gone when it was evicted or moved. Its memory, if a
        part is a whole tensor, is then freed. The copies of `offload` are in host memory, in the same parts.
        """
        ...
