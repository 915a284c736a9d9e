"""Integers from the device to the host: the copy starts at once, and the host waits only when it reads it.

Leaves out: the meaning of the numbers. Users of copies: lengths, roots, and the shapes of grown trees.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import overload

import torch

from .copy_stream import Event, copy_stream


class Arrival:
    """The copies from the device up to now: `wait` until they have arrived."""

    def __init__(self, device: torch.device) -> None:
        # The event is in the stream after the copies. Waiting for it does not wait for work launched later.
        self._done = copy_stream(device, "out").now()

    def wait(self) -> None:
        synchronize(self._done)


def synchronize(event: Event) -> None:
    """Wait on the host for an event."""
    if event is not None:
        event.synchronize()


class HostCopy:
    """Device tensors, copied to the host. The copy starts at once. A round has no other transfer to the host.

    immutable: the tensors are never written again. Then the copy runs alongside the launches, and none waits for it.
    """

    def __init__(self, *parts: torch.Tensor, immutable: bool = False) -> None:
        self._found: list[int] | None = None
        self._ends = [0, *accumulate(part.numel() for part in parts)]
        numbers = parts[0] if len(parts) == 1 else torch.cat([part.flatten() for part in parts])
        self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=numbers.is_cuda)
        out = copy_stream(numbers.device, "out")
        if immutable or len(parts) > 1:  # several parts were joined into a new tensor
            self._done = out.copy(self._numbers, numbers, behind=out.now())
        else:
            self._numbers.copy_(numbers, non_blocking=True)
            self._done = out.now()

    @property
    def size(self) -> int:
        """How many numbers the first tensor has. It is known without waiting."""
        return self._ends[1]

    def list(self, part: int = 0) -> list[int]:
        """Return the numbers of one tensor. The first call waits until the copy has finished."""
        if self._found is None:
            synchronize(self._done)
            self._found = self._numbers.tolist()
        return self._found[self._ends[part] : self._ends[part + 1]]


class Length:
    """Number of committed tokens of a request. `exact` waits for copies; `most` is an upper bound, without waiting.

    Accepted counts arrive asynchronously and accumulate here. Each commit adds the counts of the previous commit, whose
    copy has finished by then (`settle`). Reading `exact` changes nothing: the next event reserves the same pages,
    whether it was read or not.
    """

    def __init__(self, known: int = 0) -> None:
        self.most = self._known = known
        self._owed: list[tuple[HostCopy, int]] = []

    def add(self, tokens: int) -> None:
        self.most, self._known = self.most + tokens, self._known + tokens

    def owe(self, counts: HostCopy, number: int, most: int) -> None:
        """Add the `number`-th of these counts, which is at most `most`, once its copy has finished."""
        self.most += most  # until the count is known, the upper bound includes all of it
        self._owed.append((counts, number))

    def settle(self) -> None:
        """Add the counts that are still pending. Waits for copies that have not finished."""
        self._known = self.most = self.exact
        self._owed.clear()

    @property
    def exact(self) -> int:
        return self._known + sum(counts.list()[number] for counts, number in self._owed)


class Parents(Sequence[int]):
    """The parents in a tree that was grown on the device. Their number is known; a look-up reads the copy."""

    def __init__(self, copy: HostCopy, begin: int, count: int) -> None:
        self._copy, self._begin, self._count = copy, begin, count

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...
    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        return self._copy.list()[self._begin : self._begin + self._count][at]

    def __len__(self) -> int:
        return self._count


class Drafts(Sequence[int]):
    """Accepted drafts per request of a commit: its counts without the root. Their number is known; a look-up waits."""

    def __init__(self, counts: HostCopy) -> None:
        self._counts = counts

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...
    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        return [count - 1 for count in self._counts.list()][at]

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    def __len__(self) -> int:
        return self._counts.size


class Roots(Mapping[str, int]):
    """request -> root. Looking up a root reads the copy; the tensor is the engine's own."""

    def __init__(self, names: Sequence[str] = (), roots: torch.Tensor | None = None) -> None:
        self._places = {name: place for place, name in enumerate(names)}
        self._copy = None if roots is None else HostCopy(roots, immutable=True)

    def __getitem__(self, name: str) -> int:
        place = self._places[name]
        assert self._copy is not None, "a named request has a root"
        return self._copy.list()[place]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class CutPicks(Mapping[str, torch.Tensor]):
    """request -> its choices. A look-up cuts padding rows off: it reads the copy of the counts, one per request."""

    def __init__(self, picks: Mapping[str, torch.Tensor], counts: HostCopy) -> None:
        self._picks, self._counts = picks, counts
        self._places = {name: place for place, name in enumerate(picks)}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._picks[name][: self._counts.list()[self._places[name]]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._picks)

    def __len__(self) -> int:
        return len(self._picks)
