"""The lock-step `Comm`: n ranks in one process, of which exactly one runs at any time.

Every rank runs in a thread, rank 0 in the caller's. It runs until it waits for the others; then the next rank runs.
When all ranks wait in the same call, rank 0 computes the results, and the ranks continue in their order. So a run is
deterministic. If the ranks wait in different calls, or one waits and another is done, no rank can continue: that is
reported at once. Only a rank that does not come back is reported after a time limit. On a GPU all ranks use one device
and one stream, and a graph is captured with the work of all ranks in this order. Leaves out: speed.
"""

import os
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode

from instep_reference.contract.errors import InstepError
from instep_reference.contract.place_names import Place

from . import Call, Comm

T = TypeVar("T")
LIMIT_S = 20.0
PERIODS, LEAST = 15, 0.1  # a rank that computes for a tenth of the limit has it again, this often
LEAVES_S = 1.0  # seconds in which a rank must leave once the run has failed
SERVED = "has served the event"
TICK = "tick"  # the kind of a call that waits at a tick of a schedule


class Line(NamedTuple):
    """A line of source, and its function."""

    file: str
    line: int
    function: str


class RankError(RuntimeError):
    """Some ranks did not do what the others did.

    ranks: those that raised or that wait;  at: the line in which the first of them waits, if no traceback shows it
    """

    def __init__(self, says: str, ranks: Sequence[int], at: Line | None = None) -> None:
        super().__init__(says)
        self.ranks, self.at = tuple(ranks), at


class RankWaits(RankError):
    """A rank waits for a call that another rank does not make. On several devices the ranks would hang."""


class RankUnread(RankError):
    """A rank sent a tensor that the other rank did not receive. A later transfer between the two would take it."""


class RankRaised(RankError):
    """A rank raised an exception that another rank did not raise.

    evidence: what a rank in another process has posted about it; in this process, the exception is the cause
    """

    def __init__(self, says: str, ranks: Sequence[int], evidence: Any = None) -> None:
        super().__init__(says, ranks)
        self.evidence = evidence


class RankKilled(InstepError):
    """The process of a rank was ended from outside, so nothing is known about the engine."""


def computed_s(process: int | str = "self") -> float:
    """Seconds that a process on this machine has computed, with its children that have ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    except OSError:  # no Linux
        return sum(os.times()[:4])


class _Abandoned(BaseException):
    """Ends the thread of a rank that waits after the run has failed."""


class _Waits(NamedTuple):
    """A waiting rank: its call, what it gives, what makes the results of all ranks, and the line that calls."""

    call: Call
    given: Any
    make: Callable[[Sequence[Any]], Sequence[Any]]
    at: Line


class Lockstep:
    """A group of ranks. `run` runs one function per rank; these call `comms`, a `Comm` per rank.

    limit_s  seconds in which a rank must come back, to wait or to end. If this process computes meanwhile, for example
             compiles kernels, they count again, at most 15 times.
    """

    def __init__(self, size: int, limit_s: float = LIMIT_S) -> None:
        self.size, self.limit_s, self.ranks = size, limit_s, range(size)
        self.comms: tuple[Comm, ...] = tuple(_LockstepComm(self, rank) for rank in range(size))
        self._calls: list[list[Call]] = [[] for _ in range(size)]
        self._mail: dict[tuple[int, int], deque[tuple[Call, Line, torch.Tensor]]] = defaultdict(deque)
        self._reset()
        self._running = False

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Run one function per rank, and return their results.

        If all ranks raise the same kind of exception, that of rank 0 is raised. If only some do, `RankRaised` is raised
        from the first one; if a rank waits in vain, `RankWaits`; if a tensor was sent and not received, `RankUnread`.
        """
        assert len(functions) == self.size and not self._running
        self._reset()
        self._running = True
        found: list[Any] = [None] * self.size
        with_modes = _inherited_modes()

        def work(rank: int) -> None:
            try:
                self._wait(rank)
                with with_modes():
                    found[rank] = functions[rank]()
            except _Abandoned:
                pass
            except BaseException as error:
                self._errors[rank] = error
            self._end(rank)

        threads = [threading.Thread(target=copy_context().run, args=(work, rank), daemon=True)
                   for rank in range(1, self.size)]  # fmt: skip
        for thread in threads:
            thread.start()
        try:
            found[0] = functions[0]()
        except _Abandoned:
            pass
        except BaseException as error:
            self._errors[0] = error
            if not isinstance(error, Exception):  # Ctrl-C: another rank may run now, and leaves at its next call
                self._fail(error)
        try:
            self._end(0)
            if not self._came(self._ended, self._patience):
                self._fail(self._late())
        except KeyboardInterrupt as error:
            self._errors[0] = error
            self._fail(error)
        for thread in threads:  # Python aborts if it ends while a thread computes
            thread.join(None if self._failed is None else LEAVES_S)
        self._running = False
        self._raise()
        return found

    def take_calls(self) -> list[list[Call]]:
        """Return the calls of each rank since the last look."""
        found, self._calls = self._calls, [[] for _ in range(self.size)]
        return found

    def gather(self, mine: Sequence[T]) -> list[T]:
        """Return the values of all ranks. mine: those of the ranks of this process, so all"""
        return [*mine]

    def calls(self, rank: int) -> list[Call]:
        """The log of a rank since the last look."""
        return self._calls[rank]

    def meet(self, rank: int, call: Call, given: Any, make: Callable[[Sequence[Any]], Sequence[Any]]) -> Any:
        """Wait until every rank is in this call; return this rank's result of `make`, which gets what all gave."""
        if not self._running:
            raise RankWaits(f"rank {rank} waits {call}, and no other rank runs", [rank])
        self._waits[rank] = _Waits(call, given, make, caller())
        self._pass_on(rank)
        self._wait(rank)
        if rank == 0:
            try:
                self._results[:] = make(self._given)
            except BaseException as error:
                self._fail(error)
                raise
        return self._results[rank]

    def tick(self, rank: int, number: int) -> None:
        """Wait until every rank is at this tick of a schedule."""
        self.meet(rank, Call(TICK, (number,), torch.int64), None, lambda given: given)

    def post(self, rank: int, to: int, call: Call, x: torch.Tensor) -> None:
        """Put a copy of x into the mail for another rank."""
        self._mail[rank, to].append((call, caller(), x.clone()))

    def fetch(self, rank: int, source: int, call: Call) -> torch.Tensor:
        """Take the next tensor of another rank out of the mail, and wait for it if need be."""
        if not self._mail[source, rank]:
            self._waits[rank] = _Waits(call, source, _nothing, caller())
            self._pass_on(rank)
            self._wait(rank)
        return self._mail[source, rank].popleft()[-1]

    # The turn

    def _reset(self) -> None:
        self._turns = [threading.Semaphore(0) for _ in range(self.size)]
        self._ended = threading.Semaphore(0)
        self._waits: list[_Waits | None] = [None] * self.size
        self._given: list[Any] = []
        self._results: list[Any] = []
        self._done = [False] * self.size
        self._errors: list[BaseException | None] = [None] * self.size
        self._failed: BaseException | None = None
        self._mail.clear()

    @property
    def _patience(self) -> float:
        """Seconds that rank 0 waits for its turn: every other rank may run for the limit before."""
        return self.limit_s * max(1, self.size - 1)

    def _wait(self, rank: int) -> None:
        """Wait for the turn of a rank."""
        if not self._came(self._turns[rank], None if rank else self._patience):
            self._fail(self._late())
        if self._failed is not None:
            raise _Abandoned

    def _came(self, turn: threading.Semaphore, patience: float | None) -> bool:
        """Wait for a turn. patience: seconds without much computing after which it does not come; None: none"""
        for _ in range(PERIODS):
            before = computed_s()
            if turn.acquire(timeout=patience):
                return True
            assert patience is not None, "a wait without a limit ends with the turn"
            if computed_s() - before < LEAST * patience:
                break
        return False

    def _end(self, rank: int) -> None:
        self._done[rank] = True
        self._pass_on(rank)

    def _pass_on(self, rank: int) -> None:
        """Give the turn to the next rank that can run; if all wait in one call, to rank 0."""
        if self._failed is not None:
            return
        for other in ((rank + step) % self.size for step in range(1, self.size + 1)):
            if not self._done[other] and self._ready(other):
                self._waits[other] = None
                self._turns[other].release()
                return
        if all(self._done):
            left = {between: [(call, at) for call, at, _ in sent] for between, sent in self._mail.items() if sent}
            if left and not any(self._errors):
                self._fail(unread(left))
            else:
                self._ended.release()
            return
        waits = [one for one in self._waits if one is not None]
        if len(waits) == self.size and len({one.call for one in waits}) == 1 and waits[0].call.peer is None:
            self._given, self._waits = [one.given for one in waits], [None] * self.size
            self._turns[0].release()
        else:
            ended = {other: f"raised {_spelled(error)}" for other, error in enumerate(self._errors) if error}
            waiting = {other: one.call for other, one in enumerate(self._waits) if one is not None}
            error = some_wait(waiting, self.size, ended)
            error.at = min(waits, key=lambda one: one.call.kind == TICK).at  # every rank waits at ticks
            self._fail(error)

    def _ready(self, rank: int) -> bool:
        waits = self._waits[rank]
        return waits is None or (waits.call.peer is not None and bool(self._mail[waits.call.peer, rank]))

    def _fail(self, error: BaseException) -> None:
        """End the run: every waiting rank leaves."""
        self._failed = error
        for turn in self._turns:
            turn.release()
        self._ended.release()

    def _late(self) -> RankWaits:
        late = [rank for rank in range(self.size) if not self._done[rank] and self._waits[rank] is None and rank]
        return RankWaits(f"{_named(late)} did not come back within {self.limit_s:g} s", late)

    def _raise(self) -> None:
        raised = {rank: error for rank, error in enumerate(self._errors) if error is not None}
        if not raised:
            if self._failed is not None:
                raise self._failed
            return
        first = next(iter(raised.values()))
        alike = len(raised) == self.size and len({type(error) for error in raised.values()}) == 1
        if alike or first is self._failed or not isinstance(first, Exception):
            raise first
        raise some_raised({rank: _spelled(error) for rank, error in raised.items()}, self.size) from first


class _LockstepComm:
    """One rank's `Comm` in a `Lockstep`."""

    def __init__(self, group: Lockstep, rank: int) -> None:
        self._group, self.rank, self.size = group, rank, group.size

    @property
    def calls(self) -> list[Call]:
        return self._group.calls(self.rank)

    def once(self, call: Call, make: Callable[[], T]) -> T:
        found: T = self._group.meet(self.rank, call, None, lambda _: [make()] * self.size)
        return found

    def all_reduce(self, x: torch.Tensor, place: Place | None = None) -> torch.Tensor:
        return self._meet("all_reduce", x, place, lambda parts: _to_each(_added(parts), self.size))

    def all_gather(self, x: torch.Tensor, axis: int, place: Place | None = None) -> torch.Tensor:
        return self._meet("all_gather", x, place, lambda parts: _to_each(torch.cat(list(parts), axis), self.size))

    def broadcast(self, x: torch.Tensor, place: Place | None = None) -> torch.Tensor:
        return self._meet("broadcast", x, place, lambda parts: _to_each(parts[0], self.size))

    def send(self, x: torch.Tensor, to: int, place: Place | None = None) -> None:
        call = Call("send", tuple(x.shape), x.dtype, place, to)
        self.calls.append(call)
        self._group.post(self.rank, to, call, x)

    def recv(self, like: torch.Tensor, source: int, place: Place | None = None) -> torch.Tensor:
        call = Call("recv", tuple(like.shape), like.dtype, place, source)
        self.calls.append(call)
        found = self._group.fetch(self.rank, source, call)
        if (found.shape, found.dtype) != (like.shape, like.dtype):
            sent = Call("send", tuple(found.shape), found.dtype, place, self.rank)
            raise RankWaits(f"rank {source} is {sent}; rank {self.rank} is {call}", [self.rank])
        return found

    def _meet(self, kind: str, x: torch.Tensor, place: Place | None, make: Callable[..., Any]) -> torch.Tensor:
        call = Call(kind, tuple(x.shape), x.dtype, place)
        self.calls.append(call)
        found: torch.Tensor = self._group.meet(self.rank, call, x, make)
        return found


def caller() -> Line:
    """The line that calls a collective: the innermost one outside of this package."""
    frame, here = sys._getframe(1), os.path.dirname(__file__)
    while os.path.dirname(frame.f_code.co_filename) == here and frame.f_back is not None:
        frame = frame.f_back
    return Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)


def some_wait(waits: Mapping[int, Call], size: int, ended: Mapping[int, str] = MappingProxyType({})) -> RankWaits:
    """The error if ranks wait in vain. waits: their calls;  ended: how other ranks ended"""
    says = [f"rank {rank} waits {waits[rank]}" if rank in waits else f"rank {rank} {ended.get(rank, SERVED)}"
            for rank in range(size)]  # fmt: skip
    return RankWaits("; ".join(says), [*waits])


def unread(left: Mapping[tuple[int, int], Sequence[tuple[Call, Line]]]) -> RankUnread:
    """The error if tensors were sent and not received. left: (sender, receiver) -> the calls of the sender"""
    says = []
    for (source, to), calls in sorted(left.items()):
        more = f", nor {len(calls) - 1} more" if len(calls) > 1 else ""
        says.append(f"rank {source} was {calls[0][0]}; rank {to} {SERVED} and did not receive it{more}")
    return RankUnread("; ".join(says), sorted({rank for between in left for rank in between}), left[min(left)][0][1])


def some_raised(raised: Mapping[int, str], size: int, evidence: Any = None) -> RankRaised:
    """The error if some ranks raised. raised: type and message"""
    says = "; ".join(f"rank {rank} raised {error}" for rank, error in raised.items())
    others = [rank for rank in range(size) if rank not in raised]
    return RankRaised(f"{says}; {_named(others)} did not" if others else says, [*raised], evidence)


def _spelled(error: BaseException) -> str:
    return f"{type(error).__name__} ({error})"


def _added(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add in the order of the ranks, in at least fp32; integers wrap."""
    first = parts[0]
    wide = torch.promote_types(first.dtype, torch.float32) if first.is_floating_point() else first.dtype
    total = first.to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(first.dtype)


def _to_each(x: torch.Tensor, size: int) -> list[torch.Tensor]:
    return [x.clone() for _ in range(size)]


def _nothing(parts: Sequence[Any]) -> Sequence[Any]:
    return parts


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def _inherited_modes() -> Callable[[], Any]:
    """Make a context in which a thread has the caller's modes: inference mode, function modes, and the CUDA stream."""
    inference, modes = torch.is_inference_mode_enabled(), list(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    @contextmanager
    def inherited() -> Iterator[None]:
        with torch.inference_mode(inference), torch.cuda.stream(stream):
            for mode in modes:
                _push_mode(mode)  # type: ignore[no-untyped-call]
            try:
                yield
            finally:
                for _ in modes:
                    _pop_mode()  # type: ignore[no-untyped-call]

    return inherited
