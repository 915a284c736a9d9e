"""Pairs of programs that run together (a cluster of two on Hopper): the second sends its sums to the first.

Gluon makes clusters, but in Triton 3.6 it has no operations for messages between the programs of a cluster. These are
PTX here. So the shared memory that they use is PTX's, too: a buffer for numbers in fp32, after some barriers.

Gluon assumes that a tensor which both programs have is equal in both. Here each program has its own numbers in it, and
Gluon stores those of the first.

A message is released to the cluster, and its receiver acquires for the cluster, so PTX guarantees that a message is
read before the next one arrives. Such a release is a fence of the whole GPU here, so a warp that is otherwise idle
does it (LOG.md). Leaves out: the sums themselves (`few_rows_gluon.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..device.gluon_helpers import NEWER, along, wait_at

HEAD = gl.constexpr(1024)  # bytes before the messages: whole KiB keep the memory that Gluon places aligned
# Offsets of the barriers. The barrier for a message that has arrived is at 0.
TAKEN = gl.constexpr(8)  # of the second program: its message was read
READ = gl.constexpr(16)  # of the first program: its warps have read the message
FOUR = gl.constexpr(4)  # consecutive numbers of a thread that are sent together

_FIRST_THREAD = "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; "
_SEND = gl.constexpr(
    "{ .reg .u32 to, bar; mapa.shared::cluster.u32 to, $4, 0; mapa.shared::cluster.u32 bar, $12, 0; "
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [to], {$8, $9, $10, $11}, [bar]; "
    "mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; }"
)
_SEND_OPERANDS = gl.constexpr(",".join(["=r"] * 4 + ["r"] * 12))
_READ_OPERANDS = gl.constexpr(",".join(["=r"] * 4 + ["r"] * 4))
_FIRST_LANE = (
    "{ .reg .pred p; .reg .u32 lane; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; bar.warp.sync 0xffffffff; "
)
_HAVE_READ = gl.constexpr(f"{_FIRST_LANE} @p mbarrier.arrive.shared::cta.b64 _, [$1]; mov.u32 $0, 0; }}")
_TELL_SECOND = gl.constexpr(
    f"{_FIRST_LANE} .reg .u32 bar; mapa.shared::cluster.u32 bar, $1, 1; "
    "@p mbarrier.arrive.release.cluster.shared::cluster.b64 _, [bar]; mov.u32 $0, 0; }"
)
_WAIT = gl.constexpr(
    "{ .reg .pred p; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [$1], $2; @!p bra again; "
    "mov.u32 $0, 0; }"
)


@gluon.constexpr_function
def both(rank, pair):
    """Return the last field of a layout: every program of a pair has all of it."""
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
        f"{_FIRST_THREAD} @p mbarrier.init.shared::cta.b64 [$1], 1; @p mbarrier.init.shared::cta.b64 [$1+8], 1; "
        f"@p mbarrier.init.shared::cta.b64 [$1+16], {warps}; @p fence.mbarrier_init.release.cluster; mov.u32 $0, 0; }}"
    )


@gluon.constexpr_function
def _expect(size):
    return f"{_FIRST_THREAD} @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], {size}; mov.u32 $0, 0; }}"


@gluon.jit
def rank():
    """Return 0 or 1: the rank of this program in its pair."""
    return gl.inline_asm_elementwise("mov.u32 $0, %cluster_ctarank;", "=r", [], gl.int32, True, 1)


@gluon.jit
def cluster_arrive():
    """Let every warp of both programs signal once that it runs.

    The only earlier writes that the other program must see are initialized barriers: `_begin` has a fence for that. A
    stronger arrive would be a fence of the whole GPU before all but the first weights are requested.

    The threads of a warp may be at different instructions after a loop that waits. So neither this function nor
    `cluster_wait` is PTX's aligned form, which requires that they are not.
    """
    gl.inline_asm_elementwise("barrier.cluster.arrive.relaxed; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1)


@gluon.jit
def cluster_wait():
    """Wait until every warp of both programs has arrived."""
    gl.inline_asm_elementwise("barrier.cluster.wait.acquire; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1)


@gluon.jit
def idle(nothing):
    """Body of warps that a program has but does not need: they must arrive, too."""
    cluster_arrive()
    cluster_wait()


@gluon.jit
def buffer(COUNT: gl.constexpr):
    """Allocate shared memory for COUNT fp32 numbers  ->  its address; its barriers are valid after `cluster_wait`"""
    box = gl.inline_asm_elementwise(_memory(HEAD + 4 * COUNT), "=r", [], gl.int32, False, 1)
    gl.inline_asm_elementwise(_begin(gl.num_warps()), "=r,r", [box], gl.int32, False, 1)
    return box


@gluon.jit
def _wait(address, phase):
    """Wait for the other program's signal; everything that it did before is visible then."""
    gl.inline_asm_elementwise(_WAIT, "=r,r,r", [address, phase], gl.int32, False, 1)


@gluon.jit
def _places(box, ROWS: gl.constexpr, COLUMNS: gl.constexpr, SUMS: gl.constexpr):
    """Return the addresses of a thread's numbers, by fours: two adjacent ones of a row, and two of the row 8 below."""
    row, column = along(0, ROWS, SUMS), along(1, COLUMNS, SUMS)
    four = ((row // 16 * 8 + row % 8) * (COLUMNS // 8) + column // 8) * 4 + column % 8 // 2
    return box + HEAD + 4 * FOUR * four


@gluon.jit
def send(total, box, message, SUMS: gl.constexpr):
    """Send the numbers of the second program; `message` counts from 0. It waits until the previous message was read."""
    _wait(box + TAKEN, (message + 1) & 1)  # an unused barrier lets the first message pass
    at = _places(box, total.shape[0], total.shape[1], SUMS)
    value = total.to(gl.int32, bitcast=True)
    gl.inline_asm_elementwise(_SEND, _SEND_OPERANDS, [at, value, box + at * 0], gl.int32, False, FOUR)


@gluon.jit
def tell(box, messages):
    """Tell the second program that a message was read, from another warp of the first, if more messages follow.

    Without further messages the second program may have ended already. In the second program `messages` is 0.
    """
    cluster_arrive()
    cluster_wait()
    for message in range(messages - 1):
        wait_at(box + READ, message & 1)
        gl.inline_asm_elementwise(_TELL_SECOND, "=r,r", [box + TAKEN], gl.int32, False, 1)


@gluon.jit
def received(box, message, ROWS: gl.constexpr, COLUMNS: gl.constexpr, SUMS: gl.constexpr):
    """Receive a message in the first program: wait for it, read it, and signal `tell`."""
    gl.inline_asm_elementwise(_expect(4 * ROWS * COLUMNS), "=r,r", [box], gl.int32, False, 1)
    _wait(box, message & 1)
    at = _places(box, ROWS, COLUMNS, SUMS)
    found = gl.inline_asm_elementwise(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", _READ_OPERANDS, [at], gl.int32, False, FOUR
    )
    gl.inline_asm_elementwise(_HAVE_READ, "=r,r", [box + READ], gl.int32, False, 1)
    return found.to(gl.float32, bitcast=True)
