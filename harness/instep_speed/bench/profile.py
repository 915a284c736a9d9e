"""A round's time on the device by kind of work, and the gaps in it, from torch's profiler.

Leaves out: the total time (`kinds/rounds.py`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

# Kind of work -> parts of the names of its kernels; the first match counts.
KINDS: dict[str, tuple[str, ...]] = {
    "conv and its inputs": ("conv", "gdn_inputs"),
    "states": ("_window", "staged_decode", "prepare", "_solve", "carry", "fused_staged", "gated_delta", "gdn"),
    "attention": ("attend", "attention", "flash", "read_parts", "read_alone", "join_parts", "read_chunk"),
    "products": ("gemm", "gemv", "cutlass", "nvjet", "cublas", "splitk", "linear", "matmul", "moe", "sm90_", "sm80_"),
    "norms": ("norm", "draft_inputs"),
    "choices": ("pick", "accept", "argmax", "draw", "topk"),
    "copies and fills": ("memcpy", "memset", "copy", "fill", "cat", "move", "gather", "_join", "store_rows", "select",
                         "embed"),
    "rotary, gates, adds": ("rotary", "gate", "add", "silu", "elementwise"),
}  # fmt: skip
OTHER = "index ops and others"
HOLD = "_hold"  # the kernel of `instep_speed/gate/gpu_operations.py` that holds the device back

Span = tuple[float, float, str]  # a kernel's start, end and name


def by_work(rounds: Sequence[Callable[[], object]], device: str) -> dict[str, Any]:
    """Profile rounds: {"work": kind -> microseconds, "launches": kernels, "gap_us": longest gap}, each per round.

    The device is held back while the host launches a round, just as it is busy with the previous round when rounds
    overlap.
    So a gap belongs to the device: under the profiler the host is slower than the device. If a hold ended before its
    round was launched, no gap is reported.
    """
    if not device.startswith("cuda"):
        for play in rounds:
            play()
        return {}
    from ..gate.gpu_operations import Card

    card, held = Card(device), list[bool]()
    try:
        with warnings.catch_warnings(action="ignore"), torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA]
        ) as profile:
            for play in rounds:
                card.wait()
                card.hold()
                play()
                held.append(card.release() is not None)
    except RuntimeError as failed:  # the driver of this machine gives no traces; the rounds were still timed
        return {"not_profiled": str(failed)}
    events: Any = profile.events()
    spans = sorted((one.time_range.start, one.time_range.end, one.name) for one in events
                   if str(one.device_type).endswith("CUDA"))  # fmt: skip
    if not any(name != HOLD for _, _, name in spans):
        return {"not_profiled": "the profiler saw no kernel"}
    return by_kind(spans, len(rounds), all(held))


def by_kind(spans: Sequence[Span], rounds: int, held: bool) -> dict[str, Any]:
    """Sum kernel times by kind, in the order of their starts, each round after a kernel HOLD; in microseconds.

    Work of another stream during the hold, such as copying inputs, counts as work and ends no gap. If a HOLD is
    missing, the start of a round is unknown and no gap is reported.
    """
    work, launches, longest, free, until = dict[str, float](), 0, 0.0, math.inf, math.inf
    held = held and sum(name == HOLD for _, _, name in spans) == rounds
    for start, end, name in spans:
        if name == HOLD:
            free, until = end, math.inf  # the first kernel of a round has no predecessor
            continue
        kind = kind_of(name)
        work[kind] = work.get(kind, 0.0) + (end - start) / rounds
        launches += 1
        if start >= free:
            longest = max(longest, start - until)
            until = end if math.isinf(until) else max(until, end)  # a kernel may end after one that starts later
    found = {"work": dict(sorted(work.items(), key=lambda one: -one[1])), "launches": round(launches / rounds)}
    return {**found, "gap_us": longest} if held else found


def gap(told: Mapping[str, Any]) -> str:
    """Format the number of launches and the longest gap between two of them."""
    said = f"{told['launches']} launches"
    return f"{said}, longest gap {told['gap_us']:.1f} us" if "gap_us" in told else said


def kind_of(kernel: str) -> str:
    """The kind of work of a kernel, by its name."""
    name = kernel.lower()
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), OTHER)
