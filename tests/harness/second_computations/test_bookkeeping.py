"""Owners, lengths, rows and answers against the trace, and the helpers of checks: every sentence, on facts by hand.

Leaves out: whole runs (`test_checks.py`), and wrong tracked steps and slots (`test_prefix_contents.py`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.checks import check_interface as i
from instep.checks import trace_bookkeeping as t
from instep.finding_problem import Problem, WrongContent
from instep.verdict import Skipped
from instep.watch.event_context import RowSpan
from instep.watch.memory_changes import pattern
from instep.watch.visible_places import Shown
from instep_reference.contract import engine as e
from instep_reference.contract.place_names import AFTER_LAYERS, Place

KEYS, PICK, CORE = Place("trunk", 0, "keys"), Place("trunk", AFTER_LAYERS, "pick"), Place("trunk", 1, "core")


def told(found: Iterable[Any]) -> list[Any]:
    """The reason of what is not compared, the elements of what agrees, and the request and problem of what does not."""
    return [one.reason if isinstance(one, Skipped) else (one.request, one.diagnosis) if one.worst else one.elements
            for one in found]  # fmt: skip


def context(**given: Any) -> Any:
    """Requests "a" in slot 2 and "b" in slot 5, on pages 7, 3 and 1."""
    known = {"slots_after": {"a": 2, "b": 5}, "slots_before": {"z": 4}, "pages_after": {"a": (7, 3), "b": (1,)},
             "pages_before": {"a": (7, 3), "b": (1,)}, "flying": frozenset(), "prefixes": {}, "track_slots": None,
             "track_interval": None, "steps_to_track": {}, "topk": None, "lengths_after": {"a": 7, "b": 4},
             "roots_after": {"a": 11, "b": None}, "windows": {}, "parents": {},
             **given.pop("expected", {})}  # fmt: skip
    subject = {"after": {}, "before": {}, "places": {}, "answer": None, "tracked": {}, "wanted_num_steps": 3,
               "instead": False, **given.pop("subject", {})}  # fmt: skip
    truth = {"places": {}, "answer": None, "wanted_num_steps": 3, **given.pop("truth", {})}
    event = given.get("event", e.Idle())
    return SimpleNamespace(**{
        "index": 3, "kind": event.__struct_config__.tag, "event": event, "expected": SimpleNamespace(**known),
        "subject": SimpleNamespace(**subject), "truth": SimpleNamespace(**truth), "shown": Shown(),
        "log": SimpleNamespace(poison=None, copies=None),
        "earlier": SimpleNamespace(forward=None, proposed={}, dropped={}),
        "subject_slots": {"a": 2, "b": 5}, "subject_pages": {"a": [7, 3], "b": [1]}, **given,
    })  # fmt: skip


def span(request: str, kind: Any, begin: int, count: int, logits: tuple[int, int] = (0, 0)) -> RowSpan:
    return RowSpan(request, kind, begin, count, 0, *logits)


# -- helpers of checks ------------------------------------------------------------------------------------------


def test_words_follow_counts() -> None:
    assert [i.counted(count) for count in (0, 1, 2)] == ["0 tokens", "1 token", "2 tokens"]
    assert [i.counted(count, "copy", "copies") for count in (1, 2)] == ["1 copy", "2 copies"]
    assert [i.verb(count, "is", "are") for count in (0, 1, 2)] == ["are", "is", "are"]
    assert [i.at_end(count) for count in (1, 2)] == ["last token", "last 2 tokens"]
    assert i.at_end(1, "position", "first") == "first position"
    for numbers, says in (({3}, "slot 3"), ({5, 3}, "slots 3, 5"), (range(8), "slots 0, 1, 2, 3, 4, 5, 6, 7"),
                          ([*range(9, -1, -1)], "slots 0, 1, 2, 3, 4, 5, 6, 7 and 2 more")):  # fmt: skip
        assert i.listed("slot", numbers) == says
    for (count, right), says in {(0, 1): "from before the step; 1 token was", (1, 2): "after 1 token; 2 tokens were",
                                 (2, 0): "after 2 tokens; 0 tokens were"}.items():  # fmt: skip
        known = i.held("window", count, right, "kept")
        assert (known.says, known.in_a_state) == (f"holds the window {says} kept", f"holds the state {says} kept")
    for layer, says in ((0, "op x (trunk.0.core)"), (7, "op x (trunk.7.core)"), (-1, "op x (trunk.core)"),
                        (AFTER_LAYERS, "op x (trunk.core)"), (65535, "op x (trunk.65535.core)")):  # fmt: skip
        assert i.op_at("x", CORE._replace(layer=layer)) == says
    assert i.op_at("x", None) == "op x"
    assert [i.slot_of(context(), name) for name in ("a", "z", "y", None)] == [2, 4, None, None]


def test_mistakes_of_a_request_count_if_all_wrong_requests_have_them() -> None:
    one, two, three, four, five = (WrongContent(f"says {n}", name=f"n{n}") for n in range(5))
    every = [one, two, three, four, five]
    for mine, others, says in (([one, two], [[one, two], [two, five]], "says 1"), ([one], [[one], [two]], None),
                               (every[:3], [every], "says 0, or says 1, or says 2"), (every[:1], [every], "says 0"),
                               (every[:4], [every], "says 0, or says 1, or says 2, or 1 other mistake"),
                               (every, [every], "says 0, or says 1, or says 2, or 2 other mistakes")):  # fmt: skip
        found = i.shared_by_all(mine, [mine, *others])
        assert (found and found.says) == says
        assert found is None or len(found.names) == len([each for each in mine if all(each in its for its in others)])


def test_plain_values_are_compared_as_a_whole() -> None:
    check = t.Identity()
    for poison, found, right, says, elements in (
        (None, 7, 7, "", 1), (None, 7, 8, "is 7; expected 8", 1),
        (None, (1, 2), (1, 3), "is (1, 2); expected (1, 3)", 2),
        (None, {}, {}, "", 1), (None, {1: 2}, {}, "is {1: 2}; expected {}", 1), (3.0, 7, 8, "is 7; expected 8", 1),
        (3.0, pattern(3.0, torch.int64), 8, "is poison, the pattern of memory that was never written; expected 8", 1),
        (None, pattern(3.0, torch.int64), 8, f"is {pattern(3.0, torch.int64)}; expected 8", 1),
        (3.0, float(pattern(3.0, torch.int64)), 8, f"is {float(pattern(3.0, torch.int64))}; expected 8", 1),
    ):  # fmt: skip
        given = context(log=SimpleNamespace(poison=poison))
        one = i.exact(check, given, CORE, found, right, "is {}", "a")
        assert (one.diagnosis, one.elements, one.worst, one.slot) == (says, elements, float(bool(says)), 2)
    several = i.said_of(check, context(), CORE, 4, ["x", "y"], "b", 1)
    assert (several.diagnosis, several.worst, several.elements, several.rank, several.slot) == ("x; y", 2.0, 4, 1, 5)
    assert told([i.said_of(check, context(), CORE, 4, [])]) == [4]
    assert i.compared(check, context(), CORE, 1, 0, slot=9, request="a").slot == 9


def test_a_batch_is_in_another_order_if_all_wrong_requests_exchange_their_values() -> None:
    right, before = {"a": 5, "b": 9, "c": 4}, {"a": 4, "b": 6, "c": 2}
    order = ", so the requests of the batch are in another order"
    value, growth = f': it is the one of request "{{}}"{order}', f': it grew by the tokens of request "{{}}"{order}'
    for found, then, says in (
        ({"a": 9, "b": 5, "c": 4}, None, {"a": value.format("b"), "b": value.format("a")}),
        ({"a": 7, "b": 7, "c": 4}, before, {"a": growth.format("b"), "b": growth.format("a")}),
        ({"a": 6, "b": 7, "c": 5}, before, {"a": growth.format("c"), "b": growth.format("a"), "c": growth.format("b")}),
        ({"a": 7, "b": 7, "c": 4}, {"a": 4, "c": 2}, {"a": "", "b": ""}),  # nothing is known of the growth of "b"
        ({"a": 9, "b": 9, "c": 4}, None, {"a": ""}), ({"a": 9, "b": 9, "c": 4}, before, {"a": ""}),
        ({"a": 7, "c": 4}, before, {"a": "", "b": ""}), ({"a": 7, "b": None, "c": 4}, before, {"a": "", "b": ""}),
        ({"a": 9, "b": None, "c": 5}, None, {"a": "", "b": "", "c": ""}), (right, None, {}), (right, before, {}),
    ):  # fmt: skip
        results = i.in_batch(t.Identity(), context(), CORE, found, right, "is {}", then)
        assert told(results) == [(name, f"is {found.get(name)}; expected {right[name]}{says[name]}") if name in says
                                 else 1 for name in right], (found, then)  # fmt: skip
    once, other = i.TellsOnce(), []
    once.name = "x"
    for reason in ("p", "q", "p"):
        other += [one.reason for one in once.once(context(), reason)]
    assert other == ["p", "q"]


# -- owners -------------------------------------------------------------------------------------------------------


def rooms(**given: Any) -> list[Any]:
    return told(t.Identity()._rooms(context(**given)))


def test_slots_and_pages_are_those_of_the_trace() -> None:
    """Request "z" has left, and "f" is in flight and hidden, so its memory is not."""
    keeps = ": it keeps the pages after its length, which this event gives back"
    lacks = ": it has no pages for the last positions that it may use"
    assert rooms() == [2, 2, 1]
    assert rooms(subject_slots={"a": 2, "b": 3}) == [
        (None, "slots are {'a': 2, 'b': 3}; expected {'a': 2, 'b': 5}"), 2, 1]
    for pages, before, says in (((7, 3, 8), (7, 3, 8), keeps), ((3, 7), (3, 7), ""), ((7,), (7, 3), lacks),
                                ((7,), (7,), lacks), ((), (), lacks), ((7, 4), (7, 3), ""), ((3,), (7, 3), ""),
                                ((7, 3, 8), (7, 3), ""), ((7, 4, 8), (7, 4, 8), "")):  # fmt: skip
        found = rooms(subject_pages={"a": [*pages], "b": [1]}, expected={"pages_before": {"a": before}})
        assert found == [2, ("a", f"pages are {pages}; expected (7, 3){says}"), 1], pages
    assert rooms(subject_pages={"a": [7, 3], "b": [1], "z": [4]})[3:] == [("z", "pages are (4,); expected ()")]
    # Nothing is expected of hidden requests that the engine does not show, unless they are in flight and there.
    for hidden, gone, flying, due in (({}, (), (), True), ({"b": "x"}, (), (), False), ({"b": "x"}, (), ("b",), True),
                                      ({"b": "x"}, ("b",), ("b",), False), ({"b": "x"}, ("a",), ("b",), True)):
        shown = Shown(whole=False, feeds=frozenset({"slots", "pages"}), hidden=hidden, gone=frozenset(gone))
        found = rooms(shown=shown, subject_slots={"a": 2}, subject_pages={"a": [7, 3]},
                      expected={"flying": frozenset(flying)})  # fmt: skip
        assert found == ([(None, "slots are {'a': 2}; expected {'a': 2, 'b': 5}"), 2,
                          ("b", f"pages are (); expected (1,){lacks}")] if due else [1, 2])  # fmt: skip
    for feeds, due in ((("slots",), [2]), (("pages",), [2, 1]), ((), [])):
        assert rooms(shown=Shown(whole=False, feeds=frozenset(feeds))) == due
    state = SimpleNamespace(length=2, parts=lambda: [(KEYS, torch.arange(2))])
    dropped = {"k": (SimpleNamespace(state=state),)}
    found = rooms(event=e.Load("a", "k"), subject={"after": {"a": state}}, subject_pages={"a": [7], "b": [1]},
                  earlier=SimpleNamespace(dropped=dropped))  # fmt: skip
    assert found == [2, ("a", 'holds what was kept as "k" before; pages are (7,); expected (7, 3)'), 1]


def test_engines_with_own_numbers_are_compared_up_to_renaming() -> None:
    shown = Shown(whole=False, feeds=frozenset({"slots", "pages"}), exact=False)
    for slots, right in (({"a": 9, "b": 0}, True), ({"b": 3, "a": 4}, True), ({"a": 9, "b": 9}, False)):
        found = rooms(shown=shown, subject_slots=slots)
        assert found == [2 if right else (None, "slots are {'a': 0, 'b': 0}; expected {'a': 0, 'b': 1}"), 1, 1]
    shared = "pages are {}; expected ()"
    for pages, says in (({"a": [1, 2], "b": [3]}, {}), ({"a": [1, 2], "b": [2]}, {"a": (2,), "b": (2,)}),
                        ({"a": [4, 4], "b": [3]}, {"a": (4, 4)}), ({"a": [1], "b": [3], "z": [5]}, {"z": (5,)})):
        found = rooms(shown=shown, subject_pages=pages)
        assert found == [2, *((name, shared.format(says[name])) if name in says else 1 for name in sorted(pages))]
    lacks = "pages are (); expected (1,): it has no pages for the last positions that it may use"
    assert rooms(shown=shown, subject_pages={"a": [8, 9]}) == [2, 1, ("b", lacks)]
    assert rooms(shown=shown, subject_pages={"a": [8, 9]}, expected={"pages_after": {"a": (7, 3), "b": ()}}) == [2, 1]
    away = Shown(whole=False, feeds=frozenset({"pages"}), exact=False, hidden={"b": "x"})
    assert rooms(shown=away, subject_pages={"a": [8], "b": [8]}) == [1]  # its pages may have another owner now


def test_pages_of_a_live_request_do_not_move() -> None:
    """Such an engine may give pages back and take others. One that restores the request puts it elsewhere."""
    moved = "pages are {}: a page moved in the table of a live request; expected {}"
    for before, now, event, hidden, due in (
        ((1, 2, 3), (1, 2), e.Idle(), {}, [2]), ((1, 2), (1, 2, 3), e.Idle(), {}, [2]),
        ((1, 2), (2, 1), e.Idle(), {}, [("a", moved.format((2, 1), (1, 2)))]), ((), (2, 1), e.Idle(), {}, []),
        ((1, 2), (2, 1), e.Resume("a"), {}, []), ((1, 2), (2,), e.Resume("b"), {}, [("a", moved.format((2,), (1,)))]),
        ((1,), (), e.Idle(), {}, [1]), (None, (1,), e.Idle(), {}, []), ((1,), (1,), e.Idle(), {"a": "x"}, [1]),
    ):  # fmt: skip
        check = t.Identity()
        check.known = {} if before is None else {"a": before}
        given = context(subject_pages={"a": [*now]}, event=event, shown=Shown(hidden=hidden))
        assert told(check._moved(given)) == due
        assert check.known == ({} if hidden else {"a": now})


# -- lengths, prefixes, rows ------------------------------------------------------------------------------------------


def state(length: int, root: int | None = None, **more: Any) -> Any:
    return SimpleNamespace(length=length, root=root, **{"block_keys": {}, "proposal": None, **more})


def test_lengths_and_roots_are_those_of_the_trace() -> None:
    """A commit of two windows, after which "a" has 7 tokens and "b" 4; they had 5 and 3."""
    before = {"a": state(5), "b": state(3)}
    paths = (e.Path((1, 2), 11), e.Path((1,), 12))
    capped, commit = e.Commit(("a", "b"), paths, caps=(1, 0)), e.Commit(("a", "b"), paths)
    order = ", so the requests of the batch are in another order"
    for event, lengths, due in (
        (commit, (7, 4), [1, 1]), (commit, (6, 4), [("a", "length is 6; expected 7"), 1]),
        (commit, (None, 4), [("a", "length is None; expected 7"), 1]),
        (commit, (6, 5), [("a", f'length is 6; expected 7: it grew by the tokens of request "b"{order}'),
                          ("b", f'length is 5; expected 4: it grew by the tokens of request "a"{order}')]),
        (capped, (8, 5), [("a", "length is 8; expected 7: its cap is ignored"),
                          ("b", "length is 5; expected 4: its cap is ignored")]),
        (e.Commit(("a", "b"), caps=(1, 0)), (8, 4), [
            ("a", "length is 8; expected 7: its cap is ignored, or its cap is one too high"), 1]),
    ):  # fmt: skip
        after = {name: state(length, root) for name, length, root in zip("ab", lengths, (11, None), strict=True)
                 if length is not None}  # fmt: skip
        given = context(event=event, subject={"before": before, "after": after})
        roots = [1 if "a" in after else ("a", "root is None; expected 11"), 1]
        assert told(t.Identity()._standings(given)) == [*due, *roots], (event, lengths)
    given = context(subject={"before": before, "after": {"a": state(7, 12), "b": state(4, 11)}},
                    expected={"roots_after": {"a": 11, "b": 12}})  # fmt: skip
    assert told(t.Identity()._standings(given))[2:] == [
        (name, f'root is {root}; expected {due}: it is the one of request "{whose}"{order}')
        for name, root, due, whose in (("a", 12, 11, "b"), ("b", 11, 12, "a"))]  # fmt: skip


def test_prefixes_have_the_tokens_of_the_trace() -> None:
    """A commit in which "a" tracks "p" up to 8 tokens, and the window of "b" reaches no multiple for "q"."""
    commit = e.Commit(("a", "b"), (e.Path((2, 3), 1), e.Path((), 1)), ("p", "q"))
    tracking = {"prefixes": {"p": 8, "q": 4}, "steps_to_track": {"a": 2}, "track_interval": 4,
                "lengths_after": {"a": 9, "b": 7}, "windows": {"a": (1, 2, 3, 4), "b": (1, 2, 3)}}  # fmt: skip
    answer = SimpleNamespace(tracked={"a": 8}, steps_to_track=torch.tensor([2, -1]))
    kept = {"p": state(8)}

    def said(**given: Any) -> list[Any]:
        subject = {"answer": answer, "tracked": kept, **given.pop("subject", {})}
        given = {"event": commit, **given, "expected": {**tracking, **given.get("expected", {})}}
        return told(t.Identity()._tracked(context(subject=subject, **given)))

    assert said() == [1] * 6
    wrong = SimpleNamespace(tracked={"a": 4, "b": 4}, steps_to_track=torch.tensor([3, 0]))
    found = said(subject={"answer": wrong, "tracked": {"p": state(4), "q": state(4)}})
    one = ('it is the accepted node one after the one that reaches the multiple, or it is the last accepted node; '
           "steps_to_track is 3; expected 2")  # fmt: skip
    only = "the multiple is one that only the whole window reaches; steps_to_track is 0; expected -1"
    assert found[:2] == [("a", one), ("b", only)] and found[2:] == [
        ("a", "answers a prefix of 4 tokens; expected 8"), ("a", "keeps a prefix of 4 tokens; expected 8"),
        ("b", "answers a prefix of 4 tokens; expected None"), ("b", "keeps a prefix of 4 tokens; expected None")]
    missing = said(subject={"answer": SimpleNamespace(tracked={}), "tracked": {}}, expected={"track_interval": None})
    assert missing == [("a", "answers a prefix of None tokens; expected 8"),
                       ("a", "keeps a prefix of None tokens; expected 8"), 1, 1]  # fmt: skip
    unseen = SimpleNamespace(tracked={"a": 8}, steps_to_track=None)
    assert said(subject={"answer": unseen})[0] == "this engine does not show the tracked steps of its windows"
    chunk = e.Forward((e.Row("a", "prefill", 8, track="p"),))
    assert said(event=chunk, expected={"steps_to_track": {}}) == [1, 1]
    fetch = said(event=e.Fetch("p"), subject={"answer": None, "tracked": {"p": state(8), "q": state(3)}})
    assert fetch == [1, (None, '"q" is a prefix of 3 tokens; expected 4')]
    for mine, due in (({"p": 1}, [1]), (None, ["this engine does not show the slots of its prefixes"]),
                      ({"p": 2}, [(None, "a slot is taken for a window that can reach no multiple; track slots are "
                                         "{'p': 2}; expected {'p': 1}")]),
                      ({}, [(None, "track slots are {}; expected {'p': 1}")])):  # fmt: skip
        log = SimpleNamespace(poison=None, copies=SimpleNamespace(track_slots=mine))
        assert said(event=e.Idle(), expected={"track_slots": {"p": 1}}, log=log) == due
        assert said(event=e.Idle(), log=log) == said(event=e.Idle(), expected={"track_slots": {"p": 1}}) == []


def test_places_have_the_rows_of_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows at each layer, and one row where a token is chosen. A harness that packs rows itself is not judged."""
    monkeypatch.setattr(t, "row_spans", lambda context, stage: [span("a", "prefill", 0, 2, (0, 0)),
                                                                span("b", "decode", 2, 1, (0, 1))])  # fmt: skip
    final = Place("trunk", AFTER_LAYERS, "final")
    truth = {CORE: torch.zeros(3, 2), PICK: torch.zeros(1), KEYS: torch.zeros(0, 2), final: torch.zeros(3, 2)}
    for places, shown, due in (
        ({CORE: 3, PICK: 1, final: 3}, Shown(), [1, 1, 1]),
        ({CORE: 2, PICK: 3}, Shown(), [(None, "has 2 rows; expected 3"), (None, "has 3 rows; expected 1"),
                                       (None, "has 0 rows; expected 3")]),
        ({CORE: 3, PICK: 1, final: 3}, Shown(inside=frozenset({"core"})), [1, 1]),
        ({CORE: 2}, Shown(False, frozenset({"watch"}), frozenset(truth)), [(None, "has 2 rows; expected 3")]),
        ({CORE: 2}, Shown(False, frozenset({"watch"})), []), ({CORE: 2}, Shown(False, places=frozenset(truth)), []),
    ):  # fmt: skip
        subject = {"places": {place: torch.zeros(count, 2) for place, count in places.items()}}
        assert told(t.Identity()._row_counts(context(subject=subject, truth={"places": truth}, shown=shown))) == due


# -- answers ----------------------------------------------------------------------------------------------------------


def picks_at(stage: str) -> Place:
    return Place(stage, AFTER_LAYERS, "pick")


def test_drafts_are_those_of_the_trace_and_of_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Request "b" has a tree of two drafts, "a" a chain of three, of which the third is of an MTP layer."""
    spans = {"chain.1": [span("b", "draft", 0, 1), span("a", "draft", 1, 1)], "chain.2": [span("a", "draft", 0, 1)],
             "block": [span("b", "draft", 0, 3), span("a", "draft", 3, 4)]}  # fmt: skip
    monkeypatch.setattr(t, "row_spans", lambda context, stage: spans.get(stage, []))
    event = e.Draft(("b", "a"), picks=((20, 21), (30, 31, 32)))
    parents = {"b": (-1, 0, 0), "a": (-1, 0, 1, 2)}
    own = torch.tensor([[20, 20, -1], [30, 41, 7]])
    chain = {picks_at("chain.1"): torch.tensor([40, 41])}
    head = {"b": state(4, proposal=20), "a": state(7, proposal=30)}
    earlier, fewer = (SimpleNamespace(proposed={"a": picks}, forward=None) for picks in ((1, 2, 7), (1, 2)))

    def said(
        drafts: Any = ((20, 21, -1), (30, 31, 32)), mine: Any = own, event: Any = event, **given: Any
    ) -> list[Any]:
        subject = {"answer": e.Drafted(torch.tensor(drafts), torch.as_tensor(mine)), "before": head, "places": chain,
                   **given.pop("subject", {})}  # fmt: skip
        truth = {"answer": e.Drafted(torch.tensor(drafts), given.pop("right", own))}
        expected = {"parents": parents, **given.pop("expected", {})}
        given = {"earlier": earlier, **given}
        return told(t.Identity()._drafted(context(
            event=event, subject=subject, truth=truth, expected=expected, **given), event))  # fmt: skip

    assert said() == [3, 1, 1, 3, 1, 1, 1]
    assert said(((20, 22, -1), (30, 31, 33)))[::3] == [
        ("b", "drafts are [20, 22, -1]; expected [20, 21, -1]"),
        ("a", "drafts are [30, 31, 33]; expected [30, 31, 32]"), 1]  # fmt: skip
    assert said(mine=[[20, 25, -1], [31, 40, 9]]) == [
        3, 1, ("b", "own draft 2 is 25; expected 20"), 3, ("a", "own draft 1 is 31; expected 30"),
        ("a", "own draft 2 is 40; expected 41"), ("a", "own draft 3 is 9; expected 7")]  # fmt: skip
    recorded = "the window has the recorded drafts, as its own drafts differ"
    assert said(subject={"instead": True}) == [recorded, 3, 1, 1, 3, 1, 1, 1]
    assert said(expected={"topk": 2}) == [3, 3]
    free = e.Draft(("b", "a"))
    assert said(((20, 20, -1), (30, 41, 7)), event=free) == [3, 1, 1, 3, 1, 1, 1]
    assert said(((20, 20, -1), (30, 41, 8)), event=free)[3] == ("a", "drafts are [30, 41, 8]; expected [30, 41, 7]")
    none = torch.full((2, 3), -1)
    assert said(mine=none, right=none, subject={"before": {}}) == [3, 3, 3, 3]
    outside = said(right=none, subject={"before": {}})
    assert outside == [3, ("b", "own drafts are [20, 20, -1]; expected [-1, -1, -1]"), 3,
                       ("a", "own drafts are [30, 41, 7]; expected [-1, -1, -1]")]  # fmt: skip
    half = torch.tensor([[-1, -1, -1], [0, -1, -1]])
    assert said(right=half, subject={"before": {}}) == [3, 3]  # a head that chose token 0 is one
    assert said(mine=torch.zeros(2, 0)) == [3, 3]
    # Without a proposal, or without the rows of a step, nothing is known.
    rootless = said(subject={"before": {name: state(4) for name in "ab"}})
    assert rootless == [3, 3]
    assert said(earlier=fewer) == [3, 1, 1, 3, 1, 1]
    assert said(subject={"places": {}}) == [3, 1, 1, 3, 1, ("a", "own draft 2 is 41; expected 2"), 1]
    assert said(subject={"places": {picks_at("chain.1"): torch.tensor([40])}})[5] == (
        "a", "own draft 2 is 41; expected 2")
    blocks = {name: state(4, block_keys={0: 1}) for name in "ab"}
    block = {picks_at("block"): torch.tensor([90, 20, 20, 91, 30, 41, 7])}
    assert said(subject={"before": blocks, "places": block}) == [3, 1, 1, 3, 1, 1, 1]
    block[picks_at("block")][5] = 8
    assert said(subject={"before": blocks, "places": block})[5] == ("a", "own draft 2 is 41; expected 8")
    assert said(subject={"before": blocks, "places": {}}) == [3, 3]
    assert len(said(mine=own[:, :1], subject={"before": blocks, "places": block})) == 4


def test_choices_of_a_forward_are_its_picks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of three nodes, a decode, a last chunk, and a prompt that continues."""
    spans = [span("a", "verify", 0, 3, (0, 3)), span("b", "decode", 3, 1, (3, 1)), span("c", "prefill", 4, 2, (4, 1)),
             span("d", "prefill", 6, 2, (5, 0))]  # fmt: skip
    monkeypatch.setattr(t, "row_spans", lambda context, stage: spans)
    own = {"a": torch.tensor([1, 2, 3]), "b": torch.tensor([4]), "c": torch.tensor([5])}

    def said(
        mine: Mapping[str, Any] = own, roots: Any = (("b", 4), ("c", 6)), picks: Any = (1, 2, 3, 4, 5)
    ) -> list[Any]:
        places = {} if picks is None else {PICK: torch.tensor(picks)}
        return told(t.Identity()._forwarded(context(
            subject={"answer": e.Forwarded(dict(roots), mine), "places": places},
            expected={"roots_after": {"b": 4, "c": 6}})))  # fmt: skip

    assert said() == [3, 1, 1, 1, 1, 1]
    assert said({**own, "a": torch.tensor([1, 9, 3])})[0] == ("a", "own choices are [1, 9, 3]; expected [1, 2, 3]")
    assert said({"a": own["a"]}) == [3, ("b", "own choices are []; expected [4]"), 1,
                                     ("c", "own choices are []; expected [5]"), 1, 1]  # fmt: skip
    assert said(roots=(("b", 5),)) == [3, 1, ("b", "answers the root 5; expected 4"), 1,
                                       ("c", "answers the root None; expected 6"), 1]  # fmt: skip
    assert said(picks=None)[0] == ("a", "own choices are [1, 2, 3]; expected []")


# -- acceptance -----------------------------------------------------------------------------------------------


def test_windows_are_accepted_along_agreeing_children() -> None:
    """Node 2 and node 4 have the token that the root picks; the lower one is taken. Node 5 follows node 2."""
    tokens, parents, picks = (9, 5, 6, 7, 6, 8, 3), (-1, 0, 0, 1, 0, 2, 5), [6, 0, 8, 0, 1, 3, 2]
    assert [t.greedy(tokens, parents, picks, cap) for cap in (None, 0, 1, 2, 3, 9)] == [
        (3, 2), (0, 6), (1, 8), (2, 3), (3, 2), (3, 2)]  # fmt: skip
    assert t.greedy(tokens, parents, [5, 0, 8, 0, 1, 3, 2]) == (1, 0) and t.greedy((9,), (-1,), [4], 0) == (0, 4)


CAPS, WHOLE, CAP_MISTAKES = (1, 0, 2), (3, 2, 3), {
    (1, 0, 2): "", (3, 2, 3): "its cap is ignored", (0, 0, 1): "its cap counts the bonus as a draft",
    (2, 1, 3): "its cap is one too high", (1, 2, 2): "its cap of 0 is taken for no cap",
    (0, 2, 1): "it has the cap of the next row", (2, 1, 0): "it has the cap of the row before",
    (2, 0, 1): "the caps are in the reverse order", (1, 1, 1): "all requests have the cap of the first row",
    (2, 2, 2): "all requests have the highest cap of the batch",
    (0, 0, 0): "all requests have the lowest cap of the batch",
    (0, 1, 2): "it has the cap that its row had at the commit before",
    (1, 0, 0): "it has the cap that it had at the commit before",
}  # fmt: skip


def test_each_wrong_cap_stops_the_windows_elsewhere() -> None:
    """At the commit before, "c" had the cap 0 in row 0, and another request 1 in row 1."""
    check = t.Identity()
    check.caps = {"c": 0, "z": 1}
    commit = e.Commit(("a", "b", "c"), caps=CAPS)
    for found in product(range(4), repeat=3):
        assert check._cap_mistake(commit, found, WHOLE) == CAP_MISTAKES.get(found, ""), found
    several = ("its cap is ignored, or its cap is one too high, or its cap of 0 is taken for no cap, or all requests "
               "have the highest cap of the batch")  # fmt: skip
    assert t.Identity()._cap_mistake(e.Commit(("a", "b", "c"), caps=(0, 2, 2)), (1, 1, 1), (1, 1, 1)) == several
    for caps in ((1, 1, 1), (2, 2, 2)):
        assert check._cap_mistake(e.Commit(("a", "b", "c"), caps=caps), caps, (2, 2, 2)) == ""


def test_a_commit_answers_its_paths_and_accepts_by_its_own_picks() -> None:
    """Windows of 4 and 3 tokens. By its picks the subject accepts 2 and 0 drafts, and the trace 3 and 1."""
    picks = {"a": torch.tensor([1, 2, 6, 7]), "b": torch.tensor([0, 1, 2])}
    forward = SimpleNamespace(
        windows={"a": (9, 1, 2, 3), "b": (8, 4, 5)}, parents={"a": (-1, 0, 1, 2), "b": (-1, 0, 0)},
        subject=SimpleNamespace(answer=e.Forwarded({}, picks)))  # fmt: skip
    right = {
        "num_correct_drafts": [3, 1], "accept_lens": [4, 2], "accept_index": [[0, 1, 2, 3], [0, 2, -1, -1]],
        "last_correct_step_indices": [3, 2], "bonus": [50, 60], "own_num_correct_drafts": [2, 0], "own_bonus": [6, 0],
    }  # fmt: skip
    paths = (e.Path((1, 2, 3), 50), e.Path((2,), 60))

    def said(
        caps: Any = (), paths: Any = paths, forward: Any = forward, answers: Any = right, **wrong: Any
    ) -> list[Any]:
        answer = e.Committed(**{name: torch.tensor(wrong.get(name, its)) for name, its in answers.items()})
        event = e.Commit(("a", "b"), paths, caps=caps)
        earlier = SimpleNamespace(forward=forward)
        return told(t.Identity()._committed(context(event=event, subject={"answer": answer}, truth={"answer": answer},
                                                    earlier=earlier), event))  # fmt: skip

    assert said() == [1, 1, 4, 1, 1, 1, 1, 4, 1, 1, 2, 2]
    for name, value, places in (("num_correct_drafts", [3, 0], {5: "num_correct_drafts is 0; expected 1"}),
                                ("accept_lens", [3, 2], {1: "accept_lens is 3; expected 4"}),
                                ("accept_index", [[0, 1, 2, 3], [0, 1, -1, -1]],
                                 {7: "accept_index is [0, 1, -1, -1]; expected [0, 2, -1, -1]"}),
                                ("last_correct_step_indices", [2, 2],
                                 {3: "last_correct_step_indices is 2; expected 3"}),
                                ("bonus", [50, 61], {9: "bonus is 61; expected 60"}),
                                ("own_num_correct_drafts", [1, 0],
                                 {10: "own (accepted drafts, bonus) are (1, 6); expected (2, 6)"})):  # fmt: skip
        found = said(**{name: value})
        assert {at: one[1] for at, one in enumerate(found) if isinstance(one, tuple)} == places
    own = "own (accepted drafts, bonus) are {}; expected (2, 6)"
    unchosen = ": it accepts a draft that the target did not choose"
    for count, more in ((3, unchosen), (4, unchosen), (2, ""), (1, ""), (0, "")):
        assert said(own_num_correct_drafts=[count, 0], own_bonus=[7, 0])[10][1] == own.format((count, 7)) + more
    tree = SimpleNamespace(**{**vars(forward), "windows": {"a": (9, 1, 1, 6), "b": (8, 4, 5)}, "parents": {
        "a": (-1, 0, 0, 2), "b": (-1, 0, 0)}})  # fmt: skip
    for count, more in ((3, unchosen), (2, "")):
        assert said(forward=tree, own_num_correct_drafts=[count, 0])[10][1].endswith("expected (1, 2)" + more), (
            "the second of two equal drafts has a chosen child")
    assert said(paths=None)[:10] == [1, 1, 4, 1, 1, 1, 1, 4, 1, 1]
    assert said(forward=None)[10:] == []
    assert said(forward=SimpleNamespace(**{**vars(forward), "windows": {"b": (8, 4, 5)}}))[10:] == [2]
    short = {"a": torch.tensor([1, 2, 6, 7]), "b": torch.tensor([0, 1])}
    less = SimpleNamespace(**{**vars(forward), "subject": SimpleNamespace(answer=e.Forwarded({}, short))})
    assert said(forward=less)[10:] == [2]
    less.subject.answer = e.Forwarded({}, {})
    assert said(forward=less)[10:] == []
    # With caps 1 and 0: the subject accepts 1 and 0 drafts, and the choices there are 2 and 0.
    capped = {**right, "num_correct_drafts": [1, 0], "accept_lens": [2, 1], "accept_index": [[0, 1, -1], [0, -1, -1]],
              "last_correct_step_indices": [1, 0], "own_num_correct_drafts": [1, 0], "own_bonus": [2, 0]}  # fmt: skip
    caps = {"caps": (1, 0), "answers": capped}
    assert said(**caps) == [1, 1, 3, 1, 1, 1, 1, 3, 1, 1, 2, 2]
    ignored = said(**caps, num_correct_drafts=[3, 1])
    assert [ignored[at][1] for at in (0, 5)] == [f"num_correct_drafts is {found}; expected {due}: its cap is ignored"
                                                 for found, due in ((3, 1), (1, 0))]  # fmt: skip
    own = "own (accepted drafts, bonus) are {}; expected (1, 2): {}"
    assert said(**caps, own_num_correct_drafts=[2, 0], own_bonus=[6, 0])[10] == (
        "a", own.format((2, 6), "its cap is ignored, or its cap is one too high"))
    assert said(**caps, own_bonus=[6, 0])[10] == (
        "a", own.format((1, 6), "the bonus is the choice at the node that would be accepted without the cap"))
    assert said(**caps, own_bonus=[5, 0])[10] == ("a", own.format((1, 5), "")[:-2])
    part = SimpleNamespace(**{**vars(forward), "windows": {"a": (9, 1, 2, 3)}})
    assert said(**caps, forward=part, own_bonus=[6, 0])[10] == ("a", own.format((1, 6), "")[:-2])


def test_all_that_an_engine_shows_is_compared_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ("_rooms", "_row_counts", "_standings", "_tracked", "_drafted", "_forwarded", "_committed")
    for name in parts:
        monkeypatch.setattr(t.Identity, name, lambda self, context, *event, name=name: [name])
    commit, check = e.Commit(("a", "b"), caps=(1, 2)), t.Identity()
    for event, last in ((e.Idle(), []), (e.Draft(("a",)), ["_drafted"]), (e.Forward(()), ["_forwarded"]),
                        (commit, ["_committed"])):  # fmt: skip
        first, second, wish, *rest = check(context(event=event, truth={"wanted_num_steps": 2}))
        assert [first, second, *rest] == [*parts[:4], *last]
        assert told([wish]) == [(None, "next_num_steps requests 3; expected 2")]
        assert [*check(context(event=event, shown=Shown(whole=False)))] == [*parts[:2]]
    assert check.caps == {"a": 1, "b": 2}
    one = i.exact(check, context(), CORE, 1, 2, "is {}")
    for problem, says in ((Problem("differs", "x"), "x: y"), (Problem("identified", "x"), "x"), (None, "")):
        given = replace(one, problem=problem)
        assert t._because(given, "y").diagnosis == says and t._because(given, "") is given
