"""`verify_gdn` is conv, norms, gates and delta rule of a verify: the bits of its parts, in results and in memory.

Leaves out: what all fusions share (`test_fusions.py`), and whole runs (the relation `fused`).
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.dlpack import from_dlpack

from instep.kit.cases import serve
from instep.kit.cases.case import BF16, FP32, Call, Case, Draw, at
from instep.kit.cases.conv_and_gdn import SHAPES, Heads, Shape, conv_case, gdn_case
from instep.kit.cases.guarded_pools import guarded, same_bits
from instep_optimized.kernels import gdn_fusions
from instep_optimized.kernels.runtime import INTERPRETED
from instep_optimized.memory_addresses import KEPT, Address, Part
from instep_optimized.ops import fused
from instep_optimized.ops.check_op_calls import contracts
from instep_optimized.ops.fused import in_parts, serves_verify
from instep_optimized.ops.op_protocols import GdnInputs, Ops
from instep_optimized.ops.op_shapes import misfits
from instep_optimized.ops.triton import TRITON
from instep_optimized.ops.triton_with_fp32_prefill import PRECISE
from instep_optimized.ops.watch_op_calls import around
from instep_reference.contract.place_names import unseen
from support.independent.op_agreement import agree
from support.kernels.planted import on_device, planted_kernels
from support.running.covering import few
from support.running.recorded_calls import calls_of
from support.worlds.rings import Turn, World, stream

DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [pytest.mark.interpreted] if INTERPRETED else [pytest.mark.gpu]
native = pytest.mark.skipif(INTERPRETED, reason="no CUDA device here")
PLACES = tuple(map(at, ("mixed", *GdnInputs._fields, "core")))
GROUPED = Heads(2, 4, 16, 16)
REAL = Heads(2, 4, 128, 128)  # as wide as kernels with explicit layouts take them on a GPU
WIDTH = 4


def raw(heads: Heads, rows: int, seed: int = 7) -> dict[str, Any]:
    """Rows of the linear maps, all columns of something wider, and weights."""
    (H, HV, K, V), draw = heads, Draw(seed, DEVICE)
    channels = 2 * H * K + HV * V
    wider = 16 - 2 * HV % 8  # so that rows begin at whole words
    x, a, b, _ = torch.split(draw.normal(rows, channels + 2 * HV + wider, dtype=BF16), [channels, HV, HV, wider], dim=1)
    return {"x": x, "weight": draw.normal(channels, WIDTH, dtype=BF16, scale=0.5), "a": a, "b": b,
            "A_log": draw.normal(HV), "dt_bias": draw.normal(HV), "key_heads": H, "key_dim": K, "dtype": BF16,
            "to": PLACES}  # fmt: skip


def staged(monkeypatch: pytest.MonkeyPatch, least: int = 1) -> list[Part]:
    """The parts whose conv the staged kernel computes, as they come; of how few rows of V, as small as tests are."""
    if INTERPRETED:
        return []
    file: Any = sys.modules["instep_optimized.kernels.gdn_dispatch"].staged
    monkeypatch.setattr(file, "VERIFIES", range(least, file.VERIFIES.stop))
    return calls_of(monkeypatch, file, "staged", lambda *given, conv=None, **_: given[1] if conv else None)


class Verify:
    """Windows of some requests over pools of states, rings and conv windows.

    counts: rows of each request; -1: it has no unit
    by_column: the conv's source has positions
    skip: unowned rows at the end
    unkept: the row of windows that are not kept
    """

    def __init__(
        self, heads: Heads, counts: tuple[int, ...], state: torch.dtype = FP32, *, by_column: bool = False,
        skip: int = 3, unkept: int = -1,
    ) -> None:
        H, HV, K, V = heads
        self.world = World.of(TRITON, heads, DEVICE, size=16, slots=len(counts) + 1, dtype=state)
        draw, channels, slots = Draw(42, DEVICE), 2 * H * K + HV * V, range(1, len(counts) + 1)
        self.world.state.view[1:] = draw.normal(*self.world.state.view[1:].shape).to(state)
        for slot in slots:
            self.world.fill(slot, slot, stream(heads, 3, slot, DEVICE))
        turns = [
            Turn(n + 1 if count >= 0 else -1, stream(heads, max(count, 1), n, DEVICE), n + 4, (n + 1) % 4,
                 kept=n % 8 != 5, settled=n % 8 != 6, fresh=n % 5 == 4)
            for n, count in enumerate(counts)
        ]  # fmt: skip
        leading = (len(counts) + 1, 3) if by_column else (len(counts) + 1,)
        self.past = guarded(leading, (channels, WIDTH - 1), BF16, device=DEVICE)
        self.kept = guarded((len(counts) + 1, max(counts) + 1), (channels, WIDTH - 1), BF16, device=DEVICE)
        self.past.view[1:] = draw.normal(*self.past.view[1:].shape).to(BF16)
        self.state = self.world.part(turns)
        column = draw.ints([n % 3 for n in range(len(counts))]) if by_column else None
        rows = draw.ints([n if n != unkept else -1 for n in reversed(range(len(counts)))])
        self.window = replace(
            self.state, read=Address(self.past.view, self.state.read.units, column), ring=None, settled=None,
            per_row=Address(self.kept.view, rows))  # fmt: skip
        self.pools = *self.world.pools, self.past, self.kept
        rings = (f"ring of {name}" for name in KEPT[TRITON.keeps]._fields)
        self.names = ("core", "states", "scratch", "snapshots", *rings, "past windows", "kept windows")
        self.given = raw(heads, int(self.state.count.sum()) + skip)

    def ran(self, ops: Ops, **other: Any) -> list[torch.Tensor]:
        """core and all memory after the launch, which is then restored."""
        was = [pool.raw.clone() for pool in self.pools]
        given = self.given | {"windows": (self.window,), "parts": (self.state,)} | other
        core = fused.prefill_gdn(ops, **given)
        found = [core, *(pool.raw.clone() for pool in self.pools)]
        for pool, old in zip(self.pools, was, strict=True):
            pool.raw.copy_(old)
        return found


RAGGED = (4, 1, 2, -1, 4, 3, 4, 2)


@few(1)
@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("counts", [RAGGED] if INTERPRETED else [(4,), (2, 1, 2), RAGGED, 32 * (4,)], ids=str)
def test_a_verify_has_the_bits_of_the_parts(
    monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...], by_column: bool
) -> None:
    seen, one = staged(monkeypatch), Verify(GROUPED if INTERPRETED else REAL, counts, by_column=by_column)
    right, found = one.ran(in_parts(TRITON)), one.ran(TRITON)
    assert all(map(same_bits, right, found)) and bool(right[0].any()) and bool(right[0].isfinite().all())
    assert not same_bits(right[-1], one.kept.raw), "windows are kept"
    assert len(seen) == (not INTERPRETED)


@native
@pytest.mark.parametrize(
    ("shape", "heads"), [(0, Heads(2, 2, 128, 256)), (1, Heads(1, 3, 128, 128)), (2, REAL)], ids=str)
def test_every_shape_of_a_launch_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch, shape: int, heads: Heads) -> None:
    seen, one = staged(monkeypatch), Verify(heads, RAGGED, unkept=2)
    right, file = one.ran(in_parts(TRITON)), sys.modules["instep_optimized.kernels.gdn_dispatch"].staged
    known = file.SHAPES["verify"][4]
    monkeypatch.setattr(file, "shape_for", lambda *_: known[shape][1])
    assert all(map(same_bits, right, one.ran(TRITON))) and len(seen) == 1 and len(known) == 3


@native
@pytest.mark.parametrize(("counts", "state", "least"), [
    ((2, 1), FP32, 8192), ((1, 1), FP32, 1), ((5, 4), FP32, 1), ((2, 1), BF16, 1),
], ids=["few", "one row", "five rows", "16 bits"])  # fmt: skip
def test_untimed_shape_runs_the_parts(
    monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...], state: torch.dtype, least: int
) -> None:
    seen, one = staged(monkeypatch, least), Verify(REAL, counts, state)
    assert all(map(same_bits, one.ran(in_parts(TRITON)), one.ran(TRITON))) and seen == []


@native
@pytest.mark.parametrize("counts", [(4,), (4, 1, 2, 3, 4)], ids=str)
def test_wrongly_guessed_rows_are_loaded_again(monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...]) -> None:
    """A kernel that knows of one row guesses that every request begins there, or has more rows than there are."""
    seen, one = staged(monkeypatch), Verify(REAL, counts, skip=0)
    right, file = one.ran(TRITON), sys.modules["instep_optimized.kernels.gdn_dispatch"].staged
    run = file.staged
    monkeypatch.setattr(file, "staged", lambda *args, look, **named: run(*args, look=1, **named))
    assert all(map(same_bits, right, one.ran(TRITON))) and len(seen) == 2


OF_Q = "                put_windows(kept + raw * conv.kept.per_column, all_q, window_q, raw < rows)\n"
OF_K = OF_Q.replace("_q", "_k")
OF_V = "            put_windows(kept + row_v * conv.kept.per_column, all_v, window_v, row_v < rows)\n"
ANOTHERS = "gl.load(spans.begin + request, cache", "gl.load(spans.begin + request * 0, cache"
NOTICED = "(guess != first) | (first + rows > look)"
AGAIN = "forgets, strength = rows_at(\n                x, k, q, v, log_decay, beta, first, rows,"
FRESH, KEEPS = "(row < 3) & known", "(kept_by >= 0) & (keep >= 0)"
# The file, the old text and the fault; and the number of rows that the kernel gets, if not all.
Plant = tuple[str, tuple[tuple[str, str], ...], int | None]
SOUND: dict[str, Plant] = {
    "nothing": ("window", (), None), "nothing, of one row": ("window", (), 1),
    "another request's begin is the guess": ("window", (ANOTHERS,), None),
}
FAULTS: dict[str, Plant] = {
    "windows of q are not kept": ("window", ((OF_Q, ""),), None),
    "windows of k are not kept": ("window", ((OF_K, ""),), None),
    "windows of v are not kept": ("window", ((OF_V, ""),), None),
    "windows after the last row are kept": ("window", (("window_q, raw < rows)", "window_q, raw >= 0)"),), None),
    "windows of the first key head alone": ("window", (("(stripe == 0) & (head % group == 0)", "head == 0"),), None),
    "unowned windows": ("window", (("if kept_to >= 0", "if kept_to >= -1"),), None),
    "an unowned state": ("window", (("if settle >= 0", "if settle >= -1"),), None),
    "unowned entries": ("window", ((KEEPS, KEEPS.replace("keep >= 0", "keep >= -1")),), None),
    "a former request's window": ("rows", ((FRESH, "row < 3"),), None),
    "a former request's state": ("window", ((" & known)\n    if LEADS", ")\n    if LEADS"),), None),
    "a former request's entries": ("window", (("gl.where(known & (kept_by", "gl.where((kept_by"),), None),
    "an input before the window": ("rows", (("gl.where(row == 1, old[2], new[1])", "new[1]"),), None),
    "the oldest input before it": ("rows", (("gl.where(row == 2, old[2], new[0])", "new[0]"),), None),
    "another position's window": ("rows", (("(past, unit, windows.columns", "(past, unit, None"),), None),
    "values of the first stripe": ("window", (("word_v = along(0, MOST, FEW), stripe * VALUES +",
                                               "word_v = along(0, MOST, FEW),"),), None),
    "an unnoticed wrong guess": ("window", (ANOTHERS, (NOTICED, "first + rows > look")), None),
    "unknown rows": ("window", ((NOTICED, "guess != first"),), 1),
    "gates of a wrong guess": ("window", ((AGAIN, AGAIN.replace("forgets, strength", "_a, _b")),), 1),
}  # fmt: skip


@pytest.mark.parametrize("fault", [*SOUND, *FAULTS])
def test_a_fault_in_the_kernel_changes_bits(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, texts, look = (SOUND | FAULTS)[fault]
    uses, its = ("from .token_inputs_gluon", "from .planted_token_inputs_gluon"), {place: texts}
    rows, window = its.get("rows", ()), (uses, *its.get("window", ()))
    on_device(("gdn_windows.token_inputs_gluon", rows), ("gdn_windows.token_by_token_gluon", window))
    # Unowned rows become zero as far as the kernel knows of them.
    one = Verify(REAL, (4, 1, 2, 3), skip=0) if look else Verify(REAL, RAGGED, by_column=True, unkept=2)
    kept, settled = one.window.per_row, one.state.settled
    # Stores without a request have unit -1. Pools without their first units have memory there, too.
    units = torch.where(settled.units > 0, settled.units - 1, -1)
    pools = {"windows": (replace(one.window, per_row=replace(kept, pool=kept.pool[1:])),),
             "parts": (replace(one.state, settled=replace(settled, pool=settled.pool[1:], units=units)),)}
    right, file = one.ran(in_parts(TRITON), **pools), sys.modules["instep_optimized.kernels.gdn_dispatch"].staged
    planted_kernels("gdn_windows.token_inputs_gluon", rows, tmp_path, monkeypatch)
    other = planted_kernels("gdn_windows.token_by_token_gluon", window, tmp_path, monkeypatch)
    seen, run = staged(monkeypatch), file.staged
    monkeypatch.setattr(file, "staged_window", other.staged_window)
    if look is not None:
        monkeypatch.setattr(file, "staged", lambda *args, **named: run(*args, **named | {"look": look}))
    found = one.ran(TRITON, **pools)
    off = [name for name, *both in zip(one.names, right, found, strict=True) if not same_bits(*both)]
    assert (off == []) is (fault in SOUND) and len(seen) == 1, off


def wrong(plant: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[..., torch.Tensor]:
    """The fusion, of which one argument is another one."""
    return lambda **given: gdn_fusions.verify_gdn(**given | plant(given))


@few(2)
@pytest.mark.parametrize("plant", [
    lambda g: {"a": g["b"]}, lambda g: {"weight": g["weight"].roll(1, 1)}, lambda g: {"x": g["x"].roll(1, 0)},
    lambda g: {"windows": (replace(g["windows"][0], fresh=~g["windows"][0].fresh),)}, lambda g: {},
], ids=["b for a", "another tap", "another row", "no history", "nothing"])  # fmt: skip
def test_result_for_another_input_is_detected(monkeypatch: pytest.MonkeyPatch, plant: Any) -> None:
    staged(monkeypatch)
    one = Verify(GROUPED if INTERPRETED else REAL, (4, 2))
    right, found = one.ran(in_parts(TRITON)), one.ran(replace(TRITON, verify_gdn=wrong(plant)))
    same = all(map(same_bits, right, found))
    assert same is not bool(plant(one.given | {"windows": (one.window,)}))


def shifted(one: Verify, seen_as: Callable[[torch.Tensor], torch.Tensor]) -> Address:
    """Windows are read from a pool without its first unit"""
    units = one.window.read.units
    return Address(seen_as(one.past.view[1:, None]), torch.where(units > 0, units - 1, units))


def trap(**given: Any) -> torch.Tensor:
    raise AssertionError("the parts are to serve")


@pytest.mark.parametrize("other", [
    lambda one: {"windows": (replace(one.window, per_row=None),)},
    lambda one: {"windows": (replace(one.window, store=one.window.read, per_row=one.window.per_row),)},
    lambda one: {"windows": (replace(one.window, per_row=Address(one.past.view[:, None], one.window.read.units)),)},
    lambda one: {"windows": (replace(one.window, per_row=shifted(one, lambda pool: pool)),)},
    lambda one: {"windows": (replace(one.window, per_row=shifted(one, from_dlpack)),)},
], ids=["none are kept", "the last is stored", "they are kept where they are read", "the same from its second unit on",
        "the same, as another storage"])  # fmt: skip
def test_parts_run_in_other_cases(other: Callable[[Verify], dict[str, Any]]) -> None:
    one = Verify(GROUPED if INTERPRETED else REAL, (1, 1))
    given = other(one)
    right, found = one.ran(in_parts(TRITON), **given), one.ran(replace(TRITON, verify_gdn=trap), **given)
    assert all(map(same_bits, right, found))


@pytest.mark.parametrize("name", ["decode", "mixed", "prefill", "no_parts"])
def test_verify_gdn_is_not_used_for_other_parts(name: str) -> None:
    shapes: tuple[Shape, ...] = SHAPES[name]
    H, HV, K, V = GROUPED

    def build(device: str) -> Call:
        conv = conv_case(1, shapes, 2 * H * K + HV * V, WIDTH, BF16, True)(device)
        rule = gdn_case(2, shapes, GROUPED, FP32, True, BF16)(device)
        given = raw(GROUPED, len(conv.inputs["x"])) | {"windows": conv.inputs["parts"], "parts": rule.inputs["parts"]}
        return Call(given, {f"{name} {memory}": pool for call, name in ((conv, "windows"), (rule, "states"))
                            for memory, pool in call.pools.items()})  # fmt: skip

    one = Case("prefill_gdn", "drawn", build, exact=True)
    parts, found = (serve(SimpleNamespace(prefill_gdn=partial(fused.prefill_gdn, ops)), one, DEVICE) for ops in (
        in_parts(TRITON), replace(TRITON, verify_gdn=trap, prefill_gdn=None)))  # fmt: skip
    assert agree(one, parts, found) == []


@pytest.mark.parametrize("other", [
    lambda part: {"windows": replace(part, parents=torch.zeros(2, 4, dtype=torch.int64, device=DEVICE))},
    lambda part: {"parts": replace(part, parents=torch.zeros(2, 4, dtype=torch.int64, device=DEVICE))},
    lambda part: {"windows": replace(part, form="chunk")}, lambda part: {"parts": replace(part, form="chunk")},
    lambda part: {"dtype": FP32}, lambda part: {"windows": None}, lambda part: {},
], ids=["trees", "trees of states", "prompts", "prompts of states", "32 bits", "nothing", "a verify"])  # fmt: skip
def test_verify_gdn_needs_16_bit_chains_with_kept_windows(other: Callable[[Part], dict[str, Any]]) -> None:
    window = Verify(GROUPED, (4, 2)).window
    found = {"windows": window, "parts": window, "dtype": BF16} | other(window)
    parts = (() if one is None else (one,) for one in (found["windows"], found["parts"]))
    assert serves_verify(*parts, found["dtype"]) is (other(window) == {})


@pytest.mark.parametrize(("name", "change", "what"), [
    ("weight", lambda x: x[:-1], "x is"), ("a", lambda x: x[:, :-1], "a is"),
], ids=["weight", "a"])  # fmt: skip
def test_unsupported_call_is_named(name: str, change: Callable[[torch.Tensor], torch.Tensor], what: str) -> None:
    one = Verify(GROUPED, (2, 1))
    given = one.given | {"windows": (one.window,), "parts": (one.state,)}
    assert list(misfits("verify_gdn", given)) == []
    assert any(told.startswith(what) for told in misfits("verify_gdn", given | {name: change(given[name])}))


def test_op_set_with_another_rule_does_not_use_it() -> None:
    assert PRECISE.verify_gdn is None and TRITON.verify_gdn is gdn_fusions.verify_gdn


def test_call_is_checked_by_the_contracts_of_its_parts() -> None:
    broken, one = list[str](), Verify(GROUPED, (2, 1))
    told = around(TRITON, unseen, contracts(broken.append))
    one.ran(told)
    assert broken == []
    kept = one.window.per_row
    one.ran(told, windows=(replace(one.window, per_row=replace(kept, units=kept.units * 0)),))
    assert any("per_row" in clause for clause in broken), broken
