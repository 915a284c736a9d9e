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
from support.running.covering import WHOLE, few

pytestmark = pytest.mark.slow  # whole replays
NAMED = {"flush-margin-of-the-window-that-was": "lacks the oldest of the 13 tokens that a ring held",
        "flush-round-masked-with-the-old-cursor":
        "has the 2 oldest tokens of a ring of 16 entries in place of the window's last 2"}  # fmt: skip


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
    ("lazy_rerun", {"graphs": True, "overlap": True}), ("columns", {"conv": "widened"}),
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


@WHOLE
@pytest.mark.parametrize(("ops", "strategy", "options"), [
    *(("ledger", strategy, options) for strategy in STRATEGIES["state"] for options in ({}, IN_GRAPHS)),
    *(("plain", strategy, options)
      for strategy, options in zip(STRATEGIES["state"], (IN_GRAPHS, {}, IN_GRAPHS, {}), strict=True)),
], ids=str)  # fmt: skip
def test_strategies_agree_over_all_changes(ops: str, strategy: str, options: dict[str, Any], trace: Trace) -> None:
    found = run(trace, ops, strategy=strategy, **options).verdict
    tiers = {Tier.BITWISE} if ops == "ledger" else {Tier.DERIVED, Tier.DIRECTED}
    assert found.exit is Exit.AGREED and {one.tier for one in found.compared} == tiers, found.findings[:1]


@WHOLE
@pytest.mark.interpreted
@pytest.mark.parametrize("ops", ["invariant", "triton"])
def test_kernels_agree_over_a_rise(ops: str, trace: Trace, only: Callable[..., None]) -> None:
    only((2, 4))
    found = run(trace, ops, strategy="lazy_rerun").verdict
    tiers = {Tier.DERIVED, Tier.DIRECTED} | ({Tier.BITWISE} if ops == "invariant" else set())
    assert found.exit is Exit.AGREED and {one.tier for one in found.compared} == tiers, found.findings[:1]


@pytest.mark.gpu
@pytest.mark.parametrize("ops", ["triton", "invariant"])
@pytest.mark.parametrize("strategy", STRATEGIES["state"])
def test_native_strategies_agree_in_graphs(strategy: str, ops: str, only: Callable[..., None]) -> None:
    only((2, 4), (1, 8), (6, 2))
    found = run(same_events("kept", 2), ops, strategy=strategy, device="cuda", graphs=True, overlap=True).verdict
    tiers = {Tier.DERIVED, Tier.DIRECTED} | ({Tier.BITWISE} if ops == "invariant" else set())
    assert found.exit is Exit.AGREED and {one.tier for one in found.compared} == tiers, found.findings[:1]


@few(1)
@pytest.mark.parametrize("name", NAMED)
def test_ring_too_full_is_named_at_the_first_wrong_commit(
    name: str, trace: Trace, only: Callable[..., None], plant: Callable[..., None]
) -> None:
    plant(*by_id()[name].edits)
    only((2, 2), (2, 4))
    first = run(trace, "plain", strategy="lazy_rerun").verdict.findings[0]
    assert (first.kind, first.place.component, first.tier) == ("commit", "state", Tier.DIRECTED)
    assert first.request is not None and first.request.startswith("2 to 4 after 1") and NAMED[name] in first.diagnosis


def test_labels_reveal_a_margin_of_the_window_that_was(
    trace: Trace, only: Callable[..., None], plant: Callable[..., None]
) -> None:
    plant(*by_id()["flush-margin-of-the-window-that-was"].edits)
    only((2, 4))
    first = run(trace, strategy="lazy_rerun").verdict.findings[0]
    assert (first.kind, first.check, first.tier) == ("commit", "step_changes", Tier.BITWISE)
    assert first.request == "2 to 4 after 13, all accepted" and "that of plain decoding" in first.diagnosis


@WHOLE
def test_mark_that_a_change_replaces_is_found(
    trace: Trace, only: Callable[..., None], plant: Callable[..., None]
) -> None:
    plant(*by_id()["mark-of-a-step-count"].edits)
    only((2, 4))
    first = run(trace, strategy="columns").verdict.findings[0]
    assert first.place.component == "state" and first.tier is Tier.BITWISE


def test_engine_without_a_strategy_is_left_out(trace: Trace) -> None:
    plan = Replay(trace, Setting("support.wrong.differing_ops:shy")).plan
    found = held(Case.of(trace, plan), relations(["step-changes"]))
    assert found[0].lacks == "an external engine has only its own commit strategy"
