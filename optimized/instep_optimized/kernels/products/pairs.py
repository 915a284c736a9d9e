"""Pairs of programs that run beside each other (a cluster of two on Hopper): the second sends its sums to the first.

Gluon makes clusters, but in Triton 3.6 it has no words for what the programs of one tell each other. These are PTX. So
the shared memory that they name is PTX's, too: a buffer for numbers in fp32, and barriers before it.

A tensor that both programs have is equal in both, as Gluon sees it. Here each has its own numbers in it, and Gluon
stores those of the first.

To say that a message was read, an arrival has the scope of one program, not of the cluster, as its wait has. PTX does
not promise that its reads come before the next message then. They do, for the arrival has to reach the other program
and its message to come back. An arrival for the cluster is a fence of the whole GPU here (LOG.md). Leaves out: what is
summed (`slim_staged.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..device.layouts import NEWER, along, wait_at

HEAD = gl.constexpr(1024)  # bytes before the messages. Behind whole KiB, the memory that Gluon places stays aligned
TAKEN = gl.constexpr(8)  # where the barrier is that says so; that of a message that has come stands at 0
FOUR = gl.constexpr(4)  # numbers of a thread that follow each other, as they are sent

_FIRST_THREAD = "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; "
_SEND = gl.constexpr(
    "{ .reg .u32 to, bar; mapa.shared::cluster.u32 to, $4, 0; mapa.shared::cluster.u32 bar, $12, 0; "
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [to], {$8, $9, $10, $11}, [bar]; "
    "mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; }"
)
_SEND_OPERANDS = gl.constexpr(",".join(["=r"] * 4 + ["r"] * 12))
_READ_OPERANDS = gl.constexpr(",".join(["=r"] * 4 + ["r"] * 4))
_TELL_SECOND = gl.constexpr(
    "{ .reg .pred p; .reg .u32 lane, bar; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; "
    "setp.ne.and.u32 p, $2, 0, p; bar.warp.sync 0xffffffff; "
    "mapa.shared::cluster.u32 bar, $1, 1; @p mbarrier.arrive.shared::cluster.b64 _, [bar]; mov.u32 $0, 0; }"
)


@gluon.constexpr_function
def both(rank, pair):
    """The last field of a layout: every program of a pair has all of it."""
    return [[0] * rank] if pair else []


@gluon.constexpr_function
def barriers(pair):
    """Barriers that every program has for itself  ->  how many a place has, as Gluon counts, and their layout"""
    if pair and NEWER.value:
        return 2, gl.SwizzledSharedLayout(1, 1, 1, [0], cga_layout=[[1]])
    return 1, gl.SwizzledSharedLayout(1, 1, 1, [0], cga_layout=both(1, pair))


@gluon.constexpr_function
def _memory(size):
    return f"{{ .shared .align 1024 .b8 box[{size}]; mov.u32 $0, box; }}"


@gluon.constexpr_function
def _begin(warps):
    return (
        f"{_FIRST_THREAD} @p mbarrier.init.shared::cta.b64 [$1], 1; @p mbarrier.init.shared::cta.b64 [$1+8], {warps}; "
        "@p fence.mbarrier_init.release.cluster; mov.u32 $0, 0; }"
    )


@gluon.constexpr_function
def _expect(size):
    return f"{_FIRST_THREAD} @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], {size}; mov.u32 $0, 0; }}"


@gluon.jit
def rank():
    """0 or 1: which program of its pair this one is"""
    return gl.inline_asm_elementwise("mov.u32 $0, %cluster_ctarank;", "=r", [], gl.int32, True, 1)


@gluon.jit
def cluster_arrive():
    """Every warp of both programs says once that it runs, and that what it did before is done."""
    gl.inline_asm_elementwise("barrier.cluster.arrive.release.aligned; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1)


@gluon.jit
def cluster_wait():
    """Until every warp of both programs has come"""
    gl.inline_asm_elementwise("barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1)


@gluon.jit
def idle(nothing):
    """For warps that a program has without need: they come, too."""
    cluster_arrive()
    cluster_wait()


@gluon.jit
def buffer(COUNT: gl.constexpr):
    """Shared memory for so many numbers of fp32  ->  its address; the barriers in it are good once the warps met"""
    box = gl.inline_asm_elementwise(_memory(HEAD + 4 * COUNT), "=r", [], gl.int32, False, 1)
    gl.inline_asm_elementwise(_begin(gl.num_warps()), "=r,r", [box], gl.int32, False, 1)
    return box


@gluon.jit
def _places(box, ROWS: gl.constexpr, COLUMNS: gl.constexpr, SUMS: gl.constexpr):
    """Where a thread's numbers are, by fours. It has two neighbours of a row, and two of the row 8 below."""
    row, column = along(0, ROWS, SUMS), along(1, COLUMNS, SUMS)
    four = ((row // 16 * 8 + row % 8) * (COLUMNS // 8) + column // 8) * 4 + column % 8 // 2
    return box + HEAD + 4 * FOUR * four


@gluon.jit
def send(total, box, message, SUMS: gl.constexpr):
    """The second program sends its numbers: `message` counts from 0 on. It waits until the message before was read."""
    wait_at(box + TAKEN, (message + 1) & 1)  # a barrier that nobody has used yet lets the first one pass
    at = _places(box, total.shape[0], total.shape[1], SUMS)
    value = total.to(gl.int32, bitcast=True)
    gl.inline_asm_elementwise(_SEND, _SEND_OPERANDS, [at, value, box + at * 0], gl.int32, False, FOUR)


@gluon.jit
def received(box, message, more, ROWS: gl.constexpr, COLUMNS: gl.constexpr, SUMS: gl.constexpr):
    """The first program waits for them, reads them, and says so if more messages come: else the second may be gone."""
    gl.inline_asm_elementwise(_expect(4 * ROWS * COLUMNS), "=r,r", [box], gl.int32, False, 1)
    wait_at(box, message & 1)
    at = _places(box, ROWS, COLUMNS, SUMS)
    found = gl.inline_asm_elementwise(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", _READ_OPERANDS, [at], gl.int32, False, FOUR
    )
    gl.inline_asm_elementwise(_TELL_SECOND, "=r,r,r", [box + TAKEN, more.to(gl.int32)], gl.int32, False, 1)
    return found.to(gl.float32, bitcast=True)
