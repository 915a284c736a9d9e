"""The search for a cause, the ops of places, the verdict and the constants of tiers, alone on values made by hand.

Each test says beforehand which change of a run removes which findings. Leaves out: runs of an engine
(`test_ladder.py`), and explanations of a finding (`test_explanation_fit.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.diagnose import confirm_cause
from instep.diagnose.confirm_cause import locate
from instep.run.run_variants import Patch, Variant
from instep.verdict import Comparison, Located, Tier
from instep_optimized import load
from instep_reference.contract.engine import Commit, Draft, Forward
from instep_reference.contract.engine import Row as BatchRow
from instep_reference.contract.errors import BadInput
from instep_reference.contract.place_names import Place

UNUSED = frozenset({"kda", "mamba2", "lightning", "fused_gdn", "short_conv", "biased_conv", "plan_ring"})
CORE, UPDATE, MIXED, STATE, CONV, KEYS = (
    Place("trunk", 1, name) for name in ("core", "update", "mixed", "state", "conv", "keys"))
DECODE = Forward((BatchRow("a", "decode"), BatchRow("b", "decode")))
OF_B = Forward((BatchRow("b", "decode"),))
# Event 4 is a commit of a window that event 2 verified; events 6, 8 and 13 run request "a" again.
EVENTS = (DECODE, DECODE, DECODE, Draft(("a",)), Commit(("a", "b")), Draft(("a", "b")), DECODE, OF_B, DECODE, OF_B,
          OF_B,
          OF_B, OF_B, DECODE)  # fmt: skip


def found(place: Place = CORE, event: int = 4, check: str = "derived", request: str | None = "a") -> Comparison:
    return Comparison(check, Tier.DERIVED, event, "commit", place, elements=1, worst=2.0, allowed=1.0, request=request)


def side(*places: Place, size: int = 2, **after: Any) -> Any:
    return SimpleNamespace(places={place: torch.zeros(size) for place in places}, after=after)


def climbed(
    findings: Sequence[Comparison], left: Callable[..., list[Comparison]], *, shown: Sequence[Place] = (),
    wrote: Any = (), ops: Any = None, events: Any = EVENTS, last: Any = None, compared: Any = (), **setting: Any,
) -> tuple[Located, list[dict[str, Any]]]:
    """The result, and what was run. left(variant): the findings of a further run; shown: places of both sides."""
    ran = list[dict[str, Any]]()

    def run(**given: Any) -> Any:
        ran.append(given)
        return SimpleNamespace(verdict=SimpleNamespace(findings=left(given["variant"])))

    options = {"graphs": False, "stress": None, "led": False, "strategy": "rerun", "conv": "widened",
               "subject": lambda: ops, **setting}  # fmt: skip
    replay: Any = SimpleNamespace(run=run, trace=SimpleNamespace(events=events), plan=SimpleNamespace(
        setting=SimpleNamespace(**options), checkpoint=SimpleNamespace(config=None)))  # fmt: skip
    if last is None:
        last = SimpleNamespace(index=findings[0].event, subject=side(*shown), truth=side(*shown), rounded=None,
                               log=SimpleNamespace(wrote=wrote))  # fmt: skip
    outcome: Any = SimpleNamespace(tiers={Tier.DERIVED}, last=last, verdict=SimpleNamespace(
        findings=[*findings], compared=[*compared, *findings]))  # fmt: skip
    return locate(replay, outcome, {1}), ran


@pytest.fixture(autouse=True)
def _used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confirm_cause, "unused_by", lambda config: UNUSED)


def told(of: Located) -> tuple[Any, ...]:
    return of.cause, of.op, of.says


@pytest.mark.parametrize(("check", "place", "result"), [
    ("one_sided", CORE, ("place", "gdn", "cause: op `gdn` (this check compares every event from the op's own inputs)")),
    ("one_sided", Place("trunk", 1, "nothing"), (
        "place", None, "cause: the op that computes it (this check compares every event from the op's own inputs)")),
    ("agreement", CORE, ("place", None, "cause: the ranks differ (this check compares ranks, not results)")),
    ("collectives", CORE, ("place", None, "cause: the ranks differ (this check compares ranks, not results)")),
    ("contracts", CORE, ("place", "gdn", "cause: the call itself (this check looks at the call, not at its result)")),
    ("leaks", Place("trunk", 1, "nothing"), (
        "place", None, "cause: the call itself (this check looks at the call, not at its result)")),
    ("derived", CORE, ("unconfirmed", None, "not confirmed: the reference has no tensor that could replace it")),
    ("serves", CORE, ("unconfirmed", None, "not confirmed: the engine raised an error")),
])  # fmt: skip
def test_some_checks_show_their_cause_themselves(check: str, place: Place, result: tuple[Any, ...]) -> None:
    for first in (found(place, check=check), found(place, check=check, event=3)):
        of, ran = climbed([first, found(KEYS)], lambda variant: [])
        assert (told(of), of.options, of.hints, of.replays, of.finding) == (result, (), (), 0, first) and not ran


@pytest.mark.parametrize(("place", "hint"), [(None, ""), (CORE, ""), (STATE, "the first finding is trunk.1.state@5")])
def test_stress_and_graphs_are_taken_away_first(place: Place | None, hint: str) -> None:
    """Runs after them are calm, if the finding needs no stress, and always eager."""
    left = [] if place is None else [found(place, event=5), found(CORE)]
    one, other = found(check="contracts"), found(check="contracts", event=0)
    for setting, cause, says, without in (
        ({"stress": "poison"}, "stress", "cause: work that depends on time or on unowned memory, which --stress poison "
                                         "shows (without it, events 0 to 4 agree)", "without --stress, "),
        ({"graphs": True}, "graph", "cause: the CUDA graph (run eagerly, events 0 to 4 agree)", "run eagerly, "),
    ):  # fmt: skip
        of, ran = climbed([one], lambda variant: left, **setting)
        assert (of.cause, of.replays, len(ran)) == (cause if place is None else "place", 1, 1)
        assert place is not None or told(of) == (cause, None, says)
        assert of.hints == (without + hint,) * bool(hint)
        assert ran == [{"until": 4, "layers": {1}, "judged_from": 2, "tiers": {Tier.DERIVED}, "variant": Variant(
            eager=cause == "graph", calm=cause == "stress")}]  # fmt: skip
        if place is None:
            assert "event 0 agrees)" in climbed([other], lambda variant: [], **setting)[0].says
        else:
            of, ran = climbed([found()], lambda variant: left, shown=[CORE], **setting)
            assert [(one["variant"].eager, one["variant"].calm) for one in ran[1:]] == [
                (cause == "graph", cause == "stress" and place == CORE)] * (len(ran) - 1) and len(ran) > 1  # fmt: skip
    if place == CORE:
        of, ran = climbed([one], lambda variant: left, graphs=True, stress="poison")
        assert of.replays == 2 and [(one["variant"].eager, one["variant"].calm) for one in ran] == [
            (False, True), (True, True)]  # fmt: skip


@pytest.mark.parametrize(("event", "begin"), [(4, 2), (3, 3), (2, 2), (1, 1), (0, 0)])
def test_a_commit_is_judged_from_its_verify(event: int, begin: int) -> None:
    _, ran = climbed([found(event=event)], lambda variant: [], graphs=True)
    assert ran[0]["judged_from"] == begin
    for first, start in ((Commit(("a",)), 1), (DECODE, 0)):
        events = (first, Commit(("a",)), DECODE)
        _, ran = climbed([found(event=1)], lambda variant: [], graphs=True, events=events)
        assert ran[0]["judged_from"] == start


def test_a_run_that_is_not_possible_removes_nothing() -> None:
    def refuses(variant: Variant) -> list[Comparison]:
        raise BadInput("--swap", found="it", expected="another")

    of, ran = climbed([found()], refuses, shown=[CORE, UPDATE])
    assert of.replays == len(ran) == 2 and told(of) == (
        "unconfirmed", None, "not confirmed: no run with the reference's core and update is possible")
    of, ran = climbed([found(STATE)], refuses)
    assert of.replays == 1 and of.says == "not confirmed: no run with the reference's state is possible"
    nothing = found(Place("trunk", 1, "nothing"))
    of, ran = climbed([nothing], refuses, ops=with_ops("gdn"))
    assert of.replays == 1 and of.says == "not confirmed: no run with all ops of `plain` is possible"
    of, ran = climbed([found()], lambda variant: refuses(variant) if variant.swap else [nothing], ops=with_ops("gdn"),
                      shown=[CORE])  # fmt: skip
    assert of.says == "not confirmed: with the reference's core, trunk.1.nothing@4 still disagrees", "a later run was"


# -- an op ----------------------------------------------------------------------------------------------


def with_ops(*names: str, own: Any = None) -> Any:
    """The plain set with these ops as others, and with own ones."""
    return replace(load("plain"), **{name: lambda: None for name in names}, own=own or {})


@pytest.mark.parametrize(("ops", "guilty", "op", "runs"), [
    (("gdn",), {"gdn"}, "gdn", [["gdn"]]), (("gdn", "add"), {"gdn"}, "gdn", [["gdn"]]),
    (("gdn", "mlp"), {"mlp"}, "mlp", [["gdn"], ["mlp", "gdn"], ["gdn"], ["mlp"]]),
    (("gdn", "mlp"), {"nothing"}, None, [["gdn"], ["mlp", "gdn"]]), (("gdn",), {"nothing"}, None, [["gdn"]]),
    (("mlp",), {"mlp"}, "mlp", [["mlp"]]), (("kda",), {"kda"}, None, []),
    (("mlp", "add", "norm", "attend"), {"norm", "mlp"}, None, None),
])  # fmt: skip
def test_ops_are_exchanged_near_the_place_then_all_then_by_halves(
    ops: Any, guilty: set[str], op: str | None, runs: Any
) -> None:
    """A swap helps if it has all guilty ops."""
    of, ran = climbed([found()], lambda variant: [] if guilty <= {*variant.swap} else [found()], ops=with_ops(*ops))
    swaps = [[*one["variant"].swap] for one in ran]
    if runs is None:  # both halves of the four need each other, or one half has both
        assert of.cause == "op" and guilty <= {*str(of.op).split(", ")}
        assert of.says.startswith("cause: ops `") and of.says.count("`") == 2 * len(of.options) + 2
        assert ("  [" in of.says) is (len(of.options) <= 2)
        return
    assert [sorted(one) for one in swaps] == [sorted(one) for one in runs]
    assert all(value == "plain" for one in ran for value in one["variant"].swap.values())
    if op is None:
        remains = "it remains with all ops of `plain`" if len(runs) == 2 else (
            "the reference has no tensor that could replace it")
        assert told(of) == ("unconfirmed", None, f"not confirmed: {remains}")
    else:
        assert told(of) == ("op", op, f"cause: op `{op}` (with the op of `plain`, events 0 to 4 agree)  "
                                      f"[--swap {op}=plain]") and of.options == (f"--swap {op}=plain",)  # fmt: skip


def test_ops_that_need_each_other_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """An own form of the engine is an op, too, if the other set has another one. Labels are those of the ledger."""
    own = {name: (lambda: None) for name in ("mine", "same", "alone")}
    twin = with_ops(own={"mine": lambda: None, "same": own["same"]})
    monkeypatch.setattr(confirm_cause, "moves_labels", lambda ops: True)
    monkeypatch.setattr(confirm_cause, "load", {"ledger": twin}.get)
    subject = replace(twin, mlp=lambda: None, norm=lambda: None, own=own)
    for guilty, op in (({"norm", "mine"}, "norm, mlp, mine"), ({"mine"}, "mine"), ({"norm"}, "norm")):
        of, ran = climbed([found()], lambda variant, guilty=guilty: [] if guilty <= {*variant.swap} else [found()],
                          ops=subject)  # fmt: skip
        assert sorted(str(of.op).split(", ")) == sorted(op.split(", "))
        assert {value for one in ran for value in one["variant"].swap.values()} == {"ledger"}
        several = ", " in op
        assert ("cause: ops" in of.says and "with the ops of `ledger`" in of.says) is several


def test_the_ops_of_a_commit_strategy_that_wrote_the_place_are_tried_first() -> None:
    wrote = (("move", STATE), ("plan_ring", STATE), ("move", STATE), ("gdn", CONV))
    _, ran = climbed([found(STATE)], lambda variant: [found(STATE)], wrote=wrote, ops=with_ops(
        "move", "gdn", "plan_ring"))  # fmt: skip
    swaps = [[*one["variant"].swap] for one in ran if one["variant"].swap]
    assert [sorted(one) for one in swaps] == [["move"], ["gdn"], ["gdn", "move"]]


# -- a place --------------------------------------------------------------------------------------------

OTHER_LAYER = CORE._replace(layer=2)


@pytest.mark.parametrize(("helps", "says", "cause"), [
    ({CORE}, "cause: this place (with the reference's core, the rest of the event agrees)  [--graft trunk.1.core@4]",
     "place"),
    ({CORE, UPDATE}, "cause: 2 places (with the reference's core and update, the rest of the event agrees)  "
                     "[--graft trunk.1.core@4 --graft trunk.1.update@4]", "place"),
    ({CORE, UPDATE, OTHER_LAYER},
     "cause: 3 places (with the reference's core and update, the rest of the event agrees)", "place"),
    ({CORE, KEYS},
     "not confirmed: with the reference's core and update, trunk.1.keys@4 still disagrees", "unconfirmed"),
])  # fmt: skip
def test_places_get_the_tensors_of_the_reference(helps: set[Place], says: str, cause: str) -> None:
    """First the place alone, then all results of its call, then those in other layers."""
    findings = [found(CORE), found(OTHER_LAYER), found(KEYS), found(STATE)]

    def left(variant: Variant) -> list[Comparison]:
        return [] if helps <= {one.place for one in variant.patch} else [found(KEYS)]

    of, ran = climbed(findings, left, shown=[CORE, UPDATE, OTHER_LAYER, MIXED])
    patched = [[(one.place, one.event) for one in each["variant"].patch] for each in ran]
    assert patched == [[(place, 4) for place in places] for places in (
        [CORE], [CORE, UPDATE], [CORE, UPDATE, OTHER_LAYER])][: len(ran)]  # fmt: skip
    assert told(of) == (cause, "gdn" if cause == "place" else None, says)
    assert len(of.options) == (len(helps) if cause == "place" else 0)


def test_a_state_that_the_same_op_writes_may_stay_wrong() -> None:
    for also, says in (([STATE], "cause: this place (with the reference's core, the rest of the event agrees; the same "
                                 "op writes trunk.1.state@4)  [--graft trunk.1.core@4]"),
                       ([STATE, CONV], "not confirmed: with the reference's core, trunk.1.conv@4 still disagrees"),
                       ([STATE._replace(layer=2)], "not confirmed: with the reference's core, trunk.2.state@4 still "
                                                   "disagrees")):  # fmt: skip
        of, _ = climbed([found(CORE)], lambda variant, also=also: [found(one) for one in also], shown=[CORE])
        assert of.says == says


def test_memory_that_one_of_several_reads_writes_may_stay_wrong() -> None:
    query, attended = (Place("trunk", 1, name) for name in ("query", "attended"))
    of, _ = climbed([found(MIXED), found(CORE)], lambda variant: [found(STATE)])
    assert "the rest of the event agrees; the same op writes trunk.1.state@4)" in of.says
    assert climbed([found(query)], lambda variant: [], shown=[query])[0].op == "attention_inputs"
    earlier = SimpleNamespace(index=3)
    _, ran = climbed([found(KEYS), found(attended)], lambda variant: [], last=earlier)
    assert ran[-1]["variant"].patch == (Patch(KEYS, 4),), "no tensors of this event are known"


def test_a_place_needs_tensors_of_one_shape_on_both_sides() -> None:
    def at(subject: Any, truth: Any, rounded: Any = None, index: int = 4) -> Any:
        log = SimpleNamespace(wrote=())
        return SimpleNamespace(index=index, subject=subject, truth=truth, rounded=rounded, log=log)

    for last, tried in ((at(side(CORE), side(CORE)), True), (at(side(CORE), side()), False),
                        (at(side(), side(CORE)), False),
                        (at(side(CORE), side(CORE, size=3)), False), (at(side(CORE, size=0), side(CORE, size=0)),
                                                                      False),
                        (at(side(CORE), side(), side(CORE)), True), (at(side(CORE), side(CORE), side()), False),
                        (at(side(CORE), side(CORE), index=3), False)):  # fmt: skip
        _, ran = climbed([found(CORE)], lambda variant: [found()], last=last)
        assert bool(ran) is tried


@pytest.mark.parametrize(("places", "patched"), [
    ([CORE, MIXED, KEYS, CORE], [CORE, MIXED]), ([CORE, UPDATE], [CORE, UPDATE]), ([CORE, OTHER_LAYER], ()),
    ([KEYS, CORE, MIXED], ()), ([CORE], ()),
])  # fmt: skip
def test_all_reads_from_memory_get_the_tensors_of_the_reference(places: Any, patched: Any) -> None:
    """If the first finding is such a read, and reads of several kinds are wrong."""
    findings = [found(place) for place in places]
    for helps in (True, False):
        of, ran = climbed(findings, lambda variant, helps=helps: [] if helps else [found(KEYS)])
        reads = [one["variant"].patch for one in ran if one["until"] == 4 and places[0] == CORE]
        assert reads == [tuple(Patch(place, 4) for place in patched)] * bool(patched)
        if patched:
            names = " and ".join(place.component for place in patched)
            due = (f"cause: the reads from memory (with the reference's {names}, the rest of the event agrees)  "
                   f"[{' '.join(of.options)}]")  # fmt: skip
            assert told(of) == (("memory", None, due) if helps else (
                "unconfirmed", None, f"not confirmed: with the reference's {names}, trunk.1.keys@4 still disagrees"))


# -- memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("left", "says"), [
    ([], "cause: event 4 writes wrong memory (with the reference's memory restored, events 5 to 8 agree)"),
    ([found(STATE, 7)], "cause: event 4 writes wrong memory (with the reference's memory restored, events 5 to 6 "
                        "agree; event 7 corrupts it again)"),
    ([found(STATE, 6)], "cause: event 4 writes wrong memory (with the reference's memory restored, event 5 agrees; "
                        "event 6 corrupts it again)"),
    ([found(STATE, 5)], "event 4 writes wrong memory; nothing reads it before event 5 corrupts it again"),
    ([found(STATE, 7), found(CORE, 8)], "cause: event 4 writes wrong memory (with the reference's memory restored, "
                                        "events 5 to 6 agree; event 7 corrupts it again)"),
    ([found(STATE, 4), found(STATE, 7)], "not confirmed: with the reference's state, trunk.1.state@4 still disagrees"),
    ([found(STATE, 4)], "not confirmed: with the reference's state, trunk.1.state@4 still disagrees"),
    ([found(KEYS, 7)], "not confirmed: with the reference's state, trunk.1.keys@7 still disagrees"),
])  # fmt: skip
def test_memory_of_the_reference_is_restored_up_to_its_readers(left: list[Comparison], says: str) -> None:
    of, ran = climbed([found(STATE), found(CORE)], lambda variant: left)
    assert ran[-1]["until"] == 8 and ran[-1]["variant"].patch == (Patch(STATE, 4),) and len(ran) == 1
    graft = "--graft trunk.1.state@4"
    restored = says.startswith("cause")
    assert (of.says, of.options) == (says + f"  [{graft}]" * restored, (graft,) * restored)
    assert (of.cause, of.op) == ("unconfirmed" if "not confirmed" in says else "memory", None)


def test_the_first_reader_of_memory_may_come_late() -> None:
    """Within six events, or else the first one; a draft reads the memory of the draft head alone."""
    draft = Place("extend", 1, "keys")
    for place, later, until in (
        (STATE, (OF_B,) * 7 + (DECODE, DECODE), 12), (STATE, (OF_B,) * 5 + (DECODE, DECODE), 10),
        (STATE, (OF_B, DECODE, OF_B, OF_B, OF_B, DECODE, DECODE), 10),
        (STATE, (Draft(("a",)), DECODE), 6), (draft, (Draft(("a",)), OF_B), 5), (draft, (Draft(("b",)), DECODE), 6),
    ):  # fmt: skip
        of, ran = climbed([found(place)], lambda variant: [], events=(*EVENTS[:5], *later))
        last = f"events 5 to {until} agree" if until > 5 else "event 5 agrees"
        assert ran[-1]["until"] == until and f"restored, {last})" in of.says


def test_the_first_reader_may_corrupt_memory_again() -> None:
    of, _ = climbed([found(STATE)], lambda variant: [found(STATE, 5)], events=(*EVENTS[:5], DECODE))
    assert "restored, event 5 agrees until it corrupts it again)" in of.says


def test_memory_that_no_event_reads_later_is_not_restored() -> None:
    for later, place in (((OF_B,), STATE), ((Draft(("a",)),), STATE), ((), STATE)):
        of, ran = climbed([found(place), found(CONV)], lambda variant: [], events=(*EVENTS[:5], *later),
                          wrote=(("move", STATE),))  # fmt: skip
        says = "event 4 (op move) writes wrong memory; nothing reads it later in this trace"
        assert told(of) == ("memory", "move", says)
        assert not ran
    of, ran = climbed([found(STATE), found(CORE)], lambda variant: [], events=EVENTS[:5])
    assert not ran and told(of) == ("unconfirmed", None, "not confirmed: no later event reads the state, so nothing "
                                                         "was restored; trunk.1.core@4 disagrees, too")  # fmt: skip


def test_the_read_of_attention_in_the_event_gets_the_tensor_of_the_reference() -> None:
    """Attention at the event reads the entries that the event wrote: both are replaced."""
    attended = Place("trunk", 1, "attended")
    for shown, patch in (([attended], (KEYS, attended)), ([], (KEYS,))):
        findings = [found(KEYS), found(attended), found(CORE), found(KEYS), found(attended)]
        of, ran = climbed(findings, lambda variant: [], shown=[*shown, CORE])
        assert ran[-1]["variant"].patch == tuple(Patch(place, 4) for place in patch)
        begin = 4 if shown else 5
        assert f"restored, events {begin} to 8 agree)" in of.says
    of, ran = climbed([found(KEYS), found(attended)], lambda variant: [], shown=[attended], events=EVENTS[:5])
    assert ran[-1]["variant"].patch == (Patch(attended, 4),) and ran[-1]["until"] == 4
    assert "writes wrong memory (with the reference's memory restored, event 4 agrees)" in of.says
    of, _ = climbed([found(KEYS), found(attended)], lambda variant: [found(KEYS)], shown=[attended], events=EVENTS[:5])
    assert "restored, event 4 agrees)" in of.says, "the entries themselves are not restored"
    of, _ = climbed([found(KEYS), found(attended)], lambda variant: [found(attended)], shown=[attended],
                    events=EVENTS[:5])  # fmt: skip
    assert of.says == "not confirmed: with the reference's keys, trunk.1.attended@4 still disagrees"


def test_memory_without_an_owner_is_reported() -> None:
    for wrote, op in (((), None), ((("move", STATE), ("gdn", STATE)), "move, gdn")):
        of, ran = climbed([found(STATE, request=None)], lambda variant: [], wrote=wrote)
        by = f" (op {op})" if op else ""
        assert told(of) == ("memory", op, f"event 4{by} writes memory that belongs to no request") and not ran


@pytest.mark.parametrize(("place", "setting", "option"), [
    (STATE, {"strategy": "rerun"}, ("strategy", "snapshot")), (STATE, {"strategy": "snapshot"}, ("strategy", "rerun")),
    (STATE, {"strategy": "columns"}, ("strategy", "snapshot")), (CONV, {"conv": "widened"}, ("conv", "windows")),
    (CONV, {"conv": "windows"}, ("conv", "widened")), (KEYS, {}, None),
])  # fmt: skip
def test_another_commit_strategy_is_a_hint(place: Place, setting: Any, option: Any) -> None:
    for helps in (True, False):
        of, ran = climbed([found(place)], lambda variant, helps=helps: [] if helps else [found()], ops=with_ops(),
                          events=EVENTS[:5], **setting)  # fmt: skip
        assert [one["variant"].options for one in ran] == ([] if option is None else [dict([option])])
        assert of.hints == ((f"with --{option[0]} {option[1]} it agrees",) if option and helps else ())
    _, ran = climbed([found(place)], lambda variant: [], events=EVENTS[:5], **setting)
    assert not ran, "not of another engine"


# -- an engine with verbs --------------------------------------------------------------------------------


def test_an_engine_with_verbs_shows_what_was_compared() -> None:
    """Memory of "a" in the target, and in the draft head, which a place in the target does not read."""
    says = "not confirmed: the reference's tensors cannot be put into this engine; "
    before = says + "everything compared before this event agrees"
    late = "were not compared, so an earlier event may have left them wrong"
    draft, empty = Place("extend", 1, "keys"), Place("trunk", 2, "conv")
    parts = [(STATE, torch.zeros(1)), (CONV, torch.zeros(1)), (draft, torch.zeros(1)), (KEYS, torch.zeros(1)),
             (STATE._replace(layer=2), torch.zeros(1)), (empty, torch.zeros(0))]  # fmt: skip
    last = SimpleNamespace(index=4, truth=side(a=SimpleNamespace(parts=lambda: parts)), subject=side(), rounded=None)
    every = [found(place, 3) for place, _ in parts]
    for place, compared, due in (
        (CORE, every, ", its memory too: what this event computed from it is wrong"), (STATE, every, ""),
        (CORE, [], f"; states, conv windows and keys {late}"), (STATE, every[:1] + every[2:], f"; conv windows {late}"),
        (CORE, every[:2], f"; keys and states {late}"), (Place("extend", 1, "core"), [],
                                                         "; states, conv windows, draft "
                                                         f"keys and keys {late}"),
        (CORE, [*every[1:], found(STATE, 4)], f"; states {late}"),
        (CORE, [*every[1:], replace(every[0], tier=Tier.BITWISE)], f"; states {late}"),
        (CORE, [*every[1:], replace(every[0], event=0)], ", its memory too: what this event computed from it is wrong"),
    ):  # fmt: skip
        of, ran = climbed([found(place)], lambda variant: [], led=True, last=last, compared=compared)
        assert told(of) == ("unconfirmed", None, before + due) and not ran
    other = SimpleNamespace(**{**vars(last), "index": 3})
    assert climbed([found(CORE)], lambda variant: [], led=True, last=other)[0].says == before
    last.index = 0
    of, _ = climbed([found(CORE, 0)], lambda variant: [], led=True, last=last)
    assert of.says == says + "it is the first event"
