"""Real CUDA graphs, with the same `Recorder` interface as the emulator.

A capture computes nothing, but the warm-up before it runs the body for real. So the caller must give inputs with which
the body changes no byte (slots of -1, counts of 0), as `Runner` does. Ranks that take turns in one process are captured
in one graph, with their collectives, in the order of their turns; the graph is launched once, when every rank replays
it. A rank with a separate process captures its own graph. Leaves out: keys, buckets and inputs
(`capture_and_replay.py`).
"""

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from threading import get_ident
from typing import Any, TypeVar

import torch

from ..ops.op_protocols import Ops
from ..ranks import Call, Comm
from ..ranks.processes import Processes
from .capture_and_replay import Break, Recording, Rooms, Segments

T = TypeVar("T")

WARM_UPS = 2  # the first run compiles kernels and makes library handles; the second runs as the capture will


class CudaGraphs:
    """A `Recorder`. All graphs share one memory pool; one stream captures them, one at a time.

    Because the pool is shared, a later graph may reuse the memory of an earlier graph's results once those are no
    longer referenced. So replays of different graphs must follow each other on one stream. An engine runs them like
    that. A replay waits for nothing. Inputs of eager calls between segments stay referenced, so that nothing reuses
    their memory. SGLang holds them weakly instead (`weak_ref_tensor.py`), which takes less memory.
    """

    def __init__(self, comm: Comm | None = None, *, threads: bool = False) -> None:
        """comm: that of the rank whose graphs these are

        threads: whether another thread may query the device during a capture, as that of NCCL does
        """
        self._comm, self._numbers = comm, count()
        self._mode = "thread_local" if threads or isinstance(comm, Processes) else "global"
        self._stream, self._pool = self._once("capture", (0, 0), lambda: (
            torch.cuda.Stream(), torch.cuda.graph_pool_handle()))  # type: ignore[no-untyped-call]  # fmt: skip
        self.rooms = Rooms()

    def __call__(self, ops: Ops, body: Callable[[Ops, Break], T]) -> tuple[Recording, T]:
        assert not torch.cuda.is_current_stream_capturing(), "one capture at a time"
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)  # the warm-up reads the results of earlier launches on the caller's stream
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                body(ops, lambda eager, like: self.rooms.of(like))
        here.wait_stream(self._stream)
        segments, eager, number = list[_Segment](), list[Callable[[], None]](), next(self._numbers)

        def begin() -> None:
            segments.append(_Segment((number, len(segments)), self._pool, self._mode, self._once, self._comm))

        def between(call: Callable[[torch.Tensor], None], like: torch.Tensor) -> torch.Tensor:
            segments[-1].end()
            room = self.rooms.of(like)  # allocated by the warm-up, so outside of the graphs' pool
            eager.append(partial(call, room))
            begin()
            return room

        # As `torch.cuda.graph` does before a capture.
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        with torch.cuda.stream(self._stream):
            begin()
            try:
                outputs = body(ops, between)
                segments[-1].end()
            except BaseException:
                segments[-1].give_up()
                raise
        here.wait_stream(self._stream)
        return (Segments(segments, eager) if eager else segments[0]), outputs

    def _once(self, kind: str, which: tuple[int, int], make: Callable[[], T]) -> T:
        """Run `make` once for all ranks of this process. which: the number of the graph, and of its segment"""
        return make() if self._comm is None else self._comm.once(Call(kind, which, torch.int64), make)


class _Segment:
    """A captured graph, or a segment of one; of ranks in one process, the graph of all of them.

    calls: the collectives that this rank made while it was captured
    """

    def __init__(
        self, which: tuple[int, int], pool: Any, mode: str, once: Callable[..., Any], comm: Comm | None
    ) -> None:
        self._which, self._once, self._comm = which, once, comm
        self.calls: Sequence[Call] = ()
        self._graph, self._thread = once("capture", which, partial(_begun, pool, mode))
        if isinstance(comm, Processes):
            comm.ends_before(self._graph)
        self._from = 0 if comm is None else len(comm.calls)

    def end(self) -> None:
        self._once("capture", self._which, self._graph.capture_end)
        if self._comm is not None:
            self.calls = tuple(self._comm.calls[self._from :])

    def give_up(self) -> None:
        """End the capture of a body that has raised, or the device would capture all that follows."""
        if self._thread == get_ident():  # CUDA refuses it in other threads
            with suppress(RuntimeError):
                self._graph.capture_end()

    def replay(self) -> None:
        if self._comm is not None:
            self._comm.calls.extend(self.calls)
        self._once("replay", self._which, self._graph.replay)


def _begun(pool: Any, mode: str) -> tuple[torch.cuda.CUDAGraph, int]:
    """Begin a capture in the pool of all graphs, and return it with the thread in which it must end."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode=mode)
    return graph, get_ident()
