"""Whole numbers on their way from the device to the host: nobody waits for them before they are asked for.

Leaves out: what they mean to whom; a request's length and the roots of a forward are the two that there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch


class Arriving:
    """A copy of a device tensor, started at once: the one transfer that a round declares."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._numbers, self._done = numbers, None
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def list(self) -> list[int]:
        """The numbers; waits until they are here."""
        if self._done is not None:
            self._done.synchronize()
        found: list[int] = self._numbers.tolist()
        return found


class Length:
    """Committed tokens: `most` there can be, without asking; `exact` waits for the counts that are still arriving."""

    def __init__(self, known: int = 0) -> None:
        self.most = self._known = known
        self._owed: list[tuple[Arriving, int]] = []

    def add(self, tokens: int) -> None:
        self.most, self._known = self.most + tokens, self._known + tokens

    def owe(self, counts: Arriving, number: int, most: int) -> None:
        """The `number`-th of these counts, at most `most`, is added once it is here."""
        self.most += most
        self._owed.append((counts, number))

    @property
    def exact(self) -> int:
        self._known += sum(counts.list()[number] for counts, number in self._owed)
        self._owed.clear()
        self.most = self._known
        return self._known


class Roots(Mapping[str, int]):
    """request -> root, read from the device when somebody looks."""

    def __init__(self, names: Sequence[str] = (), roots: torch.Tensor | None = None) -> None:
        self._names, self._arriving = tuple(names), None if roots is None else Arriving(roots)

    def __getitem__(self, name: str) -> int:
        if name not in self._names or self._arriving is None:
            raise KeyError(name)
        return self._arriving.list()[self._names.index(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
