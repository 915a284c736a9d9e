"""Windows in parts, with explicit layouts: the items that programs read, and the copies. Device functions.

Leaves out: the kernel (`split_kv_gluon.py`) and the functions that prompts share (`warp_specialized_steps_gluon.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..device.gluon_helpers import gdc_launch_dependents, gdc_wait
from .warp_specialized_steps_gluon import copied, plus


class Work(NamedTuple):
    """All groups of warps of a launch know it: the arguments of `read_parts_staged` that divide the positions."""

    paged: Any
    most: Any
    skipped: Any
    few: Any
    requests: Any
    kv_heads: Any
    tokens: Any


@gluon.jit
def _units(positions, each, PT: gl.constexpr, GROUP: gl.constexpr):
    """Number of whole units (parts, or groups of them) in `positions`."""
    return gl.where(each == 1, positions // PT, positions // (PT * GROUP))


@gluon.jit
def listed(work, PT: gl.constexpr, GROUP: gl.constexpr, BT: gl.constexpr, SIDES: gl.constexpr):
    """Work lists over all requests [BT]: inputs of their items, and where the items end in two lists; parts in a unit.

    A unit is whole or broken. The list of the whole units comes first, because they take the same time. An item has a
    unit, a KV head, and SIDES tiles of rows. For a tree it covers the parts before its window, which all nodes see
    (`read_alone` reads the others).
    """
    paged, most, skipped, few, requests, kv_heads, tokens = work
    b = gl.arange(0, BT, gl.BlockedLayout([BT // 32], [32], [gl.num_warps()], [0]))
    there = b < requests
    rows, slot = gl.load(paged.rows + b, mask=there, other=0), gl.load(paged.slots + b, mask=there, other=-1)
    known = gl.load(paged.before + b, mask=there, other=0)
    here = gl.minimum(rows - skipped, most)
    reach, too_many = gl.minimum(known + skipped + here, paged.held), rows > paged.window
    common = reach
    if paged.ancestors is not None:  # as in `division`
        row = gl.load(paged.begin + b, mask=there, other=0)
        tree = gl.load(paged.ancestors + row * paged.ancestors_step, mask=there & (rows > 0), other=0) != 0
        reach, too_many = gl.where(tree, gl.minimum(known + paged.nodes, paged.held), reach), too_many & ~tree
        common = gl.where(tree, gl.minimum(known // PT * PT, paged.held), reach)
    rows = gl.where((slot < 0) | too_many | (here < 0), 0, here).to(gl.int32)
    reach, common = gl.where(rows > 0, reach, 0).to(gl.int32), gl.where(rows > 0, common, 0).to(gl.int32)
    each = gl.where(gl.sum((reach + PT - 1) // PT, axis=0) <= few, 1, GROUP)
    high, whole = (rows + SIDES * tokens - 1) // (SIDES * tokens), _units(common, each, PT, GROUP)
    units, read = _units(reach + PT * each - 1, each, PT, GROUP), _units(common + PT * each - 1, each, PT, GROUP)
    first = gl.associative_scan(units, 0, plus) - units
    whole_ends = gl.associative_scan(kv_heads * high * whole, 0, plus)
    ends = gl.associative_scan(kv_heads * high * (read - whole), 0, plus) + gl.max(whole_ends, axis=0)
    return (b, rows, slot.to(gl.int32), known.to(gl.int32), high, whole, first, whole_ends, ends, common), each


@gluon.jit
def of_one(mine, numbers):
    """Select the number of one request from the numbers of all requests."""
    return gl.sum(gl.where(mine, numbers, 0), axis=0)


@gluon.jit
def chosen(item, lists, work, unit_size, SIDES: gl.constexpr):
    """Locate an item -> its request, slot, KV head, first row, unit, the request's first unit; its positions."""
    b, rows, slot, known, high, whole, first, whole_ends, ends, common = lists
    held, kv_heads, tokens = work.paged.held, work.kv_heads, work.tokens
    all_whole = gl.max(whole_ends, axis=0)
    broken = item >= all_whole
    behind = gl.where(broken, ends, whole_ends)
    request = gl.sum((behind <= item).to(gl.int32), axis=0)
    begun = gl.maximum(gl.max(gl.where(behind <= item, behind, 0), axis=0), gl.where(broken, all_whole, 0))
    at, mine = item - begun, b == request
    its = gl.maximum(of_one(mine, high), 1)
    unit = at // its // kv_heads + gl.where(broken, of_one(mine, whole), 0)
    row, behind_last = work.skipped + at % its * SIDES * tokens, work.skipped + of_one(mine, rows)
    its_known = of_one(mine, known)
    if work.paged.ancestors is not None:
        held = of_one(mine, common)  # this kernel reads a tree only up to the positions that all nodes share
    reach = gl.minimum(its_known + gl.minimum(row + SIDES * tokens, behind_last), held).to(gl.int32)
    start = unit * unit_size
    of = request, of_one(mine, slot), at // its % kv_heads, row, behind_last, its_known, unit, of_one(mine, first)
    return of, start, gl.minimum(start + unit_size, reach)


@gluon.jit
def copy(
    keys, values, scales, work, tiles, beside,
    NT: gl.constexpr, DT: gl.constexpr, PT: gl.constexpr, GROUP: gl.constexpr, BT: gl.constexpr, PAGE: gl.constexpr,
    STAGES: gl.constexpr, EARLY: gl.constexpr, SIDES: gl.constexpr, KV: gl.constexpr,
):  # fmt: skip
    """Copy the keys and values of all items of this program, with their scales if there are any."""
    if EARLY:
        gdc_wait()
        if work.paged.ancestors is not None:  # the next launch, `read_alone`, uses idle multiprocessors, and waits
            gdc_launch_dependents()
    lists, each = listed(work, PT, GROUP, BT, SIDES)
    done = 0
    for item in range(gl.program_id(0), gl.max(lists[8], axis=0), gl.num_programs(0)):
        of, start, stop = chosen(item, lists, work, PT * each, SIDES)
        pages = (work.paged.table + of[1].to(gl.int64) * work.paged.table_row, work.paged.table_column)
        done = copied(done, start, stop, (keys, values), scales, of[2] * DT, pages, tiles, beside,
                      NT, DT, PAGE, STAGES, KV)  # fmt: skip
    if EARLY:  # late, so that programs of the next launch do not crowd the multiprocessors that finish first
        gdc_launch_dependents()
