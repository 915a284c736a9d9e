"""Rounds that overlap: pages of the worst case are predicted, asking changes nothing, requests end a round late.

Leaves out: the engine's own end of it (`tests/optimized/test_engine_rounds.py`).
"""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from instep.checks.trace_bookkeeping import Identity
from instep.run.build_compared_engines import bare, participants_of
from instep.run.lockstep import Lockstep
from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.event_rules import EventRules
from instep.trace.file import Trace, read
from instep.trace.policy import Arrival, Steps
from instep.verdict import Exit
from instep_optimized.transfer.to_host import Length
from instep_reference.contract.engine import Draft
from instep_reference.contract.errors import BadInput
from support.inputs.checkpoints import write
from support.inputs.traces import PROMPTS, VOCAB, policy, recorded, recording
from support.running.command import Runner
from support.running.covering import few
from support.running.verdicts import agreed

pytestmark = pytest.mark.slow  # whole replays or commands

ROUNDS = policy(
    arrivals=(Arrival("a", "few", max_new=11), Arrival("b", "one", max_new=7)), deeds=(), num_steps=3,
    steps=(Steps(2, 1), Steps(4, 3)), accept=(0, 1, 0, 2),
)


trace = recording(ROUNDS)


@few(1)
@pytest.mark.parametrize("strategy", ["snapshot", "columns", "rerun", "lazy_rerun"])
def test_pages_of_the_worst_case_are_predicted(trace: Trace, strategy: str) -> None:
    setting = Setting("ledger", strategy=strategy, overlap=True)
    agreed(Replay(trace, setting, checks=lambda plan: [Identity()]).run(), events=len(trace.events))


def test_the_prediction_differs_from_that_of_waiting_rounds(trace: Trace) -> None:
    """Or nothing above would show anything: some event leaves more pages than exact lengths need."""
    waiting, overlapping = EventRules(trace.header), EventRules(trace.header, overlap=True)
    more = 0
    for event in trace.events:
        waiting.apply(event)
        overlapping.apply(event)
        pages = [sum(len(one.pages) for one in rules.table.live.values()) for rules in (waiting, overlapping)]
        assert pages[0] <= pages[1]
        more += pages[0] < pages[1]
    assert more


def test_rules_of_waiting_rounds_see_that_they_overlap(trace: Trace) -> None:
    participants = replace(participants_of(Replay(trace, Setting("ledger", overlap=True)).plan), overlap=False)
    lockstep, off = Lockstep(trace, participants), []
    while lockstep.next < len(trace.events):
        context = lockstep.step()
        pages = {name: tuple(pages) for name, pages in context.subject_pages.items()}
        off += [context.index] * (pages != {n: p for n, p in context.expected.pages_after.items() if p or n in pages})
    assert off


def test_reading_a_state_changes_no_page(trace: Trace) -> None:
    """Everything is read from one engine after every event, and nothing from its twin."""
    plan = Replay(trace, Setting("plain", overlap=True)).plan
    asked, left_alone = bare(plan), bare(plan)
    for event in trace.events:
        asked.may_change(event)
        for engine in (asked, left_alone):
            event.on(engine)
        for name in asked.slots():
            asked.state(name)
        assert asked.pages() == left_alone.pages(), event


def test_reading_a_length_does_not_update_the_reservation() -> None:
    class Counts:
        def list(self) -> list[int]:
            return [2]

    length = Length(5)
    length.owe(Counts(), 0, 4)
    assert (length.exact, length.most) == (7, 9)
    length.settle()
    assert (length.exact, length.most) == (7, 7)


def test_event_that_fits_only_by_exact_lengths_is_served(tmp_path: Path) -> None:
    """The worst case has no room: both the rules and the engine go by exact lengths."""
    loose = recorded(tmp_path / "loose", ROUNDS)
    rules, most = EventRules(loose.header), 0
    for event in loose.events:
        rules.apply(event)
        most = max(most, sum(len(one.pages) for one in rules.table.live.values()))
    room = msgspec.structs.replace(ROUNDS.capacity, pages=tuple(range(most, 0, -1)))
    tight = recorded(tmp_path / "tight", msgspec.structs.replace(ROUNDS, capacity=room))
    assert served(tight)


def served(trace: Trace) -> bool:
    """Whether pages and lengths are right to the end; what memory holds is looked at in `test_combinations.py`."""
    run = Replay(trace, Setting("ledger", overlap=True), checks=lambda plan: [Identity()]).run()
    return run.verdict.exit is Exit.AGREED


def test_request_near_its_limit_uses_exact_lengths(tmp_path: Path) -> None:
    """The worst case of the last round is more than a request may have; its exact length is not."""
    rejected = msgspec.structs.replace(ROUNDS, accept=(0,))
    rules = EventRules((loose := recorded(tmp_path / "loose", rejected)).header, overlap=True)
    longest, most = 0, 0
    for event in loose.events:
        if isinstance(event, Draft):
            worst = rules.table.positions(dict.fromkeys(event.requests, rules.table.num_steps))
            most = max(most, *worst.values())
        rules.apply(event)
        longest = max(longest, *(one.length + len(one.window) for one in rules.table.live.values()), 0)
    assert longest < most  # or nothing below would show anything
    room = msgspec.structs.replace(rejected.capacity, max_positions=longest)
    tight = recorded(tmp_path / "tight", msgspec.structs.replace(rejected, capacity=room))
    assert tight.events == loose.events
    assert served(tight)


def test_request_ends_one_round_late_with_a_note(instep: Runner, tmp_path: Path) -> None:
    """As a user records it."""
    model = write(tmp_path / "model", vocab_size=VOCAB, num_hidden_layers=2, full_attention_interval=2)
    files = {"prompts": tmp_path / "prompts.json", "policy": tmp_path / "policy.json"}
    files["prompts"].write_bytes(msgspec.json.encode([{"name": n, "tokens": t} for n, t in PROMPTS.items()]))
    arrivals = (Arrival("a", "few", max_new=6), Arrival("b", "one", max_new=3))
    plain = msgspec.structs.replace(ROUNDS, arrivals=arrivals, accept=(), steps=())
    files["policy"].write_bytes(msgspec.json.encode(plain))
    said = {}
    for name, words in (("waiting", ()), ("overlapping", ("--overlap",))):
        out = tmp_path / f"{name}.jsonl"
        ran = instep("record", "--checkpoint", model, "--out", out, *words,
                     *(word for option, path in files.items() for word in (f"--{option}", path)))  # fmt: skip
        assert ran.code == 0, ran.err
        found = read(out)
        said[name] = found.header, [type(event).__name__.lower() for event in found.events]
        assert instep("replay", out, "--ops", "ledger", *words).code == 0
    (first, one), (second, two) = said["waiting"], said["overlapping"]
    assert (first.lag, first.recording.overlap) == (0, False)
    assert (second.lag, second.recording.overlap) == (1, True)
    assert two.count("commit") == one.count("commit") + 1 and two.count("finish") == one.count("finish") == 2
    assert one.index("finish") < two.index("finish")


def test_external_engine_decides_whether_rounds_overlap(trace: Trace) -> None:
    with pytest.raises(BadInput, match=r"--overlap: found support\.wrong\.subjects:right"):
        participants_of(Replay(trace, Setting("support.wrong.subjects:right", overlap=True)).plan)
