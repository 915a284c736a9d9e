"""A rank in a separate process: a `Comm` over torch.distributed that compares calls before it makes them.

The calls of a rank are numbered. A rank posts each call in a key-value store, and reads the calls of the other ranks
with the same number. If they differ, every rank raises before any data is exchanged: no sum mixes two results, and no
rank hangs. A rank that does not come is reported after a time limit; a rank that raised or died, at once. Leaves out:
starting the processes (`instep.run.rank_processes`).
"""

from __future__ import annotations

import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from instep_reference.contract.place_names import Place

from . import Call, Comm
from .lockstep import LIMIT_S, RankError, RankRaised, RankWaits, some_raised, some_wait

T = TypeVar("T")
BACKENDS = ("gloo", "nccl")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1e-4, 1e-2  # seconds between two looks at what another rank does
END, RAISED, COMPARED = "end", "raised", "compared"  # kinds of calls that the engine does not make
HOST = "127.0.0.1"
Post = tuple[Call, Any]


def call_of(kind: str) -> Call:
    """A call without a tensor."""
    return Call(kind, (), torch.int64)


def died(rank: int) -> str:
    """The key under which the end of a rank is posted, with its reason."""
    return f"died/{rank}"


class Processes:
    """The group of all ranks as the process of one rank has it, and its `Comm`.

    store     a key-value store that all processes share;  backend: gloo or nccl
    limit_s   seconds that this rank waits for another one
    describe  what is posted about an exception of this rank
    """

    def __init__(
        self, rank: int, size: int, store: Store, backend: str, limit_s: float = LIMIT_S,
        describe: Callable[[BaseException], Any] = str,
    ) -> None:
        self.rank, self.size, self.limit_s, self.ranks = rank, size, limit_s, (rank,)
        self.comms: tuple[Comm, ...] = (self,)
        self.calls: list[Call] = []
        self._large: str | None = None  # the key of a post that the others may still read
        self._store, self._describe = store, describe
        self._number, self._letters = 0, defaultdict[tuple[int, int], int](int)
        self._doing = "has not begun"
        self._sent: list[Any] = []
        self._transport: Any = _transport(backend, PrefixStore("transport", store), rank, size, limit_s)

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Run the function of this rank, as `Lockstep.run` does for all."""
        (function,) = functions
        try:
            found = function()
        except RankError:
            raise  # the others know it
        except Exception as error:
            raised = self.exchange(call_of(RAISED), (type(error).__name__, str(error), self._describe(error)))
            if len({kind for kind, _, _ in raised}) == 1:
                raise  # every rank raised the same
            self._differ([(call_of(RAISED), one) for one in raised])
        self.exchange(call_of(END))
        return [found]

    def close(self) -> None:
        """End the threads that move data. No call may follow."""
        self._transport, self._sent = None, []

    def take_calls(self) -> list[list[Call]]:
        """Return the calls of this rank since the last look."""
        found, self.calls = self.calls, []
        return [found]

    def gather(self, mine: Sequence[T]) -> list[T]:
        """Return the values of all ranks. mine: that of this rank"""
        return self.exchange(call_of(COMPARED), *mine)

    def meet(self, rank: int, call: Call, given: Any, make: Callable[[Sequence[Any]], Sequence[Any]]) -> Any:
        """Return this rank's result of `make`, which every rank computes from the tensors that all gave."""
        return make([one.to(given.device) for one in self.exchange(call, given)])[rank]

    def once(self, call: Call, make: Callable[[], T]) -> T:
        self.exchange(call)
        return make()

    def exchange(self, call: Call, given: Any = None) -> list[Any]:
        """Post a call with what this rank gives, and return what all ranks gave in the same call."""
        number, self._number = self._number, self._number + 1
        posted = given.cpu() if isinstance(given, torch.Tensor) else given
        self._store.set(f"{number}/{self.rank}", pickle.dumps((call, posted)))  # type: ignore[arg-type]
        posts: list[Post] = [
            (call, posted) if rank == self.rank else self._posted(rank, f"{number}/{rank}", call)
            for rank in range(self.size)]  # fmt: skip
        self._doing = str(call)
        if self._large is not None:  # all ranks are here, so nobody reads it
            self._store.delete_key(self._large)
        self._large = None if given is None else f"{number}/{self.rank}"
        if any(other != call for other, _ in posts):
            self._differ(posts)
        return [other for _, other in posts]

    # The collectives

    def all_reduce(self, x: torch.Tensor, place: Place | None = None) -> torch.Tensor:
        with self._call("all_reduce", x, place):
            wide = torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype
            total = x.to(wide, copy=True).contiguous()
            self._transport.allreduce([total]).wait()
        return total.to(x.dtype)

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
        self._store.set(f"mail/{self.rank}/{to}/{number}", pickle.dumps((call, None)))  # type: ignore[arg-type]
        copied = x.clone().contiguous()
        self._sent.append((self._transport.send([copied], to, number), copied))  # both must live until it has arrived

    def recv(self, like: torch.Tensor, source: int, place: Place | None = None) -> torch.Tensor:
        call, number = Call("recv", tuple(like.shape), like.dtype, place, source), self._next(source, self.rank)
        self.calls.append(call)
        sent, _ = self._posted(source, f"mail/{source}/{self.rank}/{number}", call)
        if (sent.shape, sent.dtype) != (call.shape, call.dtype):
            raise RankWaits(f"rank {source} is {sent}; rank {self.rank} is {call}", [self.rank])
        found = torch.empty_like(like).contiguous()
        self._transport.recv([found], source, number).wait()
        return found

    def _next(self, source: int, to: int) -> int:
        self._letters[source, to] += 1
        return self._letters[source, to] - 1

    @contextmanager
    def _call(self, kind: str, x: torch.Tensor, place: Place | None) -> Iterator[None]:
        """Compare a call with those of the other ranks, and make it inside."""
        call = Call(kind, tuple(x.shape), x.dtype, place)
        self.calls.append(call)
        self.exchange(call)
        try:
            yield
        except RuntimeError as error:  # a rank has died since
            raise RankWaits(f"rank {self.rank} waits {call}: {str(error).splitlines()[0]}", [self.rank]) from error

    # What the others do

    def _posted(self, rank: int, key: str, call: Call) -> Post:
        """Wait for the post of another rank."""
        begun, pause = time.monotonic(), FIRST_PAUSE_S
        while not self._store.check([key]):
            if self._store.check([died(rank)]) and not self._store.check([key]):
                why = self._store.get(died(rank)).decode()
                raise RankRaised(f"rank {rank} {why}; rank {self.rank} waits {call}", [rank])
            if time.monotonic() - begun > self.limit_s:
                says = (f"rank {rank} did not come within {self.limit_s:g} s, after it was {self._doing}; "
                        f"rank {self.rank} waits {call}")  # fmt: skip
                raise RankWaits(says, [rank])
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        post: Post = pickle.loads(self._store.get(key))
        return post

    def _differ(self, posts: Sequence[Post]) -> NoReturn:
        """Raise what differing calls of the ranks show."""
        raised = {rank: given for rank, (call, given) in enumerate(posts) if call.kind == RAISED}
        if raised:
            (_, _, evidence), *_ = raised.values()
            named = {rank: f"{kind} ({says})" for rank, (kind, says, _) in raised.items()}
            raise some_raised(named, self.size, evidence)
        raise some_wait({rank: call for rank, (call, _) in enumerate(posts) if call.kind != END}, self.size)


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
