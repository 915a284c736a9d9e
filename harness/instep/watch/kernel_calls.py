"""Count the real calls of external kernels and their rows, for the result.

An op call is not a kernel call: if `dense` calls a kernel once per row, the kernel never sees a window.
Leaves out: which calls are counted (`watch/op_calls.py`), and the message (`report/divergence_message.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Exercised:
    """Calls of one kernel.

    calls   number of calls; rows: in all of them
    widest  the maximum rows of one sequence in a call
    asked   the same maximum for the op that calls the kernel
    """

    calls: int = 0
    rows: int = 0
    widest: int = 0
    asked: int = 0

    def with_call(self, lengths: Sequence[int]) -> "Exercised":
        widest = max(self.widest, *lengths, 0)
        return Exercised(self.calls + 1, self.rows + sum(lengths), widest, widest)


@dataclass
class Tally:
    """Counts by form of an op ("gdn.window"): its calls, and those of the kernels that adapters call for it; and the
    forms that an adapter leaves to instep's ops.
    """

    ops: dict[str, Exercised] = field(default_factory=dict)
    kernels: dict[str, Exercised] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)

    def result(self) -> dict[str, Exercised]:
        """By form: the kernel's calls, or the op's own calls without an adapter."""
        forms, none = [form for form in {**self.ops, **self.kernels} if form not in self.left], Exercised()
        return {form: replace(self.kernels.get(form, op), asked=op.widest)
                for form in forms for op in [self.ops.get(form, none)]}  # fmt: skip


_TALLY: ContextVar[Tally | None] = ContextVar("tally", default=None)


@contextmanager
def counted_in(tally: Tally) -> Iterator[None]:
    """Count the kernel calls of a judged op in this tally."""
    token = _TALLY.set(tally)
    try:
        yield
    finally:
        _TALLY.reset(token)


def judged() -> bool:
    """Whether the calling op is judged; if not, work that only the judgement needs is skipped."""
    return _TALLY.get() is not None


def adapts(op: str, kernels: Mapping[str, object]) -> None:
    """For adapters, at their op's call: the kernels by form of the op; None: instep's op serves the form."""
    if (tally := _TALLY.get()) is not None:
        for form, kernel in kernels.items():
            if kernel is None:
                tally.left.add(f"{op}.{form}")
            else:
                tally.kernels.setdefault(f"{op}.{form}", Exercised())


def called(form: str, lengths: Sequence[int]) -> None:
    """For adapters, at a kernel's call: the number of rows of each sequence."""
    if (tally := _TALLY.get()) is not None:
        tally.kernels[form] = tally.kernels.get(form, Exercised()).with_call(lengths)
