"""Checks of ranks, stages and replicas: every sentence, count and rank, on facts made by hand.

Leaves out: runs with ranks (`test_ranks.py`, `test_stages.py`, `test_data_parallel.py`).
"""

import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.checks import ranks
from instep.finding_problem import Problem
from instep.verdict import Comparison, Skipped, Tier
from instep.watch.event_log import Served
from instep.watch.rank_facts import Decision, GroupFacts, RankFacts, Replica, StageFacts
from instep_optimized.pipeline import Ran, Step
from instep_optimized.ranks import Call
from instep_reference.contract import engine as e
from instep_reference.contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place
from instep_reference.contract.shards import Segment, Shard

CORE, HIDDEN, STATE = (Place("trunk", 1, name) for name in ("core", "hidden", "state"))
NOWHERE = Place("trunk", STAGE_LEVEL, "length")


def context(**given: Any) -> Any:
    known = {"slots_before": {}, "slots_after": {"a": 2, "b": 5}, "lengths_after": {"a": 7}, "topk": None,
             "pages_after": {"a": (3, 4)}, **given.pop("expected", {})}  # fmt: skip
    return SimpleNamespace(**{
        "index": 3, "kind": "forward", "event": e.Idle(), "expected": SimpleNamespace(**known), "ranks": None,
        "group": None, "stages": None, "rounded": None, **given,
    })  # fmt: skip


def told(found: Iterable[Comparison]) -> list[Any]:
    """(elements) of what agrees; (sentence, worst, elements, rank, request, place) of what does not."""
    return [(one.diagnosis, one.worst, one.elements, one.rank, one.request, one.place) if one.worst else one.elements
            for one in found]  # fmt: skip


def test_decisions_are_compared_with_the_trace_or_the_chief() -> None:
    """Three ranks. The trace knows the length of "a", 7, its slot, 2, and its pages. No request has its pages here."""
    served = Served("conv", CORE, "window", (2,), 4, 3, 6)
    other = Served("conv", CORE, "window", (2,), 4, 2, 6)
    long = "x" * 101
    decisions = (
        Decision("the step count", (3, 3, 3)), Decision("the wish", (1, 1, 1)), Decision("the length", (6, 7, 6), "a"),
        Decision("the slot", (2, 5, 2), "a"), Decision("the pages", ([3, 4], [3, 4], [4, 3]), "a"),
        Decision("the pages", ([3], [3, 4, 5], [3]), "a"), Decision("the length", (1, 1, 2), "z", HIDDEN),
        Decision("the roots", (9, None, long)), Decision("the rows", (served, served, other)),
    )  # fmt: skip

    def wrong(says: str, rank: int, request: str | None = "a", place: Place = NOWHERE) -> Any:
        return (says, 1.0, 1, rank, request, place)

    rows = "units (2,), rows 4 to {} after 6 positions"
    facts = RankFacts(3, lambda place: None, {}, decisions)
    right = [
        wrong("the length of rank 0 is 6; the trace has 7", 0), wrong("the length of rank 2 is 6; the trace has 7", 2),
        wrong("the slot of rank 1 is 5; the trace has 2", 1),
        wrong("the pages of rank 2 are [4, 3]; the trace has [3, 4]", 2),
        wrong("the pages of rank 1 are [3, 4, 5]; rank 0 has [3]", 1),
        wrong("the length of rank 2 is 2; rank 0 has 1", 2, "z", HIDDEN),
        wrong("the roots of rank 1 are nothing; rank 0 has 9", 1, None),
        wrong(f"the roots of rank 2 are {long[:100]}...; rank 0 has 9", 2, None),
        wrong(f"the rows of rank 2 are {rows.format(5)}; rank 0 has {rows.format(6)}", 2, None, CORE),
    ]  # fmt: skip
    assert told(ranks.Agreement()(context(ranks=facts))) == [6, *right]
    two = (Decision("the root", (1, 2)), Decision("the root", (4, 4)))
    assert told(ranks.Agreement()(context(group=GroupFacts(2, {}, two)))) == [
        2, wrong("the root of rank 1 is 2; rank 0 has 1", 1, None)]
    assert told(ranks.Agreement()(context(stages=StageFacts((range(1), range(1, 2)), decisions=two)))) == [
        2, wrong("the root of rank 0 is 1; rank 1 has 2", 0, None)]
    for given in (context(), context(ranks=RankFacts(1, lambda place: None, {}))):
        assert told(ranks.Agreement()(given)) == []
    assert ranks.shortened("y" * 100) == "y" * 100


def a_call(kind: str, place: Place | None = None) -> Call:
    return Call(kind, (2,), torch.float32, place)


def test_collectives_are_those_that_each_place_needs() -> None:
    mixer, mlp = (Place("trunk", 0, name) for name in ("mixer", "mlp"))
    logits, pick = (Place("trunk", AFTER_LAYERS, name) for name in ("logits", "pick"))
    reduced, summed, gathered, sent = (a_call(*one) for one in (
        ("all_reduce", mixer), ("all_reduce", mlp), ("all_gather", logits), ("broadcast", pick)))  # fmt: skip
    places = {mixer: 0, mlp: 0, logits: 0, pick: 0, CORE: 0}
    every = (reduced, summed, gathered, sent, a_call("broadcast"))

    def said(*calls: tuple[Call, ...], **given: Any) -> list[Any]:
        facts = RankFacts(len(calls), lambda place: None, {}, calls=calls)
        subject = SimpleNamespace(places=places)
        return told(ranks.Collectives()(context(ranks=facts, subject=subject, **given)))

    assert said(every) == [4] and said(every, every) == [6, 4] and said(every, every[1:])[1:] == [4]
    assert said(every, (*every[:2], a_call("see", CORE)), every[:4], (*every, reduced)) == [
        (f"at call 2 rank 1 is {a_call('see', CORE)}; rank 0 is {gathered}", 1.0, 6, 1, None, NOWHERE),
        (f"at call 4 rank 2 is done; rank 0 is {every[4]}", 1.0, 6, 2, None, NOWHERE),
        (f"at call 5 rank 3 is {reduced}; rank 0 is done", 1.0, 6, 3, None, NOWHERE), 4]  # fmt: skip
    lacks = ("is made without all_gather: every rank has its own", 1.0, 1, None, None, logits)
    more = ("went through all_reduce, and needs no such collective", 1.0, 1, None, None, CORE)
    elsewhere = a_call("all_reduce", HIDDEN)  # a place that it does not show
    assert said((*every[:2], sent, a_call("all_reduce", CORE), elsewhere)) == [3, lacks, more]
    assert len(said(())) == 4 and told(ranks.Collectives()(context())) == []
    tree = {"expected": {"topk": 2}, "event": e.Draft(("a",))}
    tokens = ("are followed by top-k tokens without broadcast: every rank has its own", 1.0, 1, None, None, logits)
    top = a_call("broadcast")
    for order, due in (((gathered, top, top), [1]), ((sent, gathered, top), [tokens]),
                       ((gathered, top, sent), [tokens]), ((gathered, reduced, top, top), [tokens]),
                       ((top, top, gathered), [tokens]),
                       ((gathered, top, top, gathered, top, top, sent), [1, 1])):  # fmt: skip
        judged = [one for one in said(order, **tree) if one == 1 or one == tokens]
        assert [one for one in judged if one == tokens or due == [1] * len(due)][: len(due)] == due
        assert tokens not in said(order, event=tree["event"]) and tokens not in said(order, expected=tree["expected"])


def test_copies_of_a_rank_have_the_bits_of_an_earlier_rank() -> None:
    def replica(rank: int, elements: int, differing: int, **more: Any) -> Replica:
        return Replica(STATE, rank, 0, elements, differing, **more)

    facts = RankFacts(4, lambda place: None, {}, replicas=(
        replica(1, 5, 0), replica(2, 7, 0), replica(1, 5, 1, request="b"), replica(2, 5, 2, zero=True, like=1),
        replica(3, 5, 5, like=1)))  # fmt: skip
    holds = "rank {} holds {}: {} of 5 numbers {}"
    assert told(ranks.Replicas()(context(ranks=facts))) == [
        12, (holds.format(1, "other bits than rank 0", 1, "differs"), 1.0, 5, 1, "b", STATE),
        (holds.format(2, "zeros, not a copy of the one of rank 0", 2, "differ"), 2.0, 5, 2, None, STATE),
        (holds.format(3, "the KV head of rank 1, not a copy of the one of rank 0", 5, "differ"), 5.0, 5, 3, None,
         STATE)]  # fmt: skip
    alone = RankFacts(4, lambda place: None, {}, replicas=facts.replicas[2:3])
    assert len(told(ranks.Replicas()(context(ranks=alone)))) == 1 and told(ranks.Replicas()(context())) == []


# -- the part that is wrong -----------------------------------------------------------------------------------


def test_the_rank_with_the_largest_error_is_named_if_it_is_far_larger() -> None:
    """6 channels in two segments on two ranks: rank 0 has channels 0, 3 and 4, of norm 5, and rank 1 the others."""
    right = torch.tensor([[3.0, 6.0, 8.0, 4.0, 0.0, 0.0]])[:, [0, 1, 3, 4, 2, 5]]
    shard = Shard(1, (Segment(2, 1), Segment(2, 2)))
    for wrong, rank in (([0.0, 1, 0, 0, 0, 0], 1), ([1, 0.4, 0, 0, 0, 0], 0), ([1, 0.5, 0, 0, 0, 0], None),
                        ([0.5, 1, 0, 0, 0, 0], None), ([math.nan, 1, 0, 0, 0, 0], 0), ([0.0] * 6, None),
                        ([0, 0, 0, 1, 0, 0.4], 0), ([0.0, 0, 0, 0, 9, 0], 1)):  # fmt: skip
        assert ranks.part_at_fault(right + torch.tensor([wrong]), right, shard, 2) == rank, wrong
        labels = right.long()
        found = labels + (torch.tensor([wrong]) != 0)
        counts = [sum(value != 0 for value in (wrong[at] for at in mine)) for mine in ((0, 2, 3), (1, 4, 5))]
        apart = [rank for rank, count in enumerate(counts) if count > 4 * counts[1 - rank]]
        assert ranks.part_at_fault(found, labels, shard, 2) == (apart[0] if apart else None), wrong
    assert ranks.part_at_fault(None, right, shard, 2) is ranks.part_at_fault(right, None, shard, 2) is None
    assert ranks.part_at_fault(right[:, :2], right, shard, 2) is None
    thirds = Shard(1, (Segment(6),))
    for wrong, rank in (([5.0, 0, 9, 0, 1, 0], None), ([1.0, 0, 0, 0, 90, 0], 2)):
        assert ranks.part_at_fault(torch.ones(1, 6) + torch.tensor([wrong]), torch.ones(1, 6), thirds, 3) == rank
    error = ranks._error(right + torch.tensor([[3.0, 4, 0, 0, 0, 0]]), right)
    assert error == pytest.approx(5 / math.sqrt(float((right * right).sum())))
    assert ranks._error(torch.zeros(2), torch.zeros(2)) == 0 and ranks._error(torch.ones(2), torch.zeros(2)) > 1e300


def finding(place: Place, request: str | None = None, **more: Any) -> Comparison:
    return Comparison("bytes", Tier.BITWISE, 3, "forward", place, 1, 1.0, 0.0, request=request,
                      problem=Problem("differs", "x"), **more)  # fmt: skip


def test_findings_name_the_rank_that_has_the_part() -> None:
    """Rows of the core and states are split over two ranks, and rank 1 of the subject is wrong. The rest is whole."""
    right, wrong, other = torch.ones(2, 4), torch.tensor([[1.0, 1, 1, 9]] * 2), torch.tensor([[9.0, 1, 1, 1]] * 2)
    split, draft, block = Shard(1, (Segment(4),)), Place("extend", 0, "keys"), Place("block", 0, "keys")

    def side(tensor: torch.Tensor) -> Any:
        state = SimpleNamespace(parts=lambda: [(STATE, tensor), (draft, tensor), (block, tensor)])
        return SimpleNamespace(places={CORE: tensor}, after={"a": state})

    def facts(memory: dict[str, Shard]) -> RankFacts:
        return RankFacts(2, lambda place: split if place == CORE else None, memory)

    memory = {"state": split, "draft_keys": split}
    blocks = {"block_keys": split}
    for given, place, request, rank in (
        (memory, CORE, None, 1), (memory, STATE, "a", 1), (memory, draft, "a", 1), (memory, HIDDEN, None, None),
        (memory, STATE, "z", None), (memory, STATE, None, None), (blocks, block, "a", 1), (blocks, STATE, "a", None),
    ):  # fmt: skip
        known = facts(given)
        every = context(ranks=known, subject=side(wrong), truth=side(right))
        one = finding(place, request)
        assert ranks.rank_of(every, known, one) == rank, (place, request)
        every.rounded, every.truth = every.truth, side(other)
        skipped, named = Skipped("x", 3, "y"), finding(CORE, rank=0)
        agrees = Comparison("bytes", Tier.BITWISE, 3, "forward", CORE, 1, 0.0, 0.0)
        with_ranks = ranks.with_ranks(every, [one, skipped, named, agrees])
        assert [one.rank for one in with_ranks if isinstance(one, Comparison)] == [rank, 0, None]
        assert with_ranks[1:] == [skipped, named, agrees]
    stages = StageFacts((range(1), range(1, 3)))
    (of_stage,) = ranks.with_ranks(context(stages=stages), [finding(CORE)])
    assert isinstance(of_stage, Comparison) and of_stage.rank == 1
    assert ranks.with_ranks(context(), [finding(CORE)]) == [finding(CORE)]


def test_findings_name_the_replica_of_the_request_or_of_the_vocabulary() -> None:
    logits = Place("trunk", AFTER_LAYERS, "logits")
    right, wrong = torch.ones(2, 4), torch.tensor([[1.0, 1, 1, 9]] * 2)
    group = GroupFacts(2, {"a": 0, "b": 1})
    for found, place, request, rank in ((wrong, logits, "a", 1), (right, logits, "a", 0), (wrong, CORE, "a", 0),
                                        (wrong, CORE, "b", 1), (None, logits, "b", 1), (wrong, CORE, None, None)):
        side = SimpleNamespace(places={} if found is None else {logits: found, CORE: found})
        every = context(group=group, subject=side, truth=SimpleNamespace(places={logits: right, CORE: right}))
        (one,) = ranks.with_ranks(every, [finding(place, request)])
        assert isinstance(one, Comparison) and one.rank == rank
        every.rounded, every.truth = every.truth, SimpleNamespace(places={logits: wrong + 9 * right})
        assert ranks.replica_of(every, group, finding(place, request)) == rank


def test_replicas_call_alike_and_pad_with_zeros() -> None:
    draft, calls = e.Draft(("a", "b")), ((a_call("all_gather"),), (a_call("all_gather"),))
    padded = (((CORE, 3, 0), (HIDDEN, 2, 5)), ((CORE, 1, 4),))
    for event, mine, pads, due in (
        (draft, calls, ((), ()), [2]),
        (draft, ((), ()), ((), ()), [("no replica made a collective: the vocabulary is not shared", 1.0, 1, None, None,
                                      NOWHERE), 1]),
        (draft, (calls[0], ()), ((), ()), [("at call 0 rank 1 is done; rank 0 is " + str(calls[0][0]), 1.0, 2, 1, None,
                                            NOWHERE)]),
        (e.Draft(()), ((), ()), ((), ()), [1]), (e.Save("a", "k"), ((), ()), ((), ()), [1]),
        (draft, calls, padded, [2, 3, ("has 5 numbers other than 0 in 2 padded rows of replica 0", 5.0, 2, 0, None,
                                       HIDDEN), ("has 4 numbers other than 0 in 1 padded rows of replica 1", 4.0, 1, 1,
                                                 None, CORE)]),
    ):  # fmt: skip
        group = GroupFacts(2, {}, calls=mine, padded=pads)
        assert told(ranks.Group()(context(event=event, group=group))) == due
    assert told(ranks.Group()(context())) == []


# -- pipeline stages ------------------------------------------------------------------------------------------------

PICK, CHAIN = Place("trunk", AFTER_LAYERS, "pick"), Place("chain", AFTER_LAYERS, "pick")
LAYERS = (range(1), range(1, 2), range(2, 3))  # of three stages


def steps(*every: tuple[int, int, str, tuple[str, ...]], relayed: Any = None) -> tuple[Ran, ...]:
    return tuple(Ran(Step(tick, 0, number, action), names, (relayed or {}).get((number, action), ()))  # type: ignore[arg-type]
                 for tick, number, action, names in every)  # fmt: skip


def test_stages_run_the_micro_batches_in_their_ticks() -> None:
    """A forward of two micro-batches over three stages: "a" and "b" decode, "c" ends no prompt and has no root."""
    event = e.Forward((e.Row("a", "decode"), e.Row("b", "decode"), e.Row("c", "prefill", 2)))
    answer = e.Forwarded(roots={"a": 7, "b": 8}, own={})
    relays = {(0, "relay"): ((0, 0, 7), (0, 1, 8)), (1, "relay"): ()}
    schedule = [(0, 0, "run", ("a", "b")), (1, 1, "run", ("c",)), (3, 0, "relay", ("a", "b")), (4, 1, "relay", ())]
    first = steps(*schedule, relayed=relays)
    second = steps((1, 0, "run", ("a", "b")), (2, 1, "run", ("c",)), (4, 0, "relay", ("a", "b")), (5, 1, "relay", ()),
                   relayed=relays)  # fmt: skip
    last = steps((2, 0, "run", ("a", "b")), (3, 1, "run", ("c",)))

    def said(*ran: tuple[Ran, ...]) -> list[Any]:
        facts = StageFacts(LAYERS, (("a", "b"), ("c",)), ran=ran)
        return told(ranks.Stages()(context(event=event, stages=facts, subject=SimpleNamespace(answer=answer))))

    assert said(first, second, last) == [5, 6, 5, 6, 3] and told(ranks.Stages()(context())) == []
    for ran, says in (
        (first[:3], "step 3 is nothing; the schedule has relay micro-batch 1 with no request at tick 4"),
        ((first[0], *first), "step 1 is run micro-batch 0 with a, b at tick 0; the schedule has run micro-batch 1 with "
                             "c at tick 1"),
        ((*first, first[0]), "step 4 is run micro-batch 0 with a, b at tick 0; the schedule has nothing"),
    ):  # fmt: skip
        assert said(ran, second, last) == [(says, 1.0, 5, 0, None, NOWHERE), 6, 5, 6, 3]
    assert said(first, second, last[:1])[4] == (
        "step 1 is nothing; the schedule has run micro-batch 1 with c at tick 3", 1.0, 3, 2, None, NOWHERE)
    wrong = steps(*schedule, relayed={(0, "relay"): ((0, 0, 7), (0, 1, 9)), (1, "relay"): ()})
    root = ("stage 0 received root 9 in its relay; expected 8", 1.0, 3, 0, "b", PICK)
    assert said(wrong, second, last) == [5, 3, root, 5, 6, 3]
    none = ("stage 1 received no relay of the request", 1.0, 3, 1, "{}", PICK)
    assert said(first, second[:2], last)[3:5] == [(*none[:4], name, PICK) for name in "ab"]
    idle = context(stages=StageFacts(LAYERS[:2], ran=((), ())), subject=SimpleNamespace(answer=None))
    assert told(ranks.Stages()(idle)) == [1, 1]


def test_relays_have_what_the_last_stage_answers() -> None:
    """Draft tokens end at -1, a prompt that continues has no root, and a commit has its place in the verify."""
    facts = StageFacts(LAYERS, (("b",), ("c", "a")), {"a": (4, 1), "b": (3, 0)})
    path = torch.tensor([[0, 2, -1], [0, 1, 3]])
    committed = e.Committed(torch.tensor([1, 2]), torch.tensor([2, 3]), path, torch.tensor([2, 3]),
                            torch.tensor([50, 60]), torch.tensor([1, 2]), torch.tensor([50, 60]))  # fmt: skip
    drafted = e.Drafted(torch.tensor([[5, 6, -1], [7, 0, 9]]), torch.zeros(2, 3))
    forward = e.Forward((e.Row("b", "decode"),))
    for event, answer, due in (
        (e.Draft(("a", "b")), drafted, {"a": (1, 1, 5, 6), "b": (0, 0, 7, 0, 9)}),
        (forward, e.Forwarded({"b": 4, "a": 6}, {}), {"b": (0, 0, 4), "a": (1, 0, 6)}),
        (e.Commit(("a", "b")), committed, {"a": (4, 1, 2, 2, 50, -1, 0, 2, -1), "b": (3, 0, 3, 3, 60, -1, 0, 1, 3)}),
        (e.Commit(("a", "b"), caps=(1, 9)), committed,
         {"a": (4, 1, 2, 2, 50, 1, 0, 2, -1), "b": (3, 0, 3, 3, 60, 9, 0, 1, 3)}),
        (e.Draft(("a",)), committed, {}), (e.Commit(("a",)), drafted, {}), (e.Idle(), None, {}),
    ):  # fmt: skip
        given = context(event=event, subject=SimpleNamespace(answer=answer))
        assert ranks._relays_due(given, facts) == due
    # More values than there must be are no difference, and a draft's place is a step of the chain.
    ran = steps((1, 0, "run", ("b",)), (2, 1, "run", ("a",)), relayed={(0, "run"): ((0, 0, 7, 0, 9, 1),),
                                                                      (1, "run"): ((1, 1, 5),)})  # fmt: skip
    given = context(event=e.Draft(("a", "b")), subject=SimpleNamespace(answer=drafted))
    assert told(ranks.Stages()._relays(given, facts, 1, ran)) == [
        5, ("stage 1 received drafts (5,) in its relay; expected (5, 6)", 1.0, 4, 1, "a", CHAIN)]


@pytest.mark.parametrize(("kind", "found", "says"), [
    (e.Committed, (1, 0, 3, 2, 9, -1, 4, 5), "micro-batch 1 in its relay; expected 0"),
    (e.Committed, (0, 1, 3, 2, 9, -1, 4, 5), "row 1 in its relay; expected 0"),
    (e.Committed, (0, 0, 4, 2, 9, -1, 4, 5), "accepted length 4 in its relay; expected 3"),
    (e.Committed, (0, 0, 3, 3, 9, -1, 4, 5), "last node 3 in its relay; expected 2"),
    (e.Committed, (0, 0, 3, 2, 8, -1, 4, 5), "bonus 8 in its relay; expected 9"),
    (e.Committed, (0, 0, 3, 2, 9, 8, 4, 5), "cap 8 in its relay; expected -1"),
    (e.Committed, (0, 0, 3, 2, 9, -1, 7, 5), "path (7, 5) in its relay; expected (4, 5)"),
    (e.Committed, (0, 0, 3, 2, 9, -1, 4, 7, 1), "path (4, 7) in its relay; expected (4, 5)"),
    (e.Committed, (0, 0, 3, 2, 9, -1, 4), "path (4,) in its relay; expected (4, 5)"),
    (e.Drafted, (0, 0, 3, 7, 9, -1, 4, 5), "drafts (3, 7, 9, -1, 4, 5) in its relay; expected (3, 2, 9, -1, 4, 5)"),
    (e.Drafted, (0, 0, 7, 2, 9, -1, 4, 5), "drafts (7, 2, 9, -1, 4, 5) in its relay; expected (3, 2, 9, -1, 4, 5)"),
    (e.Forwarded, (0, 0, 7, 2, 9, -1, 4, 5), "root 7 in its relay; expected 3"),
])  # fmt: skip
def test_the_first_wrong_field_of_a_relay_is_named(kind: Any, found: tuple[int, ...], says: str) -> None:
    given: Any = SimpleNamespace(subject=SimpleNamespace(answer=kind.__new__(kind)))
    assert ranks._wrong_field(given, found, (0, 0, 3, 2, 9, -1, 4, 5)) == f"received {says}"
