"""Memory that is stored in tiles with scales: both sides round alike, correct engines agree, and mistakes are found.

Leaves out: the kernels (`tests/optimized/test_tiles.py`).
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.bundled import model
from instep.campaign.relations import held, relations
from instep.campaign.relations.case import Case
from instep.checks.wrong_state_inputs import read
from instep.diagnose.mistakes.delta_rule import candidates, listed
from instep.diagnose.mistakes.delta_rule_with_hooks import Call, spread
from instep.oracle import storage_rounding
from instep.run.patched_tensors import as_kept
from instep.run.replay import Replay
from instep.setting import FP8, Setting
from instep.trace.file import Trace
from instep.verdict import Exit, Tier
from instep.watch.memory_changes import bits
from instep_optimized import Options, load
from instep_optimized.memory.tiled_units import Block, Units, tensors
from instep_optimized.memory_addresses import Chance
from instep_optimized.ops.plain import scaled_tiles
from instep_optimized.options import check
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.declared_rounding import (
    SCALED_KEPT,
    SCALED_KV,
    SCALED_STATE,
    Blocked,
    Storage,
    by_chance,
)
from instep_reference.contract.errors import BadInput, Unsupported
from support.inputs.few_channels import few_channels, same_events
from support.inputs.traces import brief, recording
from support.running.command import Runner, complaint
from support.running.covering import WHOLE, few

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E4M3 = torch.float8_e4m3fn
GIVEN = {"drafter": "external"}  # with drafts of the trace: the draft head has no states
CHANCE = {"state_dtype": FP8, "state_rounding": "stochastic:7"}


def numbers(*shape: int, size: float) -> torch.Tensor:
    """Numbers of very different sizes, a tile of zeros among them."""
    draw = torch.Generator().manual_seed(0)
    found = torch.randn(shape, generator=draw) * (3 * torch.randn(shape, generator=draw)).exp() * size
    found[0] = 0
    return found


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e6, 1e-38, 1e-41])
@pytest.mark.parametrize(("how", "shape"), [
    (SCALED_STATE, (3, 8, 16)), (SCALED_STATE, (3, 8, 40)), (SCALED_STATE, (2, 5, 7)), (SCALED_KV, (9, 2, 32)),
    (SCALED_KEPT, (3, 8, 16)), (SCALED_KEPT, (2, 5, 7)),
], ids=str)  # fmt: skip
def test_both_sides_round_alike_and_storing_is_idempotent(how: Blocked, shape: tuple[int, ...], size: float) -> None:
    x = numbers(*shape, size=size)
    values, scales = scaled_tiles.packed(x, how.dtype, how.grid(*shape))
    shown = scaled_tiles.opened(values, scales)
    assert scales.shape == how.grid(*shape) and bool(shown.isfinite().all())
    assert torch.equal(bits(shown), bits(storage_rounding.rounded(x, how)))
    again = scaled_tiles.packed(shown, how.dtype, how.grid(*shape))
    assert torch.equal(again[0].view(torch.uint8), values.view(torch.uint8)) and torch.equal(again[1], scales)
    off = (storage_rounding.before_rounding(shown, x.double(), how) - x.double()).abs()
    assert bool((off <= 1e-6 * x.double().abs().amax()).all()), "half a unit at most"
    by_chance = storage_rounding.by_chance(x, how, torch.Generator().manual_seed(1))
    most = max(2**-2.9 * float(x.abs().amax()), scaled_tiles.LEAST)  # the smallest scale is a unit of int8
    assert torch.equal(by_chance[0], x[0]) and bool(((by_chance - x).abs() <= most).all())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("pool", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_int8_prefix_is_rounded_only_once_however_often_it_is_kept(pool: torch.dtype, device: str) -> None:
    x = numbers(3, 8, 16, size=1.0).to(pool)
    x[1, 2] = 0
    values, scales = (part.cpu() for part in scaled_tiles.packed(x.to(device), torch.int8, SCALED_KEPT.grid(*x.shape)))
    assert torch.equal(scaled_tiles.opened(values, scales), storage_rounding.rounded(x.float(), SCALED_KEPT))
    assert scales.shape == (3, 8, 1), "one per head and key channel"
    largest = values.abs().amax(-1).to(torch.int64)
    assert bool((largest == torch.where(x.abs().amax(-1) == 0, 0, 127)).all()) and int(values.min()) >= -127
    hit = scaled_tiles.opened(values, scales).to(pool)
    again = scaled_tiles.packed(hit, torch.int8, SCALED_KEPT.grid(*x.shape))
    assert torch.equal(again[0], values) and torch.equal(again[1], scales), "a hit that is kept again has its bytes"


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e4, 1e-38, 1e-41])
@pytest.mark.parametrize("stored", [SCALED_STATE, torch.bfloat16, torch.float16], ids=str)
def test_both_sides_round_stochastically_alike(stored: Storage, size: float) -> None:
    how, x, state = by_chance(stored, 7), numbers(3, 8, 40, size=size), storage_rounding.State(2, 5)
    grid = how.grid(3, 8, 40) if how.tile else ()
    pool = Units(torch.zeros(2, 3, 8, 40).to(how.dtype), torch.zeros(2, *grid) if grid else None, Chance(7, 2))
    at, tokens = pool.at(torch.tensor([1])), torch.tensor([5])
    scaled_tiles.put(at, (at.units,), x[None], tokens)
    kept, shown = pool.taken(1), scaled_tiles.get(at, (at.units,))[0]
    most = 65519 if stored is torch.float16 else torch.inf  # from half an ulp above the largest number
    assert torch.equal(shown, storage_rounding.rounded(x, how, state).to(shown))
    assert torch.equal(shown.isinf(), x.abs() > most)
    assert torch.equal(scaled_tiles.as_stored(at, x[None], tokens)[0], shown.float())
    scaled_tiles.put(at, (at.units,), shown[None].float(), tokens + 9)
    again = [x.view(torch.uint8) for x in tensors(pool.taken(1))]
    assert all(map(torch.equal, again, (x.view(torch.uint8) for x in tensors(kept))))
    whole = shown.isfinite()
    before = storage_rounding.before_rounding
    right, other = ((before(shown, x.double(), how, one) - x.double())[whole] for one in (state, None))
    limit = 1e-6 * x.double()[whole].abs().amax()
    assert bool((right.abs() <= limit).all()), "of these bits"
    assert bool((other.abs() > limit).any()) or (size < 1e-30 and stored is torch.float16), "and not to nearest"


def test_non_finite_number_stays_non_finite() -> None:
    x = numbers(2, 8, 16, size=1.0)
    x[1, 3, 5] = torch.nan
    assert bool(scaled_tiles.opened(*scaled_tiles.packed(x, E4M3, SCALED_STATE.grid(2, 8, 16)))[1].isnan().all())


# Every kind of event, of a model of a few channels: a save, a load, a preemption among them.
small = recording(brief(), dtype=torch.bfloat16)


# Events: one round and a load after it; two rounds of windows next to prompts.
ENOUGH = {"one": 12, "mixed": 10}


@few(2)
@pytest.mark.slow
@pytest.mark.parametrize(("trace", "options"), [
    ("first", {"state_dtype": FP8, "strategy": "snapshot", "snapshot_layout": "KV", **GIVEN}),
    pytest.param("first", {"state_dtype": FP8, "kv_dtype": FP8, "strategy": "rerun", "dtype": "bfloat16",
                           "graphs": True}, marks=WHOLE),  # by chance: below; keys so: the next two
    ("mixed", {"state_dtype": FP8, "kv_dtype": FP8, "strategy": "columns", "conv": "widened", "layout": "KV"}),
    ("first", {"state_dtype": "float16", "kv_dtype": FP8, "overlap": True}),
    pytest.param("small", {"state_dtype": "bfloat16", "strategy": "snapshot"}, marks=WHOLE),
    ("rounds", {"state_dtype": FP8, "kv_dtype": FP8, "ops": "ledger"}),
    pytest.param("small", {**CHANCE, "strategy": "snapshot", "conv": "widened"}, marks=WHOLE),
    ("first", {**CHANCE, "strategy": "snapshot", "conv": "widened", "overlap": True, **GIVEN}),
    ("first", {**CHANCE, "strategy": "rerun", "dtype": "bfloat16", "layout": "KV", "graphs": True, **GIVEN}),
    pytest.param("one", {**CHANCE, "state_dtype": "float16", "ops": "invariant", "overlap": True, "device": DEVICE,
                         **GIVEN},
                 marks=pytest.mark.gpu if DEVICE == "cuda" else pytest.mark.interpreted),
], ids=str)  # fmt: skip
def test_a_right_engine_agrees(small: Trace, four_rounds_bf16: Trace, trace: str, options: dict[str, Any]) -> None:
    told = {"small": small, "first": four_rounds_bf16, "one": four_rounds_bf16}.get(trace) or few_channels(trace, 2)
    outcome = Replay(told, Setting(**options)).run(until=ENOUGH.get(trace))
    assert outcome.verdict.exit is Exit.AGREED, outcome.verdict.findings[:2]
    if options.get("ops") != "ledger":
        assert {"state", "keys"} & outcome.declared.narrow(torch.float32).keys()


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    pytest.param({"ops": ops, "strategy": strategy, "kept_dtype": "int8", "chunk_dtype": "bfloat16", "device": DEVICE},
                 marks=(pytest.mark.gpu,) if DEVICE == "cuda" else (pytest.mark.interpreted, WHOLE))
    for ops, strategy in (("triton", "rerun"), ("invariant", "snapshot"))
], ids=str)  # fmt: skip
def test_kernels_serve_narrow_prefixes(options: dict[str, Any]) -> None:
    outcome = Replay(same_events("prefix", 2), Setting(**options)).run(until=14)
    assert outcome.verdict.exit is Exit.AGREED, outcome.verdict.findings[:2]
    assert {"kept", "chunk"} <= outcome.declared.rounds.keys()


@pytest.mark.parametrize(("told", "says"), [
    (Options(kv=SCALED_KV), "read no scales of a pool"), (Options(state=SCALED_STATE), "read no scales of"),
    (Options(state=by_chance(torch.float16, 7)), "round states to nearest alone"),
    (Options(state=by_chance(torch.float32, 7)), "for at most 16 bits"),
    # The options of a run, before it begins.
    ({"strategy": "lazy_rerun", "state_dtype": FP8}, "where it is rounded would depend on the schedule"),
    ({"dtype": "float64", "kv_dtype": FP8}, "nothing would be left of the width"),
    ({"strategy": "rerun", "snapshot_layout": "KV"}, "only the strategy snapshot has a second pool"),
    ({**CHANCE, "state_dtype": "float16", "strategy": "lazy_rerun"}, "where it is rounded would depend"),
    ({"kv_dtype": "float4"}, f"--kv-dtype.*{FP8}"),
    ({"kept_dtype": "int8"}, "--kept-dtype: found rounds.jsonl line 1, which tracks no prefixes"),
    ({"chunk_dtype": "float16"}, "--chunk-dtype: found rounds.jsonl line 1, which tracks no prefixes"),
    ({"chunk_dtype": "float32"}, "--chunk-dtype.*bfloat16 or float16"),
    (Options(kept=SCALED_STATE), "as in the pool or in int8 with scales"),
    (Options(kept=SCALED_KEPT, state=SCALED_STATE), "of states in float32, bfloat16 or float16"),
    (Options(kept=SCALED_KEPT, state=by_chance(torch.bfloat16, 7)), "rounded to nearest"),
    (Options(chunk=torch.bfloat16, state=torch.bfloat16), "narrower than a pool of float32 alone"),
    (Options(chunk=torch.float32), "as in the pool or in 16 bits"),
    ({"state_rounding": "up"}, "--state-rounding.*nearest, stochastic or stochastic:N"),
    *(({**CHANCE, "state_rounding": f"stochastic:{seed}"}, "--state-rounding.*N below")
      for seed in (-1, 2**64, "9" * 5000)),
    ({"state_rounding": "stochastic"}, f"--state-rounding.*--state-dtype one of bfloat16, float16, {FP8}"),
    ({**CHANCE, "state_dtype": "float32"}, "--state-rounding.*--state-dtype"),
], ids=lambda value: str(value)[:60])  # fmt: skip
def test_storage_that_is_not_served_is_refused(told: Options | dict[str, Any], says: str) -> None:
    with pytest.raises((BadInput, Unsupported), match=says):
        if isinstance(told, dict):
            Replay(few_channels("rounds"), Setting(**told)).run(until=0)
        else:
            chances = told.state == by_chance(torch.float32, 7)
            narrow = told.kept is None and told.chunk is None  # so that no earlier refusal hides these
            ops = replace(load("plain"), tiled=False, chances=chances) if narrow else load("plain")
            check(told, Checkpoint.open(model()).config, 3, ops)


def test_rounding_to_nearest_is_the_usual_one() -> None:
    assert Setting(**CHANCE).words() == ("--ops", "plain", "--state-dtype", FP8, "--state-rounding", "stochastic:7")
    assert Setting(state_rounding="nearest") == Setting() and "seed 7" in str(Setting(**CHANCE).state)


@pytest.mark.slow
def test_stochastic_states_depend_on_the_request_alone() -> None:
    short = few_channels("short", 2)
    case = Case.of(short, Replay(short, Setting(**CHANCE, **GIVEN)).plan)
    for one in held(case, relations(("strategies", "slots", "alone"))):
        assert one.verdict.exit is Exit.AGREED, (one.relation.name, one.verdict.findings[:1])
        assert {compared.tier for compared in one.verdict.compared} & {Tier.BITWISE}


def test_printed_command_has_the_option_and_memory_the_scales(instep: Runner, tmp_path: Path) -> None:
    assert Setting(state_dtype=FP8, kv_dtype=FP8).words() == (
        "--ops", "plain", "--state-dtype", FP8, "--kv-dtype", FP8,
    )  # fmt: skip
    out = tmp_path / "memory.json"
    said = instep("memory", "qwen3.5-9b", "--state-dtype", FP8, "--kv-dtype", FP8, "--strategy", "rerun",
                  "--conv", "windows", "--no-guarded", "--json", str(out))  # fmt: skip
    assert said.code == 0
    (one,) = json.loads(out.read_text())["strategies"]
    numbers_of_a_state, layers = 32 * 128 * 128, 24
    assert one["pools"]["state"] == layers * numbers_of_a_state
    assert one["pools"]["state_scales"] == layers * 4 * numbers_of_a_state // (16 * 128)
    assert "depend on the schedule" in complaint(
        instep("memory", "qwen3.5-9b", "--state-dtype", FP8, "--strategy", "lazy-rerun"))


def test_patch_of_tiled_memory_is_stored_in_tiles() -> None:
    x = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    values, scales = scaled_tiles.packed(x.float(), torch.float8_e4m3fn, (1, 2))
    kept = as_kept(x, Block(torch.zeros_like(values), torch.zeros_like(scales)))
    assert isinstance(kept, Block) and torch.equal(kept.scales, scales)
    assert torch.equal(kept.values.view(torch.uint8), values.view(torch.uint8))
    plain = as_kept(x, torch.zeros(1, dtype=torch.bfloat16))
    assert isinstance(plain, torch.Tensor) and torch.equal(plain, x.bfloat16())


def test_a_state_may_be_stored_in_its_tiles_after_every_token() -> None:
    """A state that is rounded to the dtype of its tiles, without their scales, is not named so."""
    q, k, v = torch.randn(3, 5, 2, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gate, beta, k = -v[..., 0].exp(), q[..., 0].sigmoid(), k / k.norm(dim=-1, keepdim=True)
    call = Call(q, k, v, gate, beta, torch.zeros(2, 16, 16, dtype=torch.float64), stored=SCALED_STATE)
    forms = [one.walked for one in candidates(call, listed(call, ["stored-per-token"]))]
    for t, (k, v, gate, beta) in enumerate(zip(spread(call).k, call.v, call.log_decay, call.beta, strict=True)):
        state = gate.exp()[:, None, None] * forms[0].states[t]
        state = state + k[..., None] * (beta[:, None] * (v - torch.einsum("hk,hkv->hv", k, state)))[:, None]
        for one in forms:
            assert torch.allclose(one.states[t + 1], storage_rounding.rounded(state, SCALED_STATE))
            assert not torch.allclose(one.states[t + 1], state.to(SCALED_STATE.dtype).to(state), rtol=1e-3)
    assert [torch.allclose(one.core[-1], read(one.states[-1], spread(call).q[-1])) for one in forms] == [False, True]
    assert not listed(replace(call, stored=None), ["stored-per-token"])
