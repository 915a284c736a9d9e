"""The check of labels on rows and memory made by hand, one of them wrong; and chains of labels, mixed again by hand.

Leaves out: runs of the ledger (`test_lockstep.py`, `test_checks.py`).
"""

from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
import torch

from instep.checks import exact_labels as x
from instep.watch.event_context import Earlier, KeptCopy
from instep.watch.memory_changes import pattern
from instep_reference.contract import engine as e
from instep_reference.contract.engine import RequestState
from instep_reference.contract.place_names import AFTER_LAYERS, Place
from instep_reference.label_mixing import mix

CORE, KEYS, STATE, FINAL = (Place("trunk", layer, name) for layer, name in (
    (0, "core"), (1, "keys"), (0, "state"), (AFTER_LAYERS, "final")))  # fmt: skip


def state(keys: Any = (1, 2, 3), states: Any = (7, 7), final: Any = None, length: int = 3) -> RequestState:
    rows = {1: torch.tensor(keys)}
    values = {1: torch.zeros(0, dtype=torch.int64)}
    last = None if final is None else torch.tensor(final)
    return RequestState(length, None, None, None, {}, {0: torch.tensor(states)}, rows, values, final=last)


def told(subject: dict[str, Any], truth: dict[str, Any], event: Any = None, **given: Any) -> list[tuple[Any, ...]]:
    """(request, place, elements, wrong ones, problem) of all that is compared; subject, truth: after the event"""
    expected = {"flying": frozenset(), "slots_after": {}, "slots_before": {}, **given.pop("expected", {})}
    sides = [SimpleNamespace(**{"places": {}, "tracked": {}, "after": {}, **side}) for side in (subject, truth)]
    event = event or e.Idle()
    context: Any = SimpleNamespace(
        index=3, kind=event.__struct_config__.tag, event=event, subject=sides[0], truth=sides[1],
        expected=SimpleNamespace(**expected), log=SimpleNamespace(poison=given.pop("poison", None)),
        earlier=given.pop("earlier", Earlier()))  # fmt: skip
    return [(one.request, one.place, one.elements, one.worst, one.diagnosis) for one in x.Labels()(context)]


def test_rows_have_their_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(x, "whose", lambda context, place, row: f"of row {row}")
    right = torch.tensor([[1, 2], [3, 4], [5, 6], [3, 4]])
    flat = torch.tensor([1, 2, 3])
    for truth, found, wrong, row, says in (
        (right, right, 0, None, ""), (flat, flat, 0, None, ""),
        (right, [[1, 2], [3, 9], [5, 6], [3, 4]], 1, 1, "row 1 is wrong in 1 of 2 elements"),
        (right, [[1, 2], [3, 4], [3, 4], [3, 5]], 3, 2, "row 2 is wrong in 2 of 2 elements: it holds row 1"),
        (right, [[5, 6], [3, 4], [5, 6], [3, 4]], 2, 0, "row 0 is wrong in 2 of 2 elements: it holds row 2"),
        (right, [[1, 2], [1, 2], [5, 6], [3, 4]], 2, 1, "row 1 is wrong in 2 of 2 elements: it holds row 0"),
        (flat, [1, 3, 4], 2, 1, "row 1 is wrong in 1 of 1 elements: it holds row 2"),
        (right, None, 8, 0, "has no such rows"), (right, [[1, 2]], 8, 0, "has no such rows"),
    ):  # fmt: skip
        places = {} if found is None else {CORE: torch.as_tensor(found)}
        request = None if row is None else f"of row {row}"
        due = (request, CORE, truth.numel(), float(wrong), says)
        assert told({"places": places}, {"places": {CORE: truth, KEYS: truth[:0]}}) == [due]


def memory(found: Any, right: Any, **given: Any) -> list[Any]:
    """Sentences about request "a"; "b" has its own memory on both sides."""
    other = state((8, 9), (4, 5))
    after = {"a": found, "b": other} if found else {"b": other}
    every = told({"after": after}, {"after": {"a": right, "b": other}}, **given)
    assert all(not one[-1] for one in every if one[0] == "b")
    return [one[1:] for one in every if one[0] == "a"]


def test_memory_has_its_labels() -> None:
    right, poison = state(), pattern(3.0, torch.int64)
    good = [(STATE, 2, 0.0, ""), (KEYS, 3, 0.0, "")]
    assert memory(right, right) == good
    for keys, wrong, says in (
        ((1, 2, 4), 1, "1 of 3 elements is wrong, the first at (2,)"),
        ((9, 2, 4), 2, "2 of 3 elements are wrong, the first at (0,)"), ((1, 2), 3, "has (2,); expected (3,)"),
        ((9, 9, 8), 3, "holds labels that do not belong here"),
        ((0, 9, 0), 3, "holds labels that do not belong here"), ((0, 0, 0), 3, "is empty"),
        ((poison,) * 3, 3, "is poison: memory that was never written"),
        ((poison, poison, 5), 3, "holds labels that do not belong here"),
    ):  # fmt: skip
        assert memory(state(keys), right, poison=3.0) == [good[0], (KEYS, 3, float(wrong), says)]
    assert memory(state((poison,) * 3), right)[1][3] == "holds labels that do not belong here"
    assert [one[1:] for one in memory(None, right)] == [
        (2, 2.0, "has nothing; expected (2,)"), (3, 3.0, "has nothing; expected (3,)")]  # fmt: skip
    assert memory(state((1, 2), (4, 5)), state((3, 4), (7, 7)))[0][3] == 'holds what belongs to request "b"'
    assert memory(state((8, 9)), state((3, 4)))[1][3] == 'holds what belongs to request "b"'
    assert memory(state((8,)), state((3,)))[1][3] == 'holds what belongs to request "b"'  # of a prefix, with fewer rows
    assert memory(state(states=(4,)), state(states=(7,)))[0][3] == "holds labels that do not belong here"
    flying = {"expected": {"flying": frozenset({"a"})}}
    plain = "1 of 3 elements is wrong, the first at (2,)"
    assert memory(state((1, 2, 4), (1, 1)), right, **flying) == [(KEYS, 3, 1.0, plain)]
    # A load brings back what was saved. If that was wrong already, the load is right.
    came = f"comes back different from what was saved: {plain}"
    for were, event, says in (((1, 2, 3), e.Load("a", "k"), came), ((1, 2, 4), e.Load("a", "k"), plain),
                              ((1, 2, 3), e.Load("b", "k"), plain), ((1, 2, 3), e.Save("a", "k"), plain)):
        earlier = Earlier(saved={"k": KeptCopy(state(were), ())})
        assert memory(state((1, 2, 4)), right, event=event, earlier=earlier)[1][3] == says
    gone = Earlier(saved={"k": KeptCopy(right, ())})
    assert memory(None, right, event=e.Load("a", "k"), earlier=gone)[1][3] == (
        "comes back different from what was saved: has nothing; expected (3,)")


def test_prefixes_have_their_labels() -> None:
    right = state(final=(5, 6))
    event = e.Commit(("a", "b"), track=("p", "q"))
    for found, says in ((right, ["", "", ""]),
                        (state(final=(5, 7)), ["", "", "its final row is wrong in 1 of 2 elements"]),
                        (state((1, 2, 4), final=(5, 6)), ["", "1 of 3 elements is wrong, the first at (2,)", ""]),
                        (None, ["has nothing; expected (2,)", "has nothing; expected (3,)",
                                "its final row is wrong in 2 of 2 elements"])):  # fmt: skip
        every = told({"tracked": {"p": found} if found else {}}, {"tracked": {"p": right}}, event)
        assert [one[:2] for one in every] == [("a", STATE), ("a", KEYS), ("a", FINAL)]
        assert [one[4].removeprefix('tracked prefix "p": ') for one in every] == says
        assert [bool(one[3]) for one in every] == [bool(each) for each in says]


# -- states of a window -------------------------------------------------------------------------------------


def after_token(layer: int, chain: int, token: dict[str, int], recalls: bool) -> int:
    """The chain after a token: mixed with its key and decay, and with its update."""
    update = chain if recalls else 0
    for label in (token["k"], token["v"], token["log_decay"], token["write"], crc32(b"trunk.%d.update" % layer)):
        update = mix(update, label)
    return mix(chain, mix(mix(token["k"], token["log_decay"]), update))


@pytest.mark.parametrize("recalls", [True, False])
@pytest.mark.parametrize("parents", [(-1, 0, 1), (-1, 0, 0)])
def test_a_state_of_another_node_of_the_window_is_named(parents: tuple[int, ...], recalls: bool) -> None:
    """Rows 2 to 4 of a forward are the window of "a". The state before it is 7."""
    names = ("k", "v", "log_decay", "beta" if recalls else "write")
    part = {name: torch.arange(12).view(6, 2) * 3 + 100 * n for n, name in enumerate(names)}
    places = {Place("trunk", 2, name): labels for name, labels in part.items()}
    before = SimpleNamespace(state={2: torch.tensor([7, 8])})
    span = SimpleNamespace(kind="verify", begin=2)
    forward: Any = SimpleNamespace(spans={"a": span}, parents={"a": parents},
                                   truth=SimpleNamespace(before={"a": before}, places=places))  # fmt: skip
    chain = [7]
    for node, parent in enumerate(parents):
        token = {name: int(labels[2 + node, 0]) for name, labels in part.items()}
        token["write"] = token[names[3]]
        chain.append(after_token(2, chain[parent + 1], token, recalls))
    assert x.states_of_window(forward, "a", 2) == chain and len({*chain}) == 4
    assert x.states_of_window(None, "a", 2) == x.states_of_window(forward, "z", 2) == []
    tree = parents != (-1, 0, 1)
    place, check = Place("trunk", 2, "state"), x.Labels()
    signed = [label - (label >> 63 << 64) for label in chain]
    for at, taken in ((0, 2), (1, 3), (3, 1), (0, 3)):
        found, right = (torch.tensor([signed[n], signed[n] ^ 5]) for n in (at, taken))
        earlier = SimpleNamespace(forward=forward)
        given: Any = SimpleNamespace(event=e.Idle(), earlier=earlier, truth=SimpleNamespace(after={}),
                                     log=SimpleNamespace(poison=None))  # fmt: skip
        problem = check._problem(given, "a", place, found, right, found != right)
        tokens = {0: "from before the step", 1: "after 1 token", 3: "after 3 tokens"}[at]
        done = {1: "1 token was accepted", 2: "2 tokens were accepted", 3: "3 tokens were accepted"}[taken]
        says = f"holds the state {tokens}; {done}"
        if tree and at:
            says = f"holds the state after node {at - 1}; node {taken - 1} is the last accepted one"
        assert (problem.code, problem.clause) == ("identified", says)
    span.kind = "decode"
    assert x.states_of_window(forward, "a", 2) == []
