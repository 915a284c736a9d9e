"""Several ranks of one engine: `Comm`, the collectives that an engine of a rank is given, as it is given an op set.

Leaves out: the implementation in one process (`lockstep.py`), the ops that call collectives (`ops_over_ranks.py`), and
the parts of tensors that a rank holds (`instep_reference.contract.shards`).
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import torch

from instep_reference.contract.place_names import Place

T = TypeVar("T")
GRAPHS = ("capture", "replay")  # kinds of calls about a graph; shape: its number, and that of its segment


class Call(NamedTuple):
    """One collective as a rank calls it.

    kind  a method of `Comm`, one of `GRAPHS`, or "see": the rank shows a place to a watcher, which needs the parts of
          all ranks; or "tick": it waits for the others at a tick of a pipeline's schedule
    peer  the other rank of a `send` or a `recv`
    """

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: Place | None = None
    peer: int | None = None

    def __str__(self) -> str:
        if self.kind == "tick":
            return f"for tick {self.shape[0]} of the schedule"
        rows = f"{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')}"
        if self.kind == "see":
            return f"at {self.place} of {rows}"
        if self.kind in GRAPHS:
            return f"in {self.kind} of graph {self.shape[0]}, segment {self.shape[1]}"
        to = {"send": f" to rank {self.peer}", "recv": f" from rank {self.peer}"}.get(self.kind, "")
        at = "" if self.place is None else f" for {self.place}"
        return f"in {self.kind}{to}{at} of {rows}"


class Comm(Protocol):
    """The collectives of one rank. Every rank of a group makes the same calls in the same order.

    A result is a new tensor and the same bits on every rank. place: of the result, for messages and the log of calls.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def calls(self) -> list[Call]:
        """The log of this rank's calls, in order. A replay of a graph adds those that its capture made."""
        ...

    def once(self, call: Call, make: Callable[[], T]) -> T:
        """Return the result of `make`, which the ranks of one process run once, when all of them are here."""
        ...

    def all_reduce(self, x: torch.Tensor, place: Place | None = None) -> torch.Tensor:
        """Add x of all ranks, rank 0 first, in at least fp32; one cast back at the end."""
        ...

    def all_gather(self, x: torch.Tensor, axis: int, place: Place | None = None) -> torch.Tensor:
        """Concatenate x of all ranks along an axis, rank 0 first."""
        ...

    def broadcast(self, x: torch.Tensor, place: Place | None = None) -> torch.Tensor:
        """Return a copy of rank 0's x."""
        ...

    def send(self, x: torch.Tensor, to: int, place: Place | None = None) -> None:
        """Send x to another rank, without waiting for it."""
        ...

    def recv(self, like: torch.Tensor, source: int, place: Place | None = None) -> torch.Tensor:
        """Return the next tensor that a rank sent to this one. like: has its shape and dtype"""
        ...
