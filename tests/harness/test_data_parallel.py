"""Data-parallel groups: traces agree, idle replicas change nothing, and a wrong replica is found and located.

Leaves out: the catalogue's faults (`catalogue/groups.py`).
"""

from dataclasses import replace
from typing import Any

import pytest

from instep.checks.ranks import Group
from instep.diagnose import diagnose
from instep.report.outcome_data import why_inconclusive
from instep.run.replay import Outcome, Replay
from instep.setting import Setting
from instep.trace.file import Trace, read
from instep.verdict import Exit
from instep.watch.event_context import EventContext
from instep_proof.faults.catalogue.fault import Edit
from instep_proof.faults.catalogue.groups import ON_A_REQUEST
from instep_reference.contract.engine import Commit, Draft, Forward, Idle, Path, Row
from instep_reference.contract.errors import InstepError
from instep_reference.contract.event_facts import named, restricted
from instep_reference.contract.place_names import STAGE_LEVEL, Place
from support.running.covering import TRACES, WHOLE
from support.running.planting import planted_here

pytestmark = pytest.mark.slow  # whole replays

REPLICA, OVER = (f"instep_optimized/data_parallel/{name}.py" for name in ("replica_engine", "ops_of_group"))


def replayed(trace: Trace, *edits: Edit, until: int | None = None, **how: Any) -> Outcome:
    with planted_here(*edits):
        return Replay(trace, Setting(**{"ops": "ledger", "dp": 2, **how})).run(until=until)


@pytest.mark.parametrize("how", [
    pytest.param({"ops": "ledger"}, marks=WHOLE),
    pytest.param({"ops": "plain", "strategy": "columns", "conv": "widened"}, marks=WHOLE),
    {"ops": "ledger", "graphs": True, "strategy": "snapshot"},
    pytest.param({"ops": "plain", "overlap": True, "dp": 4}, marks=WHOLE),
], ids=lambda how: "-".join(map(str, how.values())))
def test_replicas_agree_with_the_reference(trace: Trace, how: dict[str, Any]) -> None:
    verdict = replayed(trace, **how).verdict
    assert verdict.exit == Exit.AGREED and verdict.events == len(trace.events) and verdict.shared > 3
    assert {"group", "agreement", "bytes", "bounds", "contracts", "graphs"} <= {one.check for one in verdict.compared}


@pytest.mark.parametrize(("ops", "graphs", "device"), [
    pytest.param("triton", True, "cpu", marks=WHOLE),
    *(pytest.param(ops, graphs, "cuda", marks=pytest.mark.gpu)
      for ops in ("triton", "invariant") for graphs in (False, True)),
])  # fmt: skip
def test_kernels_run_on_two_replicas(four_rounds_bf16: Trace, ops: str, graphs: bool, device: str) -> None:
    verdict = replayed(four_rounds_bf16, ops=ops, dtype="bfloat16", graphs=graphs, device=device).verdict
    assert verdict.exit == Exit.AGREED and verdict.shared == 2


@WHOLE
@pytest.mark.parametrize(("name", "ops"), [
    ("adaptive", "plain"), ("trees", "ledger"), ("slots", "plain"), ("slots-overlapped", "ledger"),
])
def test_long_traces_agree_on_two_replicas(name: str, ops: str) -> None:
    trace = read(TRACES / f"{name}.jsonl")
    recorded = trace.header.recording
    setting = Setting(ops=ops, overlap=name.endswith("overlapped"), dp=2)
    verdict = Replay(trace, setting if recorded is None else setting.recorded(recorded)).run(until=24).verdict
    assert verdict.exit == Exit.AGREED and verdict.shared > 1


def test_run_without_rows_of_several_replicas_is_inconclusive(trace: Trace) -> None:
    first = next(n for n, event in enumerate(trace.events) if len(named(event)) > 1)
    outcome = replayed(trace, until=first - 1)
    assert outcome.verdict.exit == Exit.INCONCLUSIVE and "no event had rows of several" in why_inconclusive(outcome)


@pytest.mark.parametrize(("how", "says"), [
    ({"graphs": True, "prompt_graphs": "16"}, "a data-parallel group with forwards with prompts in graphs"),
    ({"stages": 2}, "expected one of the two"),
    ({"dp": 3}, "a divisor of the model's 64 tokens"), ({"ranks": 2}, "expected one of the two"),
])  # fmt: skip
def test_settings_without_groups_are_refused(trace: Trace, how: dict[str, Any], says: str) -> None:
    with pytest.raises(InstepError, match=says):
        replayed(trace, until=0, **how)


def test_idle_forward_that_writes_is_located(trace: Trace) -> None:
    """The idle row of a round runs on a request of another replica: its memory changes where it is not served."""
    outcome = replayed(trace, ON_A_REQUEST)
    bytes_of = [one for one in outcome.verdict.findings if one.check == "bytes"]
    assert bytes_of and all(one.rank is not None for one in bytes_of)
    assert "which this event may not write" in bytes_of[0].diagnosis


def test_padding_and_missing_calls_are_located(trace: Trace) -> None:
    last = next(n for n, event in enumerate(trace.events) if isinstance(event, Commit))
    context = replayed(trace, until=last).last
    assert isinstance(context, EventContext) and context.group is not None
    first, second = context.group.calls
    place = Place("extend", STAGE_LEVEL, "embedding")
    for change, rank, says in (
        ({"calls": (first, second[1:])}, 1, "at call 0 rank 1 is in"),
        ({"padded": (((place, 2, 3),), ())}, 0, "has 3 numbers other than 0 in 2 padded rows of replica 0"),
    ):
        wrong = replace(context, group=replace(context.group, **change))  # type: ignore[arg-type]
        (found,) = [one for one in Group()(wrong) if not one.agrees]
        assert found.rank == rank and says in found.diagnosis
    assert all(one.agrees for one in Group()(context)) and len(first) > 3


@pytest.mark.parametrize(("edit", "component", "says"), [
    ("part = ops.lm_head(x=every, weight=weight, to=to){ => * (2 - comm.rank)}", "logits", "is twice the right value"),
    ("ops.embed(**given, to=to).masked_fill({~mine[:, None] => ~mine[:, None] | (comm.rank == 1)}, 0)",
     "embedding", "lacks the embedding of rank 1's tokens"),
])  # fmt: skip
def test_wrong_part_of_the_vocabulary_names_its_replica(trace: Trace, edit: str, component: str, says: str) -> None:
    with planted_here(Edit.of(OVER, edit)):
        findings = diagnose(Replay(trace, Setting(dp=2))).verdict.findings
    found = [one for one in findings if one.place.component == component and says in one.diagnosis]
    assert found and found[0].event == findings[0].event
    assert component == "embedding" or {one.rank for one in found} == {0}


def test_event_is_restricted_to_some_requests() -> None:
    rows = tuple(Row(name, "verify") for name in "abc")
    assert restricted(Forward(rows), "ac") == Forward((rows[0], rows[2]))
    assert restricted(Draft(("a", "b"), picks=((1,), (2,))), "b") == Draft(("b",), picks=((2,),))
    commit = Commit(("a", "b"), (Path((1,), 2), Path((), 3)), caps=(1, 0))
    assert restricted(commit, "a") == Commit(("a",), (Path((1,), 2),), caps=(1,)) and restricted(Idle(), "a") == Idle()
