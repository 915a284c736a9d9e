"""Gated products of 128 rows with explicit layouts: 96 columns a program, so that 128 programs have 12288 of them.

Rows fill the tile of the tensor cores, and two groups of warps share each weight. The columns come in a part of 64 and
one of 32, because tiles are powers of two. Every warp arrives at a barrier when a place is free. The barrier is in
shared memory that PTX names: Gluon's own arrivals make all warps wait for each other in every step. Each sum runs over
K in order, as in `few_rows.py`. Leaves out: fewer rows (`few_rows_gluon.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..device.gluon_helpers import (
    along,
    barrier,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    load_box,
    mbarrier,
    seen_as,
    stage_and_phase,
    wait_at,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

BYTES = gl.constexpr(2)  # bytes of a number
AT_ONCE = gl.constexpr(2)  # how many of the first steps are requested before the weights of one have arrived
_FREE = gl.constexpr(
    "{ .reg .pred p; .reg .u32 lane; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; setp.ne.and.u32 p, $2, 0, p; "
    "@p mbarrier.arrive.shared::cta.b64 _, [$1]; mov.u32 $0, 0; }"
)


@gluon.constexpr_function
def _memory():
    return "{ .shared .align 1024 .b8 box[1024]; mov.u32 $0, box; }"  # whole KiB: what Gluon places stays aligned


@gluon.constexpr_function
def _begin(steps, warps):
    each = " ".join(f"@p mbarrier.init.shared::cta.b64 [$1+{8 * step}], {warps};" for step in range(steps))
    return f"{{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; {each} mov.u32 $0, 0; }}"


@gluon.jit
def _ask(
    wide, narrow, places, ready, at, steps, columns,
    P: gl.constexpr, KT: gl.constexpr, STEPS: gl.constexpr, ALL: gl.constexpr,
):  # fmt: skip
    """Begin to copy the weights of a step: gate and up of P columns, and of half as many; nothing after the last step.

    ready, ALL: the barrier that waits for them, and for how many bytes
    """
    first, second, _, _, _, _ = places
    live, k, place = at < steps, at * KT, at % STEPS
    column = gl.program_id(0) * (P + P // 2)
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    one = seen_as(first, [2 * STEPS, P, KT], TILE, first.dtype)
    two = seen_as(second, [2 * STEPS, P // 2, KT], TILE, second.dtype)
    mbarrier.expect(ready, ALL, pred=live)
    load_box(wide, [column, k], ready, one.index(2 * place), pred=live)
    load_box(wide, [column + columns, k], ready, one.index(2 * place + 1), pred=live)
    load_box(narrow, [column + P, k], ready, two.index(2 * place), pred=live)
    load_box(narrow, [column + P + columns, k], ready, two.index(2 * place + 1), pred=live)


@gluon.jit
def _ask_rows(x, places, at, steps, KT: gl.constexpr, STEPS: gl.constexpr):
    """Begin to copy the rows of a step. Rows after the last, and columns after K, become 0."""
    place = at % STEPS
    load_box(x, [0, at * KT], places[3].index(place), places[2].index(place), pred=at < steps)


@gluon.jit
def _copy(
    x, wide, narrow, places, steps, columns,
    P: gl.constexpr, MT: gl.constexpr, KT: gl.constexpr, STEPS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Copy the weights of every step, as places become free, and with them the rows of all but the first steps."""
    _, _, _, full, free, come = places
    ALONE: gl.constexpr = 3 * P * KT * BYTES
    for step in gl.static_range(AT_ONCE, STEPS):
        mbarrier.wait(come.index(step - AT_ONCE), 0, pred=step - AT_ONCE < steps)
        _ask(wide, narrow, places, come.index(step), step, steps, columns, P, KT, STEPS, ALONE)
    if EARLY:
        gdc_wait()
    for at in range(STEPS, steps):
        place, phase = stage_and_phase(at, STEPS)
        wait_at(free + 8 * place, phase ^ 1)
        _ask(wide, narrow, places, full.index(place), at, steps, columns, P, KT, STEPS, ALONE + MT * KT * BYTES)
        _ask_rows(x, places, at, steps, KT, STEPS)


@gluon.jit
def _copy_rows(
    x, places, steps, MT: gl.constexpr, KT: gl.constexpr, STEPS: gl.constexpr, EARLY: gl.constexpr
):  # fmt: skip
    """Copy the rows of the first steps once they exist, even if not all weights of these steps are requested yet."""
    if EARLY:
        gdc_wait()
    for step in gl.static_range(STEPS):
        mbarrier.expect(places[3].index(step), MT * KT * BYTES, pred=step < steps)
        _ask_rows(x, places, step, steps, KT, STEPS)


@gluon.jit
def _keep(out, total, begin, rows, columns, MT: gl.constexpr, NT: gl.constexpr):
    """Store silu(gate) * up of NT columns from `begin` on: a thread has both halves of a column."""
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    gate, up = gl.split(total.reshape([MT, 2, NT]).permute((0, 2, 1)))
    found = gl.convert_layout((gate / (1.0 + gl.exp(-gate)) * up).to(out.dtype.element_ty), STORED)
    m, n = along(0, MT, STORED), begin + along(1, NT, STORED)
    gl.store(out + (m * columns + n), found, mask=(m < rows) & (n < columns))


@gluon.jit
def _sum(out, rows, columns, places, steps, P: gl.constexpr, MT: gl.constexpr, STEPS: gl.constexpr):
    """Sum both parts of all columns. A step's products begin while those of the previous step still run."""
    first, second, given, full, free, come = places
    W: gl.constexpr = gl.num_warps()
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, 2 * P, 16])
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, P, 16])
    one = warpgroup_mma_init(gl.full((MT, 2 * P), 0.0, gl.float32, WIDE))
    two = warpgroup_mma_init(gl.full((MT, P), 0.0, gl.float32, NARROW))
    for at in range(steps):
        place, phase = stage_and_phase(at, STEPS)
        if at < STEPS:
            mbarrier.wait(come.index(place), 0)
        mbarrier.wait(full.index(place), phase)
        one = warpgroup_mma(given.index(place), first.index(place).permute((1, 0)), one, is_async=True)
        two = warpgroup_mma(given.index(place), second.index(place).permute((1, 0)), two, is_async=True)
        so_far, likewise = warpgroup_mma_wait(2, deps=[one, two])
        one, two = warpgroup_mma_init(so_far), warpgroup_mma_init(likewise)
        before = free + 8 * ((at + STEPS - 1) % STEPS)  # the place of the step before
        gl.inline_asm_elementwise(_FREE, "=r,r,r", [before, gl.where(at > 0, 1, 0)], gl.int32, False, 1)
    all_one, all_two = warpgroup_mma_wait(0, deps=[one, two])
    begin = gl.program_id(0) * (P + P // 2)
    _keep(out, all_one, begin, rows, columns, MT, P)
    _keep(out, all_two, begin + P, rows, columns, MT, P // 2)


@gluon.jit(do_not_specialize=["rows"])
def _linear_parts(
    x, wide, narrow, out, rows, columns, steps,
    P: gl.constexpr, MT: gl.constexpr, KT: gl.constexpr, STEPS: gl.constexpr, COPIER_REGISTERS: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """Multiply all rows with P columns and half as many. Grid (tiles of columns)."""
    DTYPE: gl.constexpr = out.dtype.element_ty
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    first = gl.allocate_shared_memory(DTYPE, [STEPS, 2 * P, KT], TILE)
    second = gl.allocate_shared_memory(DTYPE, [STEPS, P, KT], TILE)
    given = gl.allocate_shared_memory(DTYPE, [STEPS, MT, KT], TILE)
    full = gl.allocate_shared_memory(gl.int64, [STEPS, 1], mbarrier.MBarrierLayout())
    come = gl.allocate_shared_memory(gl.int64, [STEPS, 1], mbarrier.MBarrierLayout())
    for step in gl.static_range(STEPS):
        mbarrier.init(come.index(step), count=1)
    fence_async_shared()
    barrier()
    free = gl.inline_asm_elementwise(_memory(), "=r", [], gl.int32, False, 1)
    places = (first, second, given, full, free, come)
    for step in gl.static_range(AT_ONCE):  # before anything else: the memory waits for it
        _ask(wide, narrow, places, come.index(step), step, steps, columns, P, KT, STEPS, 3 * P * KT * BYTES)
    if EARLY:
        gdc_launch_dependents()
    for step in gl.static_range(STEPS):
        mbarrier.init(full.index(step), count=1)
    gl.inline_asm_elementwise(_begin(STEPS, gl.num_warps()), "=r,r", [free], gl.int32, False, 1)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [(_sum, (out, rows, columns, places, steps, P, MT, STEPS)),
         (_copy, (x, wide, narrow, places, steps, columns, P, MT, KT, STEPS, EARLY)),
         (_copy_rows, (x, places, steps, MT, KT, STEPS, EARLY))],
        [1, 1], [COPIER_REGISTERS, COPIER_REGISTERS],
    )  # fmt: skip
