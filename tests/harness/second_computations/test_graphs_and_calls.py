"""Checks of graphs, and of the calls of ops: every sentence, on replays and calls made by hand, one of them wrong.

Leaves out: runs with graphs (`test_prompt_graphs.py`, `test_checks.py`), and how calls are judged.
"""

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.checks import graph_replays as g
from instep.checks import op_call_contracts as c
from instep.verdict import Skipped
from instep.watch import event_log as log
from instep.watch.event_context import RowSpan, branching
from instep.watch.rank_facts import GroupFacts, StageFacts
from instep_reference.contract import engine as e
from instep_reference.contract.place_names import STAGE_LEVEL, Place

NOWHERE = Place("trunk", STAGE_LEVEL, "length")
ROUND = e.Forward((e.Row("a", "verify"), e.Row("b", "verify")))
MIXED = e.Forward((e.Row("a", "verify"), e.Row("b", "decode")))
PROMPT = e.Forward((e.Row("a", "verify"), e.Row("b", "prefill", 2)))


def told(found: Iterable[Any]) -> list[Any]:
    return [one.reason if isinstance(one, Skipped) else one.elements if not one.worst
            else (one.diagnosis, one.elements, one.rank, one.request) for one in found]  # fmt: skip


def context(**given: Any) -> Any:
    """Requests "a" in slot 2 and "b" in slot 5, whose prompt is 10, 11, .. ; three steps, chains."""
    slots = {"a": 2, "b": 5}
    known = {"slots_before": slots, "slots_after": slots, "num_steps": 3, "topk": None, "device_widths": False,
             "prompts": {"b": tuple(range(10, 19))}, "parents": {}, "pages": {"a": (7, 3), "b": (1,)},
             **given.pop("expected", {})}  # fmt: skip
    expected = SimpleNamespace(**known)
    expected.pages_in_use = lambda name: expected.pages[name]
    expected.tree = lambda name: branching(expected.parents.get(name, ()))
    event = given.get("event", e.Idle())
    return SimpleNamespace(**{
        "index": 3, "kind": event.__struct_config__.tag, "event": event, "expected": expected, "log": log.NOTHING,
        "regions": (), "group": None, "stages": None, "truth": SimpleNamespace(before={}, places={}),
        "shown": SimpleNamespace(inside=()), "subject": None, **given})  # fmt: skip


def pool(name: str, layer: int = 0) -> e.Region:
    return e.Region(name, layer, "slot", torch.zeros(2, 2))


# -- which graph --------------------------------------------------------------------------------------------


def spans_of(*every: RowSpan) -> Any:
    return lambda context, stage: list(every) if stage == "trunk" else []


def span(request: str, kind: Any, begin: int, count: int, start: int, nodes: tuple[int, ...] = ()) -> RowSpan:
    return RowSpan(request, kind, begin, count, start, 0, 1, nodes)


@pytest.mark.parametrize(("event", "expected", "more", "due"), [
    (e.Idle(), {}, {}, None), (e.Save("a", "k"), {}, {}, None),
    (ROUND, {}, {}, ("verify", 3)), (MIXED, {}, {}, ("verify and decode", 3)),
    (e.Forward((e.Row("a", "decode"), e.Row("b", "decode"))), {"num_steps": 0}, {}, ("decode", 0)),
    (e.Forward((e.Row("a", "decode"), e.Row("b", "decode", uniforms=(0.5,)))), {}, {}, ("sampled decode", 3)),
    (e.Draft(("a", "b")), {}, {}, ("draft", 3)), (e.Draft(("a", "b")), {"num_steps": 1}, {}, ("draft", 1)),
    (e.Draft(("a", "b")), {"num_steps": 0}, {}, None), (e.Draft(()), {}, {}, None),
    (e.Commit(("a", "b")), {"num_steps": 0}, {}, ("commit", 0)),
    (e.Commit(("a", "b"), caps=(1, 1)), {}, {}, ("capped commit", 3)), (e.Commit(()), {}, {}, None),
    (e.Draft(("a", "b"), parents=((0, 1, 2), (0, 1, 2))), {}, {}, ("draft", 3)),
    (e.Draft(("a", "b"), parents=((0, 1, 2), (0, 1))), {}, {}, ("shaped draft", 3)),
    (e.Draft(("a", "b"), parents=((0, 0, 2), (0, 0, 2))), {}, {}, ("shaped draft", 3)),
    (e.Draft(("a", "b"), parents=((0, 0), (0,))), {"topk": 2}, {}, ("draft", 3)),
    (e.Draft(("a", "b"), parents=((0, 1), (0,))), {"device_widths": True}, {}, ("draft", 3)),
    (e.Draft(("a", "b"), parents=((0, 0), (0,))), {}, {"blocks": {0: 1}}, ("draft", 3)),
    (PROMPT, {}, {"buckets": (2, 5)}, ("prompt", 0)), (PROMPT, {}, {"buckets": (4,)}, None), (PROMPT, {}, {}, None),
    (PROMPT, {}, {"buckets": (5,), "regions": ("parents@1", "x")}, ("prompt and trees", 0)),
    (PROMPT, {}, {"buckets": (5,), "regions": ("x",)}, ("prompt", 0)),
    (e.Forward((e.Row("a", "prefill", 2),)), {}, {"buckets": (5,), "regions": ("parents",)}, ("prompt", 0)),
])  # fmt: skip
def test_the_graph_of_an_event_follows_from_its_rows(
    monkeypatch: pytest.MonkeyPatch, event: Any, expected: Any, more: Any, due: Any
) -> None:
    """A prompt has 5 packed rows, and all other batches have 2 requests."""
    monkeypatch.setattr(g, "row_spans", spans_of(span("a", "verify", 0, 3, 0), span("b", "prefill", 3, 2, 0)))
    before = {"a": SimpleNamespace(block_keys={}), "b": SimpleNamespace(block_keys=more.get("blocks", {}))}
    given = context(event=event, expected=expected, truth=SimpleNamespace(before=before),
                    log=log.EventLog(prompt_buckets=more.get("buckets", ())),
                    regions=[pool(name) for name in more.get("regions", ())])  # fmt: skip
    rows = (5, "row") if due and due[1] == 0 and "prompt" in due[0] else (2, "request")
    assert g.due(given) == (due and g.Due(due, *rows))


def replay(key: Any = ("verify", 3), bucket: int = 2, rows: int = 2, **more: Any) -> log.GraphReplay:
    fields = {"inputs": {}, "addresses": (1, 2), "buckets": (4, 2, 1, 8), **more}
    return log.GraphReplay(key, bucket, rows, **fields)


DUE = g.Due(("verify", 3), 2)


@pytest.mark.parametrize(("wanted", "replays", "says"), [
    (DUE, (replay(),), []), (DUE, (replay(["verify", 3]),), []), (None, (), []),
    (None, (replay(), replay(("draft", 3))), ["the graph ('verify', 3) was replayed; this event replays none",
                                              "the graph ('draft', 3) was replayed; this event replays none"]),
    (DUE, (), ["0 graphs were replayed; the event is one replay of ('verify', 3)"]),
    (DUE, (replay(), replay(rows=1)), ["2 graphs were replayed; the event is one replay of ('verify', 3)",
                                       "the graph was replayed for 1 requests; the event has 2"]),
    (DUE, (replay(("draft", 3)),), ["the graph ('draft', 3) was replayed; the event is one of ('verify', 3)"]),
    (DUE, (replay(bucket=4),), ["the bucket is for 4 requests; for 2 it is the one for 2"]),
    (replace(DUE, rows=3), (replay(bucket=8, rows=3),), ["the bucket is for 8 requests; for 3 it is the one for 4"]),
    (replace(DUE, most=3), (replay(bucket=4),), []), (replace(DUE, most=1), (replay(),), []),
    (replace(DUE, rows=9), (replay(bucket=8, rows=9),), ["the bucket is for 8 requests; for 9 it is the one for 0"]),
    (g.Due(("prompt", 0), 4, "row"), (replay(("prompt", 0), 8, 3),),
     ["the graph was replayed for 3 rows; the event has 4", "the bucket is for 8 rows; for 4 it is the one for 4"]),
])  # fmt: skip
def test_the_replay_of_another_graph_or_bucket_is_named(wanted: Any, replays: Any, says: list[str]) -> None:
    assert [*g._which(wanted, replays)] == says


def test_stages_replay_a_graph_for_each_micro_batch() -> None:
    parts = (("a", "b"), ("c",))
    for wanted, replays, said in (
        (DUE, [replay(), replay(rows=1, bucket=1)], [[], []]),
        (DUE, [replay(), replay()], [[], ["the graph was replayed for 2 requests; the event has 1",
                                          "the bucket is for 2 requests; for 1 it is the one for 1"]]),
        (DUE, [replay()], [["1 graph was replayed; 2 micro-batches need one each"]]), (None, [], [[]]),
        (None, [replay()], [["1 graph was replayed; 0 micro-batches need one each"]]),
    ):  # fmt: skip
        assert [*g._of_stage(wanted, replays, parts)] == said


# -- what is in it --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "own", "idle", "says"), [
    ([7, 8], [7, 8, -1, -1], -1, []), ([], [], 0, []), ([[1, 2]], [[1, 2], [0, 0]], 0, []),
    ([7, 8, 9], [7, 5, 4, -1], -1, ["x of row 1 is 5 in the graph's buffer; this event has 8"]),
    ([7], [7, -1, 3, 4], -1, ["x of padding row 2 is 3; an idle row has -1"]),
    ([[1, 2]], [[1, 3], [0, 5], [0, 0]], 0, ["x of row 0 is [1, 3] in the graph's buffer; this event has [1, 2]",
                                             "x of padding row 1 is [0, 5]; an idle row has 0"]),
])  # fmt: skip
def test_stale_rows_of_a_buffer_are_named(given: Any, own: Any, idle: Any, says: list[str]) -> None:
    assert [*g._inputs(replay(inputs={"x": (given, own, idle)}))] == says


def test_slots_in_a_graph_are_those_of_the_trace() -> None:
    def said(slots: list[int], requests: tuple[str, ...], group: Any = None) -> list[str]:
        return [*g._slots(context(group=group), replay(inputs={"slots": ([], slots, -1)}), requests)]

    wrong = 'the graph serves request "{}" in slot {}; the trace has it in slot {}'
    assert said([2, 5, -1], ("a", "b")) == [] and said([2], ("a", "b")) == [] and said([-1, 3], ()) == []
    assert said([5, 2, 9], ("a", "b")) == [wrong.format("a", 5, 2), wrong.format("b", 2, 5)]
    assert said([4], ("z",)) == [wrong.format("z", 4, None)]
    idle = "the graph serves slot {} on a replica that has no request in this event"
    assert said([-1, -1], (), object()) == said([2], ("a",), object()) == []
    assert said([-1, 0], (), object()) == [idle.format(0)] and said([3, -1], (), object()) == [idle.format(3)]
    assert [*g._slots(context(), replay(), ("a",))] == []


def test_a_row_of_a_mixed_batch_has_a_slot_for_its_kind_alone() -> None:
    def said(own: Any, requests: tuple[str, ...] = ("a", "b"), event: Any = MIXED) -> list[str]:
        return [*g._kinds(context(event=event), replay(inputs={"kinds": ([], own, -1)} if own else {}), requests)]

    wrong = 'the graph has slot {} for a {} of request "{}"; the trace has {}'
    assert said([[2, -1], [-1, 5], [-1, -1]]) == said([[], []]) == said(None) == said([[9, 9]], event=e.Idle()) == []
    assert said([[-1, 2], [5, -1]]) == [wrong.format(-1, "verify", "a", 2), wrong.format(2, "decode", "a", -1),
                                        wrong.format(5, "verify", "b", -1), wrong.format(-1, "decode", "b", 5)]
    assert said([[-1, 4]], ("b",)) == [wrong.format(4, "decode", "b", 5)]  # a replica with one of the requests


def test_prompts_in_a_graph_have_their_rows_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window in rows 0 to 2, and tokens 4 and 5 of the prompt of "b" in rows 3 and 4."""
    monkeypatch.setattr(g, "row_spans", spans_of(span("a", "verify", 0, 3, 6), span("b", "prefill", 3, 2, 4)))

    def said(tokens: Any = (1, 2, 3, 14, 15), begin: Any = (0, 3), count: Any = (3, 2), key: str = "prompt",
             event: Any = PROMPT) -> list[str]:  # fmt: skip
        inputs = {name: ([], [*own], -1) for name, own in (("tokens", tokens), ("begin", begin), ("counts", count))}
        return [*g._prompt(context(event=event), replay((key, 0), inputs=inputs))]

    assert said() == said((9, 9, 9, 14, 15, 7)) == said(key="prompt and trees") == []
    assert said((0, 0, 0, 15, 14), key="verify") == said((0, 0, 0, 15, 14), event=e.Idle()) == []
    tokens = 'the graph has tokens [15, 14] of the prompt of "b"; the trace has [14, 15]'
    assert said((0, 0, 0, 15, 14)) == said((0, 0, 0, 15, 14), key="prompt and trees") == [tokens]
    rows = 'the graph has rows {} to {} for request "{}"; the trace has {} to {}'
    assert said(begin=(1, 3), count=(3, 1)) == [rows.format(1, 3, "a", 0, 2), rows.format(3, 3, "b", 3, 4)]


def test_segments_of_a_graph_alternate_with_eager_layers() -> None:
    """Layers 0 and 2 have a recurrence, layer 3 a conv, and layer 2 embeddings of n-grams: four eager calls."""
    places = [Place("trunk", 0, "mixed"), Place("trunk", 0, "core"), Place("trunk", 1, "attended"), Place("trunk", 2,
              "core"), Place("trunk", 3, "mixed"), Place("trunk", 2, "ngrams"), Place("extend", 4, "core")]  # fmt: skip

    def said(*ran: tuple[str, int], key: str = "prompt") -> list[str]:
        given = context(truth=SimpleNamespace(places=places))
        return [*g._ran(given, replay((key, 0), ran=ran))]

    right = [("segment", 0)]
    for number in range(4):
        right += [("eager", number), ("segment", number + 1)]
    assert said(*right) == said(*right, key="prompt and trees") == said(key="verify") == []
    for count in (8, 0):
        assert said(*right[:count]) == [f"{count} segments and eager calls ran; 4 GDN layers need 9"]
    assert said(*right, ("eager", 4)) == ["10 segments and eager calls ran; 4 GDN layers need 9"]
    assert said(*right[:2], *right[3:]) == ["eager 1 of the graph ran where segment 1 was due"]


def test_all_that_is_wrong_with_the_replays_of_an_event_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(g, "row_spans", spans_of())
    check, pools = g.Graphs(), [pool("x"), pool("x", 1)]
    unseen = "instep does not see the CUDA graphs of this engine"
    given = context(event=ROUND, regions=pools)
    assert told(check(given)) == [2, unseen] and told(check(given)) == [2]
    assert told(g.Graphs()(context(log=log.EventLog(ops="plain")))) == []
    given.regions, given.log = [pools[0], pool("x", 1), pool("y")], log.EventLog(ops="plain")
    assert told(check(given)) == [("x (layer 1) moved", 3, None, None)] and told(check(given)) == [3]
    slots = {"slots": ([2, 5], [2, 5, -1], -1), "y": ([1], [1], 0)}

    def said(*replays: log.GraphReplay, **more: Any) -> list[Any]:
        kept = more.pop("in_graphs", ())
        given = context(event=ROUND, log=log.EventLog(graphs=True, replays=replays, in_graphs=kept), **more)
        return told(check(given))

    assert said(replay(inputs=slots)) == [1, 1, 4, 2]
    wrong = ("keys is in memory of graphs, which the next replay overwrites; conv is in memory of graphs, which the "
             "next replay overwrites")  # fmt: skip
    freed = "{} of the graph ('verify', 3) for 2 {} freed after it was captured; a replay reads what others write there"
    assert said(replay(inputs=slots, freed=1, addresses=(9, 2)), in_graphs=("keys", "conv")) == [
        1, (wrong, 1, None, None), (freed.format("1 input", "was"), 4, None, None),
        ("1 of 2 buffers of the graph ('verify', 3) for 2 requests moved", 2, None, None)]
    assert said(replay(("prompt", 0), ran=(), freed=2, inputs={"slots": ([2], [5], -1), **dict.fromkeys(
            ("tokens", "begin", "counts"), ([], [], 0))}), expected={}) == [
        ("the graph ('prompt', 0) was replayed; the event is one of ('verify', 3)", 1, None, None), 1,
        ("slots of row 0 is 5 in the graph's buffer; this event has 2; the graph serves request \"a\" in slot 5; the "
         "trace has it in slot 2; 0 segments and eager calls ran; 0 GDN layers need 1; "
         + freed.format("2 inputs", "were").replace("('verify', 3)", "('prompt', 0)"), 1, None, None), 2]
    # Replicas: both have one request each, or one has both and the other an idle row in the same bucket.
    one = {"slots": ([5], [5], -1)}
    group = GroupFacts(2, {"a": 0, "b": 1})
    other = replay(rows=1, bucket=1, stage=1, inputs=one)
    assert said(replay(rows=1, bucket=1), other, group=group) == [1, 1, 1, 0, 2, 1, 2]
    both = GroupFacts(2, {"a": 0, "b": 0})
    idle = {"slots": ([-1], [-1, 3], -1)}
    assert said(replay(), replay(rows=1, stage=1, inputs=idle), group=both)[:3] == [1, 1, 1]
    assert said(replay(bucket=4), replay(rows=2, bucket=2, stage=1, inputs=idle), group=both) == [
        ("the bucket is for 4 requests; for 2 it is the one for 2", 1, 0, None),
        ("the graph was replayed for 2 requests; the event has 1", 1, 1, None), 1, 0, 2,
        ("slots of padding row 1 is 3; an idle row has -1; the graph serves slot 3 on a replica that has no request "
         "in this event", 2, 1, None), 2]
    # Stages 0 and 1 are here, each with a micro-batch of "a" and one of "b".
    stages = StageFacts((range(1),) * 3, (("a",), ("b",)), here=(0, 1))
    every = [replay(rows=1, bucket=1, stage=stage, inputs={"slots": ([slot], [slot], -1)})
             for stage in (0, 1) for slot in (2, 5)]  # fmt: skip
    assert said(*every, stages=stages) == [1, 1, 1, 1, 1, 1, 2, 1, 2, 1, 2, 1, 2]
    wrong_slot = replace(every[3], inputs={"slots": ([2], [2], -1)})
    assert said(*every[:3], wrong_slot, stages=stages)[-2] == (
        'the graph serves request "b" in slot 2; the trace has it in slot 5', 1, 1, None)
    more = said(*every, replace(every[3], inputs={}), stages=stages)
    assert more[2] == ("3 graphs were replayed; 2 micro-batches need one each", 1, 1, None)
    assert more[4:] == [1, 2, 1, 2, 1, 2, 1, 2, 0, 2]


# -- calls of ops ------------------------------------------------------------------------------------------------

MIX, CORE, SECOND, ATTENDED = (Place("trunk", layer, name) for layer, name in (
    (0, "mixed"), (0, "core"), (2, "core"), (1, "attended")))  # fmt: skip


def test_the_log_of_calls_decides_what_is_judged() -> None:
    check, broken = c.Contracts(), log.Broken("gdn", CORE, "q has 3 rows")
    unseen = "instep does not see the op calls of this engine"
    assert told(check(context(event=ROUND))) == [unseen] and told(check(context(event=ROUND))) == []
    graphs = "op calls inside a CUDA graph are not judged; run without --graphs to judge them"
    captured = "a graph was captured here, so rows of its calls are not judged"
    nothing = ("no op was called and no graph was replayed", 0, None, None)
    twice = ("op gdn (trunk.0.core): q has 3 rows (2 times)", 1, None, None)
    for event, of_log, due in (
        (ROUND, {"replays": (replay(),)}, [graphs]), (ROUND, {}, [nothing]), (e.Idle(), {}, []),
        (e.Idle(), {"replays": (replay(),)}, []), (e.Idle(), {"calls": 2, "tensors": 9}, [9]),
        (ROUND, {"calls": 2, "tensors": 9, "captured": 1}, [9, captured]),
        (e.Idle(), {"calls": 2, "tensors": 9, "captured": 1}, [9]),
        (e.Idle(), {"calls": 2, "broken": (broken, replace(broken, op="x", place=None), broken)},
         [twice, ("op x: q has 3 rows", 1, None, None)]),
    ):  # fmt: skip
        assert told(check(context(event=event, log=log.EventLog(ops="plain", **of_log)))) == due, (event, of_log)
    one, _ = c.broken(log.EventLog(broken=(broken, replace(broken, place=None), broken)), 4, "forward")
    assert (one.worst, one.place, one.event) == (2.0, CORE, 4) and _.place == NOWHERE


def served(op: str, place: Place, form: str, units: Any, begin: int, count: int, **more: Any) -> log.Served:
    return log.Served(op, place, form, units, begin, count, **more)


def judged(monkeypatch: pytest.MonkeyPatch, calls: Iterable[log.Served], spans: Any = None, **given: Any) -> list[Any]:
    every = spans or {"trunk": [span("a", "verify", 0, 3, 6), span("b", "prefill", 3, 2, 4)]}
    monkeypatch.setattr(c, "row_spans", lambda context, stage: every.get(stage, []))
    replays = given.pop("replays", ())
    places = given.pop("places", (MIX, CORE, SECOND, ATTENDED))
    return told(c.Contracts()._served(context(
        event=PROMPT, log=log.EventLog(served=tuple(calls), replays=replays),
        truth=SimpleNamespace(places=dict.fromkeys(places)), **given)))  # fmt: skip


EVERY = [served("conv", MIX, "window", (2,), 0, 3), served("conv", MIX, "chunk", (5,), 3, 2),
         served("gdn", CORE, "window", (2,), 0, 3), served("gdn", CORE, "chunk", (5,), 3, 2),
         served("gdn", SECOND, "window", (2,), 0, 3), served("gdn", SECOND, "chunk", (5,), 3, 2),
         served("attend", ATTENDED, "pages", (7, 3), 0, 3, before=6),
         served("attend", ATTENDED, "pages", (1,), 3, 2, before=4)]  # fmt: skip
VERIFY, PREFILL = 'the 3 rows of request "a" (verify)', 'the 2 rows of request "b" (prefill)'


@pytest.mark.parametrize(("number", "change", "says", "request_"), [
    (2, {"form": "chunk"}, f"{VERIFY} are served as a chunk; verify rows are a window", "a"),
    (3, {"form": "window"}, f"{PREFILL} are served as a window; prefill rows are a chunk", "b"),
    (3, {"units": (2, 9)}, f"{PREFILL} are served with slot 2, 9; the trace has them in slot 5", "b"),
    (6, {"units": (3, 7)}, f"{VERIFY} are served with pages 3, 7; the trace has them in pages 7, 3", "a"),
    (3, {"count": 4}, f"{PREFILL} are served as 4 rows", "b"),
    (6, {"before": 1}, f"{VERIFY} follow 1 position; in the trace they follow 6", "a"),
    (7, {"before": 6}, f"{PREFILL} follow 6 positions; in the trace they follow 4", "b"),
    (2, {"branches": ((-1,), (0,), (0,))}, f"{VERIFY}: row 0 continues node -1; the trace has those of a chain", "a"),
    (6, {"branches": ((6,), (6, 7))}, f"{VERIFY}: row 0 sees positions 6; the trace has those of a chain", "a"),
    (3, None, f"no call serves {PREFILL}", "b"),
    (2, None, f"{VERIFY} are served as a chunk; verify rows are a window", "a"),
])  # fmt: skip
def test_rows_that_are_served_wrongly_are_named(
    monkeypatch: pytest.MonkeyPatch, number: int, change: Any, says: str, request_: str
) -> None:
    """Calls may come in any order, and each micro-batch counts its rows from 0."""
    calls = [replace(one, **change or {}) if at == number else one for at, one in enumerate(EVERY)
             if change is not None or at != number]  # fmt: skip
    assert judged(monkeypatch, EVERY[::-1]) == [5, 5, 5, 5]
    place = EVERY[number].place
    at = [MIX, CORE, SECOND, ATTENDED].index(place)
    right: list[Any] = [5, 5, 5, 5]
    right[at] = (f"op {EVERY[number].op} (trunk.{place.layer}.{place.component}): {says}", 5, None, request_)
    assert judged(monkeypatch, calls) == right


def test_rows_of_a_tree_that_are_served_wrongly_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window whose third node follows the root."""
    tree = {"parents": {"a": (-1, 0, 0)}}
    right = replace(EVERY[2], branches=((-1,), (0,), (0,)))
    for change, says in (({}, ""), ({"branches": ((-1,), (0,), (1,))}, "row 2 continues node 1; the trace has 0"),
                         ({"branches": ((-1,), (1,), (1,))}, "row 1 continues node 1; the trace has 0"),
                         ({"branches": ()}, "row 0 continues node those of a chain; the trace has -1")):  # fmt: skip
        found = judged(monkeypatch, [replace(right, **change), EVERY[3]], expected=tree, places=(CORE,))  # type: ignore[arg-type]
        assert found == ([5] if not says else [(f"op gdn (trunk.0.core): {VERIFY}: {says}", 5, None, "a")])


def test_other_calls_of_ops_are_expected_of_other_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [replace(one, begin=0, part=1) if one.begin else one for one in EVERY]
    assert judged(monkeypatch, parts[::-1]) == [5, 5, 5, 5]
    more = "op gdn (trunk.0.core): a call serves 1 rows of unit (9,) that the trace does not have"
    assert judged(monkeypatch, [*EVERY, served("gdn", CORE, "window", (9,), 9, 1)]) == [5, (more, 5, None, None), 5, 5]
    # Ops with other names: a conv by the place of its result, a recurrence of another kind, and one that is fused.
    for op, name, inside in (("gdn", "kda", ()), ("conv", "my_conv", ()), ("gdn", "fused_gdn", ("q",))):
        calls = [replace(one, op=name) if one.op == op else one for one in EVERY]
        assert judged(monkeypatch, calls, shown=SimpleNamespace(inside=inside)) == [5, 5, 5, 5]
    latents = [replace(one, op="attend_latents") if one.op == "attend" else one for one in EVERY]
    assert judged(monkeypatch, latents) == [5, 5, 5, 5]
    lacks = "op {}: no call serves " + VERIFY
    assert judged(monkeypatch, [one for one in EVERY if one.op != "conv"])[0] == (
        lacks.format("conv (trunk.0.mixed)"), 5, None, "a")
    gate = Place("trunk", 0, "in_gate")
    short = judged(monkeypatch, EVERY[2:], places=(MIX, gate))
    assert short == [(lacks.format("short_conv (trunk.0.mixed)"), 5, None, "a")]
    assert judged(monkeypatch, (), places=(CORE,)) == [(lacks.format("gdn (trunk.0.core)"), 5, None, "a")]
    # Stage 1, which has layers 1 and 2, judges its own; in a group, the rows of replica 0 come first.
    stages = StageFacts((range(1), range(1, 3)), here=(1,))
    assert judged(monkeypatch, EVERY[4:], stages=stages) == [5, 5]
    turned = [replace(one, begin=3 - one.begin if one.begin else 2) for one in EVERY]
    group = GroupFacts(2, {"a": 1, "b": 0})
    assert judged(monkeypatch, turned, group=group) == [5, 5, 5, 5] != judged(monkeypatch, turned)
    gone = {"slots_after": {"b": 5}}
    assert judged(monkeypatch, [one for one in EVERY if one.begin], expected=gone) == [2, 2, 2, 2]
    assert judged(monkeypatch, (), expected={"slots_after": {}}) == []


def test_calls_inside_a_graph_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph with a prompt hides attention. One of a round hides all calls of the target, if none is there."""
    skipped = "{} inside a CUDA graph is not judged; run without --{}graphs to judge it"
    head = Place("extend", 0, "attended")
    places = (MIX, CORE, ATTENDED, head)
    lacks = "op {}: no call serves " + VERIFY
    missing = [(lacks.format(at), 5, None, "a") for at in ("conv (trunk.0.mixed)", "gdn (trunk.0.core)")]
    graph = {"replays": (replay(),), "places": places}
    assert judged(monkeypatch, (), **graph) == [*missing, skipped.format("attention", "prompt-")]
    rounds: Any = {"trunk": [span("a", "verify", 0, 3, 6), span("b", "decode", 3, 1, 4)],
                   "extend": [span("b", "decode", 0, 1, 4)]}  # fmt: skip
    extend = served("attend", head, "pages", (1,), 0, 1, before=4)
    hidden = [skipped.format(op, "") for op in ("conv", "gdn", "attention")]
    assert judged(monkeypatch, [extend], rounds, **graph) == [*hidden, 1]
    assert judged(monkeypatch, (), rounds, **graph) == [*hidden, hidden[2]]
    gdn = [served("gdn", CORE, "window", (2,), 0, 3), served("gdn", CORE, "window", (5,), 3, 1)]
    seen = judged(monkeypatch, gdn, rounds, **graph)
    assert seen == [(lacks.format("conv (trunk.0.mixed)"), 4, None, "a"), 4, hidden[2], hidden[2]]
    assert len(judged(monkeypatch, (), rounds, places=places)) == 4
    # The latents of a target say nothing of a draft head's layers or of a block drafter's.
    latents, block = replace(EVERY[6], op="attend_latents"), Place("block", 0, "attended")
    rounds["block"] = rounds["extend"]
    of_block = served("attend_latents", block, "pages", (1,), 0, 1, before=4)
    found = judged(monkeypatch, [latents, of_block, extend], rounds,
                   places=(ATTENDED, head, block, Place("extend", 0, "core")))  # fmt: skip
    rounds["chain.1"] = rounds["extend"]
    (chained,) = judged(monkeypatch, [replace(extend, op="attend_latents")], rounds,
                        places=(Place("chain.1", 0, "attended"),))  # fmt: skip
    assert chained[0].startswith("op attend_latents (chain.1.0.attended): no call")
    lacks = "op attend_latents (trunk.1.attended): no call serves the 1 row"
    assert found[1:] == [1, 1]
    assert found[0][0].startswith(lacks)


def due(monkeypatch: pytest.MonkeyPatch, op: str, place: Place, *spans: RowSpan, **given: Any) -> list[Any]:
    monkeypatch.setattr(c, "row_spans", lambda context, stage: list(spans))
    found = c._due(context(**given), op, place)
    return [(one.units, one.begin, one.count, one.before, one.branches) for _, one in found]


def test_rows_see_the_positions_of_their_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window at position 6 whose node 2 follows the root, and the head's rows, which are one position before."""
    tree = {"parents": {"a": (-1, 0, 0, 2)}}
    window, head = span("a", "verify", 1, 4, 6), span("a", "draft", 1, 1, 6)
    pages = (7, 3)
    assert due(monkeypatch, "attend", ATTENDED, window, expected=tree) == [
        (pages, 1, 4, 6, ((6,), (6, 7), (6, 8), (6, 8, 9)))]
    assert due(monkeypatch, "gdn", CORE, window, expected=tree) == [((2,), 1, 4, 0, ((-1,), (0,), (0,), (2,)))]
    assert due(monkeypatch, "attend", ATTENDED, window) == [(pages, 1, 4, 6, ())]
    assert due(monkeypatch, "gdn", CORE, replace(window, kind="decode"), expected=tree) == [((2,), 1, 4, 0, ())]
    first, third = (Place(f"chain.{step}", 0, "attended") for step in (1, 3))
    assert due(monkeypatch, "attend", first, head) == [(pages, 1, 1, 6, ())]
    assert due(monkeypatch, "attend", third, head) == [(pages, 1, 1, 8, ())]
    assert due(monkeypatch, "attend", third, head, expected=tree) == [(pages, 1, 1, 6, ((7, 8),))]
    assert due(monkeypatch, "attend", first, head, expected=tree) == [(pages, 1, 1, 6, ())]
    block = Place("block", 0, "attended")
    rows = span("a", "draft", 0, 3, 6)
    assert due(monkeypatch, "attend", block, rows, expected=tree) == due(monkeypatch, "attend", block, rows) == [
        (pages, 0, 3, 6, ((6, 7, 8),) * 3)]
    # A grown tree: the beams of nodes 1 and 3 are rows of one launch; the tree may not have them.
    beams = [span("a", "draft", 0, 1, 6, (1,)), span("a", "draft", 1, 1, 6, (3,)), span("b", "draft", 2, 1, 4, (1,))]
    grown = {"a": SimpleNamespace(parents=(-1, 0, 0, 1)), "b": None}
    monkeypatch.setattr(c, "grown_of", lambda context, side, name: grown[name])
    topk = {"topk": 2}
    assert due(monkeypatch, "attend", first, *beams, expected=topk) == [(pages, 0, 2, 6, ((6,), (6, 8)))]
    grown["a"].parents = (-1, 0, 0)
    assert due(monkeypatch, "attend", first, *beams, expected=topk) == []


def test_beams_of_one_request_are_rows_of_one_launch() -> None:
    spans = [span(name, kind, at, 1, 0, (at,)) for at, (name, kind) in enumerate((
        *[("a", "draft")] * 3, *[("b", "draft")] * 2, *[("b", "verify")] * 2))]  # fmt: skip
    found = [(one.request, one.begin, one.count, one.nodes) for one in c._launched(spans)]
    assert found == [("a", 0, 3, (0, 1, 2)), ("b", 3, 2, (3, 4)), ("b", 5, 1, (5,)), ("b", 6, 1, (6,))]
