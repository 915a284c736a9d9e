"""Staged windows: every shape of a launch gives the bits of the compiler's layouts.

Leaves out: what the right bits are (`test_exact.py`), which a GPU asks of staged windows as well; what they take when
they are compiled (`test_compiled.py`).
"""

import sys
from functools import partial
from typing import Any

import pytest
import torch

from instep.kit.cases.case import Draw
from instep.kit.cases.conv_and_gdn import Heads
from instep.kit.cases.guarded_pools import same_bits
from instep_optimized.kernels.gdn_windows import token_by_token as window_file
from instep_optimized.kernels.runtime import INTERPRETED
from instep_optimized.memory_addresses import Address, Part
from instep_optimized.ops.triton import TRITON
from instep_reference.contract.place_names import Place
from support.running.recorded_calls import calls_of
from support.worlds.rings import Turn, World, cut, stream

native = pytest.mark.skipif(INTERPRETED, reason="no CUDA device here")
# Rows of V per thread of `_window`. With states in 16 bits, one row gets another layout there.
TWIN = {torch.float32: (1, 2, 4), torch.bfloat16: (2, 4), torch.float16: (2, 4)}
# Rows of V per thread, warps, registers; prefetch distance of states, in programs; whole lines; whether a window skips
# an unneeded final state; whether rows are written out; what is prefetched on a guess; whether rings store keys first.
SHAPES = (
    *((held, warps, 168) for held in (1, 2, 4) for warps in (1, 2, 4)),
    *((held, warps, 168, 16, True) for held, warps in ((1, 1), (2, 2), (4, 1), (2, 4))),
    (2, 4, 168, 0, False, False),
    (2, 4, 168, 16, True, True, False, 2),
    (1, 4, 168, 0, False, True, True, 2),
    (2, 4, 168, 0, True, True, False, 1, True),
)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Part]:
    """The parts that run staged, as they come."""
    file = sys.modules["instep_optimized.kernels.gdn_dispatch"].staged
    return calls_of(monkeypatch, file, "staged", key=lambda *given, **_: given[1])


def served(
    monkeypatch: pytest.MonkeyPatch, heads: Heads, dtype: torch.dtype, by: str, shape: Any, requests: int
) -> list[torch.Tensor]:
    """Core and pools of windows of four after 0 to 3 pending tokens, with the state after every row kept; then of the
    same windows without these states, and of a decode.

    All kinds of requests occur: their rings are wrapped or not, and fold as many tokens as are pending.
    """
    gdn_file: Any = sys.modules["instep_optimized.kernels.gdn_dispatch"]
    staged_file, seen = gdn_file.staged, counted(monkeypatch)
    if by == "window":
        monkeypatch.setattr(gdn_file, "staged", None)
        monkeypatch.setattr(window_file, "THREAD_ROWS", shape)
    elif shape is not None:
        monkeypatch.setattr(staged_file, "shape_for", lambda *_: shape)
    world = World.of(TRITON, heads, "cuda", size=8, slots=requests + 1, dtype=dtype)
    rows = stream(heads, 8, 41, "cuda")
    world.state.view[1:] = Draw(42, "cuda").normal(1, *world.state.view.shape[1:]).to(dtype)
    for slot in range(1, requests + 1):
        world.fill(slot, slot, cut(rows, 0, 3))
    turns = [Turn(slot, cut(rows, 3, 4), slot + 3, slot % 4) for slot in range(1, requests + 1)]
    core, ended = world.run(turns, columns=True), world.run(turns)
    one = world.run([Turn(1, cut(rows, 7, 1), 0, kept=False, settled=False, goal="slot")])
    monkeypatch.undo()
    assert len(seen) == (requests + 3 if by == "staged" else 0), "each ring is filled by a separate launch"
    written = (world.state, world.snapshots, *world.rings)  # the scratch is not written here
    return [core, ended, one, *(pool.view[1:].clone() for pool in written)]


@native
@pytest.mark.gpu
@pytest.mark.parametrize("heads", [Heads(2, 4, 128, 128), Heads(1, 3, 128, 256)], ids=str)
@pytest.mark.parametrize("dtype", TWIN, ids=str)
def test_every_shape_of_a_launch_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, heads: Heads, dtype: torch.dtype
) -> None:
    run = partial(served, monkeypatch, heads, dtype)
    right = run("window", 2, 5)
    assert all(bool(x.isfinite().any()) for x in right)
    for held in TWIN[dtype]:
        assert all(map(same_bits, run("window", held, 5), right)), f"window {held}"
    for shape in SHAPES:
        assert all(map(same_bits, run("staged", shape, 5), right)), f"staged {shape}"


@native
@pytest.mark.gpu
@pytest.mark.parametrize("requests", [5, 1, 70, 300])
@pytest.mark.parametrize("dtype", TWIN, ids=str)
def test_the_shape_that_serves_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, requests: int
) -> None:
    """Each number of requests takes the shape that its size asks for."""
    run = partial(served, monkeypatch, Heads(2, 4, 128, 128), dtype)
    assert all(map(same_bits, run("staged", None, requests), run("window", 2, requests)))


@native
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TWIN, ids=str)
def test_the_paths_of_a_tree_have_the_bits_of_windows(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """`_window` serves trees: one with two branches, each of which is also a separate window."""
    heads, rows = Heads(2, 4, 128, 128), stream(Heads(2, 4, 128, 128), 8, 43, "cuda")

    def ran(path: list[int], parents: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        world = World.of(TRITON, heads, "cuda", size=8, slots=3, dtype=dtype)
        world.state.view[1:] = Draw(44, "cuda").normal(1, *world.state.view.shape[1:]).to(dtype)
        world.fill(1, 1, cut(rows, 0, 3))
        given = type(rows)(*(x[[3 + node for node in path]] for x in rows))
        core = world.run([Turn(1, given, 4, 3)], columns=True, trees=[parents] if parents else ())
        return core, world.snapshots.view[1]

    seen = counted(monkeypatch)
    core, states = ran([0, 1, 2, 3, 4], (-1, 0, 1, 0, 3))
    assert len(seen) == 1, "the ring was filled"
    assert core.isfinite().all() and core.any() and states[:5].isfinite().all()
    for path in ([0, 1, 2], [0, 3, 4]):
        own, after = ran(path)
        assert same_bits(core[path], own) and same_bits(states[path], after[: len(path)])
    assert len(seen) == 5, "both chains ran staged"


@pytest.mark.filterwarnings("ignore:.*determinis")
@pytest.mark.parametrize("device", ["cpu" if INTERPRETED else pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("by", ["window"] if INTERPRETED else ["staged", "window"])
@pytest.mark.parametrize("requests", [3, 40])
def test_windows_write_zeros_into_unowned_rows(
    monkeypatch: pytest.MonkeyPatch, device: str, requests: int, by: str
) -> None:
    """Memory is NaN before. Requests lie anywhere, some have no unit, some no rows; gaps are between them."""
    if by == "window":
        monkeypatch.setattr(sys.modules["instep_optimized.kernels.gdn_dispatch"], "staged", None)
    heads = Heads(1, 2, 16, 16) if INTERPRETED else Heads(1, 2, 128, 128)
    draw, rows = Draw(7, device), 5 * requests + 2
    given = stream(heads, rows, 3, device)
    begin = torch.arange(requests).flip(0) * 5 + 1
    count = torch.tensor([(2, 0, 4)[n % 3] for n in range(requests)])
    units = torch.tensor([n + 1 if n % 4 else -1 for n in range(requests)])
    pool = draw.normal(requests + 1, heads.HV, heads.V, heads.K).transpose(2, 3)
    address = Address(pool, units.to(device))
    fresh = torch.zeros(requests, dtype=torch.bool, device=device)
    part = Part("window", begin.to(device), count.to(device), 4, address, fresh, address)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        core = TRITON.gdn(inputs=given, parts=(part,), dtype=torch.float32, to=Place("trunk", 0, "core"))
    finally:
        torch.use_deterministic_algorithms(False)
    spans = zip(begin.tolist(), count.tolist(), units.tolist(), strict=True)
    covered = {row for first, many, unit in spans if unit >= 0 for row in range(first, first + many)}
    assert {row for row in range(rows) if core[row].any()} == covered and core.isfinite().all()
