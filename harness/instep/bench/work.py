"""A round's time on the device by kind of work, from torch's profiler.

Leaves out: the time itself (`kinds/rounds.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

# Kind of work -> what the names of its kernels contain; the first that fits counts.
KINDS: dict[str, tuple[str, ...]] = {
    "states": ("_window", "_chunk", "_solve", "_carry", "gated_delta", "gdn"),
    "attention": ("attend", "attention", "flash", "read_parts", "join_parts", "read_chunk"),
    "conv and its inputs": ("conv", "inputs"),
    "products": ("gemm", "gemv", "cutlass", "nvjet", "cublas", "splitk", "linear", "matmul", "moe", "sm90_", "sm80_"),
    "norms": ("norm",),
    "choices": ("pick", "accept", "argmax", "draw", "topk"),
    "copies and fills": ("memcpy", "memset", "copy", "fill", "cat", "move", "store_rows", "select", "embed"),
    "rotary, gates, adds": ("rotary", "gate", "add", "silu", "elementwise"),
}
OTHER = "index ops and others"


def by_work(run: Callable[[], object], rounds: int, device: str) -> dict[str, Any]:
    """{"work": kind -> microseconds a round, "launches": kernels a round, "longest_gap_us": between two kernels}."""
    if not device.startswith("cuda"):
        run()
        return {}
    try:
        with warnings.catch_warnings(action="ignore"), torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA]
        ) as profile:
            run()
    except RuntimeError as failed:  # a machine whose driver gives no traces; the rounds were timed all the same
        return {"not_profiled": str(failed)}
    events: Any = profile.events()
    spans = sorted((one.time_range.start, one.time_range.end, one.name) for one in events
                   if str(one.device_type).endswith("CUDA"))  # fmt: skip
    if not spans:
        return {"not_profiled": "the profiler saw no kernel"}
    work: dict[str, float] = {}
    for start, end, name in spans:
        kind = kind_of(name)
        work[kind] = work.get(kind, 0.0) + (end - start) / rounds
    gaps = [after[0] - before[1] for before, after in pairwise(spans)]
    return {"work": dict(sorted(work.items(), key=lambda one: -one[1])), "launches": round(len(spans) / rounds),
            "longest_gap_us": max(gaps, default=0.0)}  # fmt: skip


def kind_of(kernel: str) -> str:
    """The kind of work of a kernel, by its name."""
    name = kernel.lower()
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), OTHER)
