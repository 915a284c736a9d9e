"""Rings that keep keys and updates in two parts of 16 bits: right engines agree, and wrong parts are found and named.

Leaves out: the bits of the op (`tests/optimized/test_exact.py`).
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from instep.campaign.fuzz.draw_events import SAMPLED, split_rings
from instep.campaign.relations import held, relations
from instep.campaign.relations.case import Case
from instep.diagnose import diagnose
from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.header import Room
from instep.verdict import Exit, Tier
from instep.watch.event_context import EventContext
from instep_optimized import Options, load
from instep_optimized.memory.budget import ring_pools
from instep_optimized.options import check
from instep_proof.faults.catalogue import FAMILIES, by_id
from instep_proof.faults.catalogue.fault import Edit, Fault
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.errors import BadInput, Unsupported
from support.inputs.few_channels import few_channels, same_events
from support.inputs.traces import brief, recording
from support.running.covering import WHOLE, few
from support.running.planting import planted_here

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = (pytest.mark.gpu,) if DEVICE == "cuda" else (pytest.mark.interpreted, WHOLE)
HERE = [fault for fault in FAMILIES["parts"] if fault.how.ops == "plain"]  # a kernel is planted in a copy
RINGS = ring_pools("split")

# Every kind of event, of a model of a few channels: a save, a load, a preemption among them.
small = recording(brief(), dtype=torch.bfloat16)


class Pools:
    """The dtypes of the pools of rings."""

    name, tier = "pools", Tier.IDENTITY

    def __init__(self) -> None:
        self.dtypes = dict[str, torch.dtype]()

    def __call__(self, context: EventContext) -> tuple[()]:
        self.dtypes |= {one.name: one.units.dtype for one in context.regions if one.name in RINGS}
        return ()


@few(1)
@pytest.mark.slow
@pytest.mark.parametrize(("trace", "options"), [
    ("accepted", {"ring_dtype": "bfloat16", "strategy": "lazy_rerun", "layout": "KV"}),
    pytest.param("small", {"ring_dtype": "bfloat16", "dtype": "bfloat16", "graphs": True, "overlap": True},
                 marks=WHOLE),
    pytest.param("branching", {"ring_dtype": "float16", "state_dtype": "bfloat16"}, marks=WHOLE),
    pytest.param("prefix", {"ring_dtype": "bfloat16", "kept_dtype": "int8"}, marks=WHOLE),
    pytest.param("ragged", {"ring_dtype": "bfloat16", "strategy": "lazy_rerun", "conv": "widened"}, marks=WHOLE),
    *(pytest.param(trace, {"ring_dtype": dtype, "ops": ops, "device": DEVICE, **more}, marks=KERNELS)
      for trace, dtype, ops, more in (
          ("accepted", "bfloat16", "triton", {"graphs": True}), ("branching", "float16", "triton", {}),
          ("accepted", "float16", "invariant", {"strategy": "lazy_rerun", "dtype": "bfloat16"}))),
], ids=str)  # fmt: skip
def test_a_right_split_ring_agrees(request: pytest.FixtureRequest, trace: str, options: dict[str, Any]) -> None:
    told = request.getfixturevalue("small") if trace == "small" else same_events(trace, 2)
    seen = Pools()
    outcome = Replay(told, Setting(**options)).run(also=[seen])
    assert outcome.verdict.exit is Exit.AGREED, outcome.verdict.findings[:2]
    part = getattr(torch, options["ring_dtype"])
    assert seen.dtypes == {"ring_decay": torch.float32} | {
        name: part for name in RINGS if name != "ring_decay"}
    assert f"keeps tokens of windows as two parts in {options['ring_dtype']}" in outcome.declared.said(torch.float32)


@WHOLE
def test_a_split_ring_without_its_declaration_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rounding of both parts is beyond the allowance of fp32. So the declaration is what makes it agree."""
    how = Setting(ring_dtype="bfloat16")
    replay = Replay(same_events("accepted", 2), how)
    monkeypatch.setattr(Setting, "apart", {})  # what the harness reads; the engine's options stay
    monkeypatch.setattr(Setting, "options", lambda how, **more: Options(ring=torch.bfloat16, drafter=how.mode, **more))
    (first, *_) = replay.run().verdict.findings
    assert (first.tier, first.place.component) == (Tier.DERIVED, "update")


@WHOLE
def test_the_rounded_reference_rounds_windows_alone() -> None:
    """Its states with a ring in two parts, and without: equal up to the first commit, then apart by such a rounding."""
    trace, apart = same_events("accepted", 2), dict[str, list[float]]()
    hows = Setting(ring_dtype="bfloat16"), Setting()
    split, wide = (Case.of(trace, Replay(trace, how).plan).rounded() for how in hows)
    for one, other in zip(split.standings, wide.standings, strict=True):
        for layer, state in one.state.state.items():
            off = (state - other.state.state[layer]).norm() / state.norm().clamp_min(1e-30)
            apart.setdefault(one.kind, []).append(float(off))
    assert max(apart["forward"][:2]) == 0 and all(2**-24 < off < 2**-14 for off in apart["commit"])


@WHOLE
@pytest.mark.parametrize("edits", [(), by_id()["split-low-stays-at-its-node"].edits], ids=["right", "wrong"])
def test_a_split_ring_continues_as_a_wide_ring_of_its_sums(edits: tuple[Any, ...]) -> None:
    trace = same_events("branching", 2)
    case = Case.of(trace, Replay(trace, Setting(ring_dtype="bfloat16")).plan)
    with planted_here(*edits):
        found = {one.relation.name: one for one in held(case, relations(("ring_parts", "strategies")))}
    parts, strategies = found["ring_parts"], found["strategies"]
    assert parts.verdict.exit is (Exit.DIVERGED if edits else Exit.AGREED), parts.verdict.findings[:1]
    assert strategies.verdict.exit is Exit.AGREED or edits, "a ring that is folded late leaves the same bits"
    (plain,) = held(Case.of(trace, Replay(trace, Setting()).plan), relations(("ring_parts",)))
    assert plain.lacks == "no ring keeps its numbers in two parts (--ring-dtype)"


@few(1)
@pytest.mark.slow
@pytest.mark.parametrize("fault", HERE, ids=lambda fault: fault.id)
def test_a_fault_in_one_part_is_found_and_named(fault: Fault) -> None:
    with planted_here(*fault.edits):
        ran = diagnose(Replay(same_events(fault.trace, 2), fault.how), until=fault.event)
    (first, *_) = findings = ran.verdict.findings
    assert (first.event, first.place) == (fault.event, fault.place)
    assert {one.check for one in findings if one.event == first.event} & {*fault.seen_by}
    assert any(fault.says in one.diagnosis for one in findings)


# Low parts are subtracted, in the first layer this many times.
FOLDED = "self._ring(layer, slots, plan)"
TIMES = ("(lambda ring, low: __import__('dataclasses').replace(ring, kept=ring.kept._replace(k_low=low * ring.kept."
         f"k_low.float(), update_low=low * ring.kept.update_low.float())))({FOLDED}, -1 if layer else -{{}})")


@few(1)
@pytest.mark.slow
@pytest.mark.parametrize(("times", "remains"), [(1.2, 0.2 / 2.2), pytest.param(2, None, marks=WHOLE)])
def test_a_finding_takes_the_mistake_of_the_others_if_it_is_near(times: float, remains: float | None) -> None:
    """No sentence fits the first layer. Subtracting explains 2 of its 1 + times low parts: all but 9%, or a third."""
    with planted_here(Edit("instep_optimized/commit/rerun.py", FOLDED, TIMES.format(times))):
        ran = diagnose(Replay(few_channels("accepted", 4), Setting(ring_dtype="float16")), until=5, judged_from=4)
    first, others = [], []
    for one in ran.verdict.findings:
        (others if one.place.layer else first).append(one.explained)
    subtracted = "was run again from keys and updates with low parts subtracted"
    assert first and {one and one.sentence for one in others} == {subtracted}
    where = remains and f", as in 4 of 5 other findings of this event, but {remains:.1%} of this error remains"
    assert {one and one.sentence for one in first} == {where and subtracted + where}
    assert all(one is None or one.names == ("low-parts-subtracted",) for one in first)


@pytest.mark.parametrize(("setting", "slots", "ring"), [
    (Setting(), 3, "bfloat16"), (Setting(strategy="lazy_rerun", state_dtype="float16"), 1, "bfloat16"),
    (Setting(), 2, None), (Setting(strategy="columns"), 3, None), (Setting(dtype="float64"), 3, None),
], ids=str)  # fmt: skip
def test_fuzz_splits_rings_of_every_second_number_of_slots(setting: Setting, slots: int, ring: str | None) -> None:
    room = Room(slots=tuple(range(1, 1 + slots)), pages=(1,), page_size=4, max_tokens=4)
    assert split_rings(setting, room, SAMPLED).ring_dtype == ring
    assert split_rings(setting, room, ()) == setting, "a setting that was given stays"


@pytest.mark.parametrize(("told", "says"), [
    ({"strategy": "snapshot"}, "needs a strategy with a ring: rerun or lazy_rerun"),
    ({"dtype": "float64"}, "hold numbers of float32, not of float64"),
    ({"ops": "ledger"}, "the ops of ledger keep no ring in two parts .labels have no high and low part; ring"),
    ({"ring_dtype": "float8"}, "--ring-dtype: found float8, expected bfloat16 or float16"),
    (Options(ring=torch.float32), "the parts of a ring's numbers are bfloat16 or float16"),
    (Options(ring=torch.bfloat16), "the ops of mine keep no ring in two parts"),
], ids=str)  # fmt: skip
def test_a_split_ring_that_is_not_served_is_refused(told: Options | dict[str, Any], says: str) -> None:
    trace = same_events("accepted", 2)
    with pytest.raises((BadInput, Unsupported), match=says):
        if isinstance(told, dict):
            Replay(trace, Setting(**{"ring_dtype": "bfloat16", **told})).run(until=0)
        else:
            ops = load("plain") if told.ring is torch.float32 else replace(load("plain"), name="mine", split=False)
            check(told, Checkpoint.open(trace.path.parent).config, 3, ops)
