"""A rank in a separate process: a `Comm` over torch.distributed that compares calls before it makes them.

The calls of a rank are numbered. A rank posts each call in a key-value store, and reads the calls of the other ranks
with the same number. If they differ, every rank raises before any data is exchanged: no sum mixes two results, and no
rank hangs. A rank that does not come is reported after a time limit; a rank that raised or died, at once. Tensors are
moved by torch.distributed alone, since a value in the store has at most 8 MiB. Leaves out: starting the processes
(`instep.run.rank_processes`).
"""

import ctypes
import io
import math
import os
import pickle
import signal
import threading
import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from instep_reference.contract.place_names import Place

from . import Call, Comm
from .lockstep import (
    LEAST,
    LIMIT_S,
    PERIODS,
    Line,
    RankError,
    RankKilled,
    RankRaised,
    RankWaits,
    caller,
    computed_s,
    some_raised,
    some_wait,
    unread,
)

T = TypeVar("T")
BACKENDS = ("gloo", "nccl")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1e-4, 1e-2  # seconds between two looks at what another rank does
END, RAISED, COMPARED = "end", "raised", "compared"  # kinds of calls that the engine does not make
ENDED = "has ended its replay"  # why a rank without an error has died
HOST = "127.0.0.1"
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)  # signals that no fault of an engine raises
CLOSES_S = 10.0  # seconds in which NCCL must end
LOOKS_S = 0.2  # seconds between two looks for a rank that has died
POSTED_S = 2.0  # seconds in which the end of a process is posted after its connections are lost
ALIGNED = 16  # bytes at whose multiples a tensor begins in a buffer of several


class _Kept(NamedTuple):
    """A tensor as a post describes it: its bytes are in a buffer, from `begin`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    away: bool  # not on the host
    begin: int


class Post(NamedTuple):
    """The post of a rank about a call: a pickled value, and the bytes of the tensors in it."""

    call: Call
    given: bytes
    size: int = 0


def call_of(kind: str) -> Call:
    """A call without a tensor."""
    return Call(kind, (), torch.int64)


def died(rank: int) -> str:
    """The key under which the end of a rank is posted: the reason, and the signal that ended it, if one did."""
    return f"died/{rank}"


class Processes:
    """The group of all ranks as the process of one rank has it, and its `Comm`.

    store     a key-value store that all processes share;  backend: gloo or nccl
    limit_s   seconds that this rank waits for another one, again and again while that one computes (`Lockstep`)
    describe  what is posted about an exception of this rank
    """

    def __init__(
        self, rank: int, size: int, store: Store, backend: str, limit_s: float = LIMIT_S,
        describe: Callable[[BaseException], Any] = str,
    ) -> None:
        self.rank, self.size, self.limit_s, self.ranks = rank, size, limit_s, (rank,)
        self.comms: tuple[Comm, ...] = (self,)
        self.calls: list[Call] = []
        self.late: tuple[int, ...] = ()  # ranks that this one has reported, because they did not come
        self._large: str | None = None  # the key of a post that the others may still read
        self._store, self._describe = store, describe
        store.set(f"process/{rank}", str(os.getpid()))
        self._number, self._letters = 0, defaultdict[tuple[int, int], int](int)
        self._gave = defaultdict[int, list[tuple[Call, Line]]](list)  # of this run, by rank
        self._took = defaultdict[int, int](int)  # of this run, by rank
        self._doing = "started"
        self._compares = True
        self._graphs = weakref.WeakSet[Any]()  # CUDA graphs with collectives of this rank
        self._device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", torch.cuda.current_device())
        self._sent: list[Any] = []
        self._transport: Any = _transport(backend, PrefixStore("transport", store), rank, size, limit_s)
        self._ways: dict[bool, Any] = {}  # what moves tensors to later ranks, and to earlier ones, with NCCL

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Run the function of this rank, as `Lockstep.run` does for all."""
        (function,) = functions
        self._gave.clear()
        self._took.clear()
        try:
            found = function()
        except (RankError, RankKilled):
            raise  # the others know it
        except Exception as error:
            raised = self.exchange(call_of(RAISED), (type(error).__name__, str(error), self._describe(error)))
            if len({kind for kind, _, _ in raised}) == 1:
                raise  # every rank raised the same
            self._differ([Post(call_of(RAISED), _packed(one)[0]) for one in raised])
        if self._compares:
            self._must_have_arrived()
        return [found]

    def _must_have_arrived(self) -> None:
        """Compare what each rank sent in this run with what the others received."""
        every = self.exchange(call_of(END), (dict(self._gave), dict(self._took)))
        left = {(source, to): calls[every[to][1].get(source, 0) :]
                for source, (gave, _) in enumerate(every) for to, calls in gave.items()}  # fmt: skip
        if left := {between: calls for between, calls in left.items() if calls}:
            raise unread(left)

    @contextmanager
    def uncompared(self) -> Iterator[None]:
        """Make calls without comparing them with those of the other ranks, as in production.

        Each rank has compared the same calls before, and all of them enter and leave at the same event. If a rank dies
        meanwhile, NCCL is aborted, as its kernels would wait for ever, and the end of that rank is raised.
        """
        self._compares, over = False, threading.Event()
        watches = threading.Thread(target=self._abort_after_a_death, args=(over,), daemon=True)
        watches.start()
        try:
            yield
        except Exception as error:
            gone = self._death("made calls that are not compared")
            if gone is None or isinstance(error, RankError | RankKilled):
                raise
            raise gone from error
        finally:
            over.set()
            watches.join()
            self._compares = True

    def _abort_after_a_death(self, over: threading.Event) -> None:
        while not over.wait(LOOKS_S):
            if self._device.type == "cuda" and self._death("") is not None:
                for one in (self._transport, *self._ways.values()):
                    one.abort()
                return

    def close(self) -> None:
        """End the threads that move data. No call may follow, and no graph with collectives can be replayed.

        NCCL ends only after the graphs that hold its collectives, which a finding or a traceback may still hold. If it
        does not end in time, it is left alone, since its destructor would wait for ever.
        """
        transports = [one for one in (self._transport, *self._ways.values()) if one is not None]
        self._transport, self._ways, self._sent = None, {}, []
        if self._device.type != "cuda" or not transports:
            return
        for graph in self._graphs:
            graph.reset()
        # Kernels that wait for a rank end, too.
        ends = threading.Thread(target=lambda: [one.abort() for one in transports], daemon=True)
        ends.start()
        ends.join(CLOSES_S)
        if ends.is_alive():
            for one in transports:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
            warnings.warn(f"NCCL of rank {self.rank} did not end within {CLOSES_S:g} s; its memory stays in use",
                          RuntimeWarning, stacklevel=2)  # fmt: skip

    def ends_before(self, graph: Any) -> None:
        """Register a CUDA graph with collectives, which must end before NCCL does."""
        self._graphs.add(graph)

    def take_calls(self) -> list[list[Call]]:
        """Return the calls of this rank since the last look."""
        found, self.calls = self.calls, []
        return [found]

    def gather(self, mine: Sequence[T]) -> list[T]:
        """Return the values of all ranks. mine: that of this rank"""
        return self.exchange(call_of(COMPARED), *mine)

    def meet(self, rank: int, call: Call, given: Any, make: Callable[[Sequence[Any]], Sequence[Any]]) -> Any:
        """Return this rank's result of `make`, which every rank computes from the tensors that all gave."""
        return make(self.exchange(call, given))[rank]

    def once(self, call: Call, make: Callable[[], T]) -> T:
        self.exchange(call)
        return make()

    def exchange(self, call: Call, given: Any = None) -> list[Any]:
        """Post a call with what this rank gives, and return what all ranks gave in the same call.

        Tensors of other ranks arrive on the host, or on the card of this rank, as they were there.
        """
        if not self._compares:
            assert given is None or call.kind == RAISED, "nothing is exchanged while calls are not compared"
            return [given] * self.size
        packed, tensors, size = _packed(given)  # which may raise: then the others find that in place of this call
        number, self._number = self._number, self._number + 1
        mine = Post(call, packed, size)
        self._store.set(f"{number}/{self.rank}", pickle.dumps(mine))  # type: ignore[arg-type]
        posts = [mine if rank == self.rank else self._posted(rank, f"{number}/{rank}", call)
                 for rank in range(self.size)]  # fmt: skip
        self._doing = str(call)
        if self._large is not None:  # all ranks are here, so none still reads it
            self._store.delete_key(self._large)
        self._large = None if given is None else f"{number}/{self.rank}"
        if any(other.call != call for other in posts):
            self._differ(posts)
        buffers = self._moved(call, tensors, [post.size for post in posts])
        return [given if rank == self.rank else _unpacked(post.given, buffer)
                for rank, (post, buffer) in enumerate(zip(posts, buffers, strict=True))]  # fmt: skip

    def _moved(self, call: Call, tensors: Sequence[tuple[_Kept, torch.Tensor]], sizes: Sequence[int]) -> Any:
        """The buffers of all ranks with the bytes of their tensors."""
        if not any(sizes):
            return [None] * self.size
        mine = torch.zeros(max(sizes), dtype=torch.uint8, device=self._device)
        for kept, x in tensors:
            # An axis of one element may have any stride, also in contiguous memory.
            flat = x.detach().contiguous().as_strided((x.numel(),), (1,)).view(torch.uint8)
            mine[kept.begin : kept.begin + len(flat)].copy_(flat)
        buffers = [torch.empty_like(mine) for _ in range(self.size)]
        with self._reported(call):
            self._transport.allgather([buffers], [mine]).wait()
        return buffers

    # The collectives

    def all_reduce(self, x: torch.Tensor, place: Place | None = None) -> torch.Tensor:
        with self._call("all_reduce", x, place):
            wide = torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype
            total = x.to(wide, copy=True).contiguous()
            self.add_in_place(total)
        return total.to(x.dtype)

    def add_in_place(self, x: torch.Tensor) -> None:
        """Add x of all ranks into it, as `all_reduce` does, and compare and log no call."""
        self._transport.allreduce([x]).wait()

    def all_gather(self, x: torch.Tensor, axis: int, place: Place | None = None) -> torch.Tensor:
        with self._call("all_gather", x, place):
            x = x.contiguous()
            parts = [torch.empty_like(x) for _ in range(self.size)]
            self._transport.allgather([parts], [x]).wait()
        return torch.cat(parts, axis)

    def broadcast(self, x: torch.Tensor, place: Place | None = None) -> torch.Tensor:
        with self._call("broadcast", x, place):
            found = x.clone().contiguous()
            self._transport.broadcast([found], dist.BroadcastOptions()).wait()  # from rank 0
        return found

    def send(self, x: torch.Tensor, to: int, place: Place | None = None) -> None:
        call, number = Call("send", tuple(x.shape), x.dtype, place, to), self._next(self.rank, to)
        self.calls.append(call)
        self._gave[to].append((call, caller()))
        post = pickle.dumps(Post(call, b""))
        self._store.set(f"mail/{self.rank}/{to}/{number}", post)  # type: ignore[arg-type]
        copied = x.clone().contiguous()
        # Both must live until it has arrived.
        self._sent = [one for one in self._sent if not one[0].is_completed()]
        self._sent.append((self._way(self.rank, to).send([copied], to, number), copied))

    def recv(self, like: torch.Tensor, source: int, place: Place | None = None) -> torch.Tensor:
        call, number = Call("recv", tuple(like.shape), like.dtype, place, source), self._next(source, self.rank)
        self.calls.append(call)
        post = self._posted(source, f"mail/{source}/{self.rank}/{number}", call, f"{self._number}/{source}")
        sent = post.call
        if (sent.shape, sent.dtype) != (call.shape, call.dtype):
            raise ValueError(f"rank {source} is {sent}; rank {self.rank} is {call}")  # which `run` posts
        found = torch.empty_like(like).contiguous()
        self._way(source, self.rank).recv([found], source, number).wait()
        self._took[source] += 1
        return found

    def _way(self, source: int, to: int) -> Any:
        """Return what moves tensors in this direction.

        NCCL makes all transfers of two ranks one after the other, and a send must not wait for one the other way round.
        A send may also wait for a rank that compiles kernels.
        """
        if self._device.type != "cuda":
            return self._transport
        if (up := source < to) not in self._ways:
            self._ways[up] = _transport("nccl", PrefixStore("up" if up else "down", self._store), self.rank, self.size,
                                        PERIODS * self.limit_s)  # fmt: skip
        return self._ways[up]

    def _next(self, source: int, to: int) -> int:
        self._letters[source, to] += 1
        return self._letters[source, to] - 1

    @contextmanager
    def _call(self, kind: str, x: torch.Tensor, place: Place | None) -> Iterator[None]:
        """Compare a call with those of the other ranks, and make it inside."""
        call = Call(kind, tuple(x.shape), x.dtype, place)
        self.calls.append(call)
        self.exchange(call)
        with self._reported(call):
            yield

    @contextmanager
    def _reported(self, call: Call) -> Iterator[None]:
        """Report a rank that has died since its post, or that makes no such call."""
        try:
            yield
        except RuntimeError as error:
            until = time.monotonic() + POSTED_S
            while (gone := self._death(f"waits {call}")) is None and time.monotonic() < until:
                time.sleep(LONGEST_PAUSE_S)
            if gone is not None:
                raise gone from error
            why = str(error).splitlines()[0].partition(". ")[0]
            raise RankWaits(f"rank {self.rank} waits {call}, and got nothing within {self.limit_s:g} s, or lost the "
                            f"connection ({why})", [self.rank]) from error  # fmt: skip

    # The other ranks

    def _posted(self, rank: int, key: str, call: Call, instead: str | None = None) -> Post:
        """Wait for the post of another rank. instead: what it posts if it does not make this post any more"""
        begun, pause, periods = time.monotonic(), FIRST_PAUSE_S, 0
        before: float | None = None
        while not self._store.check([key]):
            if instead is not None:
                if pause == FIRST_PAUSE_S:
                    self._store.set(f"waits/{self.rank}", pickle.dumps((rank, key)))  # type: ignore[arg-type]
                vain = self._store.check([instead]) or (pause == LONGEST_PAUSE_S and self._in_circle(rank))
                if vain and not self._store.check([key]):
                    self.exchange(call)  # other ranks post other calls, so all ranks raise
            if self._store.check([died(rank)]) and not self._store.check([key]):
                gone = self._death(f"waits {call}")
                assert gone is not None, "its end is posted"
                raise gone
            waited = time.monotonic() - begun
            if before is None and waited > self.limit_s / 2:
                before = self._computed_s(rank)
            if before is not None and waited > self.limit_s:
                if periods < PERIODS and self._computed_s(rank) - before > LEAST * waited / 2:
                    begun, before, periods = time.monotonic(), None, periods + 1  # it compiles kernels, for example
                    continue
                says = (f"rank {rank} did not come within {self.limit_s:g} s, after it was {self._doing}; "
                        f"rank {self.rank} waits {call}")  # fmt: skip
                self.late = (rank,)
                raise RankWaits(says, self.late)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        post: Post = pickle.loads(self._store.get(key))
        return post

    def _death(self, mine: str) -> RankRaised | RankKilled | None:
        """The error about the rank that has died first; None: no other rank has. mine: what this rank does meanwhile"""
        gone = {one: pickle.loads(self._store.get(died(one))) for one in range(self.size)
                if one != self.rank and self._store.check([died(one)])}  # fmt: skip
        for one, (why, number) in gone.items():
            if number in FROM_OUTSIDE:
                return RankKilled(f"rank {one}: its process {why}, while rank {self.rank} {mine}: from outside, or "
                                  "because this machine has too little memory; run it again")
        first = next((one for one, (why, _) in gone.items() if why != ENDED), next(iter(gone), None))
        if first is None:
            return None
        # Other ranks end because of it.
        return RankRaised(f"rank {first} {gone[first][0]}; rank {self.rank} {mine}", [first])

    def _computed_s(self, rank: int) -> float:
        """Seconds that the process of another rank has computed; 0 before it has posted its number."""
        key = f"process/{rank}"
        return computed_s(int(self._store.get(key))) if self._store.check([key]) else 0.0

    def _in_circle(self, rank: int) -> bool:
        """Return whether a rank waits, over others, for a tensor of this one, so that none of them can go on."""
        for _ in range(self.size):
            if rank == self.rank or not self._store.check([f"waits/{rank}"]):
                return rank == self.rank
            rank, key = pickle.loads(self._store.get(f"waits/{rank}"))
            if self._store.check([key]):
                return False
        return False

    def _differ(self, posts: Sequence[Post]) -> NoReturn:
        """Raise what differing calls of the ranks show."""
        raised = {rank: _unpacked(post.given, None) for rank, post in enumerate(posts) if post.call.kind == RAISED}
        if raised:
            (_, _, evidence), *_ = raised.values()
            named = {rank: f"{kind} ({says})" for rank, (kind, says, _) in raised.items()}
            raise some_raised(named, self.size, evidence)
        raise some_wait({rank: post.call for rank, post in enumerate(posts) if post.call.kind != END}, self.size)


def _packed(given: Any) -> tuple[bytes, list[tuple[_Kept, torch.Tensor]], int]:
    """Pickle a value without its tensors. Return also these, and the size of a buffer for their bytes."""
    found, size, into = list[tuple[_Kept, torch.Tensor]](), 0, io.BytesIO()

    def kept(value: Any) -> _Kept | None:
        nonlocal size
        if not isinstance(value, torch.Tensor):
            return None
        one = _Kept(tuple(value.shape), value.dtype, value.device.type != "cpu", size)
        found.append((one, value))
        size += -(-value.numel() * value.element_size() // ALIGNED) * ALIGNED
        return one

    pickler = pickle.Pickler(into)
    pickler.persistent_id = kept  # type: ignore[method-assign]
    pickler.dump(given)
    return into.getvalue(), found, size


def _unpacked(packed: bytes, buffer: torch.Tensor | None) -> Any:
    """Return a pickled value with its tensors. buffer: their bytes; None: there are none"""

    def tensor(kept: _Kept) -> torch.Tensor:
        assert buffer is not None
        size = math.prod(kept.shape) * kept.dtype.itemsize
        x = buffer[kept.begin : kept.begin + size].view(kept.dtype).view(kept.shape)
        return x if kept.away else x.cpu()

    unpickler = pickle.Unpickler(io.BytesIO(packed))
    unpickler.persistent_load = tensor  # type: ignore[method-assign]
    return unpickler.load()


def _transport(backend: str, store: Store, rank: int, size: int, limit_s: float) -> Any:
    """The library that moves the data."""
    if backend == "nccl":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timedelta(seconds=limit_s)
        return dist.ProcessGroupNCCL(store, rank, size, nccl)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
    options._timeout = timedelta(seconds=limit_s)
    return dist.ProcessGroupGloo(store, rank, size, options)
