"""Attention with explicit layouts: one group of warps copies keys and values, two others read them. Device functions.

The steps are those of `attend_steps.py`, in its order and in the layouts that the compiler chooses there. So the bits
are the same. Leaves out: which program reads which positions (`attend_chunk_staged.py`, `attend_parts_staged.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared as fence_async_shared
from triton.experimental.gluon.language.nvidia.hopper import mbarrier as mbarrier

from .layouts import along, async_copy, barrier, begin_copy

READERS = gl.constexpr(2)  # groups of warps
COPIERS = gl.constexpr(4)  # warps
ALL_REGISTERS = 504  # of a thread of each of the three groups together


@gluon.jit
def places(DTYPE: gl.constexpr, NT: gl.constexpr, DT: gl.constexpr, STAGES: gl.constexpr, TILE: gl.constexpr):
    """Shared memory for STAGES steps  ->  keys, values; for both what says that a place is full, and that it is free"""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    keys = gl.allocate_shared_memory(DTYPE, [STAGES, NT, DT], TILE)
    values = gl.allocate_shared_memory(DTYPE, [STAGES, NT, DT], TILE)
    full_keys = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    full_values = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free_keys = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free_values = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full_keys.index(stage), count=32 * COPIERS)
        mbarrier.init(full_values.index(stage), count=32 * COPIERS)
        mbarrier.init(free_keys.index(stage), count=READERS)
        mbarrier.init(free_values.index(stage), count=READERS)
    fence_async_shared()
    barrier()
    return keys, values, full_keys, full_values, free_keys, free_values


@gluon.jit
def where(step, STAGES: gl.constexpr):
    """The place of a step, counted from the first, and the turn of it that fills the place: 0, 1, 0, ..."""
    return step % STAGES, step // STAGES & 1


@gluon.jit
def copied(done, start, stop, keys, values, strides, line, table_column, tiles,
           NT: gl.constexpr, DT: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Begin to copy positions start .. stop - 1, NT at a time. done: steps before these  ->  steps with these.

    What has no page, and the rest of the last step, becomes 0.
    """
    keys_page, keys_entry, values_page, values_entry = strides
    key_tiles, value_tiles, full_keys, full_values, free_keys, free_values = tiles
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DT, DT // 8], [gl.num_warps(), 1], [1, 0])
    position, d = gl.arange(0, NT, gl.SliceLayout(1, ROWS)), along(1, DT, ROWS)
    for step in range(start, stop, NT):
        at = step + position
        page = gl.load(line + at // PAGE * table_column, mask=at < stop, other=-1)
        inside = gl.expand_dims(page >= 0, 1) & (d >= 0)
        place, turn = where(done + (step - start) // NT, STAGES)
        mbarrier.wait(free_keys.index(place), turn ^ 1)
        source = keys + gl.expand_dims(page * keys_page + at % PAGE * keys_entry, 1) + d
        begin_copy(key_tiles.index(place), source, mask=inside)
        async_copy.mbarrier_arrive(full_keys.index(place), increment_count=False)
        mbarrier.wait(free_values.index(place), turn ^ 1)
        source = values + gl.expand_dims(page * values_page + at % PAGE * values_entry, 1) + d
        begin_copy(value_tiles.index(place), source, mask=inside)
        async_copy.mbarrier_arrive(full_values.index(place), increment_count=False)
    return done + (stop - start + NT - 1) // NT


@gluon.jit
def holes(line, table_column, start, stop, PAGE: gl.constexpr):
    """1 if some of the positions start .. stop - 1 have no page, else 0"""
    lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    found = 0
    for first in range(start // PAGE, (stop + PAGE - 1) // PAGE, 32):
        pages = gl.load(line + (first + lanes) * table_column, mask=(first + lanes) * PAGE < stop, other=0)
        found = gl.maximum(found, gl.max((pages < 0).to(gl.int32), axis=0))
    return found


@gluon.jit
def weighed(
    score, best, total, scale, step, stop, last, line, table_column, missing,
    NT: gl.constexpr, PAGE: gl.constexpr, ALL: gl.constexpr,
):  # fmt: skip
    """Scores of a step -> weights, the factor of what was summed before, the new maximum and sum. ALL: all are seen."""
    if not ALL:
        SCORES: gl.constexpr = score.type.layout
        at = step + along(1, NT, SCORES)
        score = gl.where((at < stop) & (at <= gl.expand_dims(last, 1)), score, float("-inf"))
        if missing != 0:
            for page in range(step // PAGE, (gl.minimum(step + NT, stop) + PAGE - 1) // PAGE):
                if gl.load(line + page * table_column) < 0:
                    score = gl.where((at >= page * PAGE) & (at < page * PAGE + PAGE), float("-inf"), score)
    higher = gl.maximum(best, gl.max(score, axis=1) * scale)
    shift = gl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: keep -inf - -inf out
    kept = gl.exp2(best - shift)
    shift = gl.expand_dims(shift, 1)
    weight = gl.exp2(gl.fma(score, gl.zeros_like(score) + scale, gl.zeros_like(score) - shift))
    return weight, kept, higher, total * kept + gl.sum(weight, axis=1)


@gluon.jit
def over_columns(rows, OF_ROW: gl.constexpr):
    """A number per row, as a factor of tiles in the layout of OF_ROW"""
    return gl.expand_dims(gl.convert_layout(rows, OF_ROW), 1)
