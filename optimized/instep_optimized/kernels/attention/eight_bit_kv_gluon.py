"""Windows over keys and values of 8 bits, with explicit layouts: loading them as numbers of 16 bits.

Scales are copied along with them. Scores are multiplied by the scales of keys, values by the scales of values. Products
take numbers that were 8 bits wide in a particular order: `shuffled`. Device functions. Leaves out: what is computed
from them (`split_kv_gluon.py`), and the items that programs read (`split_kv_work_items_gluon.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..device.gluon_helpers import seen_as

SHUFFLED = gl.constexpr(32)  # numbers of a sum that are permuted among themselves
NARROW_PIECE = gl.constexpr(128)  # numbers of a key that are multiplied at a time: bytes after which places repeat
# Two adjacent numbers of each of two positions, the scales of these positions, and a mask of the valid bits  ->  the
# first numbers, the second numbers
_WIDER = gl.constexpr("""{
    .reg .b16 near, far, a, b, c, d;
    .reg .b32 both, first, second;
    .reg .f32 e, f, g, h;
    and.b32 both, $2, $5;
    mov.b32 {near, far}, both;
    cvt.rn.f16x2.e4m3x2 first, near;
    cvt.rn.f16x2.e4m3x2 second, far;
    mov.b32 {a, b}, first;
    mov.b32 {c, d}, second;
    cvt.f32.f16 e, a;
    cvt.f32.f16 f, b;
    cvt.f32.f16 g, c;
    cvt.f32.f16 h, d;
    mul.f32 e, e, $3;
    mul.f32 f, f, $3;
    mul.f32 g, g, $4;
    mul.f32 h, h, $4;
    cvt.rn.bf16x2.f32 $0, g, e;
    cvt.rn.bf16x2.f32 $1, h, f;
}""")


@gluon.jit
def shuffled(x):
    """Permute [A, B] along B into the order in which the compiler sums products of numbers that were 8 bits wide.

    Each of four lanes has four adjacent numbers in both halves of SHUFFLED. The first product takes the first two of
    them
    from each half, the second product the others. Axes: half, lane, product, one of two -> product, half, lane, one
    of two
    """
    A: gl.constexpr = x.shape[0]
    B: gl.constexpr = x.shape[1]
    return gl.reshape(gl.permute(gl.reshape(x, [A, B // SHUFFLED, 2, 4, 2, 2]), (0, 1, 4, 2, 3, 5)), [A, B])


@gluon.jit
def shuffled_from(place):
    """Return the index of the number at a place of a `shuffled` tensor."""
    inside = place % SHUFFLED
    return place - inside + inside % 2 + inside // 16 * 2 + inside % 8 // 2 * 4 + inside % 16 // 8 * 16


@gluon.jit
def scale_places(NT: gl.constexpr, KV: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory for the scales of keys and of values of STAGES steps, of all KV heads"""
    FLAT: gl.constexpr = gl.NVMMASharedLayout(0, 32, rank=2)
    return (gl.allocate_shared_memory(gl.float32, [STAGES, 1, NT * KV], FLAT),
            gl.allocate_shared_memory(gl.float32, [STAGES, 1, NT * KV], FLAT))  # fmt: skip


@gluon.constexpr_function
def _of_columns(rows, heads):
    """Scales [rows, heads]: a thread has those of its columns of scores"""
    lanes = [[2, 0], [4, 0], [0, 0], [0, 0], [0, 0]]
    registers = [*([0, head] for head in (1, 2) if head < heads), [1, 0], [32, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[8, 0], [16, 0]], [], [rows, heads])


@gluon.constexpr_function
def _of_rows(rows, heads):
    """Scales [rows, heads]: a thread has those of its rows of values before they are shuffled"""
    lanes = [[4, 0], [8, 0], [0, 0], [0, 0], [0, 0]]
    registers = [*([0, head] for head in (1, 2) if head < heads), [1, 0], [16, 0], [2, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0], [0, 0]], [], [rows, heads])


@gluon.jit
def _of_head(beside, piece, kv_head, LAYOUT: gl.constexpr, ROWS: gl.constexpr, KV: gl.constexpr):
    """The scales of ROWS positions of one KV head, those of a piece. beside: of a step"""
    PIECES: gl.constexpr = beside.shape[1] // (ROWS * KV)
    each = seen_as(beside, [PIECES, ROWS, KV], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).index(piece).load(LAYOUT)
    head = gl.expand_dims(gl.arange(0, KV, gl.SliceLayout(0, LAYOUT)), 0)
    return gl.sum(gl.where(head == kv_head, each, 0.0), axis=1)


@gluon.jit
def key_scales_of(beside, kv_head, OF_COLUMN: gl.constexpr, NT: gl.constexpr, KV: gl.constexpr):
    return gl.convert_layout(_of_head(beside, 0, kv_head, _of_columns(NT, KV), NT, KV), OF_COLUMN)


@gluon.constexpr_function
def _of_keys(rows):
    """Keys [rows, NARROW_PIECE] as four warps multiply them"""
    registers = [[0, 1], [0, 2], [0, 16], [0, 32], [0, 64], [32, 0]]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[8, 0], [16, 0]], [], [rows, NARROW_PIECE.value])


@gluon.jit
def keys_of(tile, piece, DTYPE: gl.constexpr, RIGHT: gl.constexpr):
    """NARROW_PIECE numbers of each key, shuffled  ->  [NARROW_PIECE, NT]"""
    narrow = tile.slice(piece * NARROW_PIECE, NARROW_PIECE, dim=1).load(_of_keys(tile.shape[0]))
    return gl.convert_layout(gl.permute(shuffled(narrow.to(gl.float32).to(DTYPE)), (1, 0)), RIGHT)


@gluon.constexpr_function
def _shuffled_rows():
    """A tile of 64 values of 256 numbers as a copy leaves it, with rows shuffled; two numbers side by side are one"""
    columns = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32]]
    rows = [[1, 8], [16, 16], [2, 32], [4, 0], [8, 0], [32, 0]]  # of rows 1, 2, 4 also columns: that is the swizzle
    return gl.SharedLinearLayout([*columns, *rows, [0, 64]], [], 1024)


@gluon.jit
def values_of(tile, beside, kv_head, piece, there, RIGHT: gl.constexpr, KV: gl.constexpr):
    """SHUFFLED values by their scales, shuffled  ->  [SHUFFLED, DT], with columns permuted (`in_columns` undoes it)

    there: whether each value counts. Values that do not count become 0: they and their scales may be NaN
    """
    NT: gl.constexpr = tile.shape[0]
    DT: gl.constexpr = tile.shape[1]
    scales = _of_head(beside, piece, kv_head, _of_rows(SHUFFLED, KV), SHUFFLED, KV)
    scales = gl.reshape(gl.permute(gl.reshape(scales, [2, 4, 2, 2]), (2, 0, 1, 3)), [SHUFFLED])
    scales = gl.where(there, gl.convert_layout(scales, gl.SliceLayout(1, RIGHT)), 0.0)
    scales, bits = gl.expand_dims(scales, 1), gl.expand_dims(gl.where(there, -1, 0).to(gl.int16), 1)
    pairs = seen_as(tile, [NT, DT // 2], _shuffled_rows(), gl.int16)
    pairs = pairs.slice(piece * SHUFFLED, SHUFFLED, dim=0).load(RIGHT)
    first, other = gl.inline_asm_elementwise(
        _WIDER, "=r,=r,r,f,f,r", [pairs, scales, bits], (gl.bfloat16, gl.bfloat16), True, 2)  # fmt: skip
    both = gl.reshape(gl.join(first, other), [SHUFFLED, DT // 64, 32, 2])
    return gl.convert_layout(gl.reshape(gl.permute(both, (0, 1, 3, 2)), [SHUFFLED, DT]), RIGHT)


@gluon.jit
def in_columns(mean):
    """Put the columns of [MT, DT], permuted as in `values_of`, back in their order."""
    MT: gl.constexpr = mean.shape[0]
    DT: gl.constexpr = mean.shape[1]
    return gl.reshape(gl.permute(gl.reshape(mean, [MT, DT // 64, 2, 32]), (0, 1, 3, 2)), [MT, DT])
