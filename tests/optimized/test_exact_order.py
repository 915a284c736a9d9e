"""The order in which programs run changes no bit: shared ring entries are never written while others may read them.

Leaves out: what the right bits are (`test_exact.py`). Interpreted, the programs of a launch run in shuffled orders, and
a ring that is too small for its window is caught so; native, launches of real size are repeated.
"""

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import pytest
import torch

from instep.kit.cases.case import Draw
from instep.kit.cases.conv_and_gdn import Heads
from instep.kit.cases.guarded_pools import same_bits
from instep_optimized.kernels.gdn_windows import token_by_token as window_file
from instep_optimized.kernels.runtime import INTERPRETED
from instep_optimized.ops.op_protocols import GdnInputs
from instep_optimized.ops.triton import TRITON
from support.worlds.rings import Turn, World, cut, stream

interpreted = pytest.mark.skipif(not INTERPRETED, reason="kernels are native here, their order is the device's")
HEADS = Heads(1, 2, 32, 44)  # three tiles of V
SLOT, PENDING, WINDOW = 3, 2, 2
ORDERS = 5


@contextmanager
def shuffled(seed: int) -> Iterator[list[tuple[int, ...]]]:
    """Run interpreted programs in another order by changing their ids. Yields the ids in order of execution."""
    from triton.runtime.interpreter import interpreter_builder as builder

    ran: list[tuple[int, ...]] = []
    order: dict[tuple[int, ...], tuple[int, ...]] = {}
    told = builder.set_grid_idx

    def instead(*program: int) -> None:
        if not order:
            grid = list(product(*(range(size) for size in builder.grid_dim)))
            order.update(zip(grid, random.Random(seed).sample(grid, len(grid)), strict=True))
        ran.append(order[program])
        told(*ran[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "set_grid_idx", instead)
        yield ran


def after_a_launch(size: int, seed: int | None, own: int | None = None) -> tuple[torch.Tensor, ...]:
    """Tokens run again and a window of as many, in a ring of `size` (updates: `own`): the core, and the pools."""
    rows = stream(HEADS, PENDING + WINDOW, 31, "cpu")
    world = World.of(TRITON, HEADS, "cpu", size=size, own=own)
    world.state.view[SLOT] = Draw(32, "cpu").normal(*world.state.view.shape[1:])
    world.fill(SLOT, 0, cut(rows, 0, PENDING))
    turn = Turn(SLOT, cut(rows, PENDING, WINDOW), PENDING, PENDING, goal="scratch")
    if seed is None:
        core = world.run([turn])
    else:
        with shuffled(seed) as ran:
            core = world.run([turn])
        assert len(ran) == len(set(ran)) == 3 * HEADS.HV, "every program once: three tiles of V, each value head"
    return (core, *(pool.raw for pool in world.pools))


def spoiled(size: int, own: int | None = None) -> list[int]:
    """The orders whose bits are not those of a ring with room to spare."""
    right = after_a_launch(4 * WINDOW, None)
    found = []
    for seed in range(ORDERS):
        outcome = after_a_launch(size, seed, own)
        # Rings of different sizes lie differently: compare the core, the state and scratch.
        found += [seed] * (not all(same_bits(x, y) for x, y in zip(outcome[:3], right[:3], strict=True)))
    return found


@pytest.fixture
def _three_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_file, "tile", lambda native, interpreted: native)


@interpreted
@pytest.mark.usefixtures("_three_tiles")
def test_a_ring_of_twice_the_window_gives_the_same_bits_in_every_order() -> None:
    assert spoiled(2 * WINDOW) == []


@interpreted
@pytest.mark.usefixtures("_three_tiles")
def test_updates_need_room_for_only_one_window() -> None:
    """Its entries are read by the program that writes them, which has run all that is pending by then."""
    assert spoiled(2 * WINDOW, own=WINDOW) == []


@interpreted
@pytest.mark.usefixtures("_three_tiles")
def test_a_ring_with_room_for_one_window_only_is_caught_by_the_order() -> None:
    """The keys and gates that the first tile keeps fall on entries that the other tiles still have to run again."""
    assert spoiled(WINDOW) != []


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="no CUDA device here")
@pytest.mark.parametrize(("heads", "requests", "launches", "tree"), [
    pytest.param(Heads(16, 32, 128, 128), 32, 20, (), id="real-size"),
    pytest.param(Heads(16, 32, 128, 128), 32, 20, (-1, 0, 0, 1), id="real-size-tree"),
    # Cases that racecheck can cover within a minute:
    pytest.param(Heads(1, 2, 128, 128), 2, 2, (), id="few-programs"),
    pytest.param(Heads(1, 2, 128, 128), 2, 2, (-1, 0, 0, 1), id="few-programs-tree"),
])  # fmt: skip
def test_launches_repeat_bit_by_bit(heads: Heads, requests: int, launches: int, tree: tuple[int, ...]) -> None:
    window, size = 4, 8
    rows = stream(heads, requests * 2 * window, 33, "cuda")
    right: tuple[torch.Tensor, ...] = ()
    for _ in range(launches):
        outcome = launched(heads, requests, window, size, rows, tree)
        right = right or outcome
        assert all(same_bits(x, y) for x, y in zip(right, outcome, strict=True))
        gc.collect()  # a world takes a gigabyte, and reference cycles would keep it for several launches


def launched(
    heads: Heads, requests: int, window: int, size: int, rows: GdnInputs, tree: tuple[int, ...]
) -> tuple[torch.Tensor, ...]:
    """The core of a window of every request after rerun tokens, and the pools after it."""
    world = World.of(TRITON, heads, "cuda", size=size, widest=1, slots=requests + 1)
    world.state.view[1:] = Draw(34, "cuda").normal(1, *world.state.view.shape[1:])
    turns = []
    for slot in range(1, requests + 1):
        first = 2 * window * (slot - 1)
        world.fill(slot, slot, cut(rows, first, window))
        turns.append(Turn(slot, cut(rows, first + window, window), slot + window, window))
    core = world.run(turns, trees=requests * [tree] if tree else ())
    return core, *(pool.raw for pool in world.pools)
