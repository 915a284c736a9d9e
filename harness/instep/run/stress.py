"""Stress while an engine runs on a GPU, so that a race that rarely loses loses (`--stress`).

    jitter     a delay of a drawn length on the stream of each event that is recorded or waited for
    squeeze    a kernel that spins on most multiprocessors, so that the programs of a launch run a few at a time
    poison     NaN in all free memory before each replay of a CUDA graph, so that a graph that reads memory which was
               freed after its capture reads NaN
    neighbour  another process on the same card, which multiplies matrices, allocates and frees

Stress changes no number of a correct engine. It acts on `torch.cuda.Event`, `torch.cuda.CUDAGraph` and torch's
allocator, so it reaches any engine that uses them. A kind that never acted is reported, and the run does not pass
(`Verdict.exit`). Leaves out: the kernel that spins (`few_multiprocessors.py`), and which numbers must agree.
"""

import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, cast
from unittest.mock import patch

import torch

from instep_reference.contract.engine import Event
from instep_reference.contract.errors import BadInput

from ..player import Observer
from ..setting import Setting
from ..verdict import Stressed

SHORTEST_S, LONGEST_S = 1e-5, 2e-2  # of a delay: a launch, and what the host needs for an event with its observers
CYCLES_PER_S = 2e9  # of a GPU's clock, about
POISON = 0xFF  # in every byte: NaN in each floating dtype, -1 in integers
NEIGHBOUR_S = 60.0  # in which another process must begin, and end
ALL_MEMORY = (0, 0)  # the number of the allocator's own pool; memory of graphs is in others


class Stress(Protocol):
    """One kind, active while its `with` lasts."""

    def __enter__(self) -> object: ...
    def __exit__(self, *failed: object) -> None: ...
    def result(self) -> Stressed: ...


class Jitter(Observer):
    """Delay a stream after each event that is recorded on it, and after each wait for one.

    So the work that follows runs late. If another stream reads its results without waiting, or the host does, it reads
    what was there before. If it must not run before some other work ends and does not wait, that other work is late.
    Half of the delays are none; the others are between `SHORTEST_S` and `LONGEST_S`, each order of magnitude equally
    often. In a capture a delay becomes a part of the graph, and nothing follows a record on a side stream: no stream
    waits for the delay, so the capture would fail. In a replay, delays while the engine is built do not count, except
    those in a graph.
    """

    def __init__(self, seed: int = 0) -> None:
        self._draw, self._lock, self._stack = random.Random(seed), threading.Lock(), ExitStack()
        self._seconds, self._streams, self._places = list[float](), set[object](), 0
        self._captured = tuple[object, ...]()  # the stream on which the last capture began
        self._eager, self._built = 0, -1  # delays outside of captures, now and before the first event

    def __enter__(self) -> None:
        for owner, name, made in ((torch.cuda.Event, "record", partial(self._followed, records=True)),
                                  (torch.cuda.Event, "wait", self._followed),
                                  (torch.cuda.CUDAGraph, "capture_begin", self._noted)):  # fmt: skip
            self._stack.enter_context(patch.object(owner, name, made(getattr(owner, name))))

    def __exit__(self, *failed: object) -> None:
        self._stack.close()

    def before(self, event: Event) -> None:
        self._built = self._eager if self._built < 0 else self._built

    def result(self) -> Stressed:
        times, total = len(self._seconds), 1e3 * sum(self._seconds)
        says = (f"{times:,} delays, {total:,.0f} ms in all, at {self._places:,} records and waits on "
                f"{len(self._streams)} streams")  # fmt: skip
        return Stressed(times - max(0, self._built), says, f"{says}, none during an event or in a graph" if self._places
                        else "the engine recorded no torch.cuda.Event and waited for none")  # fmt: skip

    def _followed(self, act: Callable[..., Any], records: bool = False) -> Callable[..., Any]:
        def delayed(event: Any, stream: Any = None) -> Any:
            stream = torch.cuda.current_stream() if stream is None else stream
            found = act(event, stream)
            with torch.cuda.stream(stream), self._lock:
                captures = torch.cuda.is_current_stream_capturing()
                if records and captures and stream not in self._captured:
                    return found
                self._places += 1
                self._streams.add(stream)
                if seconds := self._drawn():
                    self._seconds.append(seconds)
                    self._eager += not captures
                    torch.cuda._sleep(int(seconds * CYCLES_PER_S))  # type: ignore[no-untyped-call]
            return found

        return delayed

    def _noted(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def begin(*given: Any, **named: Any) -> Any:
            self._captured = (torch.cuda.current_stream(),)
            return act(*given, **named)

        return begin

    def _drawn(self) -> float:
        if self._draw.random() < 0.5:
            return 0.0
        return float(SHORTEST_S * (LONGEST_S / SHORTEST_S) ** self._draw.random())


class Poison:
    """Fill all free memory of the allocator before each replay of a CUDA graph.

    The memory of graphs stays as it is: a graph may keep numbers there from one replay to the next. On a stream other
    than that of the replay, the fill waits for this one, as an engine does before it uses such a stream again: until
    then, memory that was freed on it may still be read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stack = device, ExitStack()
        self._record, self._wait = torch.cuda.Event.record, torch.cuda.Event.wait  # before they are delayed
        self._replays = self._bytes = 0

    def __enter__(self) -> None:
        graph = torch.cuda.CUDAGraph
        self._stack.enter_context(patch.object(graph, "replay", self._poisoned(graph.replay)))

    def __exit__(self, *failed: object) -> None:
        self._stack.close()

    def result(self) -> Stressed:
        mean = self._bytes / max(1, self._replays) / 2**20
        says = f"{mean:,.1f} MiB of free memory before each of {self._replays:,} replays of graphs, on average"
        return Stressed(self._replays, says, "no CUDA graph was replayed while the allocator had free memory")

    def _poisoned(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def replay(graph: Any) -> Any:
            size, made = 0, cast(Any, torch.cuda.Event)()
            self._record(made, torch.cuda.current_stream(self._device))
            for number, address, count in free_blocks(_snapshot(), self._device.index):
                stream = _stream_at(number, self._device)
                self._wait(made, stream)
                with torch.cuda.stream(stream):
                    memory_at(address, count, self._device).fill_(POISON)
                size += count
            self._bytes += size
            self._replays += size > 0
            return act(graph)

        return replay


def free_blocks(snapshot: Sequence[Mapping[str, Any]], index: int) -> Iterator[tuple[int, int, int]]:
    """The free blocks of a card outside of graphs: the stream that they belong to, address, and bytes."""
    for segment in snapshot:
        if segment["device"] != index or tuple(segment["segment_pool_id"]) != ALL_MEMORY:
            continue
        yield from ((segment["stream"], block["address"], block["size"])
                    for block in segment["blocks"] if block["state"] == "inactive")  # fmt: skip


def memory_at(address: int, count: int, device: torch.device) -> torch.Tensor:
    """Bytes on a card that no tensor owns."""
    interface = {"shape": (count,), "typestr": "|u1", "data": (address, False), "version": 3}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=device)


class Neighbour:
    """Another process on the same card. The device gives slices of time to both, and interrupts kernels for them."""

    def __init__(self, device: torch.device, program: str | None = None) -> None:
        self._device, self._program, self._stack = device, program or OTHER_PROCESS, ExitStack()
        self._begun = self._ended = 0  # turns before and after

    def __enter__(self) -> None:
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="instep-neighbour-"))
        self._path = Path(folder, "turns")
        words = [sys.executable, "-P", "-c", self._program, str(self._device), str(self._path)]
        self._process = self._stack.enter_context(subprocess.Popen(words, stdin=subprocess.PIPE))
        self._stack.callback(self._process.kill)  # before it is waited for
        end = time.monotonic() + NEIGHBOUR_S
        while not self._path.exists() and self._process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        self._begun = self._counted()

    def __exit__(self, *failed: object) -> None:
        with self._stack:
            assert self._process.stdin is not None
            with suppress(BrokenPipeError):
                self._process.stdin.close()  # it ends when its input does, so it never outlives this process
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(NEIGHBOUR_S)
            self._ended = self._counted()

    def _counted(self) -> int:
        return int(self._path.read_text()) if self._path.exists() else 0

    def result(self) -> Stressed:
        turns = self._ended - self._begun
        return Stressed(turns, f"{turns:,} turns of another process on the card", "the other process ran nothing")


_snapshot: Any = torch.cuda.memory_snapshot  # which has no types


def _stream_at(address: int, device: torch.device) -> Any:
    made: Any = torch.cuda.ExternalStream
    return made(address, device) if address else torch.cuda.default_stream(device)  # for 0 it would be a new stream


OTHER_PROCESS = """
import os, random, sys, threading
import torch
card, path, draw = sys.argv[1], sys.argv[2], random.Random(0)
ended, turns = threading.Event(), 0
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
x = torch.randn(8192, 8192, device=card, dtype=torch.bfloat16)
while not ended.is_set():
    room = torch.full((draw.randrange(1, 2**24),), float("nan"), device=card)
    for _ in range(20):
        x @ x
    torch.cuda.synchronize(card)
    del room
    torch.cuda.empty_cache()
    turns += 1
    with open(path + ".new", "w") as file:
        file.write(str(turns))
    os.replace(path + ".new", path)
"""


def _poison(device: torch.device) -> Poison:
    if (allocator := torch.cuda.get_allocator_backend()) != "native":
        raise BadInput("--stress", found=f"poison with torch's allocator {allocator}",
                       expected="its native one, which lists free memory", hint="see PYTORCH_ALLOC_CONF")  # fmt: skip
    return Poison(device)


def _squeeze(device: torch.device) -> Any:
    from .few_multiprocessors import Squeeze  # its kernel is not interpreted

    return Squeeze(device)


# (device, seed) -> the kind
KINDS: Mapping[str, Callable[[torch.device, int], Any]] = {
    "jitter": lambda device, seed: Jitter(seed), "squeeze": lambda device, seed: _squeeze(device),
    "poison": lambda device, seed: _poison(device), "neighbour": lambda device, seed: Neighbour(device),
}


class Under:
    """All kinds of stress of a run.

    observers  for the player of the subject: kinds that act on each event
    """

    def __init__(self, kinds: Mapping[str, Stress] | None = None) -> None:
        self._kinds = kinds or {}
        self.observers = [kind for kind in self._kinds.values() if isinstance(kind, Observer)]

    def results(self) -> dict[str, Stressed]:
        """The result of each kind, complete once the stress has ended."""
        return {name: kind.result() for name, kind in self._kinds.items()}


@contextmanager
def stressed(setting: Setting, *, calm: bool = False) -> Iterator[Under]:
    """Put the engine of this setting under stress. calm: not, whatever the setting has"""
    if calm or not setting.stresses:
        yield Under()
        return
    device = torch.device(setting.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    kinds = {name: KINDS[name](device, seed) for name, seed in setting.stresses.items()}
    with ExitStack() as stack:
        for kind in kinds.values():
            stack.enter_context(kind)
        yield Under(kinds)
