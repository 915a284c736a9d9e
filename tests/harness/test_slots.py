"""Step counts by batch size: the driver, the two recorded traces, and a controller that pads no batch.

Leaves out: the rules of dialects (`tests/optimized/test_controllers.py`).
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from instep.cli.controller_options import Steps, chosen
from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.event_rules import EventRules
from instep.trace.file import Trace, read
from instep.trace.header import Header, sound
from instep.trace.policy import Arrival, read_policy
from instep.verdict import Exit
from instep_optimized.controllers import controller as optimized
from instep_reference.contract import engine as e
from instep_reference.contract.controllers import Controlled
from instep_reference.contract.errors import BadInput
from instep_reference.controllers import controller as reference
from support.inputs.few_channels import few_channels, same_events
from support.inputs.traces import header, one_round, policy, recorded
from support.running.command import Runner
from support.wrong.subjects import WithoutNumbers

TRACES = Path(__file__).resolve().parents[2] / "fixtures" / "traces"
BY_BATCH = ("slots", "slots-overlapped")


def rises_and_falls(trace: Trace) -> list[tuple[int, int]]:
    counts = [event.num_steps for event in trace.events if isinstance(event, e.SetNumSteps)]
    return list(pairwise([trace.header.num_steps, *counts]))


def courses(trace: Trace) -> list[tuple[int, ...]]:
    """The wishes of both controllers, for the batch that comes, before every new count and after every event."""
    given = trace.header.controller, trace.header.num_steps, None, trace.header.lag
    sides: list[Any] = [reference(*given), optimized(*given)]
    rules, found = EventRules(trace.header), list[tuple[int, ...]]()
    for event in trace.events:
        rules.apply(event)
        for side in sides:
            if isinstance(event, e.SetNumSteps):
                found.append((event.num_steps, side.next_num_steps(*rules.table.coming())))
                side.set_num_steps(event.num_steps)
            elif isinstance(event, e.Forward):
                side.forwarded(sum(row.kind == "decode" for row in event.rows))
            elif isinstance(event, e.Commit):
                side.committed([len(path.nodes) for path in event.accepted or ()])
        found.append(tuple(side.next_num_steps(*rules.table.coming()) for side in sides))
    return found


@pytest.mark.parametrize("name", BY_BATCH)
def test_both_controllers_wish_for_the_counts_of_the_traces(name: str) -> None:
    found = courses(read(TRACES / f"{name}.jsonl"))
    assert len(found) > 100 and all(one == other for one, other in found)


def test_traces_have_the_changes_at_which_released_engines_failed() -> None:
    trace, late = (read(TRACES / f"{name}.jsonl") for name in BY_BATCH)
    assert {(0, 3), (1, 7), (7, 0), (0, 1), (1, 0)} <= {*rises_and_falls(trace)}
    assert trace.header.controller == Controlled("sglang-0.5.14", (1, 8), defaults="0.5.23")
    assert {(0, 3), (0, 1), (1, 0)} <= {*rises_and_falls(late)} and late.header.recording.overlap
    of_slots = {key: reference(trace.header.controller, 7).slots[key][0] for key in (1, 8)}
    assert of_slots == {1: 7, 8: 1}, "the initial count is in one slot, and in no other"


@pytest.mark.parametrize("name", BY_BATCH)
def test_policies_name_the_controllers_of_their_traces(name: str) -> None:
    told = read_policy(TRACES / f"{name}.policy.json")
    assert told.follow and told.controller == read(TRACES / f"{name}.jsonl").header.controller


def test_controller_that_pads_no_batch_diverges(monkeypatch: pytest.MonkeyPatch) -> None:
    def unpadded(controlled: Any, *given: Any) -> Any:
        return optimized(None if controlled is None else replace(controlled, captured=()), *given)

    trace, ledger = same_events("slots", 2), Setting("ledger")
    assert Replay(trace, ledger).run(until=9).verdict.exit is Exit.AGREED
    monkeypatch.setattr("instep_optimized.engine.controller", unpadded)
    (found, *_) = Replay(trace, ledger).run(until=9).verdict.findings
    # Two requests have a root from event 7 on: they are padded to 8, whose slot wishes for 1.
    assert (found.event, found.diagnosis) == (7, "next_num_steps requests 7; expected 1")


def test_engine_without_numbers_of_requests_is_served_like_before() -> None:
    replay = Replay(few_channels("short", 2), Setting("support.wrong.subjects:without_numbers"))
    assert replay.run().verdict.exit is Exit.AGREED and WithoutNumbers.asked > 0
    with pytest.raises(BadInput, match="takes no `controlled`"):
        Replay(same_events("slots", 2), Setting("support.wrong.subjects:without_numbers")).run(until=1)


# -- headers, policies, the driver ---------------------------------------------------------------


def test_header_without_a_controller_has_the_line_it_always_had() -> None:
    assert "controller" not in msgspec.json.decode(header().line())
    made = header(adaptive=None, controller=Controlled("sglang-0.5.14", (1, 8)), candidates=(0, 1, 3, 5, 7))
    assert msgspec.json.decode(made.line(), type=Header) == made


@pytest.mark.parametrize(("fields", "says"), [
    ({"controller": Controlled("constant")}, "a file and a controller"),
    ({"adaptive": None, "controller": Controlled("sglang-0.5.14", (8, 1))}, "ascending order"),
    ({"adaptive": None, "controller": Controlled("sglang-0.5.14"), "num_steps": 4}, r"one of \[0, 1, 3, 5, 7\]"),
])  # fmt: skip
def test_header_with_a_wrong_controller_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        sound(header(**{"candidates": (0, 1, 3, 4, 5, 7), **fields}), "t.jsonl line 1")


def test_old_name_of_following_is_read(tmp_path: Path) -> None:
    old = json.loads((TRACES / "faults" / "controller.policy.json").read_text())
    del old["follow"]
    (tmp_path / "old.json").write_text(json.dumps({**old, "controller": True}))
    told = read_policy(tmp_path / "old.json")
    assert told.follow and told.controller is None
    (tmp_path / "old.json").write_text(json.dumps({**old, "controller": {"dialect": "other"}}))
    with pytest.raises(BadInput, match="other"):
        read_policy(tmp_path / "old.json")


ARRIVALS = (Arrival("a", "few", max_new=12), Arrival("b", "one", arrive=3, max_new=3))
TABLE = Controlled("vllm-table", table=((1, 1, 3), (2, 2, 1)), num_speculative_tokens=3)
SLOTS = Controlled("sglang-0.5.14", file={"1": {"candidate_steps": [3]}, "2": {"candidate_steps": [1]}})


@pytest.mark.parametrize(("controller", "counts"), [
    # "b" arrives in round 3, and decodes from round 4 on. The slot follows the batch that decodes; the table counts
    # the prompt, too, and acts a round later.
    (SLOTS, {4: 1, 6: 3}), (TABLE, {4: 1, 7: 3}),
])  # fmt: skip
def test_count_follows_the_coming_batch_and_the_table_a_round_later(
    controller: Controlled, counts: dict[int, int], tmp_path: Path
) -> None:
    told = policy(arrivals=ARRIVALS, steps=(), deeds=(), accept=(0,), adaptive=None, num_steps=3, follow=True,
                  controller=controller)  # fmt: skip
    found, rounds = {}, 0
    for event in recorded(tmp_path, told).events:
        if isinstance(event, e.SetNumSteps):
            found[rounds] = event.num_steps
        rounds += isinstance(event, e.Forward)
    assert found == counts


def test_no_wish_is_requested_for_a_round_of_prompts_alone(tmp_path: Path) -> None:
    """At the beginning nothing decodes: the initial count stays, although the smallest slot has another one."""
    slots = Controlled("sglang-0.5.14", file={"1": {"candidate_steps": [1]}, "9": {"candidate_steps": [3]}})
    told = policy(arrivals=ARRIVALS, steps=(), deeds=(), accept=(0,), adaptive=None, num_steps=3, follow=True,
                  controller=slots)  # fmt: skip
    kinds = [type(event) for event in recorded(tmp_path, told).events]
    assert kinds.index(e.Forward) < kinds.index(e.SetNumSteps) < kinds.index(e.Draft)


def test_coming_requests_are_counted_from_the_trace_alone() -> None:
    rules, found = EventRules(header()), []
    for event in (*one_round()[:4], e.Admit("b", (7,)), *one_round()[4:]):
        rules.apply(event)
        found.append(rules.table.coming())
    assert found == [(0, 1), (0, 1), (1, 1), (1, 1), (1, 2), (1, 2), (1, 2), (1, 2), (0, 1)]


# -- options -------------------------------------------------------------------------------------


def test_options_name_a_controller(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    assert chosen(3, None, None, None) is None
    file.write_text('{"2": {"candidate_steps": [1, 5]}}')
    found = chosen(None, file, "sglang-0.5.14", "8, 1")
    assert found is not None and (found.num_steps, found.adaptive) == (5, None)
    assert found.controller == Controlled("sglang-0.5.14", (1, 8), file={"2": {"candidate_steps": [1, 5]}})
    found = chosen(3, None, "sglang-0.5.14", None)
    assert found is not None and (found.num_steps, found.controller) == (3, Controlled("sglang-0.5.14"))
    file.write_text('{"candidate_steps": [4, 2, 0]}')
    found = chosen(None, file, None, None)
    assert found == Steps(2, {"candidate_steps": (4, 2, 0)})
    file.write_text("[[1, 4, 3], [5, 9, 1]]")
    found = chosen(None, file, "vllm-table", None)
    assert found is not None and found.num_steps == 3
    assert found.controller == Controlled("vllm-table", table=((1, 4, 3), (5, 9, 1)), num_speculative_tokens=3)


@pytest.mark.parametrize(("num_steps", "text", "dialect", "captured", "says"), [
    (None, None, None, "1", "--captured: found no controller"),
    (None, None, "sglang-1", None, "--dialect: found sglang-1"),
    (2, None, "sglang-0.5.14", None, "num_steps: found 2"), (None, None, "vllm-table", None, "found nothing"),
    (None, '{"a": 1}', "vllm-table", None, "from, to, drafts"),
    (None, "{}", "sglang-0.5.14", "a", "--captured: found a"),
    (None, "{}", "sglang-0.5.14", None, "no slot"), (None, None, "sglang-0.5.12", "1", "no sizes with"),
])  # fmt: skip
def test_wrong_options_are_refused(
    num_steps: int | None, text: str | None, dialect: str | None, captured: str | None, says: str, tmp_path: Path
) -> None:
    file = None if text is None else tmp_path / "file.json"
    if file is not None:
        file.write_text(text or "")
    with pytest.raises(BadInput, match=says):
        chosen(num_steps, file, dialect, captured)


@pytest.mark.slow
def test_commands_follow_the_controller_of_a_dialect(instep: Runner, tmp_path: Path) -> None:
    tiny, table, made = Path("fixtures/tiny"), tmp_path / "table.json", tmp_path / "made.jsonl"
    table.write_text("[[1, 1, 3], [2, 9, 1]]")
    (tmp_path / "prompts.json").write_text('[{"name": "a", "text": "Re"}, {"name": "b", "text": "The"}]')
    ran = instep("record", "--model", tiny, "--prompts", tmp_path / "prompts.json", "--rounds", 5, "--dialect",
                 "sglang-0.5.14", "--captured", "1,8", "--out", made)  # fmt: skip
    header = read(made).header
    assert ran.code == 0 and header.controller == Controlled("sglang-0.5.14", (1, 8)) and header.num_steps == 3, ran
    assert "controller sglang-0.5.14" in instep("show", made).out
    ran = instep("generate", tiny, "--prompt", "Re", "--prompt", "The", "--tokens", 6, "--dialect", "vllm-table",
                 "--adaptive", table, "--trace", made)  # fmt: skip
    assert ran.code == 0 and rises_and_falls(read(made)) == [(3, 1)], ran
