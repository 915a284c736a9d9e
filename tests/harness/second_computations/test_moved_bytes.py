"""Memory after each kind of event, computed again row by row; each part of it is spoiled, and found alone.

Leaves out: known wrong contents (`test_prefix_contents.py`), and whole runs (`test_checks.py`).
"""

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.checks import unchanged_bytes as u
from instep.checks.wrong_state_bank import ZERO
from instep.verdict import Comparison, Skipped
from instep.watch.event_context import RowSpan
from instep.watch.memory_changes import Trespass
from instep.watch.visible_places import Shown
from instep_reference.contract import engine as e
from instep_reference.contract.answers import MEMORY, memory_place
from instep_reference.contract.declared_rounding import SCALED_KEPT
from instep_reference.contract.engine import RequestState
from instep_reference.contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place
from instep_reference.contract.pool_meaning import Meaning

FINAL, QKV = Place("trunk", AFTER_LAYERS, "final"), Place("trunk", 0, "qkv")
TAIL, PROPOSED, PROPOSAL, ROOT = (Place(stage, AFTER_LAYERS, name) for stage, name in (
    ("trunk", "tail"), ("extend", "final"), ("extend", "pick"), ("trunk", "root")))  # fmt: skip
# Rows of the memory, by field and layer: the place whose rows they are.
FED = {("keys", 1): Place("trunk", 1, "key"), ("values", 1): Place("trunk", 1, "value"),
       **{(f"draft_{name}s", layer): Place(stage, layer, name) for name in ("key", "value")
          for layer, stage in ((0, "extend"), (1, "extend.1"))}}  # fmt: skip


def numbers(*shape: int, of: int = 0) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + 100 * of + 1


def state(length: int, of: int, **more: Any) -> RequestState:
    """A request: a conv with 4 inputs and 2 channels, a recurrent state, attention, two MTP layers."""
    caches = {(field, layer): numbers(length, 1, 2, of=of + n) for n, (field, layer) in enumerate(FED)}
    by_field = {field: {layer: x for (its, layer), x in caches.items() if its == field} for field, _ in FED}
    blocks = {0: numbers(2, 4, of=of + 7)}, {0: numbers(1, 2, 2, of=of + 8)}
    made = RequestState(length, 7, 8, numbers(2, of=of), *blocks, **by_field, tail={
        AFTER_LAYERS: numbers(min(length, 1), 2, of=of + 9)})  # fmt: skip
    return replace(made, **more)


def copied(one: RequestState) -> RequestState:
    return replace(one, **{name: {layer: x.clone() for layer, x in getattr(one, name).items()} for name in MEMORY})


def span(request: str, kind: Any, begin: int, count: int, start: int, **more: Any) -> RowSpan:
    return RowSpan(request, kind, begin, count, start, **{"logit_begin": 0, "logit_rows": 0, **more})


# Three rows of a window of "b", a decode of "d", the first three rows of "a".
TRUNK = {"b": span("b", "verify", 0, 3, 5), "d": span("d", "decode", 3, 1, 4), "a": span("a", "prefill", 4, 3, 0)}
EXTEND = [span("d", "decode", 0, 1, 4, logit_rows=1), span("a", "prefill", 1, 3, 0, logit_begin=1)]
COMMIT = [span("b", "commit", 0, 2, 5, nodes=(0, 2), logit_rows=1)]
BEFORE = {"a": state(0, 1), "b": state(5, 20), "c": state(2, 40), "d": state(4, 60)}


def places(extend: int) -> dict[Place, torch.Tensor]:
    """Rows of the target and of the draft head."""
    found = {QKV: numbers(7, 2, of=81), FINAL: numbers(7, 2, of=82), PROPOSED: numbers(extend, 2, of=83),
             PROPOSAL: torch.tensor([33])}  # fmt: skip
    for n, place in enumerate(FED.values()):
        found[place] = numbers(7 if place.stage == "trunk" else extend, 1, 2, of=84 + n)
    return found


def after(name: str, taken: list[int], extend: RowSpan, shown: dict[Place, torch.Tensor]) -> RequestState:
    """The memory of a request after it took these rows of a forward."""
    before, rows = BEFORE[name], [TRUNK[name].begin + row for row in taken]
    window = [before.conv[0][:, n] * (before.length > 0) for n in range(4)] + [shown[QKV][row] for row in rows]
    grown: dict[str, dict[int, torch.Tensor]] = {}
    for (field, layer), place in FED.items():
        mine = rows if place.stage == "trunk" else range(extend.begin, extend.begin + extend.count)
        lines = [*getattr(before, field)[layer], *(shown[place][row] for row in mine)]
        grown.setdefault(field, {})[layer] = torch.stack(lines)
    root = 5 if extend.logit_rows else None
    return replace(before, length=before.length + len(taken), root=root, conv={0: torch.stack(window[-4:], 1)},
                   state={0: before.state[0] + 1}, tail={AFTER_LAYERS: shown[FINAL][rows[-1:]]},
                   proposal=33 if root else None,
                   proposal_hidden=shown[PROPOSED][extend.begin + extend.count - 1] if root else None, **grown)


class World:
    """An event with the right memory after it."""

    def __init__(self, patch: pytest.MonkeyPatch, event: Any, extend: list[RowSpan], **given: Any) -> None:
        shown = places(sum(span.count for span in extend))
        self.after = {name: copied(one) for name, one in BEFORE.items()}
        for one in extend:
            self.after[one.request] = after(one.request, list(one.nodes) or [*range(one.count)], one, shown)
        side = SimpleNamespace(places=shown, before=BEFORE)
        self.forward = SimpleNamespace(spans=TRUNK, subject=side, windows={}, parents={}, tokens={})
        patch.setattr(u, "last_forward", lambda context: self.forward)
        patch.setattr(u, "row_spans", lambda context, stage: extend if stage.startswith("extend") else [])
        roots = {one.request: 5 if one.logit_rows else None for one in extend}
        expected = {"roots_after": roots, "flying": frozenset(), "slots_after": {}, "slots_before": {}, "prefixes": {},
                    "request_rows_after": {}, **given.pop("expected", {})}  # fmt: skip
        subject = {"places": shown, "before": BEFORE, "after": self.after, "tracked": {}, **given.pop("subject", {})}
        self.context: Any = SimpleNamespace(**{
            "index": 3, "kind": event.__struct_config__.tag, "event": event, "expected": SimpleNamespace(**expected),
            "subject": SimpleNamespace(**subject), "shown": Shown(whole=True), "log": SimpleNamespace(poison=None),
            "changes": SimpleNamespace(bytes=9, trespasses=(), units=4), "ranks": None,
            "earlier": SimpleNamespace(saved={}, preempted={}, dropped={}), **given})  # fmt: skip

    def told(self, check: u.Bytes | None = None) -> list[Any]:
        """(request, place) of all that is compared, request by request; with the problem, if there is one"""
        found = sorted((check or u.Bytes())(self.context), key=lambda one: getattr(one, "request", "") or "")
        return [one.reason if isinstance(one, Skipped) else (one.request, one.place, *[one.diagnosis] * bool(one.worst))
                for one in found]  # fmt: skip

    def each_spoiled(self, right: list[Any]) -> None:
        """Spoil one number of every part in the memory after the event: the check finds this part alone."""
        right.sort(key=lambda one: one[0] or "")
        assert self.told() == right
        for name, kept in list(self.after.items()):
            for place, part in kept.parts():
                if not part.numel():
                    continue
                last = tuple(size - 1 for size in part.shape)
                value, at = part[last].clone(), (name, place)
                part[last] = -5
                size = 4 * part.numel()
                says = f" of {size} bytes differ, the first at {last}"
                wrong = [one for one, was in zip(self.told(), right, strict=True) if one != was]
                assert [one[:2] for one in wrong] == [at] * (at in right)
                assert all(one[2].endswith(says) and 4 >= int(one[2].split()[0]) >= 1 for one in wrong), wrong
                part[last] = value


def parts_of(name: str, *but: str) -> list[tuple[str, Place]]:
    return [(name, place) for place, _ in BEFORE["b"].parts() if place.component not in but]


def compared(name: str) -> list[Place]:
    return [place for place, part in BEFORE[name].parts() if part.numel()]


FIRST = (None, Place("trunk", STAGE_LEVEL, "state"))
IDLE = [PROPOSED, PROPOSAL, ROOT]


def grown_parts(name: str, root: bool) -> list[tuple[str, Place]]:
    """In the order of the check: window, caches, the final rows, and what the draft head proposes."""
    order = [memory_place("conv", 0), *(memory_place(*one) for one in FED), TAIL]
    return [(name, place) for place in [*order, *([PROPOSED, PROPOSAL] if root else [])]]


def test_a_forward_adds_its_rows_and_changes_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    event = e.Forward((e.Row("b", "verify"), e.Row("d", "decode"), e.Row("a", "prefill", 2)))
    world = World(monkeypatch, event, EXTEND)
    idle = [*parts_of("c"), *(("c", place) for place in IDLE)]
    flying = parts_of("b", "conv", "state")
    world.each_spoiled([FIRST, *flying, *grown_parts("d", True), *grown_parts("a", False), *idle])
    assert world.after["a"].conv[0][:, 0].tolist() == [0, 0]  # a new request does not read what its slot had
    world.after["d"] = replace(world.after["d"], proposal=34, proposal_hidden=numbers(2))
    world.after["c"] = replace(world.after["c"], root=1)
    assert [one[:2] for one in world.told() if len(one) > 2] == [("c", ROOT), ("d", PROPOSED), ("d", PROPOSAL)]
    world.context.shown = Shown(whole=False, hidden={"b": "x", "c": "y"})
    found = world.told()
    assert {one[0] for one in found} == {"d", "a"}
    world.context.shown, world.context.expected.flying = Shown(), frozenset({"c"})
    assert {one[0] for one in world.told()} == {None, "b", "d", "a"}


def test_rows_that_are_not_shown_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without rows, with too few rows for the accepted nodes, and of shapes that cannot be joined."""
    event = e.Commit(("b",))
    world = World(monkeypatch, event, COMMIT)
    others = [(name, place) for name in "acd" for place in [*compared(name), *IDLE]]
    world.each_spoiled([FIRST, *grown_parts("b", True), *others])
    shown = world.context.subject.places
    conv, final, keys = ("b", memory_place("conv", 0)), ("b", TAIL), ("b", memory_place("keys", 1))
    head = ("b", memory_place("draft_keys", 1))
    for place, rows, gone in ((QKV, None, conv), (QKV, 2, conv), (FINAL, 2, final), (FED["keys", 1], 2, keys),
                              (FED["draft_keys", 1], None, head)):  # fmt: skip
        whole = shown.pop(place)
        if rows is not None:
            shown[place] = whole[:rows]
        assert set(world.told()) == {FIRST, *grown_parts("b", True), *others} - {gone}, place
        shown[place] = whole
    for place, at in ((FED["keys", 1], keys), (FED["draft_keys", 1], head)):
        whole = shown[place]
        shown[place] = numbers(6, 3, 2)
        (wrong,) = (one for one in world.told() if len(one) > 2)
        assert wrong[:2] == at and wrong[2] == "has (7, 1, 2); expected (2, 3, 2)"
        shown[place] = whole
    whole = shown[QKV]
    shown[QKV] = numbers(6, 3)
    (wrong,) = (one for one in world.told() if len(one) > 2)
    assert wrong[:2] == conv
    shown[QKV] = whole
    one = [*world.context.subject.after["b"].tail]
    world.after["b"] = replace(world.after["b"], tail={})
    assert one == [AFTER_LAYERS] and set(world.told()) == {FIRST, *grown_parts("b", True), *others} - {final}
    world.after["b"] = replace(world.after["b"], conv={0: numbers(2, 4).double()}, keys={})
    assert [one[2] for one in world.told() if len(one) > 2] == [
        "is torch.float64; expected torch.float32", "has nothing; expected (7, 1, 2)"]  # fmt: skip
    assert [one.worst for one in u.Bytes()(world.context) if isinstance(one, Comparison) and one.worst] == [1.0, 1.0]
    none = torch.zeros(2, 0)
    monkeypatch.setitem(BEFORE, "b", replace(BEFORE["b"], conv={0: none}))
    world.after["b"] = replace(world.after["b"], conv={0: none})
    assert "a conv of width 1 keeps no inputs: no window is compared" in world.told()
    world.forward.spans = {}
    assert {one[0] for one in world.told()} == {None, "a", "c", "d"}


def test_bytes_of_pools_change_with_permission_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    units = torch.zeros(4, 6)
    region = e.Region("pool", 1, "slot", units, means=Meaning("state"), rank=1)
    says = "changed in {}pool slot {}, which this event may not write"
    for trespass, due, slot in (
        (Trespass(region, 2, 1, False), f"1 byte {says.format('', 2)}", 2),
        (Trespass(region, 0, 3, True), f"3 bytes {says.format('the red zone next to ', 0)}", 0),
        (Trespass(region, 2, 8, False, (3, 5)),
         f"8 bytes {says.format('', 2)}: as if slots were 3 or 5 elements apart; they are 6 apart", 2),
    ):  # fmt: skip
        world = World(monkeypatch, e.SetNumSteps(1), [], expected={"slots_after": {"b": 2}})
        world.context.changes.trespasses = (trespass,)
        (found, *rest) = u.Bytes()(world.context)
        assert isinstance(found, Comparison) and (found.diagnosis, found.slot) == (due, slot)
        assert found.rank == 1 and found.worst == found.elements == trespass.bytes
        assert found.request == ("b" if slot == 2 else None) and found.place == Place("trunk", 1, "state")
        assert all(one.agrees for one in rest if isinstance(one, Comparison))
    world = World(monkeypatch, e.Idle(), [])
    (first, *_) = u.Bytes()(world.context)
    assert isinstance(first, Comparison) and (first.elements, first.blocks, first.worst) == (9, 4, 0.0)
    world.context.changes.bytes = 0
    assert world.told()[0] == "no pool bytes were watched: this engine does not show its memory"
    world.context.shown = Shown(whole=False)
    assert world.told() == [(name, place) for name in "abcd" for place in [*compared(name), PROPOSED]]


def test_a_change_of_the_step_count_reads_memory_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, e.SetNumSteps(1), [])
    assert all(len(one) == 2 for one in world.told())
    world.after["b"] = replace(BEFORE["b"], conv={0: BEFORE["b"].conv[0] * 2}, keys={})
    found = [one for one in world.told() if len(one) > 2]
    assert [one[:2] for one in found] == [("b", memory_place("conv", 0)), ("b", memory_place("keys", 1))]
    assert found[0][2].startswith("changed with the step count, as if a mark or a cursor was not carried over: ")
    assert found[0][2].endswith("the first at (0, 0)") and found[1][2] == "has nothing; expected (5, 1, 2)"
    del world.after["b"]
    assert {one[0] for one in world.told()} == {None, "a", "c", "d"}


# -- copies ----------------------------------------------------------------------------------------------------


def kept(whole: RequestState, **more: Any) -> Any:
    return SimpleNamespace(state=whole, sent=None, ranks=None, **more)


def test_memory_comes_back_as_it_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Request "b" is loaded from a copy, or resumed; the other requests keep theirs."""
    idle = [("c", place) for place in [*dict(BEFORE["c"].parts()), *IDLE]]
    for event, earlier in ((e.Load("b", "k"), {"saved": {"k": kept(BEFORE["b"])}}),
                           (e.Resume("b"), {"preempted": {"b": kept(BEFORE["b"])}})):  # fmt: skip
        world = World(monkeypatch, event, [])
        world.context.earlier = SimpleNamespace(**{"saved": {}, "preempted": {}, "dropped": {}, **earlier})
        back = [("b", place) for place in [*dict(BEFORE["b"].parts()), *IDLE]]
        assert [one for one in world.told() if one[0] == "b"] == back
        assert [one for one in world.told() if one[0] == "c"] == idle
        parts = {memory_place("draft_keys", 0): replace(BEFORE["b"], draft_keys={
            **BEFORE["b"].draft_keys, 0: BEFORE["b"].draft_keys[0] * torch.tensor([1, 1, 1, 9, 1]).view(5, 1, 1)}),
            memory_place("state", 0): replace(BEFORE["b"], state={0: BEFORE["b"].state[0] * 2})}  # fmt: skip
        came = "comes back different from what was saved: "
        draft = f"{came}the target's memory came back, the draft KV is valid only for its first 3 of 5 positions: "
        for (place, wrong), says in zip(parts.items(), (draft, came), strict=True):
            world.after["b"] = wrong
            (found,) = (one for one in world.told() if len(one) > 2)
            assert found[:2] == ("b", place) and found[2].startswith(says)
            assert found[2].count("came") == says.count("came")
        world.after["b"] = BEFORE["b"]
        for shown in (Shown(rebuilt=frozenset({"b"})), Shown(hidden={"b": "x"})):
            world.context.shown = shown
            assert not [one for one in world.told() if one[0] == "b"]
        world.context.shown, world.context.earlier = Shown(), SimpleNamespace(saved={}, preempted={}, dropped={})
        assert not [one for one in world.told() if one[0] == "b"]


def test_draft_kv_is_wrong_alone_if_all_of_the_target_came_back() -> None:
    """Three positions of the draft head's keys. A prefix has another last row, and a wrong target says nothing."""
    right = state(3, 5)
    place, other = memory_place("draft_keys", 0), memory_place("keys", 1)
    factors = {(1, 1, 2): "is valid only for its first 2 of 3 positions", (2, 1, 1): "did not", (1, 2, 1):
               "is valid only for its first 1 of 3 positions"}  # fmt: skip
    for factor, says in factors.items():
        only = torch.stack((torch.ones(3), torch.tensor(factor)), 1).view(3, 1, 2)  # one of two channels
        wrong = {**right.draft_keys, 0: right.draft_keys[0] * only}
        found, event = replace(right, draft_keys=wrong), e.Load("b", "k")
        given: Any = SimpleNamespace(event=event, subject=SimpleNamespace(after={"b": found}), earlier=SimpleNamespace(
            saved={"k": kept(right)}, preempted={}))  # fmt: skip
        assert u.draft_alone(given, place) == f"the target's memory came back, the draft KV {says}: "
        assert u.draft_alone(given, other) == u.draft_alone(given, PROPOSED) == ""
        for name in ("state", "keys"):
            layers = {layer: its * 2 for layer, its in getattr(right, name).items()}
            given.subject.after["b"] = replace(found, **{name: layers})
            assert u.draft_alone(given, place) == ""
        given.subject.after["b"] = replace(found, state={})
        assert u.draft_alone(given, place)
        given.earlier.saved = {"k": kept(replace(right, final=numbers(2)))}
        assert u.draft_alone(given, place) == ""
        given.earlier.saved = {}
        assert u.draft_alone(given, place) == ""
    for found in (replace(right, draft_keys={}), replace(right, draft_keys={0: numbers(2, 1, 2)})):
        given.subject.after, given.earlier.saved = {"b": found}, {"k": kept(right)}
        assert u.draft_alone(given, place).endswith("the draft KV did not: ")
    given.subject.after = {}
    assert u.draft_alone(given, place) == ""


def prefix(length: int, whole: RequestState, final: torch.Tensor, **more: Any) -> RequestState:
    """A prefix: MTP layer i has 1 + i rows fewer."""
    cut = {field: {layer: x[: length - (1 + layer) * ("draft" in field)] for layer, x in getattr(whole, field).items()}
           for field in ("keys", "values", "draft_keys", "draft_values")}  # fmt: skip
    return replace(whole, length=length, root=None, proposal=None, proposal_hidden=None, final=final, **cut, **more)


def test_a_prefix_has_the_memory_of_its_request_at_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt of "a" reaches 3 tokens, where its prefix ends too; and a window of "b", whose prefix ends inside."""
    event = e.Forward((e.Row("b", "verify"), e.Row("d", "decode"), e.Row("a", "prefill", 3, track="p")))
    world = World(monkeypatch, event, EXTEND, expected={"prefixes": {"p": 3}})
    shown, whole = world.context.subject.places, world.after["a"]
    right = prefix(3, whole, shown[FINAL][6], tail={AFTER_LAYERS: shown[FINAL][5:6]})
    world.context.subject.tracked = {"p": right}

    def mine() -> list[Any]:
        return [one for one in world.told() if one[0] == "a"][len(grown_parts("a", False)) :]

    caches = [memory_place(*one) for one in FED]
    blocks = [memory_place("conv", 0), memory_place("state", 0)]
    assert mine() == [("a", place) for place in (*blocks, *caches, FINAL, TAIL)]
    for field, layer in (("keys", 1), ("draft_keys", 0), ("state", 0)):
        wrong = {**getattr(right, field), layer: getattr(right, field)[layer] + 1}
        world.context.subject.tracked = {"p": replace(right, **{field: wrong})}
        (found,) = (one for one in mine() if len(one) > 2)
        assert found[1] == memory_place(field, layer) and found[2].startswith('tracked prefix "p": ')
    longer = {**right.draft_keys, 0: whole.draft_keys[0]}
    world.context.subject.tracked = {"p": replace(right, draft_keys=longer)}
    (found,) = (one for one in mine() if len(one) > 2)
    assert found[2].endswith("keeps the draft head's last row, which depends on the token after the prefix")
    for wrong in (replace(right, final=shown[FINAL][4]), replace(right, tail={AFTER_LAYERS: shown[FINAL][4:6]})):
        world.context.subject.tracked = {"p": wrong}
        assert len([one for one in mine() if len(one) > 2]) == 1
    # A prefix that has a part which its request lacks; a part of the request that is empty, as in no prefix.
    more = replace(right, state={**right.state, 5: numbers(1, 2, 2)})
    world.context.subject.tracked = {"p": more}
    assert not [one for one in mine() if len(one) > 2]
    world.after["a"] = replace(whole, state={**whole.state, 5: torch.zeros(0), 6: torch.zeros(0)})
    ((_, place, says),) = (one for one in mine() if len(one) > 2)
    assert place == memory_place("state", 5) and says.endswith("has (1, 2, 2); expected (0,)")
    assert len(mine()) == 2 + len(caches) + 2 + 1
    world.after["a"] = whole
    # With one MTP layer there are no rows before the final one.
    one_layer = {name: {0: getattr(whole, name)[0]} for name in ("draft_keys", "draft_values")}
    world.after["a"] = replace(whole, tail={}, **one_layer)
    cut = {name: {0: getattr(right, name)[0]} for name in one_layer}
    world.context.subject.tracked = {"p": replace(right, tail={}, **cut)}
    assert all(len(one) == 2 for one in mine()) and ("a", TAIL) not in mine() and ("a", FINAL) in mine()
    world.after["a"] = whole
    # The state is the request's own, rounded once as declared.
    narrow = u.Bytes(SimpleNamespace(rounds={"kept": SCALED_KEPT}))  # type: ignore[arg-type]
    rounded = torch.tensor([[[row[0], row[1]] for row in whole.state[0][0].tolist()]])
    for row in rounded[0]:
        row[0] = round(float(row[0] / (row[1] / 127))) * (row[1] / 127)
    for kept_state, good in ((rounded, True), (whole.state[0], False)):
        world.context.subject.tracked = {"p": replace(right, state={0: kept_state})}
        (result,) = (one for one in narrow(world.context) if isinstance(one, Comparison)
                     and one.place == memory_place("state", 0) and one.request == "a")  # fmt: skip
        assert (result.sides is None or torch.allclose(result.sides.found, result.sides.right)) is good
    for tracked, due in (({}, {"p": 3}), ({"p": right}, {}), ({"p": right}, {"p": 1})):
        world.context.subject.tracked, world.context.expected.prefixes = tracked, due
        assert mine() == []

    commit = e.Commit(("b",), (e.Path((2,), 1),), ("q",))
    world = World(monkeypatch, commit, COMMIT, expected={"prefixes": {"q": 6}})
    shown, whole = world.context.subject.places, world.after["b"]
    window = torch.cat((BEFORE["b"].conv[0], shown[QKV][:1].T), 1)[:, 1:]
    right = prefix(6, whole, shown[FINAL][0], conv={0: window}, tail={AFTER_LAYERS: BEFORE["b"].tail[AFTER_LAYERS]})
    world.context.subject.tracked = {"q": right}
    found = [one for one in world.told() if one[0] == "b"][len(grown_parts("b", True)) :]
    every = [memory_place(*one) for one in FED]
    assert found == [("b", place) for place in (*every, memory_place("conv", 0), FINAL, TAIL)]
    for place, count, gone in ((QKV, 0, memory_place("conv", 0)), (FINAL, 0, FINAL)):
        rows = shown.pop(place)
        shown[place] = rows[:count]
        assert ("b", gone) not in [one for one in world.told() if one[0] == "b"][len(grown_parts("b", True)) - 1 :]
        shown[place] = rows
    world.context.subject.tracked = {"q": replace(right, state={})}
    assert ("b", memory_place("state", 0)) not in world.told()
    world.context.subject.tracked = {"q": replace(right, conv={0: whole.conv[0]}, final=shown[FINAL][2])}
    wrong = [one[1] for one in world.told() if one[0] == "b" and len(one) > 2]
    assert wrong == [memory_place("conv", 0), FINAL]
    # With states in int8 the numbers of this prefix must be on that grid, and of one at the end be the request's own.
    narrow = u.Bytes(SimpleNamespace(rounds={"kept": SCALED_KEPT}))  # type: ignore[arg-type]
    state_place = ("b", memory_place("state", 0))
    for first, whole_numbers in ((1.0, True), (1.5, False)):
        grid = torch.tensor([[[127.0, first], [127.0, 2.0]]])
        world.context.subject.tracked = {"q": replace(right, state={0: grid})}
        (found,) = (one for one in world.told(narrow) if one[:2] == state_place)
        assert (len(found) == 2) is whole_numbers
        assert whole_numbers or found[2].endswith("; its numbers are not numbers of the declared storage")


# -- known wrong contents ---------------------------------------------------------------------------------------


def wrongs_of(found: Iterable[Any], place: Place, request: str | None = "b") -> list[str]:
    """The sentences of the known wrong contents of a finding."""
    (one,) = (one for one in found if isinstance(one, Comparison) and one.place == place and one.worst
              and one.request == request)  # fmt: skip
    assert one.sides is not None
    return [known.says for known, _ in one.sides.wrongs()]


def test_wrong_windows_are_named_by_the_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit of a tree, a decode next to other requests, and a prefix inside a path."""
    conv = memory_place("conv", 0)
    world = World(monkeypatch, e.Commit(("b",)), COMMIT)
    world.after["b"].conv[0][0, 0] = -1
    world.forward.spans = {"b": TRUNK["b"]}
    for parents, node in (((-1, 0, 0), True), ((-1, 0, 1), False)):
        world.forward.parents = {"b": parents}
        says = wrongs_of(u.Bytes()(world.context), conv)
        assert "holds the window after 1 token; 2 tokens were accepted" in says
        assert any("node" in each for each in says) is node
    event = e.Forward((e.Row("b", "verify"), e.Row("d", "decode"), e.Row("a", "prefill", 2)))
    world = World(monkeypatch, event, EXTEND)
    world.forward.parents = {"d": (-1, 0, 0)}
    world.after["d"].conv[0][0, 0] = -1
    says = wrongs_of(u.Bytes()(world.context), conv, "d")
    assert "holds the window from before the step; 1 token was given" in says
    assert {each.split('"')[1] for each in says if '"' in each} == {"a", "b"}
    assert not any("node" in each for each in says)
    others = {name: window for name, window, _ in u._others(world.forward, "d", conv)}  # type: ignore[arg-type]
    assert others["a"].tolist() == [[0.0] * 4] * 2 and torch.equal(others["b"], BEFORE["b"].conv[0])
    world.context.subject.places.pop(QKV)
    assert not [*u._others(world.forward, "d", conv)]  # type: ignore[arg-type]


def test_the_rounding_of_prefixes_names_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """States are kept in int8. Other prefixes have states, too; a copy of a request is none of them."""
    narrow = u.Bytes(SimpleNamespace(rounds={"kept": SCALED_KEPT, "chunk": torch.bfloat16}))  # type: ignore[arg-type]
    place, keys = memory_place("state", 0), memory_place("keys", 1)
    saved = {"mine": kept(state(2, 3, final=numbers(2))), "other": kept(state(2, 4, final=numbers(2))),
             "copy": kept(state(2, 5)), "none": kept(state(2, 6, final=numbers(2), state={}))}  # fmt: skip
    world = World(monkeypatch, e.Idle(), [])
    world.context.earlier.saved = saved
    assert [*narrow._other_states(world.context, "mine", place)] == ["other"]
    assert [*narrow._other_states(world.context, "", place)] == ["mine", "other"]
    running = "is rounded as in a prefix; a request's own state is not"
    right = BEFORE["b"].state[0]
    said = [(known.says, wrong) for known, wrong in narrow._misread(world.context, place, right)]
    assert [says for says, _ in said] == [running] * 2
    commit, forward = (wrong for _, wrong in said)
    assert not torch.equal(commit, forward) and torch.equal(forward, u.kept_states(
        right, narrow.oracle.rounds, forward=True))  # type: ignore[union-attr]  # fmt: skip
    assert not [*narrow._misread(world.context, keys, right)] and not [*u.Bytes()._misread(world.context, place, right)]
    load = World(monkeypatch, e.Load("b", "mine"), [])
    load.context.earlier.saved = saved
    said = [known.says for known, _ in narrow._misread(load.context, place, right)]
    assert said[:2] == [running] * 2 and 'is read with the scales of "other"' in said and len(said) > 3
    assert 'is read with the scales of "mine"' not in said
    load.context.earlier.saved = {"mine": kept(state(2, 3))}
    assert [known.says for known, _ in narrow._misread(load.context, place, right)] == [running] * 2
    sent = SimpleNamespace(state=state(2, 3), sent=state(2, 3), ranks=None)
    load.context.earlier.saved = {"mine": sent}
    first, *_ = u.Bytes()._misread(load.context, place, right)
    assert first[0].says == ZERO.sentence
    # Moves of a prefix.
    fetch = World(monkeypatch, e.Fetch("mine"), [])
    fetch.context.earlier.saved = saved
    for at, scales in ((place, True), (keys, False)):
        said = [known.says for known, _ in narrow._of_other_moves(fetch.context, "mine", at, right, 2)]
        assert ('is read with the scales of "other"' in said) is scales and 'holds what is kept as "other"' in said
    # What a prefix copies is rounded if it has two axes.
    for shape, due in (((2,), 0), ((2, 3), 1), ((0, 3), 0), ((1, 2, 2), 1)):
        nowhere = Place("trunk", 9, "keys")
        assert len([*narrow._in_its_place(world.context, "z", nowhere, numbers(*shape))]) == due


def test_the_draft_head_ends_a_prefix_that_a_load_brings_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix of 4 tokens; at its load each of two MTP layers computes rows from position 2 on, and the tail moves."""
    spans = [span("a", "prefill", 0, 2, 2), span("z", "prefill", 2, 1, 0)]
    shown = places(3)
    monkeypatch.setattr(u, "row_spans", lambda context, stage: spans if stage == "extend" else [])
    given: Any = SimpleNamespace(subject=SimpleNamespace(places=shown))
    whole = prefix(4, state(4, 5), numbers(2, of=9), tail={AFTER_LAYERS: numbers(1, 2, of=8)})
    found = u.Bytes()._extended(given, whole)
    for (field, layer), place in FED.items():
        lines = getattr(whole, field)[layer]
        due = torch.cat((lines[:2], shown[place][:2])) if "draft" in field else lines
        assert torch.equal(getattr(found, field)[layer], due), (field, layer)
    assert found.tail[AFTER_LAYERS].tolist() == [numbers(2, of=9).tolist()] and whole.final is not None
    one = replace(whole, draft_keys={0: whole.draft_keys[0]}, draft_values={0: whole.draft_values[0]}, tail={})
    assert u.Bytes()._extended(given, one).tail == {}
    assert u.Bytes()._extended(given, replace(whole, final=None)).draft_keys is whole.draft_keys
    spans.clear()
    assert u.Bytes()._extended(given, whole) is whole
    stored = u.Bytes(SimpleNamespace(rounds={"kept": SCALED_KEPT, "state": torch.bfloat16}))  # type: ignore[arg-type]
    assert stored._extended(given, whole).state[0].dtype == torch.bfloat16
    assert stored._extended(given, replace(whole, final=None)).state[0].dtype == torch.float32
