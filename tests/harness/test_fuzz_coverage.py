"""The coverage report: a hand-made run meets exactly the conditions for which it was made.

Leaves out: what a campaign draws.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from instep.campaign.fuzz.campaign import Settings, campaign
from instep.campaign.fuzz.coverage import TREES, Coverage
from instep.setting import Setting
from instep.trace.event_rules import EventRules
from instep.trace.file import read
from instep.trace.header import SCHEMA, Header, Model, Part, Room
from instep_reference.contract import engine as e
from support.inputs.checkpoints import write

HEADER = Header(
    schema=SCHEMA, name="by hand", claim="", checkpoint=Model(".", "", "", 64, 1),
    capacity=Room((2, 1, 4), tuple(range(1, 31)), 4, 96), num_steps=2, candidates=(1, 2, 3), adaptive=None, lag=0,
    seed=0, stop=None, replay=(Part("ledger"),), created={},
)
ALWAYS = {"slots in no order"}  # of this room
FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"


OTHER = "other tokens accepted in one batch"


def met(*events: e.AnyEvent, header: Header = HEADER) -> set[str]:
    """The conditions that the last of these events met."""
    rules, coverage, known = EventRules(header), Coverage(), dict[str, int]()
    for event in events:
        before = rules.table.as_it_stands()
        rules.apply(event)
        known = dict(coverage.counts())
        coverage.note(before, event, rules.table)
    return {name for name, count in coverage.counts().items() if count > known.get(name, 0)} - ALWAYS


def test_every_condition_is_met_by_a_committed_trace() -> None:
    """Those of `fixtures/long` are too long to be replayed by a test: `fixtures/results/long-cpu.json` is their run."""
    coverage = Coverage()
    for file in sorted(file for file in FIXTURES.rglob("*.jsonl") if "live" not in file.parts):
        trace = read(file)
        rules = EventRules(trace.header)
        coverage.begin(overlap=trace.header.recording.overlap, heads=trace.header.heads)
        for event in trace.events:
            before = rules.table.as_it_stands()
            rules.apply(event)
            coverage.note(before, event, rules.table)
    assert [name for name, count in coverage.counts().items() if not count] == []


def path(count: int) -> e.Path:
    return e.Path(tuple(range(1, count + 1)), 9)


ENTERED = (
    e.Admit("a", (1, 2, 3)), e.Admit("b", (4,)),
    e.Forward((e.Row("a", "prefill", 3, 5), e.Row("b", "prefill", 1, 6))),
)
VERIFIED = (*ENTERED, e.Draft(("a", "b"), ((7, 7), (8, 8))), e.Forward((e.Row("b", "verify"), e.Row("a", "verify"))))


def test_a_forward_is_seen_with_its_chunks_and_order() -> None:
    assert met(*ENTERED) == {
        "several requests in one forward", "batch order is not slot order", "a chunk of 1", "a chunk of 3",
        "a last chunk as long as a window",
    }
    assert met(*VERIFIED) == {"several requests in one forward"}


def test_accepted_counts_are_distinguished() -> None:
    requests = ("a", "b")
    assert met(*VERIFIED, e.Commit(requests, (path(0), path(0)))) == {"accepted: none"}
    assert met(*VERIFIED, e.Commit(requests, (path(2), path(2)))) == {"accepted: all", OTHER}
    assert met(*VERIFIED, e.Commit(requests, (path(2), path(1)))) == {"accepted: ragged", OTHER}
    plain = e.Forward((e.Row("a", "decode", root=3),))
    assert met(*VERIFIED, e.Commit(requests, (path(2), path(0))), plain) == {"a plain step after several accepted"}
    assert met(*VERIFIED, e.Commit(requests, (path(0), path(2))), plain) == set()


def test_step_counts_and_what_comes_after_them() -> None:
    down, up, none, back = (e.SetNumSteps(n) for n in (1, 3, 0, 2))
    assert met(*ENTERED, down) == {"steps down"}
    assert met(*ENTERED, up) == {"steps up"}
    assert met(*ENTERED, none) == {"steps to 0"}
    assert met(*ENTERED, none, back) == {"steps back from 0"}
    behind = (none, e.Forward((e.Row("a", "decode", root=3),)), back, e.Draft(("a",), ((1, 1),)))
    assert met(*ENTERED, *behind) == {"drafts after plain steps at 0"}
    verify = e.Forward((e.Row("a", "verify"),))
    assert met(*ENTERED, *behind, verify) == {"a verify after a switch", "a window that begins a page"}


def test_coming_and_going() -> None:
    assert met(*ENTERED, e.Preempt("a")) == {"preempted", "preempted behind a root"}
    assert met(*ENTERED, e.Preempt("a"), e.Resume("a")) == set()
    taken = (e.Preempt("a"), e.Admit("c", (1,)), e.Resume("a"))
    assert met(*ENTERED, *taken) == {"resumed in another slot", "every slot taken"}
    assert met(*ENTERED, e.Save("a", "kept")) == {"saved", "saved behind a root"}
    assert met(*ENTERED, e.Save("a", "kept"), e.Admit("c", (1, 2, 3)), e.Load("c", "kept")) >= {"loaded"}
    assert met(*ENTERED, e.Finish("b")) == {"finished"}
    assert met(*ENTERED, e.Finish("b"), e.Admit("c", (1,))) == {"a slot used again"}
    assert met(e.Admit("a", (1,)), e.Abort("a")) == {"aborted in its prompt", "aborted before its prompt"}
    assert met(*VERIFIED[:-1], e.Abort("a")) == {"aborted after a draft"}
    assert met(*VERIFIED, e.Abort("a")) == {"aborted after a verify"}
    assert met(e.Idle()) == {"idle"}




SAVED = (*ENTERED, e.Save("a", "kept"), e.Admit("c", (1, 2, 3)), e.Load("c", "kept"))
OF_A = (e.Draft(("a",), ((7, 7),)), e.Forward((e.Row("a", "verify"),)), e.Commit(("a",), (path(2),)))
OF_B = (e.Draft(("b",), ((7, 7),)), e.Forward((e.Row("b", "verify"),)), e.Commit(("b",), (path(1),)))
AGAIN = e.Draft(("a",), ((7, 7),))
UNREAD = (e.Admit("a", (1, 2, 3, 4, 5, 6)), e.Admit("b", (4,)))
BOTH = e.Commit(("a", "b"), (path(2), path(0)))


def chunk(tokens: int) -> e.Forward:
    return e.Forward((e.Row("a", "prefill", tokens),))


@pytest.mark.parametrize(("events", "condition", "holds"), [
    ((*ENTERED, *OF_A, *OF_B, AGAIN), "absent from a round, tokens pending", True),
    ((*ENTERED, *OF_A, AGAIN), "absent from a round, tokens pending", False),
    ((*ENTERED, *OF_A, *OF_B, AGAIN), "absent from several rounds, tokens pending", False),
    ((*ENTERED, *OF_A, *OF_B, *OF_B, AGAIN), "absent from several rounds, tokens pending", True),
    ((*ENTERED, *OF_A, e.SetNumSteps(1)), "steps below what is pending", True),
    ((*ENTERED, *OF_B, e.SetNumSteps(1)), "steps below what is pending", False),
    ((*VERIFIED, BOTH), "all, none and some accepted in one batch", False),
    ((*VERIFIED, BOTH, *OF_A), "a smaller batch", True),
    (SAVED, "loaded into another slot", True),
    (SAVED, "loaded twice", False),
    ((*SAVED[:-1], e.SetNumSteps(1), SAVED[-1]), "loaded under another step count", True),
    ((*SAVED, e.Finish("b"), e.Admit("d", (1, 2, 3)), e.Load("d", "kept")), "loaded twice", True),
    ((*UNREAD, e.Preempt("a")), "preempted before its prompt", True),
    ((*UNREAD, chunk(3), e.Preempt("a")), "preempted in its prompt", True),
    ((*UNREAD, chunk(3), e.Save("a", "kept")), "saved in its prompt", True),
    ((*UNREAD, chunk(3)), "a chunk that ends in a page", True),
    ((*UNREAD, chunk(4)), "a chunk that ends in a page", False),
    ((*UNREAD, chunk(4)), "a chunk that ends with a page", True),
    ((*ENTERED, e.Abort("a")), "aborted between rounds", True),
    ((*ENTERED, e.Preempt("a"), e.Abort("a")), "aborted while preempted", True),
    ((*UNREAD, e.Refused(e.Admit("a", (1,)))), "refused: a name, a phase or a number", True),
    ((*UNREAD, e.Refused(e.Admit("a", (1,)))), "refused: no slot is free", False),
    ((*UNREAD, e.Admit("c", (1,)), e.Refused(e.Admit("d", (1,)))), "refused: no slot is free", True),
    ((*ENTERED, e.Refused(e.Draft(("a", "d"), ((7, 7), (7, 7))))), "refused: after a request that may be named", True),
    ((*ENTERED, e.Refused(e.Draft(("d", "a"), ((7, 7), (7, 7))))), "refused: after a request that may be named", False),
])  # fmt: skip
def test_condition_is_met_by_its_event(events: tuple[e.AnyEvent, ...], condition: str, holds: bool) -> None:
    assert (condition in met(*events)) is holds


def test_trees_have_conditions_of_their_own_where_there_may_be_any() -> None:
    room = structs.replace(HEADER, capacity=structs.replace(HEADER.capacity, num_draft_tokens=4))
    drafted = (*ENTERED, e.Draft(("a", "b"), ((7, 7, 8), (8, 8)), ((0, 0, 1), (0, 1))))
    commit = e.Commit(("a", "b"), (e.Path((1, 3), 9), path(2)))
    alone = e.Commit(("a", "b"), (path(0), path(0)))
    forward = e.Forward((e.Row("a", "verify"), e.Row("b", "verify")))
    shown = met(*drafted, forward, header=room)
    assert "a tree next to a chain" in shown
    assert not {"trees of different shapes in one batch", "a tree next to a prompt"} & shown
    beside = (*ENTERED, e.Admit("c", (4, 5)), e.Draft(("a", "b"), ((7, 8, 8), (7, 8)), ((0, 0, 1), (0, 0))))
    mixed = met(*beside, e.Forward((*forward.rows, e.Row("c", "prefill", 1))), header=room)
    assert {"trees of different shapes in one batch", "a tree next to a prompt"} <= mixed
    assert "a tree next to a chain" not in mixed
    left_out, last = "an accepted path that is not 1, 2, ...", "the last node of a tree accepted"
    assert {left_out, last} <= met(*drafted, forward, commit, header=room)
    assert met(*drafted, forward, alone, header=room) == {"accepted: none", "nothing of a tree accepted"}
    assert not set(TREES) & set(Coverage().counts())


@pytest.mark.slow
def test_campaign_of_overlapped_rounds_is_labelled(tmp_path: Path) -> None:
    model = write(tmp_path / "model", num_hidden_layers=2, full_attention_interval=2)
    counts = campaign(Settings(Setting("ledger", overlap=True), model, 2, 9, tmp_path / "found")).coverage.counts()
    assert counts["finished while rounds overlap"] == counts["finished"] > 0


def test_conditions_of_a_drafter_are_met_and_counted_where_it_drafts() -> None:
    coverage = Coverage()
    assert not [name for name in coverage.counts() if "handed in" in name or "several MTP" in name]
    for heads, said in ((0, "handed in"), (3, "several MTP layers")):
        coverage.begin(heads=heads)
        rules = EventRules(HEADER)
        for event in (*VERIFIED, e.Commit(("a", "b"), (path(2), path(0)))):
            before = rules.table.as_it_stands()
            rules.apply(event)
            coverage.note(before, event, rules.table)
        assert coverage.counts()[f"{said}: accepted: ragged"] == 1
        assert coverage.counts()[f"{said}: resumed or loaded after a root"] == 0
