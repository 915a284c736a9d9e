"""Whole numbers on their way from the device to the host: nobody waits for them before they are asked for.

Leaves out: what they mean to whom; a request's length and the roots of a forward are the two that there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch


class HostCopy:
    """A copy of a device tensor, started at once: the one transfer that a round declares."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._found: list[int] | None = None
        self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=numbers.is_cuda)
        self._numbers.copy_(numbers, non_blocking=True)
        self._done = None
        if numbers.is_cuda:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def list(self) -> list[int]:
        """The numbers; waits until they are here, once."""
        if self._found is None:
            if self._done is not None:
                self._done.synchronize()
            self._found = self._numbers.tolist()
        return self._found


class Length:
    """Committed tokens: `most` there can be, without asking; `exact` waits for the counts that are still arriving.

    Accepted counts arrive asynchronously and accumulate here. Each commit adds the counts of the previous commit, whose
    copy has finished by then (`settle`). Asking for the exact length changes nothing: the next event reserves the
    same pages, whether somebody asked or not.
    """

    def __init__(self, known: int = 0) -> None:
        self.most = self._known = known
        self._owed: list[tuple[HostCopy, int]] = []

    def add(self, tokens: int) -> None:
        self.most, self._known = self.most + tokens, self._known + tokens

    def owe(self, counts: HostCopy, number: int, most: int) -> None:
        """The `number`-th of these counts, at most `most`, is added once it is here."""
        self.most += most
        self._owed.append((counts, number))

    def settle(self) -> None:
        """Take in what is owed; waits for what is not here yet."""
        self._known = self.most = self.exact
        self._owed.clear()

    @property
    def exact(self) -> int:
        return self._known + sum(counts.list()[number] for counts, number in self._owed)


class Roots(Mapping[str, int]):
    """request -> root, read from the device when somebody looks."""

    def __init__(self, names: Sequence[str] = (), roots: torch.Tensor | None = None) -> None:
        self._places = {name: place for place, name in enumerate(names)}
        self._copy = None if roots is None else HostCopy(roots)

    def __getitem__(self, name: str) -> int:
        place = self._places[name]
        assert self._copy is not None, "whoever has a name has a root"
        return self._copy.list()[place]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
