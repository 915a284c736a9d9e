"""Device functions with explicit layouts (Gluon): index tensors, axes of size 1, copies, and stores of a tile.

Everything that some Triton version lacks is imported here, so that a missing name shows up in this file, not in a
kernel's.

A kernel uses a barrier that it made (`mbarrier.init`) until its end. The compiler would reuse the memory of a barrier
that is no longer used, and the device writes the barrier's word again when a program resumes after another process's
time slice.

Leaves out: the computation (`token_by_token_gluon.py`, `warp_specialized_steps_gluon.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy as async_copy
from triton.experimental.gluon.language.nvidia.ampere import mma_v2 as mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared as fence_async_shared
from triton.experimental.gluon.language.nvidia.hopper import mbarrier as mbarrier
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma as warpgroup_mma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_init as warpgroup_mma_init
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents as gdc_launch_dependents
from triton.language.extra.cuda import gdc_wait as gdc_wait

# Four functions and a method have other names in newer versions of Triton (3.9) than in older ones (3.6).
begin_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_box = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
stored = tma.store_wait  # until shared memory has been read
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
NEWER = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
LINE = gl.constexpr(1024)  # bits of a line of the cache
_WAIT = gl.constexpr(
    "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; @!p bra again; mov.u32 $0, 0; }"
)


@gluon.jit
def along(axis: gl.constexpr, size: gl.constexpr, layout: gl.constexpr):
    """0 .. size-1 along an axis of a tensor of rank 2"""
    return gl.expand_dims(gl.arange(0, size, gl.SliceLayout(1 - axis, layout)), 1 - axis)


@gluon.jit
def along_3(axis: gl.constexpr, size: gl.constexpr, layout: gl.constexpr):
    """0 .. size-1 along an axis of a tensor of rank 3"""
    if axis == 0:
        return gl.expand_dims(gl.expand_dims(gl.arange(0, size, gl.SliceLayout(1, gl.SliceLayout(2, layout))), 1), 2)
    elif axis == 1:
        return gl.expand_dims(gl.expand_dims(gl.arange(0, size, gl.SliceLayout(0, gl.SliceLayout(2, layout))), 0), 2)
    else:
        return gl.expand_dims(gl.expand_dims(gl.arange(0, size, gl.SliceLayout(0, gl.SliceLayout(1, layout))), 0), 1)


@gluon.jit
def over_rows(key):
    """[P, KI] -> [1, 1, P, KI]"""
    return gl.expand_dims(gl.expand_dims(key, 0), 0)


@gluon.jit
def over_k(rows):
    """[VL or 1, VR or 1] -> [.., .., 1, 1]"""
    return gl.expand_dims(gl.expand_dims(rows, 2), 2)


@gluon.jit
def place(pool, unit, columns, request, unit_step, column_step):
    """Return the address of a unit, or of its column."""
    if columns is not None:
        return pool + unit * unit_step + gl.load(columns + request) * column_step
    else:
        return pool + unit * unit_step


@gluon.jit
def barriers(number: gl.constexpr, arrivals: gl.constexpr):
    """Make barriers, each of which ends a phase after so many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(number):
        mbarrier.init(made.index(at), count=arrivals)
    return made


@gluon.jit
def stage_and_phase(step, STAGES: gl.constexpr):
    """The stage of a step, counted from the first, and the phase in which the step fills it: 0, 1, 0, ..."""
    return step % STAGES, step // STAGES & 1


@gluon.jit
def wait_at(address, phase):
    """Run `mbarrier.wait` on a barrier in shared memory that PTX names."""
    gl.inline_asm_elementwise(_WAIT, "=r,r,r", [address, phase], gl.int32, False, 1)


@gluon.jit
def seen_as(memory, shape: gl.constexpr, layout: gl.constexpr, dtype: gl.constexpr = gl.float32):
    """View the same numbers in another shape and layout. A layout without the first axis fits what `index` gives."""
    if NEWER:
        return memory.reinterpret(dtype, shape, layout)
    else:
        return memory._reinterpret(dtype, shape, layout)


@gluon.jit
def whole(copy, shape: gl.constexpr):
    """View a copy made by `copied` as its original tensor of rank 3."""
    return seen_as(copy, shape, gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


@gluon.jit
def copied(source, inside, shape: gl.constexpr):
    """Begin to copy a tensor of rank 3 to shared memory  ->  the copy, whose index is a tensor of rank 2"""
    memory = gl.allocate_shared_memory(gl.float32, shape, gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    begin_copy(memory, source, mask=inside)
    return seen_as(memory, shape, gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def shared(rows, shape: gl.constexpr):
    """Put rows [tokens, ..] of rank 2 or 3 into shared memory, like a copy of `copied` with this shape."""
    order: gl.constexpr = [1, 0] if len(rows.shape) == 2 else [2, 1, 0]
    memory = gl.allocate_shared_memory(gl.float32, rows.shape, gl.SwizzledSharedLayout(1, 1, 1, order), rows)
    return seen_as(memory, shape, gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def gates(lanes, size: gl.constexpr):
    """Put a number per lane where every thread can read each  ->  memory whose index is a tensor [1]"""
    memory = gl.allocate_shared_memory(gl.float32, [size], gl.SwizzledSharedLayout(1, 1, 1, [0]), lanes)
    return seen_as(memory, [size, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def copied_gates(source, inside, size: gl.constexpr):
    """Begin to copy what `gates` would put there."""
    memory = gl.allocate_shared_memory(gl.float32, [size], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    begin_copy(memory, source, mask=inside)
    return seen_as(memory, [size, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def into_cache(places):
    """Prefetch the lines at these places into the L2 cache. Nothing waits for them."""
    gl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places], gl.int32, False, 1)


@gluon.jit
def ask_for(source, source_v, first_v, ROWS: gl.constexpr, KT: gl.constexpr):
    """Prefetch rows of a state from `first_v` on into the L2 cache."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    EACH: gl.constexpr = LINE // source.dtype.element_ty.primitive_bitwidth  # numbers of a line
    lines = gl.arange(0, ROWS * KT // EACH, LANES)
    into_cache(source + (first_v + lines // (KT // EACH)) * source_v + lines % (KT // EACH) * EACH)


@gluon.jit
def store_tile(target, target_v, state, stripe, LINED: gl.constexpr, FIRST: gl.constexpr):
    """Store a tile [VL, VR, P, KI] of a state.

    LINED: lanes of two rows first swap pieces. That takes time, but so does a line that is written in two halves.
    FIRST: the cache evicts the stored data first, because a state is not read again before many others were.
    """
    VL: gl.constexpr = state.shape[0]
    VR: gl.constexpr = state.shape[1]
    P: gl.constexpr = state.shape[2]
    KI: gl.constexpr = state.shape[3]
    OF_V: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(2, state.type.layout))
    OF_K: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, state.type.layout))
    if LINED:
        LINES: gl.constexpr = in_lines(VR, gl.num_warps(), P * KI)
        state = gl.convert_layout(gl.reshape(state, [VL * VR, P * KI]), LINES)
        row = stripe * (VL * VR) + along(0, VL * VR, LINES)
        places = target + (row * target_v + along(1, P * KI, LINES))
    else:
        # Offsets of a lane and those of a register: the latter become part of an instruction.
        lane_v, lane_k = over_k((stripe * VL + along(0, VL, OF_V)) * VR), over_rows(along(1, KI, OF_K))
        thread_v, thread_k = over_k(along(1, VR, OF_V)), over_rows(along(0, P, OF_K) * KI)
        places = target + (lane_v * target_v + lane_k) + (thread_v * target_v + thread_k)
    put_state(places, state, FIRST)


@gluon.jit
def store_through(memory, places, tile, FIRST: gl.constexpr):
    """Store a tile of a state through shared memory. If `places` are contiguous, adjacent lanes write whole lines.

    tile: in the layout in which it was loaded from this memory, so that no lane stores what another still loads
    """
    memory.store(tile)
    barrier()
    put_state(places, memory.load(places.type.layout), FIRST)


@gluon.jit
def put_state(places, state, FIRST: gl.constexpr):
    """FIRST: as in `store_tile`"""
    if FIRST:
        gl.store(places, state, eviction_policy="evict_first")
    else:
        gl.store(places, state)


@gluon.constexpr_function
def in_lines(held, warps, keys):
    """Layout of a tile [rows, keys] in 32 bits: a lane has 4 numbers at a time, and 8 lanes have a line of the cache.

    Apart from that it is the layout in which `token_by_token_gluon.py` computes, where 4 lanes have 16 numbers of each
    of `held` rows: here the lanes of every other row have a piece of their neighbour's row instead of one of their own.
    """
    own = [[row, 0] for row in (1, 2, 4) if row < held]
    registers = [[0, 1], [0, 2], [held, 0], *own, *([0, key] for key in (32, 64) if key < keys)]
    lanes = [[0, 4], [0, 8], [0, 16], [2 * held, 0], [4 * held, 0]]
    several = [[8 * held * warp, 0] for warp in (1, 2, 4) if warp < warps]
    return gl.DistributedLinearLayout(registers, lanes, several, [], [8 * held * warps, keys])


@gluon.jit
def wrapped(entry, size):
    """Wrap an entry below twice the size of its ring."""
    return gl.where(entry >= size, entry - size, entry)
