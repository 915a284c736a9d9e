"""Op sets for a GPU whose results are right, and wrong under one kind of stress, or for one tool of compute-sanitizer.

    instep replay fixtures/traces/faults/ragged.jsonl --device cuda --graphs --ops support.kernels.under_stress:IN_PLACE

Leaves out: engines that miss a wait between streams (`harness/test_stress.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from instep_optimized import load

TRITON = load("triton")
PROGRAMS, READS_NS = 64, 50_000
WORD = tl.constexpr(
    "{ .shared .align 4 .b8 word[4]; .reg .u64 at; mov.u64 at, word; st.shared.u32 [at], $1; ld.shared.u32 $0, [at]; }")
LONG_NS = 15_000_000  # several slices of time
TABLE = 9 << 18  # numbers of a copy: 9 MiB, so that nothing else is put where it was


@triton.jit
def _shift(x, size, reads, BLOCK: tl.constexpr):
    """Each program moves the block of the program before it to its own place, in the same memory.

    It stays after its store as long as before, so all that run next to it have stored when the next one begins. That
    one reads the L2 cache, because the L1 cache may have a line as it was before.
    """
    program, count = tl.program_id(0), tl.num_programs(0)
    lane, begun = tl.arange(0, BLOCK), globaltimer()
    moved = tl.load(x + (program + count - 1) % count * size + lane, lane < size, cache_modifier=".cg")
    while globaltimer() < begun + reads:
        pass
    tl.store(x + program * size + lane, moved, lane < size)
    while globaltimer() < begun + 2 * reads:
        pass


def in_place(**given: Any) -> torch.Tensor:
    """A norm whose result is moved to its place by a shift that needs all programs to run at the same time."""
    right = TRITON.norm(**given)
    size = -(-right.numel() // PROGRAMS)
    room = right.new_zeros(PROGRAMS * size)
    room[: right.numel()] = right.flatten()
    room = room.roll(-size)
    _shift[(PROGRAMS,)](room, size, READS_NS, BLOCK=triton.next_power_of_2(size), num_warps=32)  # two fill an SM
    return room[: right.numel()].view(right.shape)


class Dangling:
    """A norm that has a copy of its weight in the graphs, by its address; `free` lets all copies go."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []  # next to each copy: what has something in it is never given back
        self._copies: dict[int, torch.Tensor] = {}
        self._freed = False

    def __call__(self, *, weight: torch.Tensor, **given: Any) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            weight = self._copies.get(weight.data_ptr(), weight)
        elif not self._freed and weight.data_ptr() not in self._copies:
            room, kept = (torch.empty(TABLE, device=weight.device, dtype=weight.dtype) for _ in range(2))
            self._copies[weight.data_ptr()] = room[: len(weight)].copy_(weight)
            self._kept.append(kept)
        return TRITON.norm(weight=weight, **given)

    def free(self) -> None:
        self._freed = True
        self._copies.clear()


def over_a_barrier(**given: Any) -> torch.Tensor:
    """An embedding that waits for a kernel whose numbers lie over a barrier, and adds the words that changed there."""
    from support.kernels.reused_barriers import NUMBERS, forgotten
    from support.kernels.reused_barriers import PROGRAMS as KERNELS

    right = TRITON.embed(**given)
    changed = torch.zeros(KERNELS, NUMBERS, dtype=torch.int32, device=right.device)
    forgotten[(KERNELS,)](changed, LONG_NS, False, NUMBERS, False, num_warps=4)
    return right + changed.count_nonzero().to(right.dtype)


# ---- wrong accesses that change no result, each for one tool of compute-sanitizer (`running/sanitized.py`)


@triton.jit
def _keep(x, at, kept):
    tl.store(kept, tl.load(x + at))


def past_the_end(**given: Any) -> torch.Tensor:
    """memcheck: a norm after which a program reads the number after the end of the result."""
    right = TRITON.norm(**given)
    _keep[(1,)](right, right.numel(), right.new_zeros(1))
    return right


def unwritten(**given: Any) -> torch.Tensor:
    """initcheck: a norm after which a program reads a number that nothing has written."""
    right = TRITON.norm(**given)
    _keep[(1,)](torch.empty_like(right), 0, right.new_zeros(1))
    return right


@triton.jit
def _race(kept, N: tl.constexpr):
    """All warps write one word of shared memory, and read it, without a barrier between."""
    lane = tl.arange(0, N)
    tl.store(kept + lane, tl.inline_asm_elementwise(WORD, "=r,r", [lane], tl.int32, False, 1))


def raced(**given: Any) -> torch.Tensor:
    """racecheck: a norm after which warps race for a word of shared memory."""
    right = TRITON.norm(**given)
    _race[(1,)](torch.empty(128, dtype=torch.int32, device=right.device), N=128, num_warps=4)
    return right


IN_PLACE = replace(TRITON, name="in_place", norm=in_place)
OVER_A_BARRIER = replace(TRITON, name="over_a_barrier", embed=over_a_barrier)
PAST_THE_END = replace(TRITON, name="past_the_end", norm=past_the_end)
UNWRITTEN = replace(TRITON, name="unwritten", norm=unwritten)
RACED = replace(TRITON, name="raced", norm=raced)
