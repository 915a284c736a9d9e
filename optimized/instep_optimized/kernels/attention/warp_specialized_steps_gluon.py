"""Attention with explicit layouts: one group of warps copies keys and values, others read them. Device functions.

The steps are those of `online_softmax.py`, in its order and in the layouts that the compiler chooses there. So the bits
are the same. Leaves out: which program reads which positions (`prefill_chunks_gluon.py`,
`split_kv_work_items_gluon.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...memory_addresses import Pages
from ..device.gluon_helpers import (
    TensorDescriptor,
    along,
    barrier,
    fence_async_shared,
    load_box,
    mbarrier,
    seen_as,
    stage_and_phase,
)
from ..runtime import hopper

WIDTH = 256  # numbers of a head; other widths were not measured
NARROW = torch.float8_e4m3fn  # dtype of numbers that have scales: `eight_bit_kv_gluon.py`
SCALED_HEADS = (1, 2, 4)  # numbers of KV heads with scales; others never ran
BOX = gl.constexpr(128)  # bytes of a row that are copied at a time where a page has fewer positions than a step


def fitted(
    query: torch.Tensor, pages: Pages, rows: int, positions: int, stages: int, registers: int, copier_registers: int
) -> tuple[tuple[TensorDescriptor | None, ...], dict[str, int]] | None:
    """Return pools, scales and constants of a kernel whose tiles have `rows` rows  ->  None if it does not fit

    registers: of a thread in the warp groups of the second function on; the first function's group gets the rest
    """
    pools, scales = (pages.keys, pages.values), (pages.key_scales, pages.value_scales)
    tiled = pages.key_scales is not None
    if query.element_size() != 2 or {pool.dtype for pool in pools} != {NARROW if tiled else query.dtype}:
        return None
    if tiled and (query.dtype is not torch.bfloat16 or positions != 64 or not all(map(_scales_copyable, scales))):
        return None
    if query.shape[2] != WIDTH or positions % 64 or not hopper(query.device):
        return None
    if not pages.table.shape[1]:  # nothing would be copied, and readers would wait for the first positions
        return None
    page = pages.keys.shape[1]
    if max(page, positions) % min(page, positions) or page % 8 or not all(map(_copyable, pools)):
        return None
    constants = {
        "MT": rows, "NT": positions, "DT": WIDTH, "PAGE": page, "STAGES": stages,
        "REGISTERS": registers, "COPIER_REGISTERS": copier_registers, "warps": 4,
    }  # fmt: skip
    return (*(_boxes(pool, positions) for pool in pools), *(_scale_boxes(x, positions) for x in scales)), constants


def _copyable(pool: torch.Tensor) -> bool:
    """Return whether a GPU can copy boxes of a pool. There may be other memory between its pages: a red zone.

    A page's pitch need not be a multiple of an entry's: the GPU only requires strides of whole 16 bytes.
    """
    left = (step * pool.element_size() % 16 for step in pool.stride()[:2])
    return pool.stride()[2:] == (pool.shape[3], 1) and pool.data_ptr() % 16 == 0 and not any(left)


def _boxes(pool: torch.Tensor, positions: int) -> TensorDescriptor:
    """Descriptor of boxes of a pool: a whole step, or BOX bytes of all positions of a page."""
    pages, size, heads, width = pool.shape
    rows = min(size, positions)
    seen = pool.as_strided((pages, size, heads * width), (*pool.stride()[:2], 1))
    tile = gl.NVMMASharedLayout(128, 8 * pool.element_size(), rank=3)
    box = width if rows == positions else BOX.value // pool.element_size()
    return TensorDescriptor.from_tensor(seen, [1, rows, box], tile)


def _scales_copyable(scales: torch.Tensor | None) -> bool:
    """Return whether the scales of a step or of a page are a box.

    A box has at most 256 numbers, and whole 128 bytes where buffers begin. The scales of a page are contiguous.
    """
    if scales is None or scales.dtype is not torch.float32:
        return False
    size, heads = scales.shape[1:3]
    fits = heads in SCALED_HEADS and size * heads % 32 == 0
    return fits and scales.data_ptr() % 16 == 0 and scales.stride(0) % 4 == 0


def _scale_boxes(scales: torch.Tensor | None, positions: int) -> TensorDescriptor | None:
    """Descriptor of boxes of scales: those of a step, or of a page, for all heads."""
    if scales is None:
        return None
    pages, size, heads = scales.shape[:3]
    seen = scales.as_strided((pages, size * heads), (scales.stride(0), 1))
    flat = gl.NVMMASharedLayout(0, 8 * scales.element_size(), rank=2)
    return TensorDescriptor.from_tensor(seen, [1, min(size, positions) * heads], flat)


@gluon.jit
def plus(x, y):
    """Add two partial sums over requests (for a scan)."""
    return x + y


@gluon.jit
def places(
    DTYPE: gl.constexpr, NT: gl.constexpr, DT: gl.constexpr, STAGES: gl.constexpr, OF_KEYS: gl.constexpr,
    OF_VALUES: gl.constexpr,
):  # fmt: skip
    """Allocate shared memory for STAGES steps -> keys, values; for both the barriers for a full and for a free place.

    OF_KEYS, OF_VALUES: groups of warps that read them.
    """
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, DTYPE.primitive_bitwidth, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    keys = gl.allocate_shared_memory(DTYPE, [STAGES, NT, DT], TILE)
    values = gl.allocate_shared_memory(DTYPE, [STAGES, NT, DT], TILE)
    full_keys = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    full_values = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free_keys = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free_values = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full_keys.index(stage), count=1)
        mbarrier.init(full_values.index(stage), count=1)
        mbarrier.init(free_keys.index(stage), count=OF_KEYS)
        mbarrier.init(free_values.index(stage), count=OF_VALUES)
    fence_async_shared()
    barrier()
    return keys, values, full_keys, full_values, free_keys, free_values


@gluon.jit
def _page_of(pages, step, stop, PAGE: gl.constexpr):
    """Return the page of a position; -1, before the first page, for a position after the last or without a page."""
    line, table_column = pages
    return gl.load(line + step // PAGE * table_column, mask=step < stop, other=-1).to(gl.int32)


@gluon.jit
def _begin(
    pool, scales, column, pages, step, stop, full, tile, beside,
    NT: gl.constexpr, DT: gl.constexpr, PAGE: gl.constexpr, KV: gl.constexpr,
):  # fmt: skip
    """Begin to copy the positions of a step, from one page or from several. Positions without a page become 0.

    scales: those of the pool, for all KV heads, which are copied into `beside`; None: the pool has none
    """
    BITS: gl.constexpr = tile.dtype.primitive_bitwidth
    EACH: gl.constexpr = BOX * 8 // BITS  # numbers of a row in a box
    BESIDE: gl.constexpr = 0 if scales is None else NT * KV * 4
    mbarrier.expect(full, NT * DT * BITS // 8 + BESIDE)
    BOXES: gl.constexpr = gl.NVMMASharedLayout(128, BITS, rank=3)
    if PAGE >= NT:
        whole = seen_as(tile, [1, NT, DT], BOXES, tile.dtype)
        load_box(pool, [_page_of(pages, step, stop, PAGE), step % PAGE, column], full, whole)
        if scales is not None:
            load_box(scales, [_page_of(pages, step, stop, PAGE), step % PAGE * KV], full, beside)
    else:
        PIECES: gl.constexpr = NT // PAGE
        boxes = seen_as(tile, [DT // EACH * PIECES, 1, PAGE, EACH], BOXES, tile.dtype)
        for piece in gl.static_range(PIECES):
            source = _page_of(pages, step + piece * PAGE, stop, PAGE)
            for part in gl.static_range(DT // EACH):
                load_box(pool, [source, 0, column + part * EACH], full, boxes.index(part * PIECES + piece))
        if scales is not None:
            lines = seen_as(beside, [PIECES, 1, PAGE * KV], gl.NVMMASharedLayout(0, 32, rank=2))
            for piece in gl.static_range(PIECES):
                load_box(scales, [_page_of(pages, step + piece * PAGE, stop, PAGE), 0], full, lines.index(piece))


@gluon.jit
def copied(
    done, start, stop, pools, scales, column, pages, tiles, beside,
    NT: gl.constexpr, DT: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr, KV: gl.constexpr,
):  # fmt: skip
    """Copy positions start .. stop - 1 of both pools, NT at a time. The rest of the last step may hold anything.

    done: steps before these  ->  with these.  scales, beside: of both pools, as in `_begin`
    """
    key_tiles, value_tiles, full_keys, full_values, free_keys, free_values = tiles
    for step in range(start, stop, NT):
        place, phase = stage_and_phase(done + (step - start) // NT, STAGES)
        mbarrier.wait(free_keys.index(place), phase ^ 1)
        _begin(pools[0], scales[0], column, pages, step, stop, full_keys.index(place), key_tiles.index(place),
               None if scales[0] is None else beside[0].index(place), NT, DT, PAGE, KV)  # fmt: skip
        mbarrier.wait(free_values.index(place), phase ^ 1)
        _begin(pools[1], scales[1], column, pages, step, stop, full_values.index(place), value_tiles.index(place),
               None if scales[1] is None else beside[1].index(place), NT, DT, PAGE, KV)  # fmt: skip
    return done + (stop - start + NT - 1) // NT


@gluon.jit
def holes(line, table_column, start, stop, PAGE: gl.constexpr):
    """Return 1 if some of the positions start .. stop - 1 have no page, else 0."""
    lanes = gl.arange(0, 128, gl.BlockedLayout([4], [32], [gl.num_warps()], [0]))
    found = 0
    for first in range(start // PAGE, (stop + PAGE - 1) // PAGE, 128):
        pages = gl.load(line + (first + lanes) * table_column, mask=(first + lanes) * PAGE < stop, other=0)
        found = gl.maximum(found, gl.max((pages < 0).to(gl.int32), axis=0))
    return found


@gluon.jit
def seen(score, step, stop, last, pages, missing, NT: gl.constexpr, PAGE: gl.constexpr):
    """Mask the scores of positions that a row does not see, or that have no page."""
    line, table_column = pages
    SCORES: gl.constexpr = score.type.layout
    at = step + along(1, NT, SCORES)
    score = gl.where((at < stop) & (at <= gl.expand_dims(last, 1)), score, float("-inf"))
    if missing != 0:
        for page in range(step // PAGE, (gl.minimum(step + NT, stop) + PAGE - 1) // PAGE):
            if gl.load(line + page * table_column) < 0:
                score = gl.where((at >= page * PAGE) & (at < page * PAGE + PAGE), float("-inf"), score)
    return score


@gluon.jit
def weights_of(score, best, higher, scale):
    """Turn scores of a step into weights, and the factor of what was summed before. higher: the new maximum"""
    shift = gl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: keep -inf - -inf out
    kept = gl.exp2(best - shift)
    shift = gl.expand_dims(shift, 1)
    return gl.exp2(gl.fma(score, gl.zeros_like(score) + scale, gl.zeros_like(score) - shift)), kept


@gluon.jit
def weighed(score, best, total, scale):
    """Turn scores of a step into weights; also the factor of what was summed before, the new maximum and sum."""
    higher = gl.maximum(best, gl.max(score, axis=1) * scale)
    weight, kept = weights_of(score, best, higher, scale)
    return weight, kept, higher, total * kept + gl.sum(weight, axis=1)


@gluon.jit
def over_columns(rows, OF_ROW: gl.constexpr):
    """A number per row, as a factor of tiles in the layout of OF_ROW"""
    return gl.expand_dims(gl.convert_layout(rows, OF_ROW), 1)
