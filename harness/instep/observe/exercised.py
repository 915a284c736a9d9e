"""How often somebody's kernel was really called, and with how many rows: noted where the call is, told in the result.

An op call is not a kernel call: where `dense` calls a kernel once per row, the kernel never sees a window.
Leaves out: which calls are looked at (`observe/calls.py`), and the words (`report/words.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Exercised:
    """calls of a kernel; rows: in all of them; widest: the most rows of one sequence in a call; asked: the same of the
    op that calls it."""

    calls: int = 0
    rows: int = 0
    widest: int = 0
    asked: int = 0

    def with_call(self, lengths: Sequence[int]) -> Exercised:
        widest = max(self.widest, *lengths, 0)
        return Exercised(self.calls + 1, self.rows + sum(lengths), widest, widest)


@dataclass
class Tally:
    """By form of an op ("gdn.window"): its calls, and those of the kernels that adapters call for it; the forms that
    an adapter leaves to ours."""

    ops: dict[str, Exercised] = field(default_factory=dict)
    kernels: dict[str, Exercised] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)

    def result(self) -> dict[str, Exercised]:
        """By form: the kernel's calls, or the op's own where no adapter stands between."""
        forms, none = [form for form in {**self.ops, **self.kernels} if form not in self.left], Exercised()
        return {form: replace(self.kernels.get(form, op), asked=op.widest)
                for form in forms for op in [self.ops.get(form, none)]}  # fmt: skip


_TALLY: ContextVar[Tally | None] = ContextVar("tally", default=None)


@contextmanager
def counted_in(tally: Tally) -> Iterator[None]:
    """Around an op that is judged: the kernels that it calls are counted."""
    token = _TALLY.set(tally)
    try:
        yield
    finally:
        _TALLY.reset(token)


def judged() -> bool:
    """Whether the op that calls is judged; else what the judging alone needs is left out."""
    return _TALLY.get() is not None


def adapts(op: str, kernels: Mapping[str, object]) -> None:
    """For adapters, where their op is called: the kernels by form of the op; None: the form is left to ours."""
    if (tally := _TALLY.get()) is not None:
        for form, kernel in kernels.items():
            if kernel is None:
                tally.left.add(f"{op}.{form}")
            else:
                tally.kernels.setdefault(f"{op}.{form}", Exercised())


def called(form: str, lengths: Sequence[int]) -> None:
    """For adapters, where they call a kernel: its sequences have so many rows."""
    if (tally := _TALLY.get()) is not None:
        tally.kernels[form] = tally.kernels.get(form, Exercised()).with_call(lengths)
