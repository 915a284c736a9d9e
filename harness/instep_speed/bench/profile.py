"""A round's time on the device by kind of work, the gaps in it, and its collectives, from torch's profiler.

Leaves out: the total time (`kinds/rounds.py`).
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from instep_reference.contract.recurrences import RECURRENCES

# Kind of work -> parts of the names of its kernels; the first match counts.
COLLECTIVES, NCCL = "collectives", "nccl"
KINDS: dict[str, tuple[str, ...]] = {
    COLLECTIVES: (NCCL,),  # first, since NCCL names its kernels after what they do: AllGather
    "conv and its inputs": ("conv", "gdn_inputs"),
    "states": ("_window", "staged_decode", "prepare", "_solve", "carry", "fused_staged", "gated_delta", *RECURRENCES),
    "attention": ("attend", "attention", "flash", "read_parts", "read_alone", "join_parts", "read_chunk"),
    "products": ("gemm", "gemv", "cutlass", "nvjet", "cublas", "splitk", "linear", "matmul", "moe", "sm90_", "sm80_"),
    "norms": ("norm", "draft_inputs"),
    "choices": ("pick", "accept", "argmax", "draw", "topk"),
    "copies and fills": ("memcpy", "memset", "copy", "fill", "cat", "move", "gather", "_join", "store_rows", "select",
                         "embed"),
    "rotary, gates, adds": ("rotary", "gate", "add", "silu", "elementwise"),
}  # fmt: skip
OTHER = "index ops and others"
Span = tuple[float, float, str]  # a kernel's start, end and name
HOLD = "_hold"  # the kernel of `instep_speed/gate/gpu_operations.py` that holds the device back

@dataclass(frozen=True)
class Collectives:
    """The collectives of a round over ranks.

    calls     their number;  bytes: minimum that a rank sends for them;  floor_us: the minimum time for that
    ranks_us  for each rank, the median of its rounds by its own clock
    us        for each rank, the time of its NCCL kernels; a rank that comes first waits for the others within them
    moving_us the part of that in which all ranks are there: of each collective, the shortest kernel of all ranks
    """

    calls: float
    bytes: float
    floor_us: float
    ranks_us: Sequence[float]
    us: Sequence[float] = ()
    moving_us: float | None = None

    def data(self) -> dict[str, Any]:
        return asdict(self)


def by_work(
    rounds: Sequence[Callable[[], object]], device: str, meet: Callable[[], object] | None = None,
    keep: list[Span] | None = None,
) -> dict[str, Any]:
    """Profile rounds: {"work": kind -> microseconds, "launches": kernels, "gap_us": longest gap}, each per round.

    meet: launches a collective, with which all ranks begin a round together; it counts as a part of the hold
    keep: receives the profiled kernels

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
                if meet is not None:
                    meet()
                play()
                held.append(card.release() is not None)
    except RuntimeError as failed:  # the driver of this machine gives no traces; the rounds were still timed
        return {"not_profiled": str(failed)}
    events: Any = profile.events()
    spans = sorted((one.time_range.start, one.time_range.end, one.name) for one in events
                   if str(one.device_type).endswith("CUDA"))  # fmt: skip
    if not any(name != HOLD for _, _, name in spans):
        return {"not_profiled": "the profiler saw no kernel"}
    if meet is not None:
        spans = without_meetings(spans)
    if keep is not None:
        keep += spans
    return by_kind(spans, len(rounds), all(held))


def without_meetings(spans: Sequence[Span]) -> list[Span]:
    """Join each HOLD with the collective that follows it, in which the rank has waited for the others."""
    found, at = list[Span](), -1
    for start, end, name in spans:
        if name == HOLD:
            at = len(found)
        elif at >= 0 and kind_of(name) == COLLECTIVES:
            found[at] = (found[at][0], end, HOLD)
            at = -1
            continue
        found.append((start, end, name))
    return found


def of_ranks(every: Sequence[Sequence[Span]], rounds: int) -> tuple[list[float], float] | None:
    """Time of each rank in collectives, and the part in which all ranks are there; in microseconds of a round.

    every: the kernels of each rank.  None: the ranks have not the same collectives in each of these rounds, or none
    """
    lists = list[list[tuple[int, str, float]]]()
    for spans in every:
        number, mine = 0, list[tuple[int, str, float]]()
        for start, end, name in spans:
            number += name == HOLD
            if kind_of(name) == COLLECTIVES:
                mine.append((number, name, end - start))
        lists.append(mine)
    (first, *others) = [[(number, name) for number, name, _ in mine] for mine in lists]
    if {number for number, _ in first} != {*range(1, rounds + 1)} or any(one != first for one in others):
        return None
    times = [[took for _, _, took in mine] for mine in lists]
    return [sum(mine) / rounds for mine in times], sum(map(min, zip(*times, strict=True))) / rounds


def collectives(found: Mapping[str, Any]) -> str:
    """Format the collectives of a round: their number and floor, and the time of each rank in them."""
    parts = [f"{found['calls']:.0f} collectives of a rank, which sends {found['bytes'] / 1e6:.2f} MB for them: "
             f"at least {found['floor_us']:.0f} us"]  # fmt: skip
    if found.get("us"):
        parts += [f"rank {rank} {us:.0f} us in them" for rank, us in enumerate(found["us"])]
        parts += [f"{found['moving_us']:.0f} us of that with all ranks there"]
    rounds = ", ".join(f"{us:.0f}" for us in found["ranks_us"])
    return f"{', '.join(parts)}; rounds of the ranks {rounds} us"


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
