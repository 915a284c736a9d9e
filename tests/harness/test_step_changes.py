"""The relation `step_changes`: its schedules, correct strategies, and faults that it locates and names.

Leaves out: the wrong states themselves (`test_directed.py`), and rings of other projects (`test_sglang_ring.py`).
"""

from collections.abc import Callable
from typing import Any

import pytest

from instep.campaign.relations import Held, held, relations, step_changes
from instep.campaign.relations.case import Case
from instep.campaign.relations.step_changes import ABSENT, BOTH, CHANGES, LOADED, OURS, PREEMPTED, PROMPT, changed
from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.event_rules import EventRules
from instep.trace.file import Trace
from instep.verdict import Exit, Tier
from instep_optimized.commit import OURS as STRATEGIES
from instep_proof.faults.catalogue import by_id
from instep_reference.contract.engine import Commit, Forward, Load, Preempt, Resume
from support.inputs.few_channels import same_events
from support.running.covering import WHOLE
from support.running.verdicts import agreed, first_finding

pytestmark = pytest.mark.slow  # whole replays


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`only((2, 4))`: the relation tries no other change."""

    def limit(*changes: tuple[int, int]) -> None:
        monkeypatch.setattr(step_changes, "CHANGES", changes)
        monkeypatch.setattr(step_changes, "OURS", ())

    return limit


def run(trace: Trace, ops: str = "ledger", **options: Any) -> Held:
    (found,) = held(Case.of(trace, Replay(trace, Setting(ops, **options)).plan), relations(["step-changes"]))
    return found


@pytest.mark.parametrize(("before", "after"), (*CHANGES, *OURS))
def test_schedule_changes_the_width_at_every_fill(before: int, after: int, trace: Trace) -> None:
    made = changed(Case.of(trace, Replay(trace, Setting("ledger")).plan), before, after, BOTH)
    rules, full = EventRules(made.header), max(16, 4 * max(before, after))
    for event in made.events[: made.begin]:
        rules.apply(event)
    lengths = {name: standing.length for name, standing in rules.table.live.items()}
    accepted: set[tuple[int, int]] = set()
    for event in made.events[made.begin :]:
        rules.apply(event)
        ended = isinstance(event, Commit) or (isinstance(event, Forward) and event.rows[0].kind == "decode")
        if ended and not accepted:
            grown = {name: rules.table.live[name].length - length for name, length in lengths.items()}
            accepted = {(lengths[name] - PROMPT, count) for name, count in grown.items() if count}
            assert {name.rpartition(", ")[2] for name, count in grown.items() if not count} == {ABSENT, PREEMPTED}
    assert accepted == {(fill, count) for fill in range(full + 1) for count in {after, max(after // 2, 1)}}
    assert sum(name.endswith(LOADED) for name in rules.table.live) == 1
    assert sum(isinstance(event, Preempt | Resume | Load) for event in made.events) == 3


@pytest.mark.parametrize(("strategy", "options"), [
    ("lazy_rerun", {"graphs": True, "overlap": True}), pytest.param("columns", {"conv": "widened"}, marks=WHOLE),
    pytest.param("rerun", {"layout": "KV", "graphs": True}, marks=WHOLE),
    pytest.param("snapshot", {"overlap": True}, marks=WHOLE),
], ids=str)  # fmt: skip
def test_strategies_keep_all_labels(
    strategy: str, options: dict[str, Any], trace: Trace, only: Callable[..., None]
) -> None:
    only((2, 4))
    found = run(trace, strategy=strategy, **options).verdict
    assert found.exit is Exit.AGREED and {one.tier for one in found.compared} == {Tier.BITWISE}, found.findings[:1]
    assert found.elements > 10_000


IN_GRAPHS = {"graphs": True, "overlap": True}


NUMBERS = {Tier.DERIVED, Tier.DIRECTED}
TIERS = {"ledger": {Tier.BITWISE}, "plain": NUMBERS, "triton": NUMBERS, "invariant": NUMBERS | {Tier.BITWISE}}
RISE, NATIVE = ((2, 4),), ((2, 4), (1, 8), (6, 2))
ON_GPU = IN_GRAPHS | {"device": "cuda"}


@pytest.mark.parametrize(("ops", "strategy", "options", "tried"), [
    *(pytest.param(ops, strategy, options, (*CHANGES, *OURS)[number % each :: each], marks=WHOLE)
      for ops, each, turn in (("ledger", 2, ({}, IN_GRAPHS)), ("plain", 4, (IN_GRAPHS, {})))
      for number, (strategy, options) in enumerate(zip(STRATEGIES["state"], 2 * turn, strict=True))),
    *(pytest.param(ops, "lazy_rerun", {}, RISE, marks=(WHOLE, pytest.mark.interpreted))
      for ops in ("invariant", "triton")),
    *(pytest.param(ops, strategy, ON_GPU, NATIVE, marks=pytest.mark.gpu)
      for ops in ("triton", "invariant") for strategy in STRATEGIES["state"]),
], ids=str)  # fmt: skip
def test_strategies_agree_over_changes(
    ops: str, strategy: str, options: dict[str, Any], tried: tuple[tuple[int, int], ...], trace: Trace,
    only: Callable[..., None],
) -> None:
    """tried: changes. Two strategies try each with labels, one with numbers."""
    only(*tried)
    told = same_events("kept", 2) if "device" in options else trace
    assert {one.tier for one in agreed(run(told, ops, strategy=strategy, **options)).compared} == TIERS[ops]


MARGIN, OLD_CURSOR = "flush-margin-of-the-window-that-was", "flush-round-masked-with-the-old-cursor"


@pytest.mark.parametrize(("fault", "ops", "strategy", "tried", "found", "request_", "says"), [
    pytest.param(MARGIN, "plain", "lazy_rerun", ((2, 2), (2, 4)), ("commit", "state", Tier.DIRECTED), "2 to 4 after 1",
                 "lacks the oldest of the 13 tokens that a ring held", marks=WHOLE),
    pytest.param(OLD_CURSOR, "plain", "lazy_rerun", ((2, 2), (2, 4)), ("commit", "state", Tier.DIRECTED),
                 "2 to 4 after 1", "has the 2 oldest tokens of a ring of 16 entries in place of the window's last 2",
                 marks=WHOLE),
    (MARGIN, "ledger", "lazy_rerun", RISE, ("commit", "state", Tier.BITWISE), "2 to 4 after 13, all accepted",
     "that of plain decoding"),
    pytest.param("mark-of-a-step-count", "ledger", "columns", RISE, ("commit", "state", Tier.BITWISE), "", "",
                 marks=WHOLE),
])  # fmt: skip
def test_fault_is_named_at_the_first_wrong_commit(
    fault: str, ops: str, strategy: str, tried: tuple[tuple[int, int], ...], found: tuple[str, str, Tier],
    request_: str, says: str, trace: Trace, only: Callable[..., None], plant: Callable[..., None],
) -> None:
    """A ring that is too full, in numbers and in labels; and a mark that a change replaces."""
    plant(*by_id()[fault].edits)
    only(*tried)
    first = first_finding(run(trace, ops, strategy=strategy))
    assert (first.kind, first.place.component, first.tier) == found
    assert str(first.request).startswith(request_) and says in first.diagnosis


def test_engine_without_a_strategy_is_left_out(trace: Trace) -> None:
    plan = Replay(trace, Setting("support.wrong.differing_ops:shy")).plan
    found = held(Case.of(trace, plan), relations(["step-changes"]))
    assert found[0].lacks == "an external engine has only its own commit strategy"
