"""`prefill_gdn` and `window_gdn`, conv, norms and delta rule in one op: the bits of their parts, and where those serve.

Leaves out: `verify_gdn` (`test_verify_gdn.py`), other fusions (`test_fusions.py`), whole runs (the relation `fused`).
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.kit.cases import serve
from instep.kit.cases.case import BF16, FP32, Call, Case, Draw, at
from instep.kit.cases.conv_and_gdn import SHAPES, Heads, Shape, conv_case, gdn_case
from instep.kit.cases.guarded_pools import same_bits
from instep_optimized.kernels import gdn_fusions
from instep_optimized.kernels.runtime import INTERPRETED
from instep_optimized.memory_addresses import Part
from instep_optimized.ops import fused
from instep_optimized.ops.check_op_calls import contracts
from instep_optimized.ops.fused import in_parts, stored
from instep_optimized.ops.op_protocols import GdnInputs, Ops
from instep_optimized.ops.row_invariant_triton import INVARIANT
from instep_optimized.ops.triton import TRITON
from instep_optimized.ops.triton_with_fp32_prefill import PRECISE
from instep_optimized.ops.watch_op_calls import around
from instep_reference.contract.place_names import unseen
from support.independent.op_agreement import agree
from support.running.covering import each_value, few
from support.running.recorded_calls import calls_of
from support.worlds.rings import Turn, World, cut

DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [pytest.mark.interpreted] if INTERPRETED else [pytest.mark.gpu]
native = pytest.mark.skipif(INTERPRETED, reason="no CUDA device here")
FP16 = torch.float16
INSIDE = GdnInputs._fields
Shapes = tuple[Shape, ...]
DENSE, GROUPED, NO_TILE = Heads(2, 2, 16, 16), Heads(2, 4, 16, 16), Heads(2, 4, 16, 32)
REAL = Heads(1, 2, 128, 128)  # as wide as kernels with explicit layouts take them on a GPU
PROMPTS: dict[str, Shapes] = {
    # Several blocks, a request without rows, one without a unit, one that is not stored; before and after them unowned
    # rows. Short ones take another kernel of the conv.
    "long": (Shape("chunk", (70, 2, 0, 133, 3), (3, 1, 2, 6, -1), (0, 0, 0, 1, 0), (3, -1, 2, 6, -1), skip=3),),
    "short": SHAPES["prefill"],
    "apart": (*SHAPES["prefill"], Shape("chunk", (3, 66), (9, 7), (0, 1), store=(9, 7), skip=1)),
}
OTHERS: dict[str, tuple[Shapes, torch.dtype]] = {
    "beside a window": (SHAPES["mixed"], BF16), "a window": (SHAPES["decode"], BF16), "nothing": ((), BF16),
    "32 bits": (SHAPES["prefill"], FP32),
}  # fmt: skip
WINDOWS = {name: SHAPES[name] for name in ("decode", "padded", "verify", "columns")} | {
    "apart": (*SHAPES["decode"], Shape("window", (2, 3), (9, 2), (0, 1), store=(9, 2), skip=1)),
    "fresh": (Shape("window", (3, 1, 2), (2, 5, 8), (1, 0, 1), store=(2, 5, 8), skip=2),),
}  # fmt: skip


def prompt_case(shapes: Shapes, heads: Heads, dtype: torch.dtype) -> Case:
    """a and b are columns of something wider."""

    def build(device: str) -> Call:
        (H, HV, K, V), draw = heads, Draw(7, device)
        conv = conv_case(1, shapes, 2 * H * K + HV * V, 4, dtype, True)(device)
        rule = gdn_case(2, shapes, heads, FP32, True, dtype)(device)
        x, weight, windows, _ = conv.inputs.values()
        sides = draw.normal(len(x), 2 * HV + 3, dtype=dtype, scale=3.0)
        given = {"x": x, "weight": weight, "windows": windows, "a": sides[:, :HV], "b": sides[:, HV : 2 * HV],
                 "A_log": draw.normal(HV), "dt_bias": draw.normal(HV), "key_heads": H, "key_dim": K,
                 "parts": rule.inputs["parts"], "dtype": dtype,
                 "to": tuple(map(at, ("mixed", *INSIDE, "core")))}  # fmt: skip
        return Call(given, {"windows": conv.pools["memory"], "states": rule.pools["memory"]} | {
            f"kept {name}": call.pools["snapshots"] for name, call in (("windows", conv), ("states", rule))
            if "snapshots" in call.pools})  # fmt: skip

    return Case("prefill_gdn", "drawn", build, exact=True)


def raw(heads: Heads, rows: int, dtype: torch.dtype, seed: int = 7) -> dict[str, Any]:
    """Rows of the conv and of the linear maps; a and b are columns of something wider."""
    (H, HV, K, V), draw = heads, Draw(seed, DEVICE)
    sides = draw.normal(rows, 2 * HV + 3, dtype=dtype, scale=3.0)
    return {"mixed": draw.normal(rows, 2 * H * K + HV * V, dtype=dtype), "a": sides[:, :HV], "b": sides[:, HV : 2 * HV],
            "A_log": draw.normal(HV), "dt_bias": draw.normal(HV), "key_heads": H, "key_dim": K}  # fmt: skip


def window_case(shapes: Shapes, heads: Heads, dtype: torch.dtype, state: torch.dtype = FP32) -> Case:
    def build(device: str) -> Call:
        rule = gdn_case(2, shapes, heads, state, True, dtype)(device)
        given = raw(heads, len(rule.inputs["inputs"].v), dtype)
        places = tuple(map(at, (*INSIDE, "core")))
        return Call(given | {"parts": rule.inputs["parts"], "dtype": dtype, "to": places}, rule.pools)

    return Case("window_gdn", "drawn", build, exact=True)


def composed(ops: Ops, op: str) -> Any:
    """The functions that the model calls, as an op set with this one op."""
    return SimpleNamespace(**{op: partial(getattr(fused, op), ops)})


def trap(**given: Any) -> torch.Tensor:
    raise AssertionError("the parts are to serve")


def differences(one: Case, ours: Ops, theirs: Ops) -> list[str]:
    return agree(one, *(serve(composed(ops, one.op), one, DEVICE) for ops in (ours, theirs)))


# ---- prompts


@few(2)
@pytest.mark.parametrize(
    ("heads", "shape", "dtype"), each_value((DENSE, GROUPED, NO_TILE, REAL), PROMPTS, (BF16, FP16)), ids=str)
def test_rows_of_16_bits_give_the_bits_of_the_parts(
    heads: Heads, shape: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, seen = prompt_case(PROMPTS[shape], heads, dtype), list[tuple[torch.dtype, ...]]()
    parts = serve(composed(in_parts(TRITON), one.op), one, DEVICE)

    def told(*, inputs: GdnInputs, **given: Any) -> torch.Tensor:
        seen.append(tuple(x.dtype for x in inputs))
        return TRITON.gdn(inputs=inputs, **given)

    monkeypatch.setattr(gdn_fusions, "gdn", told)
    whole = serve(composed(TRITON, one.op), one, DEVICE)
    assert agree(one, parts, whole) == [] and bool(parts.results["result"].any())
    assert seen == [(BF16, BF16, dtype, FP32, FP32)] == [stored(dtype)]


def rounded(**formats: torch.dtype) -> Callable[..., torch.Tensor]:
    """The fusion, with some of its rows rounded to another format on their way."""

    def planted(*, windows: Any, parts: Any, dtype: torch.dtype, to: Any, **given: Any) -> torch.Tensor:
        right = fused.conv_inputs(TRITON, parts=windows, to=to[:-1], **given)
        wrong = {name: getattr(right, name).to(narrow) for name, narrow in formats.items()}
        narrow = GdnInputs(*(x.to(how) for x, how in zip(right._replace(**wrong), stored(dtype), strict=True)))
        return TRITON.gdn(inputs=narrow, parts=parts, dtype=dtype, to=to[-1])

    return planted


@cache
def short_in_parts(dtype: torch.dtype) -> tuple[Case, Any]:
    one = prompt_case(PROMPTS["short"], GROUPED, dtype)
    return one, serve(composed(in_parts(TRITON), one.op), one, DEVICE)


@pytest.mark.parametrize(("formats", "dtype"), [
    ({"k": FP16}, BF16), ({"q": FP16}, BF16), ({"v": BF16}, FP16), ({}, FP16),
], ids=["k rounded twice", "q rounded twice", "v in bf16 next to fp16", "nothing"])  # fmt: skip
def test_differently_rounded_row_is_detected(formats: dict[str, torch.dtype], dtype: torch.dtype) -> None:
    one, right = short_in_parts(dtype)
    found = serve(composed(replace(TRITON, prefill_gdn=rounded(**formats)), one.op), one, DEVICE)
    assert bool(agree(one, right, found)) is bool(formats)


@pytest.mark.parametrize("name", OTHERS)
def test_parts_run_next_to_windows_and_with_32_bits(name: str) -> None:
    one = prompt_case(OTHERS[name][0], GROUPED, OTHERS[name][1])
    assert differences(one, in_parts(TRITON), replace(TRITON, prefill_gdn=trap)) == []


def test_parts_run_when_every_row_is_kept() -> None:
    kept = Shape("chunk", (3, 2), (1, 2), (0, 1), store=(1, 2), per_row=(0, 1))
    for which in ("windows", "parts"):
        given = prompt_case((kept,), GROUPED, BF16).build(DEVICE).inputs
        other = next(name for name in ("windows", "parts") if name != which)
        given[other] = tuple(replace(part, per_row=None) for part in given[other])
        watched = replace(TRITON, prefill_gdn=trap, gdn=lambda *, inputs, **rest: inputs.v)
        assert fused.prefill_gdn(watched, **given).dtype is FP32


def test_op_set_with_other_chunk_rounding_does_not_use_it() -> None:
    """`precise` has another `gdn`. `invariant` has ours, and what it declares of it."""
    assert PRECISE.prefill_gdn is None and INVARIANT.prefill_gdn is TRITON.prefill_gdn
    one = prompt_case(SHAPES["prefill"], GROUPED, BF16)
    for products in ({}, {"gdn.chunk": replace(TRITON.products["gdn.chunk"], format="fp16")}):
        assert differences(one, in_parts(TRITON), replace(TRITON, prefill_gdn=trap, products=products)) == []


def test_observed_row_inside_is_shown_and_its_replacement_is_used() -> None:
    one, shown = prompt_case(SHAPES["prefill"], GROUPED, BF16), dict[str, torch.Tensor]()

    def see(place: Any, x: torch.Tensor) -> torch.Tensor:
        shown[place.component] = x
        return x * 2 if place.component == "q" else x

    told = around(TRITON, see)
    assert told.prefill_gdn is None
    watched, plain = (serve(composed(ops, one.op), one, DEVICE) for ops in (told, TRITON))
    assert tuple(shown) == ("mixed", *INSIDE, "core") and shown["q"].dtype is FP32
    # A power of two changes no rounding: the read-out is twice as large, and the memory is what it was.
    assert same_bits(watched.results["result"], 2 * plain.results["result"]) and bool(shown["core"].any())
    assert all(same_bits(pool.raw, plain.pools[name].raw) for name, pool in watched.pools.items())


# ---- windows


def staged(monkeypatch: pytest.MonkeyPatch) -> list[Part]:
    """The parts whose norms and gates the staged kernel computes, as they come."""
    file: Any = sys.modules["instep_optimized.kernels.gdn_dispatch"].staged
    return calls_of(monkeypatch, file, "staged", lambda *given, rule=None, **_: given[1] if rule else None)


@pytest.mark.parametrize(
    ("heads", "shape", "dtype"), each_value((GROUPED, NO_TILE, REAL), WINDOWS, (BF16, FP16)), ids=str)
def test_windows_with_their_norms_and_gates_have_the_bits_of_the_parts(
    heads: Heads, shape: str, dtype: torch.dtype
) -> None:
    one = window_case(WINDOWS[shape], heads, dtype)
    parts, whole = (serve(composed(ops, one.op), one, DEVICE) for ops in (in_parts(TRITON), TRITON))
    assert agree(one, parts, whole) == [] and bool(parts.results["result"].any())


@native
@pytest.mark.parametrize("shape", WINDOWS)
@pytest.mark.parametrize("state", [FP32, BF16, FP16], ids=str)
def test_the_staged_kernel_computes_them(monkeypatch: pytest.MonkeyPatch, shape: str, state: torch.dtype) -> None:
    seen, one = staged(monkeypatch), window_case(WINDOWS[shape], Heads(2, 4, 128, 256), BF16, state)
    parts, whole = (serve(composed(ops, one.op), one, DEVICE) for ops in (in_parts(TRITON), TRITON))
    assert agree(one, parts, whole) == [] and bool(parts.results["result"].any())
    assert len(seen) == (shape != "apart"), "several parts are served one by one"


@pytest.mark.parametrize("requests", [3] if INTERPRETED else [3, 1, 70, 300])
@pytest.mark.parametrize("state", [BF16] if INTERPRETED else [FP32, BF16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 4])
def test_rings_keep_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, requests: int, state: torch.dtype, rows: int
) -> None:
    """Windows after 0 to 3 pending tokens; each launch has the shape for its size."""
    heads = GROUPED if INTERPRETED else Heads(2, 4, 128, 128)
    given = raw(heads, requests * rows, BF16)
    made = TRITON.gdn_inputs(**given, to=tuple(map(at, INSIDE)))
    earlier = TRITON.gdn_inputs(**raw(heads, 3, BF16, seed=8), to=tuple(map(at, INSIDE)))
    seen = list[Part]() if INTERPRETED else staged(monkeypatch)

    def ran(ops: Ops) -> list[torch.Tensor]:
        world = World.of(TRITON, heads, DEVICE, size=8, slots=requests + 1, dtype=state)
        world.state.view[1:] = Draw(42, DEVICE).normal(1, *world.state.view.shape[1:]).to(state)
        for slot in range(1, requests + 1):
            world.fill(slot, slot, earlier)
        turns = [Turn(n + 1, cut(made, n * rows, rows), n + 4, n % 4) for n in range(requests)]
        places = tuple(map(at, (*INSIDE, "core")))
        core = fused.window_gdn(ops, **given, parts=(world.part(turns),), dtype=BF16, to=places)
        return [core, *(pool.view[1:].clone() for pool in (world.state, *world.rings))]

    right, found = ran(in_parts(TRITON)), ran(TRITON)
    assert all(map(same_bits, right, found)) and bool(right[0].any()) and bool(right[0].isfinite().all())
    assert len(seen) == (not INTERPRETED)


@native
@pytest.mark.parametrize("requests", [3, 1, 70])
@pytest.mark.parametrize("state", [FP32, BF16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8])
def test_wrongly_guessed_rows_are_loaded_again(
    monkeypatch: pytest.MonkeyPatch, requests: int, state: torch.dtype, rows: int
) -> None:
    """A kernel that knows of one row guesses that every request begins there, or has more rows than there are."""
    heads, file = Heads(2, 4, 128, 128), sys.modules["instep_optimized.kernels.gdn_dispatch"].staged
    given, run, told = raw(heads, requests * rows, BF16), file.staged, list[int]()
    made = TRITON.gdn_inputs(**given, to=tuple(map(at, INSIDE)))

    def ran(rows_told: int | None) -> list[torch.Tensor]:
        def short(*args: Any, look: int, **named: Any) -> None:
            told.append(look if rows_told is None else rows_told)
            run(*args, look=told[-1], **named)

        monkeypatch.setattr(file, "staged", short)
        world = World.of(TRITON, heads, DEVICE, size=16, slots=requests + 1, dtype=state)
        world.state.view[1:] = Draw(42, DEVICE).normal(1, *world.state.view.shape[1:]).to(state)
        turns = [Turn(n + 1, cut(made, n * rows, rows), 1, 0) for n in range(requests)]
        places = tuple(map(at, (*INSIDE, "core")))
        core = fused.window_gdn(TRITON, **given, parts=(world.part(turns),), dtype=BF16, to=places)
        monkeypatch.setattr(file, "staged", run)
        return [core, *(pool.view[1:].clone() for pool in (world.state, *world.rings))]

    right, found = ran(None), ran(1)
    assert all(map(same_bits, right, found)) and bool(right[0].any()) and told == [requests * rows, 1]


def wrong(plant: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[..., torch.Tensor]:
    """The fusion, of which one argument is another one."""
    return lambda **given: gdn_fusions.window_gdn(**given | plant(given))


@pytest.mark.parametrize("plant", [
    lambda g: {"a": g["b"]}, lambda g: {"A_log": g["A_log"].bfloat16().float()},
    lambda g: {"dt_bias": g["dt_bias"].roll(1)}, lambda g: {"mixed": g["mixed"].roll(1, 0)}, lambda g: {},
], ids=["b for a", "A_log rounded", "another head's dt_bias", "another row", "nothing"])  # fmt: skip
def test_result_for_another_input_is_detected(plant: Any) -> None:
    one = window_case(SHAPES["verify"], GROUPED if INTERPRETED else REAL, BF16)
    found = differences(one, in_parts(TRITON), replace(TRITON, window_gdn=wrong(plant)))
    assert bool(found) is bool(plant(raw(GROUPED, 1, BF16)))


@pytest.mark.parametrize(("shapes", "dtype"), [
    (SHAPES["mixed"], BF16), (SHAPES["prefill"], BF16), ((), BF16), (SHAPES["decode"], FP32),
], ids=["beside chunks", "chunks", "nothing", "32 bits"])  # fmt: skip
def test_parts_run_in_other_cases(shapes: tuple[Shape, ...], dtype: torch.dtype) -> None:
    one = window_case(shapes, GROUPED, dtype)
    assert differences(one, in_parts(TRITON), replace(TRITON, window_gdn=trap)) == []


def test_parts_run_for_a_tree() -> None:
    given = window_case(SHAPES["decode"], GROUPED, BF16).build(DEVICE).inputs
    (part,) = given["parts"]
    given["parts"] = (replace(part, store=None, parents=torch.full_like(part.begin, -1)),)
    watched = replace(TRITON, window_gdn=trap, gdn=lambda *, inputs, **rest: inputs.v)
    assert fused.window_gdn(watched, **given).dtype is FP32


def test_op_set_with_another_rule_does_not_use_it() -> None:
    assert PRECISE.window_gdn is None and TRITON.window_gdn is gdn_fusions.window_gdn


def test_a_model_puts_the_conv_before_it() -> None:
    """`prefill_gdn` composes conv and `window_gdn` where all parts are windows: with the bits of all parts."""
    shapes, heads = WINDOWS["fresh"], GROUPED if INTERPRETED else REAL
    H, HV, K, V = heads

    def build(device: str) -> Call:
        conv = conv_case(1, shapes, 2 * H * K + HV * V, 4, BF16, True)(device)
        rule = gdn_case(2, shapes, heads, FP32, True, BF16)(device)
        x, weight, windows, _ = conv.inputs.values()
        given = raw(heads, len(x), BF16) | {"x": x, "weight": weight, "windows": windows}
        given |= {"parts": rule.inputs["parts"], "dtype": BF16, "to": tuple(map(at, ("mixed", *INSIDE, "core")))}
        del given["mixed"]
        return Call(given, {"windows": conv.pools["memory"], "states": rule.pools["memory"]})

    one, seen = Case("prefill_gdn", "drawn", build, exact=True), list[str]()
    told = around(TRITON, unseen, lambda name, op: lambda **given: (seen.append(name), op(**given))[1])
    assert differences(one, in_parts(TRITON), told) == [] and seen == ["conv", "window_gdn"]


# ---- both


@pytest.mark.parametrize(("one", "which"), [
    (prompt_case(PROMPTS["short"], GROUPED, BF16), "windows"), (prompt_case(PROMPTS["short"], GROUPED, BF16), "parts"),
    (window_case(SHAPES["decode"], GROUPED, BF16), "parts"),
], ids=["conv of prompts", "prompts", "windows"])  # fmt: skip
def test_call_is_checked_by_the_contracts_of_its_parts(one: Case, which: str) -> None:
    broken, given = list[str](), one.build(DEVICE).inputs
    told = composed(around(TRITON, unseen, contracts(broken.append)), one.op)
    assert getattr(told, one.op)(**given).shape == (len(given["a"]), 4, 16) and broken == []
    (part,) = given[which]
    units = part.store.units.clone()
    units[0] = 0
    getattr(told, one.op)(**given | {which: (replace(part, store=replace(part.store, units=units)),)})
    assert any("reserved" in clause for clause in broken), broken
