"""Real CUDA graphs behind the same `Recorder` as the emulator's.

Leaves out: keys, buckets and inputs (`runner.py`). A capture computes nothing, but the warm-up before it runs the body
for real: whoever records gives inputs with which it changes no byte (slots of -1, counts of 0), as `Runner` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from ..ops.base import Ops

T = TypeVar("T")

WARM_UPS = 2  # the first run compiles kernels and makes handles; the second shows that it had nothing left to make


class CudaGraphs:
    """A `Recorder`: all graphs share one memory pool, one stream captures, one graph at a time.

    Sharing: a later graph may use the memory of an earlier one's results once nobody holds those; replays of different
    graphs must therefore follow each other on one stream, which is how an engine runs them. A replay waits for nothing.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, ops: Ops, body: Callable[[Ops], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        assert not torch.cuda.is_current_stream_capturing(), "one capture at a time"
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                body(ops)
        here.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            outputs = body(ops)
        return graph, outputs
