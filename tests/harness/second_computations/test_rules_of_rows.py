"""The rules of rows, drafts, prefixes and second engines: legal and illegal events one step apart, with the sentence.

Leaves out: phases, pages and the driver (`test_event_rules.py`), and the table itself (`test_request_table.py`).
"""

from typing import Any

import pytest
from msgspec.structs import replace

from instep.trace.event_rules import EventRules, uniforms_due
from instep.trace.header import Receiver
from instep.trace.request_table import Standing
from instep_reference.contract import engine as e
from instep_reference.contract.errors import BadInput
from instep_reference.contract.event_facts import Phase
from instep_reference.contract.sampling import Sampling
from support.inputs.traces import header

DRAWS = Sampling(temperature=1.0)
TRACK = {"track_interval": 4}


def rules_after(*events: e.AnyEvent, drafts: bool = False, overlap: bool = False, **room: object) -> EventRules:
    rules = EventRules(replace(header(), capacity=replace(header().capacity, **room)), overlap=overlap)
    rules.drafts_itself = drafts
    for event in events:
        rules.apply(event)
    return rules


def said(rules: EventRules, event: e.AnyEvent, choices: bool = True) -> str:
    """The refusal; empty: the event is legal."""
    try:
        rules.check(event, choices=choices)
    except BadInput as refused:
        return str(refused)
    return ""


def ready(name: str = "a", count: int = 3, **admit: Any) -> tuple[e.AnyEvent, ...]:
    uniforms = (0.5,) if admit else ()
    return (e.Admit(name, tuple(range(count)), **admit),
            e.Forward((e.Row(name, "prefill", count, root=9, uniforms=uniforms),)))  # fmt: skip


def prefill(*tokens: int, **more: Any) -> e.Forward:
    return e.Forward(tuple(e.Row(name, "prefill", count, **more) for name, count in zip("ab", tokens, strict=False)))


PICKS = e.Draft(("a",), picks=((4, 5, 6),))
VERIFY = e.Forward((e.Row("a", "verify"),))
BOTH = e.Forward((*VERIFY.rows, e.Row("b", "prefill", 2)))
DEVICE = {"device_widths": True}


# -- rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "event", "room", "says"), [
    ((e.Admit("a", tuple(range(40))),), prefill(32), {}, ""),
    ((e.Admit("a", tuple(range(40))),), prefill(33), {}, "found 33 tokens, expected at most max_tokens = 32"),
    ((e.Admit("a", (1, 2)),), prefill(0), {}, "rows[0].tokens: found 0, expected 1 to 2"),
    (ready(), e.Forward((e.Row("a", "decode", 2, root=1),)), {}, "rows[0].tokens: found 2, expected 1 to 1"),
    (ready(), e.Forward((e.Row("a", "decode", 0, root=1),)), {}, "rows[0].tokens: found 0, expected 1 to 1"),
    ((*ready(), PICKS, *ready("b", 5)[:1]), BOTH, {}, ""),
    ((*ready(), PICKS, *ready("b", 5)[:1]), BOTH, DEVICE,
     "rows: found a prompt next to windows, expected one of them, because of capacity.device_widths"),
    ((*ready(), PICKS, *ready("b")), e.Forward((*VERIFY.rows, e.Row("b", "decode", root=1))), DEVICE, ""),
    (ready("a", 6)[:1], prefill(5, inner=("k",)), TRACK, ""),
    (ready("a", 10)[:1], prefill(9, inner=("k", "")), TRACK, ""),
    (ready("a", 10)[:1], prefill(9, inner=("k",)), TRACK, "inner: found 1 names on a prefill row, expected 2"),
    (ready("a", 6)[:1], prefill(5, inner=("k", "l")), TRACK, "inner: found 2 names on a prefill row, expected 1"),
    (ready("a", 5), e.Forward((e.Row("a", "decode", root=1, inner=("k",)),)), TRACK, "found 1 names on a decode row"),
    (ready("a", 3), e.Forward((e.Row("a", "decode", root=1, inner=("k",)),)), TRACK, "found 1 names on a decode row"),
    (ready("a", 6)[:1], prefill(5, inner=("k",)), {}, "rows[0].inner: found 1 names on a prefill row, expected 0"),
    (ready("a", 9)[:1], prefill(8, inner=("k",), track="k"), TRACK, 'rows: found "k", expected a name under which'),
    (ready("a", 9)[:1], prefill(8, inner=("k",), track="l"), TRACK, ""),
    (ready("a", 9)[:1], prefill(8, track="l"), {**TRACK, "tracked": 1}, ""),
    (ready("a", 9)[:1], prefill(8, inner=("k",), track="l"), {**TRACK, "tracked": 1}, "capacity.tracked = 1"),
])  # fmt: skip
def test_rows_have_the_tokens_and_names_that_they_may_have(before: Any, event: Any, room: Any, says: str) -> None:
    found = said(rules_after(*before, **room), event)
    assert says in found and bool(found) is bool(says)


def test_inner_prefixes_of_a_row_have_their_tokens() -> None:
    """A request of 3 tokens and 7 more: multiples of 4 inside the row are 4 and 8, and 10 is none."""
    rules = rules_after(e.Admit("a", tuple(range(12))), prefill(3), prefill(7, inner=("", "eight")), prefill(
        2, root=1, track="twelve"), **TRACK)  # fmt: skip
    assert {name: kept.prompt for name, kept in rules.table.saved.items()} == {
        "eight": tuple(range(8)), "twelve": tuple(range(12))}  # fmt: skip


@pytest.mark.parametrize(("before", "row", "due", "why"), [
    (ready(), e.Row("a", "decode", root=1), 0, "as it does not sample"),
    (ready(sampling=DRAWS), e.Row("a", "decode", root=1), 1, "the final one: it samples"),
    (ready(sampling=DRAWS)[:1], e.Row("a", "prefill", 3, root=1), 1, "the final one: it samples"),
    (ready(sampling=DRAWS)[:1], e.Row("a", "prefill", 2), 0, "as this row chooses nothing"),
    ((*ready(sampling=DRAWS), PICKS), e.Row("a", "verify"), 5, "one per node and the final one"),
    ((*ready(), PICKS), e.Row("a", "verify"), 0, "as it does not sample"),
])  # fmt: skip
def test_rows_have_a_number_for_each_choice(before: Any, row: e.Row, due: int, why: str) -> None:
    rules = rules_after(*before)
    for count in range(7):
        event = e.Forward((replace(row, uniforms=(0.5,) * count),))
        expected = "" if count == due else f"rows[0].uniforms: found {count} numbers, expected {due}, {why}"
        found = said(rules, event)
        assert expected in found and bool(found) is bool(expected)
    assert uniforms_due(rules.table.live["a"], row) == due
    step = 2.0**-24
    for at, uniform in ((due - 1, value) for value in (0.0, step, 1 - step, -step, 1.0, 1.5, step / 2)) if due else ():
        numbers = [0.5] * due
        numbers[at] = uniform
        found = said(rules, e.Forward((replace(row, uniforms=tuple(numbers)),)))
        legal = 0 <= uniform < 1 and uniform != step / 2
        expected = "" if legal else f"uniforms[{at}]: found {uniform}, expected a multiple of 2**-24"
        assert expected in found and bool(found) is bool(expected)


# -- drafts -----------------------------------------------------------------------------------------------------


GROWS: dict[str, Any] = {"num_draft_tokens": 8, "topk": 2}
TREES: dict[str, Any] = {"num_draft_tokens": 4}


@pytest.mark.parametrize(("drafts", "room", "event", "choices", "says"), [
    (False, {}, e.Draft(("a",)), True, "picks: found nothing"),
    (False, {}, e.Draft(("a",)), False, "picks: found nothing"),
    (True, {}, e.Draft(("a",)), True, "picks: found nothing"), (True, {}, e.Draft(("a",)), False, ""),
    (True, TREES, e.Draft(("a",), parents=((0, 1),)), False, ""),
    (True, TREES, e.Draft(("a",), parents=((0, 0),)), False, "picks: found nothing"),
    (True, GROWS, e.Draft(("a",)), False, ""),
    (True, GROWS, e.Draft(("a",), parents=((0, 1),)), False, "picks: found nothing"),
    (True, {}, replace(PICKS, own=True), True, ""),
    (True, TREES, e.Draft(("a",), ((4,),), ((0,),), own=True), True, "own: found drafts that nobody gave"),
    (False, {}, replace(PICKS, own=True), True, "own: found drafts that nobody gave"), (True, {}, PICKS, True, ""),
    (True, {}, e.Draft(("a",), own=True), False, ""),
    (True, GROWS, e.Draft(("a",), ((4, 5),), ((0, 1),), own=True), True, ""),
    (True, GROWS, e.Draft(("a",), own=True), False, "own: found drafts that nobody gave"),
    (False, GROWS, e.Draft(("a",), ((4, 5),), ((0, 1),), own=True), True, "own: found drafts that nobody gave"),
    (False, TREES, e.Draft(("a",), ((4, 5, 6),), ((0, 0, 0),)), True, ""),
    (False, TREES, e.Draft(("a",), ((4, 5),), ((-1, 0),)), True, "parents[0][0]: found -1, expected an earlier"),
    (False, TREES, e.Draft(("a",), ((4, 5),), ((0, 2),)), True, "parents[0][1]: found 2, expected an earlier node, 0"),
    (False, TREES, e.Draft(("a",), ((4,),), ((0, 0),)), True, "picks: found [1] drafts, expected [2], one list"),
    (False, TREES, e.Draft(("a",), ((4,),), ((0,), (0,))), True, "picks: found [1] drafts, expected [1, 1]"),
    (True, TREES, e.Draft(("a",), None, ((0,), (0,))), False, "parents: found 2 trees, expected 1"),
    (False, {}, e.Draft(("a",), ((4, 5, 64),)), True, "picks[0][2]: found token 64"),
])  # fmt: skip
def test_drafts_are_given_or_those_of_a_drafter(drafts: bool, room: Any, event: Any, choices: bool, says: str) -> None:
    found = said(rules_after(*ready(), drafts=drafts, **room), event, choices)
    assert says in found and bool(found) is bool(says), found


def test_mixed_trees_are_no_chains_and_drafts_are_replaced_by_picks_alone() -> None:
    rules = rules_after(*ready(), *ready("b"), drafts=True, **TREES)
    for parents, legal in ((((0, 1), (0, 1)), True), (((0, 1), (0, 0)), False), (((0, 0), (0, 1)), False)):
        assert bool(said(rules, e.Draft(("a", "b"), parents=parents), False)) is not legal
    rules.apply(PICKS)
    assert said(rules, PICKS) == ""
    assert "requests: found a drafted already, expected picks" in said(rules, e.Draft(("a", "b")), False)


def test_pages_of_a_draft_are_those_of_its_window_or_beams() -> None:
    """Pages of 8 tokens. A request of 6 tokens; a grown tree of 3 steps has 2 x 2 rows of beams after it."""
    for room, event, choices, pages in (
        ({}, e.Draft(("a",), ((4, 5),), ((0, 1),)), True, 1), ({}, PICKS, True, 2), ({}, e.Draft(("a",)), False, 2),
        (GROWS, e.Draft(("a",), ((4,),), ((0,),)), True, 2), (GROWS, e.Draft(("a",)), False, 2),
    ):  # fmt: skip
        rules = rules_after(*ready("a", 6), drafts=True, **room)
        few = rules_after(*ready("a", 6), drafts=True, **room, pages=(1,))
        assert bool(said(few, event, choices)) is (pages > 1)
        if choices:
            rules.apply(event)
            assert len(rules.table.live["a"].pages) == pages
    rules = rules_after(*ready("a", 12), drafts=True, **GROWS, pages=(1, 2))
    assert said(rules, e.Draft(("a",), ((4,),), ((0,),))) == ""
    assert "pages too few by 1" in said(rules, e.Draft(("a",)), False)


# -- commits and copies ----------------------------------------------------------------------------------------------


def test_a_commit_takes_slots_for_names_that_a_window_may_reach() -> None:
    """Windows of 4 tokens, and multiples of 4: "a" has 4 tokens and reaches 8 alone, "b" has 5, and may reach 8."""
    both = (*ready("a", 4), *ready("b", 5), e.Draft(("a", "b"), picks=((4, 5, 6),) * 2),
            e.Forward((e.Row("a", "verify"), e.Row("b", "verify"))))  # fmt: skip
    paths = (e.Path((1, 2, 3), 7), e.Path((1,), 7))
    rules = rules_after(*both, tracked=1, **TRACK)
    assert "capacity.tracked = 1" in said(rules, e.Commit(("a", "b"), paths, ("x", "y")))
    rules = rules_after(*both, tracked=2, **TRACK)
    rules.apply(e.Commit(("b", "a"), paths[::-1], ("y", "x")))
    assert [(name, kept.length, kept.track_slot) for name, kept in rules.table.saved.items()] == [("x", 8, 2)]
    assert rules.table.steps == {"a": 3} and rules.table.free_track_slot() == 1
    short = e.Draft(("a",), ((4,),), ((0,),))  # a window of 2 tokens reaches no multiple, so its name needs no room
    rules = rules_after(*ready("a", 4), short, VERIFY, tracked=0, **TRACK)
    assert said(rules, e.Commit(("a",), (e.Path((), 7),), ("x",))) == ""
    rules = rules_after(*ready("a", 7), short, VERIFY, e.Commit(("a",), (e.Path((1,), 7),), ("x",)), **TRACK)
    assert rules.table.steps == {"a": 0} and rules.table.saved["x"].prompt == (*range(7), 9)
    rules = rules_after(*ready("a", 5), e.Save("a", "taken"), PICKS, VERIFY, **TRACK)
    assert 'track: found "taken"' in said(rules, e.Commit(("a",), paths[:1], ("taken",)))
    tree = e.Draft(("a",), ((4, 5, 6),), ((0, 0, 2),))
    rules = rules_after(*ready("a", 6), tree, VERIFY, num_draft_tokens=4, **TRACK)
    for nodes, says in (((2, 3), ""), ((0,), "nodes[0]: found 0, expected a child of node 0: [1, 2]"),
                        ((1, 3), "node 1: it has none"), ((-1,), "nodes[0]: found -1"),
                        ((2, 4), "nodes[1]: found 4, expected a child of node 2: [3]")):  # fmt: skip
        found = said(rules, e.Commit(("a",), (e.Path(nodes, 7),)))
        assert says in found and bool(found) is bool(says)
    rules.apply(e.Commit(("a",), (e.Path((2, 3), 7),), ("k",)))
    assert rules.table.steps == {"a": 2} and rules.table.saved["k"].length == 8


def test_a_copy_is_exact_and_a_prefix_moves_with_its_slot() -> None:
    """With overlapping rounds a request of 3 tokens may have 3 more after a commit, until it is saved."""
    commit = e.Commit(("a",), (e.Path((), 7),))
    rules = rules_after(*ready(), PICKS, VERIFY, commit, overlap=True)
    assert rules.table.live["a"].ahead == 3
    rules.apply(e.Save("a", "k"))
    assert rules.table.live["a"].ahead == rules.table.saved["k"].ahead == 0
    rules = rules_after(*ready(), e.Save("a", "k"), PICKS, VERIFY, commit, e.Preempt("a"), overlap=True)
    assert rules.table.live["a"].ahead == 0
    rules = rules_after(*ready(), e.Save("a", "k"), e.Finish("a"), e.Admit("b", (0, 1, 2)))
    rules.table.change("b", ahead=2)
    rules.apply(e.Load("b", "k"))
    assert rules.table.live["b"].ahead == 0
    rules = rules_after(e.Admit("a", tuple(range(6))), prefill(4, track="p"), e.Save("a", "copy"), tracked=1, **TRACK)
    slots = [rules.table.saved["p"].track_slot]
    for event in (e.Offload("p"), e.Offload("copy"), e.Fetch("copy"), e.Fetch("p")):
        rules.apply(event)
        slots.append(rules.table.saved[event.name].track_slot)
    assert slots == [1, None, None, None, 1]
    assert 'name: found "", expected a name' in said(rules, e.Save("a", ""))


def test_an_event_that_may_come_cannot_be_recorded_as_refused() -> None:
    rules = rules_after(*ready())
    for of, legal in ((e.Idle(), False), (e.Draft(("z",)), True), (e.Resume("a"), True),
                      (e.Refused(e.Draft(("z",))), False), (e.Refused(e.Idle()), False),
                      (e.Forward((e.Row("a", "decode"),)), False)):  # fmt: skip
        found = said(rules, e.Refused(of))
        assert bool(found) is not legal and (legal or "which may come here, expected an event that is refused" in found)
    with pytest.raises(BadInput, match=r"^here: of: found idle, which may come here"):
        rules.check(e.Refused(e.Idle()), "here")


# -- two engines -------------------------------------------------------------------------------------------------------


def two(*events: e.AnyEvent, tracked: int | None = None) -> EventRules:
    room = replace(header().capacity, track_interval=4, tracked=tracked)
    rules = EventRules(replace(header(), capacity=room, receiver=Receiver(room, 1)))
    for event in events:
        rules.apply(event)
    return rules


def test_events_of_two_engines_are_served_where_their_requests_and_copies_are() -> None:
    rules = two(*ready(), e.Admit("r", (0, 1, 2), receiver=True), e.Save("a", "k"))
    other = rules.other
    assert other is not None and (rules.receives, other.receives, other.other) == (False, True, rules)
    assert [*rules.table.live] == ["a"] and [*other.table.live] == ["r"]
    assert (rules.table.num_steps, other.table.num_steps) == (3, 1)
    serves = {"a": e.Preempt("a"), "r": e.Preempt("r"), "new": e.Admit("x", (1,)), "none": e.Preempt("z"),
              "there": e.Admit("x", (1,), receiver=True), "idle": e.Idle(), "copy": e.Evict("k"), "lost": e.Evict("z"),
              "gone": e.Fetch("z"), "refused": e.Refused(e.Preempt("r")),
              "rows": e.Forward((e.Row("r", "prefill", 1), e.Row("a", "decode")))}  # fmt: skip
    for asked in (rules, other):
        of = {name: asked.serving(event) is other for name, event in serves.items()}
        assert {name for name, there in of.items() if there} == {"r", "there", "refused", "rows"}
    assert "receiver" in said(rules_after(), e.Admit("x", (1,), receiver=True))
    for name, at in (("r", False), ("a", True)):
        assert "which the other engine serves" in said(rules, e.Admit(name, (1,), receiver=at))
    rules.apply(e.Offload("k"))
    assert rules.serving(e.Fetch("k")) is other and rules.serving(e.Evict("k")) is rules
    assert rules.legal()["evict"] == ("k",) and "fetch" not in rules.legal() and other.legal()["fetch"] == ("k",)
    rules.apply(e.Admit("s", (1, 2), receiver=True))
    rules.apply(e.Forward((e.Row("s", "prefill", 1),)))
    assert "nothing is kept" in said(rules, e.Save("s", "k"))  # a name is one of both engines
    rules.apply(e.Abort("s"))
    rules.apply(e.Fetch("k"))
    assert "k" not in rules.table.saved and not other.table.saved["k"].aside
    for event in (e.Evict("k"), e.Offload("k"), e.Load("r", "k"), e.Fetch("k")):
        assert rules.serving(event) is other
    rules.apply(e.Load("r", "k"))
    assert other.table.live["r"].length == 3 and other.table.live["r"].root == 9
    rules.apply(e.Offload("k"))
    assert rules.serving(e.Fetch("k")) is rules
    rules.apply(e.Fetch("k"))
    assert "k" in rules.table.saved and not other.table.saved
    rules.apply(e.Finish("a"))
    other.table.live["both"] = rules.table.live["both"] = Standing("both", (1,), 1)
    assert rules.serving(e.Preempt("both")) is rules
    assert other.table.in_phase(Phase.PREFILLING) == () and other.table.in_phase(Phase.WAITING) == ("both",)


def test_a_prefix_needs_room_on_the_engine_that_fetches_it() -> None:
    chunk, mine = prefill(4, track="p"), e.Forward((e.Row("r", "prefill", 4, track="own"),))
    begun = (e.Admit("a", tuple(range(6))), e.Admit("r", tuple(range(6)), receiver=True), chunk, e.Offload("p"))
    rules = two(*begun, tracked=1)
    assert rules.other is not None and said(rules, e.Fetch("p")) == "" and rules.other.legal()["fetch"] == ("p",)
    rules.apply(mine)
    assert "fetch: found 1 prefixes on the device and 1 more" in said(rules, e.Fetch("p"))
    assert "fetch" not in rules.other.legal()
