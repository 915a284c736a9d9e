"""Findings of `instep bench` before, during and after the timing, and errors of prompts compared with FLA's.

Every row keeps its errors, and the table reports an error of ours above FLA's. Leaves out: figures, and FLA's kernels
themselves, which need a card.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from instep.report.document import document_of
from instep.verdict import Exit
from instep_optimized.ops.op_protocols import Ops
from instep_optimized.ops.plain import PLAIN
from instep_speed.bench import bench_types, interleaved_timing, kernels_of_peers, kind, measure_arms, run
from instep_speed.bench.answer_check import Judged, errors
from instep_speed.bench.bench_types import Arm, Cell
from instep_speed.bench.drawn_rows import on
from instep_speed.bench.measure_arms import measured
from instep_speed.bench.resume import joined
from instep_speed.bench.run import Bench
from support.inputs.bench_runs import CPU, FP32, make_up_peer, measured_cells, text
from support.running.command import Runner
from support.running.covering import few

pytestmark = pytest.mark.slow  # whole replays

TO = kind("prefill").bar
Gdn = Callable[..., torch.Tensor]
SMALL, LARGE = 2e-7, 1e-3  # within what is allowed of fp32, and far outside


def off_in_core(part: float) -> Gdn:
    return lambda **given: PLAIN.gdn(**given) * (1 + part)


def off_in_state(part: float) -> Gdn:
    def gdn(*, parts: Any, **given: Any) -> torch.Tensor:
        core = PLAIN.gdn(parts=parts, **given)
        for one in parts:
            one.store.pool[one.store.units] *= 1 + part
        return core

    return gdn


@pytest.fixture
def next_to_fla(quick: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Bench]:
    """Prompts with `ours` next to a peer under FLA's name that computes as `theirs`; None: there is none."""

    def ran(ours: Gdn, theirs: Gdn | None) -> Bench:
        def maker(ground: Any, at: Any, name: str, *, parts: Any, inputs: Any, judge: Any, **drawn: Any) -> Arm:
            assert theirs is not None

            def core(pool: torch.Tensor) -> torch.Tensor:
                return theirs(inputs=inputs, parts=(on(parts[0], pool),), dtype=FP32, to=None)

            return Arm(name, lambda: core(parts[0].read.pool), lambda: judge(core), peer="fla-core 0.0")

        make_up_peer(monkeypatch, "prefill", maker, TO)
        if theirs is None:
            monkeypatch.setitem(kernels_of_peers.PEERS, "prefill", {})
        return measured_cells(replace(PLAIN, gdn=ours), "prefill", peers=True, at={"sequences": ("2",)})

    return ran


@few(3)
@pytest.mark.parametrize(("ours", "theirs", "place"), [
    (off_in_core(SMALL), PLAIN.gdn, "core"), (off_in_state(SMALL), PLAIN.gdn, "state"),
    (PLAIN.gdn, PLAIN.gdn, None), (PLAIN.gdn, off_in_core(SMALL), None), (PLAIN.gdn, off_in_state(LARGE), None),
    (off_in_core(SMALL), None, None),
], ids=["a core above", "a state above", "equal", "theirs above", "theirs wrong", "nobody there"])  # fmt: skip
def test_error_above_flas_is_printed_next_to_our_speed(
    ours: Gdn, theirs: Gdn | None, place: str | None, next_to_fla: Callable[..., Bench]
) -> None:
    found = next_to_fla(ours, theirs)
    (row,), said = found.rows, text(found)
    own = row["arms"]["it"]
    assert found.exit is Exit.AGREED and not own["finding"] and "us" in own
    assert all(arm["errors"].keys() == {"core", "state"} for arm in row["arms"].values())
    assert "off by: core, state" in said and f"{own['errors']['core']:.1e}, {own['errors']['state']:.1e}" in said
    page = document_of(found.result().data())
    if place is None:
        assert "above" not in own and "ABOVE" not in said and "errs more" not in str(page)
        return
    higher, lower = (row["arms"][name]["errors"][place] for name in ("it", TO))
    assert higher > lower and own["above"] == (
        f"errs more than {TO}: {place} is off by {higher:.4g}, there by {lower:.4g}")  # fmt: skip
    assert f"ABOVE  prefill, sequences 2, tokens 33, heads 4: it {own['above']}" in said
    assert own["above"] in str(page) and "above" not in row["arms"][TO]


def test_an_error_is_relative_to_the_norm_over_all_heads() -> None:
    truth = torch.tensor([[3.0, 4.0], [0.0, 12.0]], dtype=torch.float64)
    found = errors(off=(truth + torch.tensor([[0.0, 0.0], [1.3, 0.0]]), truth), right=(truth, truth),
                   lost=(truth * torch.nan, truth), cut=(truth[:1], truth))  # fmt: skip
    assert found == {"off": pytest.approx(0.1), "right": 0.0}
    assert Judged("", found).above(Judged("", {"off": 0.05})) == "off is off by 0.1, there by 0.05"


def test_rows_with_and_without_errors_share_a_table(next_to_fla: Callable[..., Bench], tmp_path: Path) -> None:
    """Files that are older than errors are joined and printed as they were."""
    files = [tmp_path / name for name in ("old.json", "new.json")]
    for file in files:
        next_to_fla(off_in_core(SMALL), PLAIN.gdn).result().write(file)
    old = json.loads(files[0].read_text())
    for arm in old["rows"][0]["arms"].values():
        arm.pop("errors"), arm.pop("above", None)
    old["rows"][0]["cell"]["tokens"] = 34
    files[0].write_text(json.dumps(old))
    found = joined(files, None)
    assert sorted("errors" in row["arms"]["it"] for row in found.rows) == [False, True]
    assert text(found).count("ABOVE") == 1


# Findings, and when they occur

def picks(*, logits: torch.Tensor, to: Any) -> torch.Tensor:
    return PLAIN.pick(logits=logits, to=to)


def wrong_from(first: int, wrong: Callable[..., Any]) -> Ops:
    """An op set whose picks are wrong from this call on."""
    calls = count(1)
    return replace(PLAIN, pick=lambda **given: (wrong if next(calls) >= first else picks)(**given))


def falls(**given: Any) -> Any:
    raise ValueError("planted")


@few(1)
@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_fp64_activations_are_judged_in_fp64(state: str, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`lazy_rerun` rounds a state where its ring is full: with states narrower than the arithmetic it is refused."""
    monkeypatch.setitem(bench_types.STATES, "tiny", (state,))
    found = measured_cells({"it": PLAIN}, "strategies", dtype=torch.float64, at={"batch": ("2",)})
    assert found.exit is Exit.AGREED
    for row in found.rows:
        assert all(not arm["finding"] and arm["us"] for arm in row["arms"].values())
        assert row["absent"] == {"lazy_rerun": "it stores no state narrower than float64"}

    def narrow(*, parts: Any, **given: Any) -> torch.Tensor:
        core = PLAIN.gdn(parts=parts, **given)
        return core.float().double() if parts[0].most > 1 else core

    wrong = measured_cells({"it": replace(PLAIN, gdn=narrow)}, "strategies", dtype=torch.float64, at={"batch": ("1",)})
    assert all("the read-out of round 1" in arm["finding"] for arm in wrong.rows[0]["arms"].values())


@pytest.mark.parametrize("first", [4, 10], ids=["when it is first called", "in a lap"])
def test_exception_during_timing_is_a_finding_and_others_are_timed(first: int, quick: None) -> None:
    """The check calls it once, and so does who looks whether it can be timed at all, in two layers."""
    found = measured_cells({"falls": wrong_from(first, falls), "it": PLAIN}, "pick", "conv")
    row = found.rows[0]
    assert found.exit is Exit.DIVERGED and [one["kind"] for one in found.rows].count("conv") > 1 and not found.left
    assert row["arms"]["falls"] == {"peer": "", "finding": "ValueError: planted"}
    assert row["arms"]["it"]["samples"] == interleaved_timing.SAMPLES and not row["arms"]["it"]["finding"]
    assert "ValueError: planted; no speed is shown" in text(found)


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """An op that kills the device at its n-th call; every later launch raises."""
    dead = list[bool]()
    for place in (measure_arms, run):
        monkeypatch.setattr(place, "gone", lambda device: bool(dead))

    def made(op: Callable[..., Any], at: int) -> Callable[..., Any]:
        calls = count(1)

        def call(*given: Any, **named: Any) -> Any:
            if next(calls) == at:
                dead.append(True)
            if dead:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            return op(*given, **named)

        return call

    return made


@pytest.mark.parametrize("at", [1, 2, 30], ids=["in its check", "when it is first called", "in a lap"])
def test_arm_that_kills_the_device_is_the_only_one_blamed(at: int, quick: None, killed: Callable[..., Any]) -> None:
    sets = {"it": replace(PLAIN, pick=killed(picks, 10**6)), "kills": replace(PLAIN, pick=killed(picks, at))}
    found = measured_cells(sets, "pick", "conv")
    (row,), said = found.rows, text(found)
    finding = "it has killed the device: RuntimeError: CUDA error: an illegal memory access was encountered"
    assert row["arms"] == {"kills": {"peer": "", "finding": finding}}
    assert row["absent"] == {"it": "kills has killed the device"} and found.exit is Exit.DIVERGED
    assert found.left.keys() == {"pick", "conv"} and "cells left out, since the device works no longer" in said
    assert "for want of minutes" not in said


def test_device_killed_while_a_cell_is_built_is_reported(
    quick: None, killed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a peer that tries itself out."""
    make_up_peer(monkeypatch, "pick", killed(picks, 1))
    found = measured_cells(PLAIN, "pick", peers=True)
    (row,) = found.rows
    assert row["arms"] == {} and found.exit is Exit.INCONCLUSIVE and found.left == {"pick": 1}
    assert row["absent"].keys() == {"it", "made up"} and "illegal memory access" in row["absent"]["made up"]
    assert row["absent"]["it"] == "the device was killed while the cell was built"


def test_exception_of_a_self_timing_arm_is_a_finding() -> None:
    def arm(name: str, samples: Any = lambda count: [1.0], more: Any = dict) -> Arm:
        return Arm(name, None, lambda: "", samples=samples, more=more)

    found = measured(Cell([arm("time", lambda count: falls()), arm("more", more=falls), arm("it")]), CPU)
    assert [found[name].judged.finding for name in found] == ["ValueError: planted"] * 2 + [""]
    assert [one.times is None for one in found.values()] == [True, True, False]


def test_exception_while_building_drops_only_its_op_set(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured_cells({"falls": replace(PLAIN, gdn_inputs=falls), "it": PLAIN}, "decode")
    for row in found.rows:
        assert row["arms"]["falls"] == {"peer": "", "finding": "ValueError: planted"} and "us" in row["arms"]["it"]
    assert found.exit is Exit.DIVERGED
    assert measured_cells({"falls": replace(PLAIN, gdn_inputs=falls)}, "decode").exit is Exit.DIVERGED
    monkeypatch.setattr(run, "kind", lambda name: replace(kind(name), make=lambda *given: falls()))
    with pytest.raises(ValueError, match="planted"):  # `plain` cannot be blamed
        measured_cells({"it": PLAIN}, "decode")


def test_the_command_ends_with_1_where_an_op_raises_in_a_lap(
    instep: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = ModuleType("made_up_ops")
    module.OPS = wrong_from(10, falls)
    monkeypatch.setitem(sys.modules, "made_up_ops", module)
    file = tmp_path / "bench.json"
    done = instep("bench", "--ops", "made_up_ops:OPS", "--kind", "pick", "--kind", "conv", "--json", str(file))
    kept = json.loads(file.read_text())
    assert done.code == kept["exit"] == 1 and "ValueError: planted" in done.out
    assert {row["kind"] for row in kept["rows"]} == {"pick", "conv"} and not kept["left_out"]


@pytest.mark.parametrize("calls", [2, 20], ids=["on its first call", "as long as it was timed first"])
def test_arm_that_becomes_wrong_has_no_time(calls: int, quick: None) -> None:
    found = measured_cells({"it": wrong_from(calls, lambda logits, to: picks(logits=-logits, to=to))}, "pick")
    own = found.rows[0]["arms"]["it"]
    assert found.exit is Exit.DIVERGED and "us" not in own
    assert own["finding"].startswith("after it was timed: picks: ")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], Any]], None]:
    """Work is timed as a card does it: what is replayed is not what is called, but what `changed` makes of it."""

    def as_on_a_card(changed: Callable[[Any], Any]) -> None:
        monkeypatch.setattr(
            interleaved_timing, "_ready", lambda work, card, period: (lambda: 1.0, "graph", changed(work))
        )

    return as_on_a_card


@few(3)
@pytest.mark.parametrize("name", ["strategies", "decode", "mixer", "conv", "prefill", "attend", "pick", "products"])
def test_a_graph_that_computes_as_a_call_agrees_in_every_kind(
    name: str, quick: None, graphs: Callable[[Callable[[Any], Any]], None]
) -> None:
    """So every kind gives both the same memory to begin with, whatever was done to it before."""
    graphs(lambda work: work)
    found = measured_cells({"it": PLAIN}, name)
    assert found.exit is Exit.AGREED and all(not arm["finding"] for row in found.rows for arm in row["arms"].values())


def stale(work: Any) -> Any:
    """Returns the results of its first call each time: it neither reads nor stores."""
    left = [x.clone() for x in work()]
    return lambda: left


def lost(work: Any) -> Any:
    return lambda: [x * torch.nan for x in work()]


@pytest.mark.parametrize(("name", "changed", "says"), [
    ("decode", stale, "have other bits"), ("mixer", stale, "have other bits"), ("strategies", stale, "have other bits"),
    ("prefill", stale, "have other bits"), ("attend", lost, "is not finite"),
    ("products", lambda work: lambda: [2 * x for x in work()], "have other bits"),
    ("products", lambda work: falls, "ValueError: planted"),
])  # fmt: skip
def test_graph_that_differs_from_a_call_has_no_time(
    name: str, changed: Callable[[Any], Any], says: str, quick: None, graphs: Callable[[Callable[[Any], Any]], None]
) -> None:
    graphs(changed)
    found = measured_cells({"it": PLAIN}, name)
    for arm in found.rows[-1]["arms"].values():
        assert "us" not in arm and arm["finding"].startswith("after it was timed: "), arm
        assert says in arm["finding"]
    assert found.exit is Exit.DIVERGED


def test_graph_of_irreproducible_calls_needs_no_equal_bits() -> None:
    """For kernels that sum with atomics. They are still judged, and a peer's time is next to its finding."""
    turn = count(1.0)
    drawn = Arm("drawn", lambda: torch.tensor(next(turn)), lambda: "")
    assert measured_in_a_graph(drawn).judged.finding == ""
    fixed = Arm("fixed", lambda: torch.ones(2), lambda: "", peer="made-up 1.0")
    found = measured_in_a_graph(fixed)
    assert "2 of 2 numbers have other bits" in found.judged.finding and found.times is not None
    assert measured_in_a_graph(replace(fixed, peer="")).times is None


def measured_in_a_graph(arm: Arm) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interleaved_timing, "_ready", lambda *given: (lambda: 1.0, "graph", lambda: torch.zeros(2)))
        return measured(Cell([arm]), CPU)[arm.name]
