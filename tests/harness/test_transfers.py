"""Requests and prefixes move between two engines with other pools, step counts, ranks and dtypes of states.

Leaves out: copies on the host of one engine (`test_offloaded_prefixes.py`), and engines of several ranks alone
(`test_ranks.py`).
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import structs

from instep.bundled import model
from instep.campaign.relations import hold, relations
from instep.campaign.relations.case import Case
from instep.checks.transfer_findings import wrong_transfers
from instep.cli.record import make
from instep.diagnose import diagnose
from instep.report.divergence_message import divergence
from instep.run.build_compared_engines import Plan
from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.event_rules import EventRules
from instep.trace.file import Trace, read
from instep.trace.header import Receiver, sound
from instep.trace.policy import Transfer, read_policy, read_prompts
from instep.verdict import Exit
from instep_optimized import OptimizedEngine
from instep_optimized.ops.ledger_label_ops import LEDGER
from instep_optimized.transfer_between_engines import Wire
from instep_proof.faults.catalogue import TRACES, by_id
from instep_proof.faults.catalogue.fault import Edit, Wrap
from instep_proof.faults.catalogue.transfers import WIRE
from instep_reference.contract import engine as e
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.errors import BadInput, InstepError, Unsupported
from instep_reference.contract.place_names import Place
from support.inputs.checkpoints import TWO_LAYERS, write
from support.inputs.traces import VOCAB, committed
from support.running.command import Runner
from support.running.covering import WHOLE, few
from support.running.planting import planted_here

MODEL = TRACES.parent / "drafters"

trace = committed("faults/transfer")


SETTINGS = (
    Setting("plain", strategy="columns", conv="widened", ranks=2), Setting("plain", strategy="snapshot"),
    Setting("ledger", strategy="columns", ranks=2, graphs=True), Setting("triton", graphs=True),
    Setting("plain", state_dtype="bfloat16", strategy="columns"), Setting("ledger", overlap=True),
)  # fmt: skip


@WHOLE
@pytest.mark.parametrize("setting", [*map(lambda one: pytest.param(one, id=" ".join(one.words()[1:])), SETTINGS)])
def test_transferred_requests_agree_in_every_setting(setting: Setting, trace: Trace) -> None:
    until = None if setting.ops == "ledger" else 24
    outcome = Replay(trace, setting).run(until=until)
    assert outcome.verdict.exit is Exit.AGREED, outcome.verdict.findings[:1]
    compared = {one.kind for one in outcome.verdict.compared if one.check == "bytes" and one.request == "b"}
    assert "load at the receiver" in compared, "the moved memory itself was compared"


def test_the_sender_refuses_requests_that_neither_engine_has(trace: Trace) -> None:
    rules = EventRules(trace.header)
    assert rules.other is not None
    assert all(one.serving(e.Draft(("nobody",))) is rules for one in (rules, rules.other))


def test_the_policy_of_the_trace_records_it_again(trace: Trace, tmp_path: Path) -> None:
    told, prompts = read_policy(TRACES / "transfer.policy.json"), read_prompts(MODEL / "prompts.json")
    again = make(MODEL, prompts, told, tmp_path / "again.jsonl", Setting(drafter="vanilla", dtype="float64"))
    assert again.events == trace.events
    never = structs.replace(told, transfers=(*told.transfers, Transfer(11, "c")))
    with pytest.raises(BadInput, match='"c", never possible from round 11 on'):
        make(MODEL, prompts, never, tmp_path / "never.jsonl", Setting(drafter="vanilla", dtype="float64"))


def test_a_name_may_be_used_again_at_once(trace: Trace) -> None:
    """The first engine serves no event between the fetch of its copy and another save under the name."""
    events = (*trace.events[:10], e.Save("a", "moved"), e.Evict("moved"))
    outcome = Replay(replace(trace, events=events), Setting("ledger")).run()
    assert outcome.verdict.exit is Exit.AGREED, outcome.verdict.findings[:1]


def test_illegal_transfers_are_refused(trace: Trace) -> None:
    rules = EventRules(trace.header)
    for event in trace.events[:5]:
        rules.apply(event)
    save = e.Save("a", "mine")
    rules.apply(save)
    assert rules.other is not None
    for wrong, says in (
        (e.Admit("a", (1,), receiver=True), "which the other engine serves"),
        (e.Load("a", "moved"), '"a", which is prefilling'),
        (e.Fetch("mine"), "a name under which something is kept on the host"),
        (e.Save("b", "moved"), "a name under which nothing is kept"),
        (e.Forward((e.Row("a", "prefill", 1), e.Row("nobody", "prefill", 1))), '"nobody", which is not there'),
    ):
        with pytest.raises(BadInput, match=says):
            rules.check(wrong)
    rules.apply(e.Fetch("moved"))
    assert "moved" in rules.other.table.saved and "moved" not in rules.table.saved
    with pytest.raises(BadInput, match="a name under which something is kept on the host"):
        rules.check(e.Fetch("moved"))
    with pytest.raises(BadInput, match="the field `receiver` in the header"):
        EventRules(structs.replace(trace.header, receiver=None)).check(e.Admit("x", (1,), receiver=True))


@pytest.mark.parametrize(("change", "says"), [
    ({"num_steps": -1}, "receiver: candidates"), ({"ranks": 0}, "receiver.ranks: found 0, expected at least 1"),
    ({"capacity": {"page_size": 0}}, "receiver: capacity.page_size"),
    ({"capacity": {"track_interval": 8}}, "receiver.capacity.track_interval"),
])  # fmt: skip
def test_a_header_with_a_wrong_receiver_is_refused(change: dict[str, Any], says: str, trace: Trace) -> None:
    receiver = trace.header.receiver
    assert receiver is not None
    fields = {"capacity": structs.replace(receiver.capacity, **change.pop("capacity", {})), **change}
    wrong: Receiver = structs.replace(receiver, **fields)
    with pytest.raises(BadInput, match=says):
        sound(structs.replace(trace.header, receiver=wrong), "line 1")


def test_a_receiver_with_one_rank_and_whole_experts_is_refused_by_its_field(trace: Trace) -> None:
    receiver = trace.header.receiver
    assert receiver is not None
    one = replace(trace, header=structs.replace(trace.header, receiver=structs.replace(receiver, ranks=1)))
    plan = Plan.of(one.header, Checkpoint.open(model()), Setting("ledger", ranks=2, experts="whole"), "line 1")
    with pytest.raises(BadInput, match=r"line 1: receiver\.ranks: found 1 with --experts whole, expected 2 or more"):
        plan.of_receiver(one.header, "line 1")


@pytest.mark.parametrize(("setting", "says"), [
    (Setting("plain", state_dtype="float8_e4m3fn"), "--state-dtype: found float8_e4m3fn"),
    (Setting("plain", kv_dtype="float8_e4m3fn"), "--kv-dtype"), (Setting("plain", kept_dtype="int8"), "--kept-dtype"),
    (Setting("plain", chunk_dtype="bfloat16"), "--chunk-dtype"),
])  # fmt: skip
def test_memory_in_tiles_is_refused_with_a_receiver(setting: Setting, says: str, trace: Trace) -> None:
    with pytest.raises(BadInput, match=says):
        Replay(trace, setting).run(until=1)


def test_ranks_that_a_receiver_cannot_have_are_refused(trace: Trace) -> None:
    assert trace.header.receiver is not None
    three = structs.replace(trace.header, receiver=structs.replace(trace.header.receiver, ranks=3))
    with pytest.raises(BadInput, match=r"receiver\.ranks: found 3, expected a divisor of the model's 2 key heads"):
        Replay(replace(trace, header=three), Setting()).run(until=1)


@WHOLE
def test_the_cause_at_the_receiver_is_confirmed(trace: Trace) -> None:
    with planted_here(*by_id()["transfer-conv-one-block"].edits):
        found = diagnose(Replay(trace, Setting("plain")), ladder=True)
    said = divergence(found) or ""
    assert "event 8 load at the receiver" in said and "cause: event 8 writes wrong memory" in said, said


@WHOLE
@pytest.mark.slow
def test_copies_of_before_leaks_and_earlier_rows_are_named(trace: Trace) -> None:
    keeps = Edit.of(WIRE, "for home in self.wire.{pop => get}(name).homes:\n    home.pop(name, None)")
    early = Wrap(WIRE, "Courier.take", result=(
        "rows = {n: x.roll(-1, 0) for n, x in result[1]['keys'].items()}\n"
        "result = result[0], result[1].changed(keys=rows)"))  # fmt: skip
    before = Wrap(WIRE, "Courier.take", result=(
        "old = self.__dict__.setdefault('old', {})\n"
        "state = old.get(name, result[1]['state'])\n"
        "old[name] = copy_layers(result[1]['state'], torch.clone)\n"
        "result = result[0], result[1].changed(state=state)"))  # fmt: skip
    for edit, event, says in (
        (before, 23, 'holds what was kept as "moved" before'),
        (keeps, 18, 'the copy that offload kept as "a, 1" is gone, but its memory is still held'),
        (early, 8, "has its rows 1 position earlier [equal bits: has its rows 3 positions further]"),
    ):
        with planted_here(edit):
            said = divergence(diagnose(Replay(trace, Setting()), until=event)) or ""
        assert f"event {event} " in said and says in said, said


def test_wrong_contents_of_moved_rows_are_listed() -> None:
    """3 rows of values, moved by one: with the last ones again at the other end, and with nothing there."""
    mine, keys, draft = Place("trunk", 0, "values"), Place("trunk", 0, "keys"), Place("draft", 0, "values")
    right = torch.arange(1.0, 13.0).view(3, 2, 2)
    kept = SimpleNamespace(ranks=None, sent=None, state=SimpleNamespace(
        length=3, parts=lambda: [(mine, right), (keys, -right), (draft, right[:2])]))  # fmt: skip
    context = SimpleNamespace(ranks=None, event=e.Load("a", "kept"), subject=SimpleNamespace(after={}),
                              earlier=SimpleNamespace(saved={}, dropped={}))  # fmt: skip
    first, second, third, none = *right, torch.zeros(2, 2)
    wrong = [(known.says, [*rows]) for known, rows in wrong_transfers(context, "kept", kept, mine, right)]  # type: ignore
    due = {"has its rows 1 position further": ([third, first, second], [none, first, second]),
           "has its rows 1 position earlier": ([second, third, first], [second, third, none]),
           "has its rows 2 positions further": ([second, third, first], [none, none, first]),
           "holds the keys (trunk layer 0 keys) of the copy": ([*-right],)}
    for says, contents in due.items():
        found = [rows for known, rows in wrong if known == says]
        assert len(found) == len(contents), (says, [known for known, _ in wrong])
        assert all(torch.equal(x, y) for some, rows in zip(found, contents, strict=True)
                   for x, y in zip(some, rows, strict=True)), says  # fmt: skip
    assert not any("values" in says for says, _ in wrong), "a part of itself, or of another shape"


def test_commands_for_one_engine_refuse_two(instep: Runner, tmp_path: Path) -> None:
    file = TRACES / "transfer.jsonl"
    for command in (("relations", file, "slots", "--ops", "ledger"), ("streams", file, "--ops", "plain")):
        ran = instep(*command)
        assert ran.code == 2 and "transfer.jsonl line 1: receiver: found a second engine" in ran.err, ran
    page = tmp_path / "page.html"
    assert instep("replay", file, "--ops", "ledger", "--until", 24, "--html", page).code == 0 and page.stat().st_size


def test_an_incomplete_entry_is_an_error_and_no_answer() -> None:
    """Nothing has changed afterwards, and the fetch of a complete entry works."""
    checkpoint, wire = Checkpoint.open(MODEL, "vanilla"), Wire()
    setting = Setting("ledger", drafter="vanilla")
    room = e.Capacity((1, 2), (1, 2, 3, 4), 8, 24)
    sender, receiver = (
        OptimizedEngine(checkpoint, LEDGER, setting.options(), replace(room, page_size=size), num_steps=steps,
                        wire=wire)
        for size, steps in ((8, 3), (4, 1)))  # fmt: skip
    for engine in (sender, receiver):
        engine.admit("a", (1, 2, 3, 4, 5))
    sender.forward((e.Row("a", "prefill", 3),))
    sender.save("a", "moved")
    sender.offload("moved")
    request, kept, arrival = wire["moved"][0]
    for broken, says in (
        (kept.changed(draft_values={}), "has draft_values of the layers"),
        (kept.changed(keys={layer: rows[:-1] for layer, rows in kept["keys"].items()}), r"has \[2\] rows; expected 3"),
        (kept.changed(state={layer: x[:2] for layer, x in kept["state"].items()}), "has 2 entries of rank 0 on axis 0"),
    ):
        wire["moved"][0] = request, broken, arrival
        with pytest.raises(InstepError, match=says):
            receiver.fetch("moved")
        with pytest.raises(BadInput, match="nothing of that name"):
            receiver.load("a", "moved")
    wire["moved"].ranks = 2
    with pytest.raises(InstepError, match="parts of 1 of 2 ranks"):
        receiver.fetch("moved")
    wire["moved"].ranks = 1
    wire["moved"][0] = request, kept, arrival
    receiver.fetch("moved")
    receiver.load("a", "moved")
    assert not wire and not sender.copies()
    mine, its = receiver.state("a"), sender.state("a")
    assert mine.length == its.length == 3
    for (place, found), (_, right) in zip(mine.parts(), its.parts(), strict=True):
        assert torch.equal(found, right), place


def test_engines_with_tiles_refuse_a_wire() -> None:
    setting = Setting("plain", drafter="vanilla", state_dtype="float8_e4m3fn")
    with pytest.raises(Unsupported, match="states or KV in tiles"):
        OptimizedEngine(Checkpoint.open(MODEL, "vanilla"), setting.op_set(), setting.options(),
                        e.Capacity((1,), (1, 2), 8, 24), num_steps=1, wire=Wire())  # fmt: skip


@few(1)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "setting"), [
    ("faults/widths", Setting("ledger")), ("faults/shared", Setting("plain")),
    ("faults/several", Setting("plain", strategy="columns", ranks=2, graphs=True, overlap=True)),
    ("faults/block", Setting("plain")), ("trees", Setting("ledger")), ("slots", Setting("plain")),
])  # fmt: skip
def test_requests_that_move_after_each_round_continue(name: str, setting: Setting) -> None:
    trace = read(TRACES.parent / f"{name}.jsonl")
    case = Case.of(trace, Replay(trace, setting).plan, until=40)
    (relation,) = relations(["moving"])
    found = hold(case, relation)
    assert found.verdict.exit is Exit.AGREED and found.lacks is None and not found.verdict.skipped
    if setting.ops == "plain":
        with planted_here(*by_id()["transfer-null-block"].edits):
            wrong = hold(Case.of(trace, Replay(trace, setting).plan, until=40), relation).verdict
        assert wrong.exit is Exit.DIVERGED


def test_relation_of_moves_does_not_apply_to_tiles() -> None:
    trace = read(TRACES / "widths.jsonl")
    (relation,) = relations(["moving"])
    case = Case.of(trace, Replay(trace, Setting("plain", kv_dtype="float8_e4m3fn")).plan)
    assert hold(case, relation).lacks == "memory in tiles and narrow prefixes do not move to another engine"
    alone = Case.of(trace, Replay(trace, Setting("plain")).plan, until=0)
    assert [one.reason for one in hold(alone, relation).verdict.skipped] == ["no request of this trace could move"]


@WHOLE
def test_a_transfer_between_four_and_two_ranks_agrees(tmp_path: Path) -> None:
    """Ranks hold the same KV head, and each rank of one engine has parts of several ranks of the other one."""
    model = write(tmp_path / "model", **{**TWO_LAYERS, "vocab_size": VOCAB, "linear_num_key_heads": 4,
                                         "linear_num_value_heads": 8, "num_attention_heads": 4,
                                         "num_key_value_heads": 1})  # fmt: skip
    told = read_policy(TRACES / "transfer.policy.json")
    assert told.receiver is not None
    told = structs.replace(told, receiver=structs.replace(told.receiver, ranks=4, state_dtype=None))
    made = make(model, read_prompts(MODEL / "prompts.json"), told, tmp_path / "four.jsonl")
    for setting in (Setting("ledger", ranks=2), Setting("plain", ranks=2)):
        assert Replay(made, setting).run().verdict.exit is Exit.AGREED
