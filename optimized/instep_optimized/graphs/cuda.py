"""Real CUDA graphs, with the same `Recorder` interface as the emulator.

A capture computes nothing, but the warm-up before it runs the body for real. So the caller must give inputs with which
the body changes no byte (slots of -1, counts of 0), as `Runner` does. Leaves out: keys, buckets and inputs
(`capture_and_replay.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from ..ops.op_protocols import Ops

T = TypeVar("T")

WARM_UPS = 2  # the first run compiles kernels and makes library handles; the second runs as the capture will


class CudaGraphs:
    """A `Recorder`. All graphs share one memory pool; one stream captures them, one at a time.

    Because the pool is shared, a later graph may reuse the memory of an earlier graph's results once those are no
    longer referenced. So replays of different graphs must follow each other on one stream. An engine runs them like
    that. A replay waits for nothing.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, ops: Ops, body: Callable[[Ops], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        assert not torch.cuda.is_current_stream_capturing(), "one capture at a time"
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)  # the warm-up reads the results of earlier launches on the caller's stream
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                body(ops)
        here.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            outputs = body(ops)
        return graph, outputs
