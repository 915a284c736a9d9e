"""Exactness of re-running: from the same (k, v, log decay, beta) bits the state is, bit by bit, that of decoding.

Leaves out: the strategies that choose the addresses, and races (`test_exact_order.py`). Plain and Triton; the latter
interpreted on a CPU, native on a GPU.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.kit.cases.case import Draw, at
from instep.kit.cases.conv_and_gdn import Heads
from instep.kit.cases.guarded_pools import same_bits
from instep_optimized.ops.op_protocols import Ops
from instep_optimized.ops.plain import PLAIN
from instep_optimized.ops.triton import TRITON
from support.running.covering import each_value, few
from support.worlds.rings import DEED, WIDEST, Deed, Life, Right, Turn, World, cut, garbage, stream, walk

HERE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if HERE == "cuda" else []
OF_INPUTS = replace(PLAIN, name="plain of inputs", keeps="inputs")
OPS = pytest.mark.parametrize("ops", [PLAIN, OF_INPUTS, TRITON], ids=lambda ops: ops.name)
LAYOUTS = pytest.mark.parametrize("swap", [True, False], ids=["VK", "KV"])
ONE = Heads(1, 1, 20, 12)  # neither a power of two nor square
STAGED = [Heads(2, 4, 128, 64)] if HERE == "cuda" else []  # what a GPU runs with explicit layouts
GROUPS = [Heads(2, 2, 12, 20), Heads(1, 2, 20, 12), Heads(1, 3, 16, 4), *STAGED]
TOKENS = 20


class Truth(NamedTuple):
    """A request as one-token decoding leaves it: the values of `Right`, and the core of each token."""

    right: Right
    cores: tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def _rejected_rows_may_overflow() -> Iterator[None]:
    with np.errstate(all="ignore"):  # the interpreter computes them with numpy
        yield


@cache
def truth(ops: Ops, heads: Heads, swap: bool, seed: int, tokens: int, fresh: bool = False) -> Truth:
    """One token a launch, alone, stored every time."""
    rows = stream(heads, tokens, seed, HERE)
    world = World.of(ops, heads, HERE, size=1, swap=swap, slots=2)
    pool = world.state.view
    pool[1] = torch.zeros(()) if fresh else Draw(seed + 1, HERE).normal(*pool.shape[1:], scale=0.5)
    states, cores = [pool[1].clone()], []
    alone = world.part([Turn(1, cut(rows, 0, 1), goal="slot")])
    alone = replace(alone, ring=None, settled=None)
    for t in range(tokens):
        cores.append(ops.gdn(inputs=cut(rows, t, 1), parts=(alone,), dtype=torch.float32, to=at("core"))[0])
        states.append(pool[1].clone())
    return Truth(Right(rows, states, lambda count, seed: garbage(heads, count, seed, HERE)), tuple(cores))


def kept_one_by_one(ops: Ops, right: Right, heads: Heads, swap: bool, tokens: int) -> tuple[torch.Tensor, ...]:
    """The ring's contents if each token is a separate window, after the state that decoding left."""
    world = World.of(ops, heads, HERE, size=tokens, swap=swap, slots=2)
    for t in range(tokens):
        world.state.view[1] = right.states[t]
        world.run([Turn(1, cut(right.rows, t, 1), before=t, settled=False)])
    return world.kept(1, 0, tokens)


EVERY = tuple(range(1, WIDEST + 1))


@few(4)
@OPS
@pytest.mark.parametrize(
    ("heads", "swap", "widths"),
    [pytest.param(ONE, True, EVERY, marks=pytest.mark.slow), *each_value(GROUPS, (True, False), [(1, 3)])], ids=str,
)
def test_state_equals_decoding_after_every_accepted_length(
    ops: Ops, heads: Heads, swap: bool, widths: tuple[int, ...]
) -> None:
    """Verify, then a launch that runs the accepted tokens again and takes one more; with idle rows in between."""
    pairs = [(width, accepted) for width in widths for accepted in range(width + 1)]
    (right, cores), size = truth(ops, heads, swap, 11, max(widths) + 1), 2 * WIDEST
    world = World.of(ops, heads, HERE, size=size, swap=swap, slots=len(pairs) + 1)
    world.state.view[1:] = right.states[0]
    idle = Turn(-1, cut(right.rows, 0, 1))
    where = [3 * slot for slot in range(1, len(pairs) + 1)]  # numbers of their first tokens: some rings wrap
    verify = [
        Turn(slot, right.window(0, width, accepted), before=before)
        for slot, ((width, accepted), before) in enumerate(zip(pairs, where, strict=True), 1)
    ]
    world.run([verify[0], idle, *verify[1:], idle])
    assert same_bits(world.state.view[1:], right.states[0].expand_as(world.state.view[1:]))
    single = kept_one_by_one(ops, right, heads, swap, max(widths))
    for slot, ((_, accepted), before) in enumerate(zip(pairs, where, strict=True), 1):
        for whole, one in zip(world.kept(slot, before, accepted) if accepted else (), single, strict=False):
            assert same_bits(whole, one[:accepted])
    after = [
        Turn(slot, cut(right.rows, accepted, 1), before + accepted, accepted, goal="scratch")
        for slot, ((_, accepted), before) in enumerate(zip(pairs, where, strict=True), 1)
    ]
    core = world.run([idle, *after], columns=True)[1:]
    for slot, (_, accepted) in enumerate(pairs, 1):
        assert same_bits(world.state.view[slot], right.states[accepted])
        assert same_bits(core[slot - 1], cores[accepted])
        assert same_bits(world.scratch.view[slot], right.states[accepted + 1])
        assert same_bits(world.snapshots.view[slot, 0], right.states[accepted + 1])


@OPS
@LAYOUTS
def test_wrapped_or_full_ring_runs_in_order_with_clamped_counts(ops: Ops, swap: bool) -> None:
    """Folds to scratch, without a row in the launch: nothing else changes, and a count below 1 does nothing."""
    size, (right, _) = 10, truth(ops, ONE, swap, 12, 14)
    asked = [(5, 0, 0), (7, 3, 3), (9, 5, 5), (10, 10, 10), (14, 10, 10_000), (4, 0, -3)]  # before, true, said
    world = World.of(ops, ONE, HERE, size=size, swap=swap, slots=len(asked) + 1)
    nothing = cut(right.rows, 0, 0)
    folds = []
    for slot, (before, true, _) in enumerate(asked, 1):
        world.state.view[slot] = right.states[before - true]
        world.fill(slot, before - true, cut(right.rows, before - true, true))
        folds.append(Turn(slot, nothing, before, true, kept=False, settled=False, goal="scratch"))
    part = world.part(folds)
    said = Draw(0, HERE).ints([count for *_, count in asked])
    part = replace(part, ring=replace(part.ring, pending=said))
    was = [pool.raw.clone() for pool in (world.state, *world.rings)]
    empty = world.scratch.raw.clone()
    ops.gdn(inputs=nothing, parts=(part,), dtype=torch.float32, to=at("core"))
    for pool, old in zip((world.state, *world.rings), was, strict=True):
        assert same_bits(pool.raw, old)
    for slot, (before, true, _) in enumerate(asked, 1):
        untouched = empty[world.scratch.numbers[slot]]
        assert same_bits(world.scratch.view[slot], right.states[before] if true else untouched)


@OPS
def test_a_fresh_request_reads_neither_its_slot_nor_its_ring(ops: Ops) -> None:
    """For any mark: the slot and the ring hold NaN, which times zero would be NaN."""
    right, cores = truth(ops, GROUPS[1], True, 13, 4, fresh=True)
    world = World.of(ops, GROUPS[1], HERE, size=8)
    core = world.run([
        Turn(1, cut(right.rows, 0, 3), before=0, pending=5, fresh=True),
        Turn(2, cut(right.rows, 0, 1), before=0, pending=8, fresh=True, kept=False, settled=False, goal="slot"),
        Turn(3, cut(right.rows, 0, 0), before=0, pending=8, fresh=True, kept=False, settled=False, goal="slot"),
    ])  # fmt: skip
    assert all(same_bits(core[t], cores[t]) for t in range(3))
    assert same_bits(core[3], cores[0])
    assert same_bits(world.state.view[1], right.states[0])
    assert same_bits(world.state.view[2], right.states[1])
    assert bool(world.state.view[3].isnan().all()), "a fold of a fresh request has nothing to fold"
    world.run([Turn(1, cut(right.rows, 3, 1), before=3, pending=3)])
    assert same_bits(world.state.view[1], right.states[3])


@OPS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rerun_with_rows_equals_a_fold_followed_by_rows(ops: Ops, dtype: torch.dtype) -> None:
    """Also in a narrow pool: what was run again is rounded once, as the store of the fold and the next load do."""
    heads, rows = GROUPS[1], stream(GROUPS[1], 6, 14, HERE)
    once, twice = (World.of(ops, heads, HERE, size=8, dtype=dtype) for _ in range(2))
    for world in (once, twice):
        world.state.view[4] = Draw(15, HERE).normal(*world.state.view.shape[1:]).to(dtype)
        world.fill(4, 6, cut(rows, 0, 3))  # entries 6, 7, 0
    whole = once.run([Turn(4, cut(rows, 3, 3), 9, 3)], columns=True)
    twice.run([Turn(4, cut(rows, 0, 0), 9, 3, kept=False, settled=False, goal="slot")])
    apart = twice.run([Turn(4, cut(rows, 3, 3), 9, 0)], columns=True)
    assert same_bits(whole, apart)
    for one, other in zip(once.pools, twice.pools, strict=True):
        assert same_bits(one.raw, other.raw)


@OPS
def test_a_turn_without_a_ring_unit_is_a_plain_window(ops: Ops) -> None:
    right, _ = truth(ops, ONE, True, 11, WIDEST + 1)
    world = World.of(ops, ONE, HERE, size=8)
    world.state.view[2] = right.states[0]
    part = world.part([Turn(2, cut(right.rows, 0, 2), before=4, pending=4, settled=False, goal="slot")])
    part = replace(part, ring=replace(part.ring, units=torch.full_like(part.begin, -1)))
    was = [pool.raw.clone() for pool in world.rings]
    ops.gdn(inputs=cut(right.rows, 0, 2), parts=(part,), dtype=torch.float32, to=at("core"))
    assert same_bits(world.state.view[2], right.states[2])
    assert all(same_bits(pool.raw, old) for pool, old in zip(world.rings, was, strict=True))


def test_a_prefill_chunk_has_no_ring() -> None:
    rows = stream(ONE, 1, 1, HERE)
    part = World.of(PLAIN, ONE, HERE, size=2).part([Turn(1, rows)])
    for fields in ({"settled": None}, {"ring": None}):
        with pytest.raises(AssertionError, match="a prefill chunk has no ring"):
            replace(part, form="chunk", **fields)


ROUNDS = st.lists(st.tuples(DEED, DEED), min_size=1, max_size=4)
ANY = given(rounds=ROUNDS, start=st.integers(0, 40), lazy=st.booleans(), room=st.integers(2 * WIDEST, 2 * WIDEST + 9))


@ANY
@settings(max_examples=40, deadline=None, database=None)
def test_any_rounds_leave_the_state_of_decoding_plain(
    rounds: list[tuple[Deed, Deed]], start: int, lazy: bool, room: int
) -> None:
    any_rounds(PLAIN, GROUPS[1], rounds, start, lazy, room)


@ANY
@settings(max_examples=3, deadline=None, database=None)
def test_any_rounds_leave_the_state_of_decoding_triton(
    rounds: list[tuple[Deed, Deed]], start: int, lazy: bool, room: int
) -> None:
    any_rounds(TRITON, ONE, rounds, start, lazy, room)


@pytest.mark.slow
@ANY
@settings(max_examples=60 if HERE == "cuda" else 6, deadline=None, database=None)
def test_any_rounds_leave_the_state_of_decoding_triton_with_groups(
    rounds: list[tuple[Deed, Deed]], start: int, lazy: bool, room: int
) -> None:
    any_rounds(TRITON, GROUPS[1], rounds, start, lazy, room)


def any_rounds(ops: Ops, heads: Heads, rounds: list[tuple[Deed, Deed]], start: int, lazy: bool, room: int) -> None:
    lives = [Life(slot, truth(ops, heads, True, 20 + slot, TOKENS).right, start + slot) for slot in (2, 5)]
    walk(World.of(ops, heads, HERE, size=room), lives, rounds, lazy)


def in_two_parts(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Both parts in fp64, by the unit of the last place: the high part to nearest even, and the rest again."""
    def nearest(y: torch.Tensor) -> torch.Tensor:
        _, exponent = torch.frexp(y.abs().clamp_min(torch.finfo(dtype).tiny))
        unit = torch.ldexp(torch.full_like(y, torch.finfo(dtype).eps / 2), exponent)
        return (y / unit).round() * unit

    high = nearest(x.double())
    return high, nearest(x.double() - high)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("ops", "heads"), [(PLAIN, Heads(1, 2, 20, 12)), (TRITON, Heads(1, 2, 20, 12)), (TRITON, Heads(1, 2, 32, 8))],
    ids=["plain", "triton", "pieces"],
)  # fmt: skip
def test_split_ring_has_both_parts_and_runs_their_sum_again(ops: Ops, heads: Heads, dtype: torch.dtype) -> None:
    """Verify into a wide ring and into a split one; run both again, the wide one with the sums of the parts.

    Keys of 32 numbers are moved in pieces of several numbers.
    """
    size, (first, last, again) = 6, (4, 3, 2)
    right, _ = truth(ops, heads, True, 13, first + 1)
    wide, two = (World.of(ops, heads, HERE, size=size, slots=3, split=to) for to in (None, dtype))
    for world in (wide, two):
        world.state.view[1:] = right.states[0]
        world.run([Turn(1, cut(right.rows, 0, first), 4), Turn(2, cut(right.rows, 0, last), 9)])
    for slot, before, count in ((1, 4, first), (2, 9, last)):
        (k, decay, update), found = wide.kept(slot, before, count), two.kept(slot, before, count)
        assert same_bits(found[1], decay)
        for x, high, low in ((k, found[0], found[3]), (update, found[2], found[4])):
            due, rest = in_two_parts(x, dtype)
            assert torch.equal(high.double(), due) and torch.equal(low.double(), rest) and rest.any()
            # Half a unit of the low part: 2 ** -17 of a number in bf16, 2 ** -23 in fp16; there at least 2 ** -25.
            error, one = (high.double() + low.double() - x).abs(), torch.finfo(dtype)
            assert bool((error <= (x.abs() * one.eps**2 / 8).clamp_min(one.tiny * one.eps / 2)).all())
    for pool, parts in ((wide.rings[0], (0, 3)), (wide.rings[2], (2, 4))):
        pool.view.copy_(sum(two.rings[part].view.float() for part in parts))
    cores = [world.run([Turn(1, cut(right.rows, again, 1), 4 + again, again, goal="scratch"),
                        Turn(2, cut(right.rows, last, 1), 9 + last, last, goal="scratch")]) for world in (wide, two)]
    assert same_bits(*cores) and not same_bits(two.state.view[1], right.states[again])
    for mine, theirs in zip((two.state, two.scratch), (wide.state, wide.scratch), strict=True):
        assert same_bits(mine.view[1:], theirs.view[1:])
