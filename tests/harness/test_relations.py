"""Relations between runs of a trace: they agree where nothing is wrong, and each meets the fault that it exists for.

Leaves out: the command (`test_relations_command.py`).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from instep.campaign import relations as table
from instep.campaign.relations import NAMES, Held, held, relations, step_changes, worst
from instep.campaign.relations.case import Case
from instep.campaign.relations.compare_records import Yardstick
from instep.campaign.relations.request_timelines import (
    alone,
    as_traced,
    chunked,
    decoded,
    exact_windows,
    rejected,
    rescheduled,
    timelines_of,
)
from instep.campaign.relations.same_events import PAIRWISE
from instep.campaign.relations.same_tokens import REWRITTEN
from instep.campaign.relations.state_error_drift import LongRun, judged, long_request
from instep.checks.tensor_and_choice_judgement import Ties
from instep.run.replay import Replay
from instep.setting import FP8, Setting
from instep.trace.event_rules import EventRules
from instep.trace.file import Trace
from instep.trace.policy import Arrival
from instep.verdict import Comparison, Exit, Tier
from instep_optimized import OptimizedEngine
from instep_optimized.commit import write_set
from instep_optimized.transfer.to_host import HostCopy
from instep_proof.faults.catalogue import by_id
from instep_proof.faults.catalogue.fault import Wrap
from instep_reference.contract.engine import Commit, Draft, Forward, Load
from support.inputs.traces import brief, policy, recorded, recording
from support.running.covering import WHOLE, few
from support.running.verdicts import agreed

pytestmark = pytest.mark.slow  # whole replays

SLOTS = (5, 2)
GIVEN = {"drafter": "external"}  # with the drafts of the trace, where no relation is about who drafts
FIRST_COMMIT, SECOND_COMMIT = 6, 16  # events of both small traces; what follows is like what was before


# Chunks, rounds, a preemption, a reload: every kind of event, and few of each.
trace = recording(msgspec.structs.replace(brief(), capacity=msgspec.structs.replace(policy().capacity, slots=SLOTS)))


# Chunks, rounds of every outcome, a preemption, a reload: all that two slots can see.
whole = recording(policy(capacity=msgspec.structs.replace(policy().capacity, slots=SLOTS)))


def case(
    trace: Trace, ops: str, *, until: int | None = None, bitwise: bool = False, tokens: int = 64, **plan: Any
) -> Case:
    return Case.of(trace, Replay(trace, Setting(ops, **plan)).plan, until=until, bitwise=bitwise, tokens=tokens)


def hold(name: str, trace: Trace, ops: str, **given: Any) -> Held:
    return held(case(trace, ops, **given), relations([name]))[0]


# ---- nothing is wrong


@WHOLE
@pytest.mark.parametrize("ops", ["plain", "ledger"])
def test_all_relations_agree_for_a_correct_engine(trace: Trace, ops: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_changes, "CHANGES", ((2, 4),))  # `test_step_changes.py` tries every change
    monkeypatch.setattr(step_changes, "OURS", ())
    found = held(case(trace, ops), relations())
    assert worst(found) is Exit.AGREED, [one.verdict.findings[:1] for one in found]
    without = {one.relation.name for one in found if one.lacks is not None}
    assert without == {"fused", "kept_once", "ring_parts"} | ({"drift"} if ops == "ledger" else set())
    for one in found:
        if one.lacks is None:
            assert one.verdict.elements > 40 and one.verdict.events >= 4, one.relation.name
            inexact = {Tier.PROPAGATED, Tier.DECISIONS, Tier.DERIVED} & {c.tier for c in one.verdict.compared}
            assert ops == "plain" or not inexact, "labels are exact"


@few(2)
@pytest.mark.parametrize(("plan", "names"), [
    ({"dtype": "bfloat16", "strategy": "columns", "conv": "widened", "layout": "KV"}, ("alone", "rejected_is_plain")),
    ({"strategy": "lazy_rerun"}, ("rejected_is_plain", "decode_is_verify_1")),
    pytest.param({"dtype": "float64", "drafter": None}, ("draft_layout",), marks=WHOLE),
    ({"state_dtype": FP8, "state_rounding": "stochastic:3"}, ("split", "schedule")),  # states are stored elsewhere
])  # fmt: skip
def test_relations_agree_in_other_settings(narrow: Trace, plan: dict[str, Any], names: tuple[str, ...]) -> None:
    for one in held(case(narrow, "plain", until=SECOND_COMMIT, **{**GIVEN, **plan}), relations(names)):
        assert one.verdict.exit is Exit.AGREED, one.verdict.findings[:1]


# A model that is stored in bf16, as real ones are.
narrow = recording(brief(), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The smallest useful trace for the interpreter: prompts of one token, a few rounds, weights stored in bf16."""
    arrivals = (Arrival("a", "one", max_new=3), Arrival("b", "one", arrive=1, max_new=2))
    told = policy(deeds=(), arrivals=arrivals, adaptive={"candidate_steps": [1]}, steps=(), accept=(1, 0))
    small = {"hidden_size": 16, "intermediate_size": 16, "linear_num_value_heads": 2, "num_attention_heads": 2}
    return recorded(tmp_path_factory.mktemp("tiny"), told, dtype=torch.bfloat16, **small)


@few(1)
@pytest.mark.parametrize(("ops", "names", "dtype"), [
    ("triton", ("rejected_is_plain", "fused"), "float32"), pytest.param("triton", ("slots",), "float32", marks=WHOLE),
    ("triton", ("fused", "unseen"), "bfloat16"), ("invariant", ("alone",), "float32"),
])  # fmt: skip
def test_relations_agree_for_kernels_on_a_tiny_trace(tiny: Trace, ops: str, names: tuple[str, ...], dtype: str) -> None:
    until = None if dtype == "bfloat16" else 6  # in fp32 as long as there are two requests
    for one in held(case(tiny, ops, until=until, dtype=dtype, **GIVEN), relations(names)):
        assert one.verdict.exit is Exit.AGREED, one.verdict.findings[:1]
        assert ops == "triton" or {c.tier for c in one.verdict.compared} == {Tier.BITWISE}, "not a bit may differ"


# ---- the fault that a relation exists for

FAULTS = [
    ("poison", "NEVER_FRESH", {}, "mixed"), ("pitch", "OWN_STRIDE", {}, "state"),
    ("slots", "FEW_SLOTS", {}, "mixed"), ("later_rows", "ONE_SCALE", {}, "mixer"),
    ("alone", "ONE_SCALE", {}, "conv"), ("split", "ALWAYS_FRESH", {}, "hidden"),
    ("split", "ALWAYS_FRESH", {"state_dtype": FP8}, "conv"), ("schedule", "FORGETFUL", {}, "state"),
    ("rejected_is_plain", "NEVER_THE_ROOT", {"strategy": "snapshot"}, "conv"),
    ("decode_is_verify_1", "COARSE_DECODE", {}, "core"),
    ("draft_layout", "LAST_OF_THE_LAYOUT", {}, "final"),
    ("strategies", "NARROW_MOVE", {}, "state"),
    ("unseen", "shy", {}, "conv"), ("fused", "NEVER_ROUNDED", {}, "keys"),
    ("speculation_off", "other_layout", {}, "state"),
    ("capped", "CAPLESS", {}, "length"), ("full_caps", "CAP_WITH_BONUS", {}, "length"),
]


@pytest.mark.parametrize(("name", "fault", "plan", "component"), FAULTS, ids=[name for name, *_ in FAULTS])
def test_relation_detects_its_planted_fault(
    request: pytest.FixtureRequest, name: str, fault: str, plan: dict[str, Any], component: str
) -> None:
    few_rounds = name not in ("split", "schedule", "full_caps") or bool(plan)
    trace = request.getfixturevalue("trace" if few_rounds else "whole")
    # From 10 on the ring holds more than is rerun; event 10 accepts a whole window.
    until = {"FORGETFUL": 10, "CAP_WITH_BONUS": 10}.get(fault, FIRST_COMMIT)
    given = GIVEN if name not in ("draft_layout", "speculation_off") else {}
    found = hold(name, trace, f"support.wrong.differing_ops:{fault}", until=until, **given, **plan)
    assert found.verdict.exit is Exit.DIVERGED
    first = found.verdict.findings[0]
    assert first.place.component == component, first
    assert first.check == name and first.diagnosis
    assert 0 < first.event <= until and first.request is not None


@pytest.mark.parametrize(("name", "fault", "strategy", "dtype", "until"), [
    ("schedule", "OTHER_ORDER", "rerun", "bfloat16", SECOND_COMMIT),
    ("rejected_is_plain", "OTHER_ORDER", "lazy_rerun", "bfloat16", 12),  # a decode
    ("decode_is_verify_1", "OTHER_ORDER_IN_DECODE", "rerun", "bfloat16", 12),
    ("rejected_is_plain", "NARROW_MOVE", "snapshot", "bfloat16", FIRST_COMMIT),
    ("alone", "OTHER_ORDER_OF_MANY", "rerun", "bfloat16", FIRST_COMMIT),
    # in fp32, too: what another order changes is as small a part of a tolerance there
    pytest.param("rejected_is_plain", "NARROW_MOVE", "snapshot", "float32", FIRST_COMMIT, marks=WHOLE),
    pytest.param("alone", "OTHER_ORDER_OF_MANY", "rerun", "float32", FIRST_COMMIT, marks=WHOLE),
])  # fmt: skip
def test_bits_reveal_a_fault_below_every_tolerance(
    request: pytest.FixtureRequest, name: str, fault: str, strategy: str, dtype: str, until: int
) -> None:
    trace = request.getfixturevalue("trace" if dtype == "float32" else "narrow")
    ops = f"support.wrong.differing_ops:{fault}"
    found = hold(name, trace, ops, until=until, strategy=strategy, dtype=dtype, **GIVEN).verdict
    by_bits = [each for each in found.findings if each.tier is Tier.BITWISE]
    assert by_bits and by_bits[0].place.component in ("core", "update", "state"), found.findings[:1]
    assert len(by_bits) == len(found.findings) or (fault, dtype) == ("NARROW_MOVE", "float32")


def test_maker_may_declare_invariant_rows(trace: Trace) -> None:
    told = case(trace, "support.wrong.differing_ops:shy")
    assert not told.rows_are_invariant and told.row_by_row is None
    maker = partial(told.found)
    maker.row_invariant = True  # type: ignore[attr-defined]
    assert replace(told, found=maker).rows_are_invariant


def test_graph_is_eager_detects_a_graph_with_stale_memory(trace: Trace, plant: Callable[..., None]) -> None:
    plant(*by_id()["frozen-capture-table"].edits)
    found = hold("graph_is_eager", trace, "plain").verdict
    assert found.exit is Exit.DIVERGED and '"eager" and "replayed"' in found.findings[0].diagnosis


def test_handed_detects_a_drafter_that_writes_the_targets_memory(trace: Trace, plant: Callable[..., None]) -> None:
    assert hold("handed", trace, "ledger", until=FIRST_COMMIT).verdict.exit is Exit.AGREED
    write = "(layer,) = memory.layers('keys')[:1]\nmemory.pools['keys'].units(layer)[1:, 0] += 1"
    plant(Wrap("instep_optimized/draft/eagle.py", "Eagle.extend", result=write))
    found = hold("handed", trace, "ledger", until=FIRST_COMMIT).verdict
    assert found.exit is Exit.DIVERGED and found.findings[0].check == "handed"


def test_prompt_buckets_detects_addresses_of_an_earlier_forward(trace: Trace, plant: Callable[..., None]) -> None:
    plant(*by_id()["prompt-addresses-frozen"].edits)
    found = hold("prompt_buckets", trace, "ledger", until=FIRST_COMMIT).verdict
    assert found.exit is Exit.DIVERGED and "prompts run in graphs of" in found.findings[0].diagnosis


def test_overlapped_detects_a_count_one_round_late(whole: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose rounds overlap adds the counts of the round before to a length; one that waits does not."""
    commit, before = OptimizedEngine.commit, dict[int, HostCopy]()

    def late(self: OptimizedEngine, requests: tuple[str, ...], accepted: Any = None) -> Any:
        answer = commit(self, requests, accepted)
        newest = self._unreported[-1]
        older = before.get(id(self), newest)
        before[id(self)] = newest
        for name in requests if self._options.overlap else ():
            length = self._requests[name].length
            length._owed = [
                (older if counts is newest else counts, min(number, len(older.list()) - 1))
                for counts, number in length._owed
            ]
        return answer

    monkeypatch.setattr(OptimizedEngine, "commit", late)
    found = hold("overlapped", whole, "plain")
    assert found.verdict.exit is Exit.DIVERGED
    first, *others = found.verdict.findings
    assert first.diagnosis.endswith('between "waiting" and "overlapping"') and first.place.component == "pick"
    lengths = [each for each in others if each.place.component == "length"]
    assert lengths and all(each.request for each in lengths)


@pytest.mark.parametrize(("field", "says"), [("roots", "the answer's roots of"), ("bonus", "the answer's bonus parts")])
def test_overlapped_detects_a_wrong_answer(
    trace: Trace, monkeypatch: pytest.MonkeyPatch, field: str, says: str
) -> None:
    method = "forward" if field == "roots" else "commit"
    right = getattr(OptimizedEngine, method)

    def other(self: OptimizedEngine, *given: Any) -> Any:
        answer = right(self, *given)
        if not self._options.overlap:
            return answer
        wrong = {n: r + 1 for n, r in answer.roots.items()} if field == "roots" else answer.bonus + 1
        return replace(answer, **{field: wrong})

    monkeypatch.setattr(OptimizedEngine, method, other)
    found = hold("overlapped", trace, "plain")
    assert says in found.verdict.findings[0].diagnosis


def test_overlapped_detects_a_wrong_pool_byte(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a red zone, which no logical state shows."""
    idle = OptimizedEngine.commit

    def beside(self: OptimizedEngine, *given: Any) -> Any:
        answer = idle(self, *given)
        if self._options.overlap:
            self.regions()[0].gaps.view(torch.uint8)[0, 0] += 1  # type: ignore[union-attr]
        return answer

    monkeypatch.setattr(OptimizedEngine, "commit", beside)
    found = hold("overlapped", trace, "plain")
    assert "red zone 0 differs" in found.verdict.findings[0].diagnosis


def test_overlapped_detects_pages_for_a_stale_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are reserved for the last known length, not for the maximum, so later keys are lost."""
    small = msgspec.structs.replace(policy().capacity, pages=tuple(range(1, 60)), page_size=2)
    trace = recorded(tmp_path, policy(capacity=small))
    assert hold("overlapped", trace, "plain").verdict.exit is Exit.AGREED

    def by_what_is_known(drafts: Any, requests: Any, *, exact: bool = False) -> Any:
        return [(name, requests[name].length._known + count) for name, count in drafts.items()]

    def forwarded(rows: Any, requests: Any, *, exact: bool = False) -> Any:
        width = write_set.width_of
        return [(r.request, requests[r.request].length._known + width(r, requests[r.request])) for r in rows]

    monkeypatch.setattr(write_set, "draft_wants", by_what_is_known)
    monkeypatch.setattr(write_set, "forward_wants", forwarded)
    found = hold("overlapped", trace, "plain")
    assert found.verdict.findings[0].diagnosis.startswith("overlapping: raised ")


def test_drift_detects_decays_from_sums_since_the_start(trace: Trace) -> None:
    found = hold("drift", trace, "support.wrong.differing_ops:SINCE_THE_BEGINNING", tokens=256)
    assert found.verdict.exit is Exit.DIVERGED
    first = found.verdict.findings[0]
    assert first.place.component == "state" and first.head is not None
    assert any(each.diagnosis.startswith("the error grows") for each in found.verdict.findings)


@pytest.mark.parametrize(("reference", "grows"), [(1.0, True), (2.5, False)])
def test_drift_allows_the_growth_of_the_rounded_reference(reference: float, grows: bool) -> None:
    """Both errors are far below the allowance; the engine's error is 2.5 times as large in the second half."""
    late = torch.arange(64)[:, None] >= 32

    def course(factor: float) -> torch.Tensor:
        return torch.where(late, factor, 1.0).double() * 1e-6

    run = LongRun("windows", "window", 0, tuple(range(8, 520, 8)), course(2.5), course(reference), torch.float32)
    found = [each for each in judged(run) if isinstance(each, Comparison) and not each.agrees]
    assert [each.diagnosis.split(":")[0] for each in found] == ["the error grows"] * grows


def test_drift_reports_a_run_that_stops_early(trace: Trace) -> None:
    found = hold("drift", trace, "support.wrong.differing_ops:STUCK", tokens=128)
    said = [each.diagnosis for each in found.verdict.findings]
    assert "windows of the op: raised RuntimeError (too far) after 0 tokens" in said
    assert any(each.startswith("a long request: raised RuntimeError (too far)") for each in said) and len(said) == 3


def test_drift_reports_rows_that_are_not_shown(trace: Trace) -> None:
    told = case(trace, "plain", tokens=128)
    told.recorded("a long request", lambda: long_request(told)).rows.clear()
    found = held(told, relations(["drift"]))[0].verdict
    assert found.exit is Exit.DIVERGED and found.findings[0].diagnosis.startswith("a long request: 0 of ")


def test_drift_skips_growth_when_a_quarter_has_few_launches(trace: Trace) -> None:
    found = agreed(hold("drift", trace, "plain", tokens=128))
    assert any("chunks of the op, whether the error grows" in each.reason for each in found.skipped)


def test_ties_are_capped(trace: Trace) -> None:
    told = case(trace, "plain")
    yardstick = Yardstick("alone", told.truth(), told.rounded, told.traced(), told.truth())
    yardstick.ties = Ties(made=0, ties=100)
    found = [one for one in yardstick.compare() if not one.agrees]  # type: ignore[union-attr]
    assert found[0].check == "alone" and found[0].diagnosis.endswith("choices so far were ties: too many")


def test_relation_is_inconclusive_when_nothing_is_computed(trace: Trace) -> None:
    assert not isinstance(trace.events[0], Forward)
    admissions = Case.of(trace, Replay(trace, Setting("plain")).plan, until=0)
    found = held(admissions, relations(["unseen"]))[0].verdict
    assert found.elements and found.exit is Exit.INCONCLUSIVE


def test_relation_reports_a_run_that_raises(trace: Trace) -> None:
    found = hold("slots", trace, "support.wrong.subjects:refusing")
    assert found.verdict.exit is Exit.DIVERGED
    assert "raised IndexError (row 3 of 2); the event is legal" in found.verdict.findings[0].diagnosis


def test_bitwise_requires_bits_that_no_op_set_promised(trace: Trace) -> None:
    assert {c.tier for c in hold("alone", trace, "plain", bitwise=True).verdict.compared} == {Tier.BITWISE}


# ---- rewritten timelines


@pytest.mark.parametrize("rewrite", [
    lambda timeline: timeline, decoded, rejected((1, 3), 64), rescheduled((0, 1, 3, 1), 64), exact_windows, chunked(()),
    chunked((1, 2, 3)),
], ids=["as it was", "decoded", "rejected", "rescheduled", "exact windows", "whole", "small chunks"])  # fmt: skip
def test_rewritten_timeline_is_legal_and_has_the_same_tokens(whole: Trace, rewrite: Any) -> None:
    said = {}
    for told in (alone(whole), alone(whole, rewrite)):
        rules, texts = EventRules(told.header), {}
        for event in told.events:
            rules.apply(event)
        texts = {ended.request: ended.said for ended in rules.table.ended}
        for name, text in texts.items():
            shorter = min(len(text), len(said.setdefault(name, text)))
            assert text[:shorter] == said[name][:shorter] and (shorter > 1 or name == "d")


def test_every_request_has_its_own_timeline(whole: Trace) -> None:
    told = {timeline.request: timeline for timeline in timelines_of(whole)}
    assert set(told) == {"a", "b", "c", "d"}
    loads = [index for index, event in enumerate(whole.events) if isinstance(event, Load)]
    assert loads and [step.origins[-1] for step in told["d"].steps].count(loads[0]) >= 1, "what led to the saved state"
    assert not any(isinstance(event, Load) for event in alone(whole).events)
    rounds = [step for timeline in told.values() for step in timeline.steps if step.kind == "round"]
    assert {len(step.nodes) for step in rounds} >= {0, 1}
    assert all(
        isinstance(whole.events[one], kind) for step in rounds for one, kind in
        zip(step.origins, (Draft, Forward, Commit), strict=True) if not isinstance(whole.events[one], Load)
    )
    assert as_traced(whole).events == whole.events


def test_relation_table_is_complete() -> None:
    assert [relation.name for relation in relations()] == list(NAMES)
    files = Path(str(table.__file__)).parent.glob("*.py")
    modules = [file.stem for file in files if "\nRELATION = " in file.read_text()]
    alone = {import_module(f"{table.__name__}.{module}").RELATION.name for module in modules}
    rows = [relation.name for relation in (*PAIRWISE, *REWRITTEN)]
    assert sorted((*rows, *alone)) == sorted(NAMES) and len(set(NAMES)) == len(NAMES)
    assert all(relation.says and relation.catches and relation.tiers for relation in relations())


def test_every_relation_has_a_planted_wrong_engine() -> None:
    planted = {name for name, *_ in FAULTS} | {
        "graph_is_eager", "overlapped", "drift", "read_late", "step_changes", "prompt_buckets", "handed"}
    planted |= {"kept_once", "moving", "ring_parts"}  # `test_prefixes.py`, `test_transfers.py`, `test_split_rings.py`
    assert planted == set(NAMES), "a relation that is never seen to find anything"
