"""Real CUDA graphs, with the same `Recorder` interface as the emulator.

A capture computes nothing, but the warm-up before it runs the body for real. So the caller must give inputs with which
the body changes no byte (slots of -1, counts of 0), as `Runner` does. Leaves out: keys, buckets and inputs
(`capture_and_replay.py`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

from ..ops.op_protocols import Ops
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

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self.rooms = Rooms()

    def __call__(self, ops: Ops, body: Callable[[Ops, Break], T]) -> tuple[Recording, T]:
        assert not torch.cuda.is_current_stream_capturing(), "one capture at a time"
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)  # the warm-up reads the results of earlier launches on the caller's stream
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                body(ops, lambda eager, like: self.rooms.of(like))
        here.wait_stream(self._stream)
        graphs, eager = list[torch.cuda.CUDAGraph](), list[Callable[[], None]]()

        def between(call: Callable[[torch.Tensor], None], like: torch.Tensor) -> torch.Tensor:
            graphs[-1].capture_end()
            room = self.rooms.of(like)  # allocated by the warm-up, so outside of the graphs' pool
            eager.append(partial(call, room))
            self._begin(graphs)
            return room

        # As `torch.cuda.graph` does before a capture.
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        with torch.cuda.stream(self._stream):
            self._begin(graphs)
            try:
                outputs = body(ops, between)
            finally:
                graphs[-1].capture_end()
        here.wait_stream(self._stream)
        return (Segments(graphs, eager) if eager else graphs[0]), outputs

    def _begin(self, graphs: list[torch.cuda.CUDAGraph]) -> None:
        """Begin a capture in the pool of all graphs."""
        graphs.append(torch.cuda.CUDAGraph())
        graphs[-1].capture_begin(pool=self._pool)
