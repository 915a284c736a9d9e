"""The event rules: the legal order of events, and slots, pages, lengths and roots; and the driver, which follows them.

The rules predict every slot and page without an engine. The driver turns prompts and a policy into complete, legal
events, and carries out all that the policy requires. Leaves out: what an engine computes.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from instep.trace.event_rules import EventRules, verified
from instep.trace.file import Trace, read
from instep.trace.policy import Arrival, ScheduledAction, Steps, Transfer, read_policy, read_prompts
from instep_reference.contract import engine as e
from instep_reference.contract.errors import BadInput
from instep_reference.contract.event_facts import Phase
from support.inputs.traces import PROMPTS, ROOM, header, one_round, policy, recorded, recording


def rules_after(*events: e.AnyEvent, **changes: object) -> EventRules:
    rules = EventRules(header(**changes))
    for event in events:
        rules.apply(event)
    return rules


def ready(name: str = "a", prompt: tuple[int, ...] = (1, 2, 3), root: int = 9) -> tuple[e.AnyEvent, ...]:
    return e.Admit(name, prompt), e.Forward((e.Row(name, "prefill", len(prompt), root=root),))


def after_a_verify(name: str = "a") -> tuple[e.AnyEvent, ...]:
    return *ready(name), e.Draft((name,), picks=((4, 5, 6),)), e.Forward((e.Row(name, "verify"),))


def refusal(rules: EventRules, event: e.AnyEvent) -> str:
    with pytest.raises(BadInput) as refused:
        rules.check(event, "t.jsonl line 7")
    assert str(refused.value).startswith("t.jsonl line 7: ")
    return str(refused.value)


def test_a_request_goes_through_its_phases() -> None:
    rules, phases = EventRules(header()), []
    for event in one_round():
        rules.apply(event)
        phases.append(rules.table.live["a"].phase if "a" in rules.table.live else None)
    assert phases == [
        Phase.WAITING, Phase.PREFILLING, Phase.READY, Phase.DRAFTED, Phase.VERIFIED, Phase.READY, Phase.READY, None,
    ]
    ended = rules.table.ended[0]
    assert ended.said == (9, 10, 11, 13, 14) and ended.length == 9 and ended.root == 14


def test_slots_are_the_first_free_ones_in_the_header_s_order() -> None:
    rules = rules_after(e.Admit("a", (1,)), e.Admit("b", (2,)))
    assert [rules.table.live[name].slot for name in "ab"] == [3, 1]
    rules.apply(e.Abort("a"))
    rules.apply(e.Admit("c", (1,)))
    assert rules.table.live["c"].slot == 3


def test_pages_grow_with_what_may_be_written_and_are_never_trimmed() -> None:
    rules = rules_after(*ready(prompt=tuple(range(7))))
    assert rules.table.live["a"].pages == (5,)  # 7 positions of 8
    rules.apply(e.Draft(("a",), picks=((4, 5, 6),)))
    assert rules.table.live["a"].pages == (5, 2)  # the draft's KV reaches position 9
    rules.apply(e.Forward((e.Row("a", "verify"),)))
    rules.apply(e.Commit(("a",), accepted=(e.Path((), 8),)))
    assert rules.table.live["a"].length == 8 and rules.table.live["a"].pages == (5, 2)


def test_a_prefix_of_a_request_is_replaced_by_one_new_prefix_alone() -> None:
    """Request "a" keeps "own", which a commit tracks again; twice, the name is taken."""
    prefill = e.Forward((e.Row("a", "prefill", 4, root=9, track="own"), e.Row("b", "prefill", 4, root=9)))
    drafts = e.Draft(("a", "b"), picks=((4, 5, 6), (4, 5, 6)))
    rules = rules_after(e.Admit("a", (1, 2, 3, 4)), e.Admit("b", (5, 6, 7, 8)), prefill, drafts,
                        e.Forward((e.Row("a", "verify"), e.Row("b", "verify"))), **TRACKING)  # fmt: skip
    paths = (e.Path((1, 2, 3), 7), e.Path((1, 2, 3), 7))
    rules.check(e.Commit(("a", "b"), paths, ("own", "new")))
    assert "track" in refusal(rules, e.Commit(("a", "b"), paths, ("own", "own")))


@pytest.mark.parametrize(("overlap", "counts"), [(False, [2, 3, 2, 3, 3]), (True, [2, 3, 3, 4, 3])])
def test_a_commit_gives_back_pages_when_the_header_says_so(overlap: bool, counts: list[int]) -> None:
    """With overlapping rounds the length of a commit is known at the next one."""
    room = replace(header().capacity, page_size=4, pages=tuple(range(1, 9)), trim=True)
    rules = EventRules(replace(header(), capacity=room), overlap=overlap)
    for event in ready(prompt=tuple(range(7))):
        rules.apply(event)
    found = [len(rules.table.live["a"].pages)]
    for _ in range(2):  # of three drafts each, and none is accepted: 7, 8, 9 tokens
        rules.apply(e.Draft(("a",), picks=((4, 5, 6),)))
        rules.apply(e.Forward((e.Row("a", "verify"),)))
        found.append(len(rules.table.live["a"].pages))
        rules.apply(e.Commit(("a",), accepted=(e.Path((1, 2, 3), 8),), caps=(0,)))
        found.append(len(rules.table.live["a"].pages))
    assert rules.table.live["a"].length == 9 and rules.table.live["a"].said == (9, 8, 8)
    assert found == counts


def test_preempted_request_frees_everything_and_resumes() -> None:
    rules = rules_after(*ready(), e.Preempt("a"))
    assert rules.table.live["a"].slot is None and rules.table.live["a"].pages == ()
    rules.apply(e.Admit("b", (1,)))
    rules.apply(e.Resume("a"))
    back = rules.table.live["a"]
    assert (back.phase, back.slot, back.pages, back.length, back.root) == (Phase.READY, 1, (5,), 3, 9)


def test_fresh_request_with_the_same_prompt_can_load_a_state() -> None:
    rules = rules_after(*ready(), e.Save("a", "kept"), e.Finish("a"), e.Admit("b", (1, 2, 3)), e.Load("b", "kept"))
    assert (rules.table.live["b"].length, rules.table.live["b"].root) == (3, 9)
    assert "name" in refusal(rules_after(*ready(), e.Save("a", "kept"), e.Admit("b", (1,))), e.Load("b", "kept"))


def trees(nodes: int | None) -> dict[str, object]:
    """A header that allows tree windows with this number of nodes."""
    return {"capacity": msgspec.structs.replace(header().capacity, num_draft_tokens=nodes)}


@pytest.mark.parametrize(("nodes", "parents", "says"), [
    (None, (0, 0, 1), "parents[0]: found a tree, expected a chain: the header has no capacity.num_draft_tokens"),
    (4, (0, 0, 1, 1), "found 5 nodes with the root, expected at most capacity.num_draft_tokens = 4"),
    (6, (0, 1, 2, 3, 0), "found a path of 4 drafts, expected at most num_steps = 3"),
    (6, (0, 1, 2, 3), "found a path of 4 drafts, expected at most num_steps = 3"),
    (4, (0, 2, 0), "parents[0][1]: found 2, expected an earlier node, 0 to 1"),
])  # fmt: skip
def test_a_tree_has_room_and_no_path_longer_than_the_step_count(
    nodes: int | None, parents: tuple[int, ...], says: str
) -> None:
    draft = e.Draft(("a",), picks=(tuple(range(len(parents))),), parents=(parents,))
    assert says in refusal(rules_after(*ready(), **trees(nodes)), draft)


@pytest.mark.parametrize(("nodes", "parents"), [(None, (0, 1, 2)), (4, (0, 0)), (5, (0, 0, 1, 3)), (4, (0,))])
def test_tree_reserves_pages_for_its_nodes_and_a_chain_does_not(nodes: int | None, parents: tuple[int, ...]) -> None:
    draft = e.Draft(("a",), picks=(tuple(range(len(parents))),), parents=(parents,))
    rules = rules_after(*ready(prompt=tuple(range(7))), draft, **trees(nodes))
    assert len(rules.table.live["a"].pages) * 8 >= 7 + len(parents)
    assert rules.table.live["a"].parents == (-1, *parents)


def test_a_tree_is_committed_along_parents() -> None:
    tree = e.Draft(("a",), picks=((4, 5, 6),), parents=((0, 0, 2),))
    rules = rules_after(*ready(), tree, e.Forward((e.Row("a", "verify"),)), **trees(4))
    rules.check(e.Commit(("a",), accepted=(e.Path((2, 3), 8),)))
    said = refusal(rules, e.Commit(("a",), accepted=(e.Path((1, 3), 8),)))
    assert "accepted[0].nodes[1]: found 3, expected a child of node 1" in said


def test_a_drafter_proposes_chains_by_itself_and_no_given_trees() -> None:
    rules = rules_after(*ready())
    rules.drafts_itself = True
    rules.check(e.Draft(("a",), parents=((0, 1, 2),)), choices=False)
    with pytest.raises(BadInput, match="picks: found nothing"):
        rules.check(e.Draft(("a",), parents=((0, 0, 2),)), choices=False)


@pytest.mark.parametrize(("before", "event", "field"), [
    ((), e.Admit("a", (64,)), "prompt[0]: found token 64"),
    ((), e.Admit("a", ()), "prompt: found no token"),
    ((e.Admit("a", (1,)),), e.Admit("a", (1,)), "a name that no live request has"),
    ((e.Admit("a", (1,)), e.Admit("b", (1,))), e.Admit("c", (1,)), "no free slot"),
    ((e.Admit("a", (1,)),), e.Draft(("a",), picks=((1, 2, 3),)), "waiting, expected a request that is ready"),
    (ready(), e.Draft(("a",), picks=((1, 2),)), "picks: found [2] drafts"),
    (ready(), e.Draft(("a",)), "picks: found nothing"),
    (ready(), e.Draft(("a", "a"), picks=((1, 2, 3), (1, 2, 3))), "none twice"),
    (ready(), e.Draft(("z",), picks=((1, 2, 3),)), "which is not there"),
    (ready(), e.Draft(("a",), picks=((1, 2, 3),), parents=((0, 2, 0),)), "parents[0][1]"),
    ((*ready(), e.SetNumSteps(0)), e.Draft(("a",), picks=((),)), "a step count above 0"),
    (ready(), e.Forward((e.Row("a", "verify"),)), "ready, expected a request that is drafted"),
    (ready(), e.Forward((e.Row("a", "prefill", 1),)), "waiting or prefilling"),
    (ready(), e.Forward((e.Row("a", "decode"),)), "rows[0].root: found nothing"),
    (ready(), e.Forward((e.Row("a", "decode", root=-1),)), "rows[0].root[0]: found token -1"),
    (ready(), e.Forward(()), "at least one request"),
    ((e.Admit("a", (1, 2)),), e.Forward((e.Row("a", "prefill", 1, root=4),)), "only a decode row and a last chunk"),
    ((e.Admit("a", (1, 2)),), e.Forward((e.Row("a", "prefill", 3),)), "rows[0].tokens: found 3, expected 1 to 2"),
    (after_a_verify(), e.Forward((e.Row("a", "verify"),)), "a commit first"),
    (after_a_verify(), e.SetNumSteps(1), "the end of the round"),
    (after_a_verify(), e.Preempt("a"), "verified"),
    (after_a_verify(), e.Finish("a"), "verified"),
    (after_a_verify(), e.Idle(), "a commit first"),
    (after_a_verify(), e.Commit(("a",)), "accepted: found nothing"),
    (after_a_verify(), e.Commit(("a",), accepted=(e.Path((2,), 1),)), "nodes[0]: found 2, expected a child of node 0"),
    (after_a_verify(), e.Commit(("a",), accepted=(e.Path((1, 2, 3, 4), 1),)), "it has none"),
    (after_a_verify(), e.Commit(("a",), accepted=(e.Path((1,), 64),)), "bonus"),
    (after_a_verify(), e.Commit(("a",), accepted=()), "0 paths"),
    (after_a_verify(), e.Commit(("a",), (e.Path((), 1),), (), (4,)), "caps[0]: found 4, expected 0 to 3"),
    (after_a_verify(), e.Commit(("a",), (e.Path((), 1),), (), (-1,)), 'the number of drafts of "a"'),
    (after_a_verify(), e.Commit(("a",), (e.Path((), 1),), (), (1, 1)), "caps: found 2 numbers, expected 1, one"),
    (ready(), e.SetNumSteps(2), "num_steps: found 2, expected one of [0, 1, 3]"),
    (ready(), e.Resume("a"), "preempted"),
    ((e.Admit("a", (1,)),), e.Finish("a"), "ready"),
    ((e.Admit("a", (1,)),), e.Save("a", "k"), "prefilling or ready"),
])  # fmt: skip
def test_an_illegal_event_is_refused_by_name(before: tuple[Any, ...], event: Any, field: str) -> None:
    assert field in refusal(rules_after(*before), event)


def test_refusal_lists_the_legal_events() -> None:
    assert "legal here: commit, preempt" not in refusal(rules_after(*after_a_verify()), e.Idle())
    assert "legal here: admit, commit, abort" in refusal(rules_after(*after_a_verify()), e.Idle())


def test_a_commit_covers_every_verified_request_in_any_order() -> None:
    both = (
        *ready("a"), *ready("b"), e.Draft(("a", "b"), picks=((4, 5, 6), (7, 8, 9))),
        e.Forward((e.Row("b", "verify"), e.Row("a", "verify"))),
    )
    paths = (e.Path((), 1), e.Path((1,), 2))
    rules_after(*both).check(e.Commit(("a", "b"), accepted=paths))
    rules_after(*both).check(e.Commit(("b", "a"), accepted=paths))
    assert "every verified request: a, b" in refusal(rules_after(*both), e.Commit(("a",), accepted=paths[:1]))
    rules_after(*both, e.Abort("a")).check(e.Commit(("b",), accepted=paths[:1]))


def test_room_is_counted_over_all_rows() -> None:
    rules = rules_after(e.Admit("a", tuple(range(40))))
    assert "33 tokens" in refusal(rules, e.Forward((e.Row("a", "prefill", 33),)))
    few = msgspec.structs.replace(header().capacity, pages=(1, 2))
    rules = rules_after(e.Admit("a", tuple(range(20))), capacity=few)
    assert "pages too few by 1" in refusal(rules, e.Forward((e.Row("a", "prefill", 17),)))


def test_no_event_may_need_more_positions_than_a_request_may_have() -> None:
    short = msgspec.structs.replace(header().capacity, max_positions=6)
    rules = rules_after(e.Admit("b", tuple(range(7))), *ready("a"), capacity=short)  # "a" at 3
    said = refusal(rules, e.Forward((e.Row("b", "prefill", 7, root=1),)))
    assert 'rows: found "b" at 7 positions, expected at most max_positions = 6' in said and "\n" not in said
    rules.apply(e.Draft(("a",), picks=((4, 5, 6),)))
    assert '"a" at 7 positions' in refusal(rules, e.Forward((e.Row("a", "verify"),)))
    rules = rules_after(*ready("a", (1, 2, 3, 4)), capacity=short)
    assert 'draft: found "a" at 7 positions' in refusal(rules, e.Draft(("a",), picks=((4, 5, 6),)))
    for root in (7, 8):
        rules.apply(e.Forward((e.Row("a", "decode", root=root),)))
    assert '"a" at 7 positions' in refusal(rules, e.Forward((e.Row("a", "decode", root=9),)))
    rules.check(e.Finish("a"))


def test_every_event_listed_as_legal_is_accepted() -> None:
    rules = rules_after(*ready("a"), e.Admit("b", (1, 2)), e.Save("a", "kept"))
    assert rules.legal() == {
        "prefill": ("b",), "draft": ("a",), "decode": ("a",), "set_num_steps": ("0", "1", "3"), "save": ("a",),
        "preempt": ("a", "b"), "finish": ("a",), "abort": ("a", "b"), "idle": ("",), "offload": ("kept",),
        "evict": ("kept",),
    }
    for event in (
        e.Forward((e.Row("b", "prefill", 2, root=5), e.Row("a", "decode", root=4))), e.SetNumSteps(1), e.Preempt("b"),
        e.Draft(("a",), picks=((1, 2, 3),)), e.Finish("a"), e.Abort("b"), e.Idle(), e.Save("a", "again"),
        e.Evict("kept"), e.Offload("kept"),
    ):
        rules.check(event)
    rules.apply(e.Offload("kept"))
    assert {"fetch", "evict"} == {kind for kind, names in rules.legal().items() if names == ("kept",)}


TRACKING = {"capacity": msgspec.structs.replace(header().capacity, track_interval=4)}
ONE_TRACKED = {"capacity": msgspec.structs.replace(TRACKING["capacity"], tracked=1)}
CHUNK = e.Forward((e.Row("a", "prefill", 4, track="four"),))
LONG = (1, 2, 3, 4, 5)


@pytest.mark.parametrize(("before", "event", "says"), [
    ((), e.Forward((e.Row("a", "prefill", 3, track="k"),)), "rows[0].track: found a prefill row up to token 3"),
    ((CHUNK, e.Forward((e.Row("a", "prefill", 1, root=9),))), e.Forward((e.Row("a", "decode", root=1, track="k"),)),
     "found a decode row up to token 6"),
    ((CHUNK,), e.Save("a", "four"), "a name under which nothing is kept"),
    ((CHUNK, e.Admit("b", LONG[:4])), e.Load("b", "four"), "a prefix of this one's prompt"),  # nothing is left to run
    ((CHUNK, e.Admit("b", (1, 2, 3, 9, 5))), e.Load("b", "four"), "a prefix of this one's prompt"),
    ((CHUNK, e.Admit("b", LONG), e.Offload("four")), e.Load("b", "four"), "and which is on the device"),
    ((CHUNK, e.Admit("b", LONG), e.Evict("four")), e.Load("b", "four"), "a prefix of this one's prompt"),
    ((CHUNK,), e.Fetch("four"), "something is kept on the host"),
    ((CHUNK, e.Offload("four")), e.Offload("four"), "something is kept on the device"),
    ((CHUNK, e.Offload("four"), e.Evict("four")), e.Evict("four"), "a name under which something is kept"),
    ((e.Admit("b", LONG),), e.Forward((CHUNK.rows[0], e.Row("b", "prefill", 4, track="k"))), "capacity.tracked = 1"),
    ((CHUNK, e.Offload("four"), e.Admit("b", LONG), e.Forward((e.Row("b", "prefill", 4, track="k"),))),
     e.Fetch("four"), "capacity.tracked = 1"),
])  # fmt: skip
def test_illegal_prefix_tracking_is_refused(before: tuple[Any, ...], event: Any, says: str) -> None:
    assert says in refusal(rules_after(e.Admit("a", LONG), *before, **ONE_TRACKED), event)
    assert "capacity.track_interval" in refusal(rules_after(e.Admit("a", LONG)), CHUNK)


@pytest.mark.parametrize(("nodes", "tokens"), [((1, 2, 3), 8), ((1, 2), 8), ((1,), None), ((), None)])
def test_commit_tracks_the_last_interval_that_it_reaches(nodes: tuple[int, ...], tokens: int | None) -> None:
    rules = rules_after(
        *ready(prompt=LONG), e.Draft(("a",), picks=((4, 5, 6),)), e.Forward((e.Row("a", "verify"),)), **TRACKING)
    assert "track: found ['k', 'l']" in refusal(rules, e.Commit(("a",), (e.Path(nodes, 7),), ("k", "l")))
    rules.apply(e.Commit(("a",), (e.Path(nodes, 7),), ("k",)))
    kept = rules.table.saved.get("k")
    assert (None if kept is None else kept.length) == tokens
    rules.apply(e.Admit("b", (*LONG, 9, 4, 5, 6, 7)))
    assert rules.legal().get("load") == (None if kept is None else ("b",))
    if kept is not None:
        rules.apply(e.Load("b", "k"))
        now = rules.table.live["b"]
        assert (now.phase, now.length, now.root, now.said, now.unread) == (Phase.PREFILLING, 8, None, (), 2)


trace = recording()


def of(trace: Trace, kind: type) -> list:
    return [event for event in trace.events if isinstance(event, kind)]


def ended(trace: Trace) -> dict[str, tuple[int, ...]]:
    """The tokens of every request according to the rules."""
    rules = EventRules(trace.header)
    for event in trace.events:
        rules.apply(event)
    assert not rules.table.live
    return {standing.request: standing.said for standing in rules.table.ended}


def test_a_recorded_trace_is_legal_and_complete(trace: Trace) -> None:
    assert verified(read(trace.path)).events == trace.events
    assert all(draft.picks is not None for draft in of(trace, e.Draft))
    assert all(commit.accepted is not None for commit in of(trace, e.Commit))


def test_everything_the_policy_asks_for_happens(trace: Trace) -> None:
    assert [event.num_steps for event in of(trace, e.SetNumSteps)] == [3, 0, 3]
    for kind in (e.Preempt, e.Resume, e.Save, e.Load, e.Idle):
        assert len(of(trace, kind)) == 1, kind
    aborted = next(i for i, event in enumerate(trace.events) if isinstance(event, e.Abort) and event.request == "c")
    assert isinstance(trace.events[aborted - 1], e.Forward)
    assert set(ended(trace)) == {"a", "b", "c", "d"}


def test_prompts_run_in_the_chunks_they_were_given(trace: Trace) -> None:
    chunks = [row.tokens for event in of(trace, e.Forward) for row in event.rows
              if row.request == "a" and row.kind == "prefill"]
    assert chunks == [7, 3, 1, 7, 2]


def test_rows_are_mixed_and_the_batch_order_turns(trace: Trace) -> None:
    kinds = [{row.kind for row in event.rows} for event in of(trace, e.Forward)]
    assert {"prefill", "verify"} in kinds
    orders = {tuple(row.request for row in event.rows) for event in of(trace, e.Forward) if len(event.rows) == 2}
    assert any(order[::-1] in orders for order in orders)


def test_forced_acceptance_is_ragged(trace: Trace) -> None:
    counts = [len(path.nodes) for commit in of(trace, e.Commit) for path in commit.accepted]
    assert min(counts) == 0 and max(counts) == 3 and len(set(counts)) > 2


def test_the_same_policy_gives_the_same_events(trace: Trace, tmp_path: Path) -> None:
    assert recorded(tmp_path).events == trace.events


def test_engine_answers_are_stored_next_to_the_trace(trace: Trace) -> None:
    admits = [index for index, event in enumerate(trace.events) if isinstance(event, e.Admit)]
    assert [tuple(trace.recorded[f"prompt.{index}"].tolist()) for index in admits] == [
        trace.events[index].prompt for index in admits
    ]
    for index, event in enumerate(trace.events):
        if isinstance(event, e.Draft):
            assert trace.recorded[f"own.{index}"].numel() == sum(map(len, event.picks))


@pytest.mark.slow
@pytest.mark.parametrize("accept", [(), (3,)])
def test_caps_of_a_policy_end_free_and_forced_paths(tmp_path: Path, accept: tuple[int, ...]) -> None:
    """A forced path is recorded whole, and the table has the tokens up to the cap."""
    arrivals = (Arrival("a", "few", max_new=12), Arrival("b", "one", max_new=12))
    told = policy(arrivals=arrivals, deeds=(), accept=accept, steps=(Steps(1, 3),), caps=(1, 0, 9))
    trace = recorded(tmp_path, told)
    commits = of(trace, e.Commit)
    assert {cap for commit in commits for cap in commit.caps} >= {0, 1}
    pairs = [pair for commit in commits for pair in zip(commit.accepted, commit.caps, strict=True)]
    assert all(len(path.nodes) <= cap for path, cap in pairs) is not bool(accept)
    rules = EventRules(trace.header)
    for event in trace.events:
        before = {name: standing.length for name, standing in rules.table.live.items()}
        rules.apply(event)
        for name, cap in zip(event.requests, event.caps, strict=True) if isinstance(event, e.Commit) else ():
            assert rules.table.live[name].length - before[name] <= 1 + cap


@pytest.mark.slow
def test_free_acceptance_follows_the_engine_and_a_stop_token_ends_a_path(tmp_path: Path) -> None:
    arrivals = (Arrival("a", "few", max_new=24), Arrival("b", "one", max_new=24))
    free = recorded(tmp_path, policy(arrivals=arrivals, deeds=(), accept=(), steps=(Steps(1, 3),)))
    said = ended(free)
    stop = said["a"][7]
    ending = recorded(tmp_path, policy(arrivals=arrivals, deeds=(), accept=(), steps=(Steps(1, 3),), stop=stop))
    for name, tokens in ended(ending).items():
        cut = said[name].index(stop) + 1 if stop in said[name] else len(said[name])
        assert tokens == said[name][:cut]


def test_the_controller_is_followed_with_its_lag(tmp_path: Path) -> None:
    quick = {"candidate_steps": [1, 3], "warmup_batches": 1, "update_interval": 1, "ema_alpha": 1.0}
    told = policy(follow=True, steps=(), deeds=(), adaptive=quick, accept=(0, 3))
    counts = {lag: [event.num_steps for event in of(recorded(tmp_path, replace(told, lag=lag)), e.SetNumSteps)]
              for lag in (0, 2)}
    assert counts[0], "the controller never wished for anything"
    assert counts[0] != counts[2]


def test_an_action_that_is_never_due_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match='found abort "nobody", never possible from round 1 on'):
        recorded(tmp_path, policy(deeds=(ScheduledAction(1, "abort", "nobody"),)))
    assert not list(tmp_path.glob("small*"))


def test_a_prompt_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match='found prompt "novel"'):
        recorded(tmp_path, policy(arrivals=(Arrival("a", "novel"),), deeds=()))


def test_request_near_its_last_position_decodes_without_drafts(tmp_path: Path) -> None:
    """Positions are counted with the drafts in flight; the others go on as they were."""
    short = replace(ROOM, max_positions=23)
    trace = recorded(tmp_path, policy(capacity=short, deeds=(), steps=(), num_steps=3, arrivals=(
        Arrival("a", "more", max_new=30), Arrival("b", "one", max_new=12))))
    assert read(trace.path).header.room().max_positions == 23
    last = {}
    for row in (row for event in of(trace, e.Forward) for row in event.rows):
        last.setdefault(row.request, []).append(row.kind)
    assert last["a"] == ["prefill", "decode", "decode", "decode"]  # 20, and then no window of 4 fits
    assert last["b"].count("verify") > 2 and "decode" not in last["b"]
    mixed = [{row.kind for row in event.rows} for event in of(trace, e.Forward)]
    assert {"verify", "decode"} in mixed
    said = ended(trace)
    assert len(said["a"]) == 4 and len(said["b"]) >= 12
    window = recorded(tmp_path, policy(capacity=replace(ROOM, max_positions=24), deeds=(), steps=(), num_steps=3))
    assert [row.kind for event in of(window, e.Forward) for row in event.rows if row.request == "a"][5] == "verify"


def test_a_prompt_longer_than_a_request_may_be_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match='prompt "more": found 20 tokens, expected at most 19, the positions that'):
        recorded(tmp_path, policy(capacity=replace(ROOM, max_positions=19)))
    trace = recorded(tmp_path, policy(capacity=replace(ROOM, max_positions=20), deeds=()))
    assert len(ended(trace)["a"]) == 1


def test_policies_and_prompts_are_read_strictly(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text('[{"name": "x", "text": "caf\\u00e9"}, {"name": "y", "tokens": [3, 4], "from": "here"}]')
    assert read_prompts(file) == {"x": (99, 97, 102, 0xE9), "y": (3, 4)}
    for text, complaint in (
        ('[{"name": "x"}]', "neither"), ('[{"name": "x", "text": "\\u0100"}]', "above 255"),
        ('[{"name": "x", "txt": "a"}]', "unknown field `txt`"), ("[{", "truncated"),
    ):
        file.write_text(text)
        with pytest.raises(BadInput, match=complaint):
            read_prompts(file)
    file.write_text('{"name": "x"}')
    with pytest.raises(BadInput, match="missing required field"):
        read_policy(file)
    refused = policy(deeds=(ScheduledAction(1, "refused"),))
    idle = policy(deeds=(ScheduledAction(1, "idle"), ScheduledAction(1, "idle", of=e.Idle())))
    early = policy(transfers=(Transfer(0, "a"), Transfer(-1, "a")))
    for told, complaint in (
        (refused, r"deeds\[0\].of: found no event"), (idle, r"deeds\[1\].of: found an event"),
        (early, r"transfers\[1\].round: found -1, expected at least 0"),
        (policy(deeds=(ScheduledAction(-2, "idle"),)), r"deeds\[0\].round: found -2"),
        (policy(steps=(Steps(-1, 2),)), r"steps\[0\].round: found -1"),
    ):
        file.write_bytes(msgspec.json.encode(told))
        with pytest.raises(BadInput, match=complaint):
            read_policy(file)


def test_prompts_of_these_tests_reach_over_several_chunks() -> None:
    assert len(PROMPTS["more"]) > 2 * 7
