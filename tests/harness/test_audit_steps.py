"""Step counts of a recording are judged by the controller that it names, and docs/audit.md shows the tool's output.

Leaves out: the rules of the dialects (`test_step_controller.py`), and other judgements (`test_audit.py`).
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from instep.audit import step_counts
from instep.audit.audit import audit
from instep.audit.result import told
from instep.audit.write import Recording
from instep.trace.file import read
from instep.verdict import Exit, Tier
from instep_reference.contract import engine as e
from instep_reference.contract.controllers import Controlled
from instep_reference.contract.errors import BadInput
from support.inputs.recordings import PROMPTS, TINY, edited, lines, recorded, shown, stated, tensors
from support.running.command import Runner

TRACES = Path("fixtures/traces")
FILE = {"candidate_steps": [1, 3], "warmup_batches": 1, "update_interval": 1}
# Accepted drafts of the ten rounds of a run of SGLang 0.5.13 (six requests, graphs up to 8), which switched from 3 to 1
# before the ninth; and the file of that run.
REAL = ((0, 0, 3, 0, 3, 3), (0, 3, 3, 3, 3, 1), (3, 3, 3, 3, 3, 3), (3, 3, 3, 3, 3, 3), (1, 3, 3, 3, 0, 3),
        (3, 3, 3, 3, 3, 0), (3, 2, 3, 3, 3, 3), (0, 1, 3, 3, 3, 0), (1, 1, 1, 1, 1, 1), (0, 1, 1, 1, 0, 0))  # fmt: skip
SLOT = {"candidate_steps": [1, 3], "ema_alpha": 0.6, "update_interval": 2, "warmup_batches": 2,
        "up_hysteresis": 1.9, "down_hysteresis": 2.0}  # fmt: skip
SLOTS = {"1": SLOT, "8": SLOT, "64": SLOT}
AT_12 = "steps stay 3; the controller sglang-0.5.12 requests 1 (slot 1: count 1, average 2.474)"
AT_14 = ("steps stay 3; the controller sglang-0.5.14 requests 1 (slot 1: count 3, average 2; slot 8: count 1, average "
         "2.474; slot 64: count 3, average 2)")  # fmt: skip


def wrong(controlled: Controlled, num_steps: int, events: list[e.Event], lag: int = 0) -> list[tuple[int, str]]:
    found = step_counts.judged(controlled, num_steps, lag, events, "controller")
    assert found and all(one.tier is Tier.IDENTITY for one in found)
    return [(one.event, one.diagnosis) for one in found if not one.agrees]


def rounds(accepted: tuple[tuple[int, ...], ...], switch: int) -> list[e.Event]:
    """Windows of all requests in every round; before round `switch` the count falls to 1."""
    names = tuple("abcdef")
    events: list[e.Event] = []
    for number, counts in enumerate(accepted):
        if number == switch:
            events.append(e.SetNumSteps(1))
        events.append(e.Forward(tuple(e.Row(name, "verify") for name in names)))
        paths = tuple(e.Path(tuple(range(1, count + 1)), 0) for count in counts)
        events.append(e.Commit(names, paths))
    return events


@pytest.mark.parametrize(("controlled", "first"), [
    (Controlled("sglang-0.5.13", captured=(1, 2, 4, 8), file=SLOTS), None),
    (Controlled("sglang-0.5.14", captured=(1, 2, 4, 8), file=SLOTS), (12, AT_14)),
    (Controlled("sglang-0.5.12", file=SLOT), (12, AT_12)),
    (Controlled("constant"), (16, "steps 3 -> 1; the controller constant requests 3")),
])
def test_a_switch_of_a_released_engine_follows_its_dialect_alone(
    controlled: Controlled, first: tuple[Any, ...] | None
) -> None:
    found = wrong(controlled, 3, rounds(REAL, 8))
    assert (found[0] if found else None) == first


@pytest.mark.parametrize("late", [7, 9, 99])
def test_a_switch_at_another_round_is_named(late: int) -> None:
    controlled = Controlled("sglang-0.5.13", captured=(1, 2, 4, 8), file=SLOTS)
    found = wrong(controlled, 3, rounds(REAL, late))
    event, says = found[0]
    right = (14, "steps 3 -> 1", "3") if late == 7 else (16, "steps stay 3", "1")
    assert event == right[0] and says.startswith(f"{right[1]}; the controller sglang-0.5.13 requests {right[2]} (slot ")


def test_a_controller_of_chains_refuses_trees() -> None:
    drafted = e.Draft(("a",), ((1, 2, 3),), parents=((0, 0, 1),))
    with pytest.raises(BadInput, match="a window at event 0 that is a tree"):
        wrong(Controlled("sglang-0.5.13", file=SLOTS), 3, [drafted])


@pytest.mark.parametrize("name", ["slots", "slots-overlapped", "faults/controller"])
def test_a_trace_that_followed_its_controller_agrees(name: str) -> None:
    trace = read(TRACES / f"{name}.jsonl")
    header = trace.header
    controlled = header.controller or Controlled("sglang-0.5.12", file=header.adaptive)
    assert not wrong(controlled, header.num_steps, trace.events, header.lag)
    if header.controller is not None:
        assert wrong(controlled, header.num_steps, trace.events, 1 - header.lag), "overlap matters"


def test_a_table_by_batch_size_acts_one_round_later() -> None:
    controlled = Controlled("vllm-table", table=((1, 1, 3), (2, 8, 1)), num_speculative_tokens=3)
    rows = {name: e.Row(name, "verify") for name in "ab"}
    paths = {"a": (e.Path((), 0),), "ab": (e.Path((), 0),) * 2}
    both = [e.Forward(tuple(rows.values())), e.Commit(("a", "b"), paths["ab"])]
    alone = [e.Forward((rows["a"],)), e.Commit(("a",), paths["a"])]
    right = [*both, e.SetNumSteps(1), *both, *alone, e.SetNumSteps(3), *alone]
    assert not wrong(controlled, 3, right)
    found = wrong(controlled, 3, [*both, e.SetNumSteps(1), *both, e.SetNumSteps(3), *alone])
    assert found == [(5, "steps 1 -> 3; the controller vllm-table requests 1")]


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = recorded(tmp_path_factory.mktemp("recordings") / "right", shows=False)
    stated(made, controller={"dialect": "sglang-0.5.12", "file": FILE}, num_steps=3)
    return made


@pytest.mark.slow
def test_a_recording_names_its_controller_or_is_not_judged(
    right: Path, copy: Path, tmp_path: Path, instep: Runner
) -> None:
    result = tmp_path / "r.json"
    ran = instep("audit", right, "--model", TINY, "--json", result)
    found = json.loads(result.read_text())
    assert ran.code == 0 and found["step_counts"].endswith("rounds judged by the controller sglang-0.5.12"), ran
    assert int(found["step_counts"].split()[0]) > 5
    stated(copy, controller=None)
    ran = instep("audit", copy, "--model", TINY)
    assert ran.code == 0 and "step counts: not judged" in ran.out, ran


@pytest.mark.slow
def test_a_wrong_count_of_a_recording_is_a_finding(copy: Path) -> None:
    file = FILE | {"candidate_steps": [3, 7], "up_hysteresis": -9}
    stated(copy, controller={"dialect": "sglang-0.5.12", "file": file})
    found = audit(copy, TINY)
    one = found.verdict.findings[0]
    assert found.exit is Exit.DIVERGED and (one.check, one.kind) == ("step counts", "forward")
    assert one.diagnosis.startswith("steps stay 3; the controller sglang-0.5.12 requests 7 (slot 1: count 7, average ")
    commits = [n for n, one in enumerate(lines(copy / "events.jsonl")) if one["event"] == "commit"]
    assert commits[1] < one.event < commits[2], "the second counted batch is the first that decides"


@pytest.mark.parametrize(("controller", "num_steps", "says"), [
    ({"dialect": "sglang-0.5.14", "file": SLOTS}, 2, "num_steps: found 2, expected one of"),
    ({"dialect": "sglang-0.5.14", "file": {"candidate_steps": [1]}}, 3, r"recording.json: controller.file"),
    ({"dialect": "sglang-9"}, 3, "sglang-9"),
    ({"dialect": "constant"}, None, "num_steps"),
    ({"dialect": "constant", "sizes": [1]}, 3, "sizes"),
])
def test_a_bad_controller_of_a_recording_is_refused(
    copy: Path, controller: dict[str, Any], num_steps: int | None, says: str
) -> None:
    stated(copy, controller=controller, num_steps=num_steps)
    with pytest.raises(BadInput, match=says):
        audit(copy, TINY, level=1)


@pytest.mark.slow
def test_a_round_of_zero_steps_is_written_as_a_window(right: Path, tmp_path: Path) -> None:
    """Windows of 3, then of one token without a token in `forward`, then of 3 again."""
    told = next(text for text in audit(right, TINY, level=1).told.texts if text.request == "a")
    prompt, said = list(PROMPTS["a"]), list(told.said)
    n = len(prompt)
    slots = {"dialect": "sglang-0.5.14", "file": {"1": {"candidate_steps": [0, 3], "warmup_batches": 0,
                                                       "update_interval": 1, "ema_alpha": 1.0}}}  # fmt: skip
    made = Recording(tmp_path / "r", engine="by hand", model=TINY, controller=slots, num_steps=3)
    made.admit("a", prompt)
    made.forward(["a"], [n], range(n), prompt, [[said[0]]])
    bad = [(token + 1) % 256 for token in said]
    made.forward(["a"], [4], range(n, n + 4), [said[0], *bad[1:4]], None)
    made.accepted({"a": [said[1]]})
    made.forward(["a"], [1], [n + 1], [said[1]], None)
    with pytest.raises(ValueError, match="requests a: a forward, but the last one was not accepted"):
        made.forward(["a"], [1], [n + 1], [said[1]], None)
    with pytest.raises(ValueError, match="2 tokens, but its window had no draft"):
        made.accepted({"a": said[2:4]})
    made.accepted({"a": [said[2]]})
    made.forward(["a"], [4], range(n + 2, n + 6), said[2:6], None)
    made.accepted({"a": said[3:7]})
    made.finish("a")
    made.close()
    kinds = [one["event"] for one in lines(tmp_path / "r" / "events.jsonl")]
    window = ["draft", "forward", "commit"]
    assert kinds == ["admit", "forward", *window, "set_num_steps", "forward", "set_num_steps", *window, "finish"]
    found = audit(tmp_path / "r", TINY)
    assert found.exit is Exit.AGREED and found.rounds == 3, found.verdict.findings
    number = kinds.index("set_num_steps")
    found = audit(edited(tmp_path / "r", number, num_steps=3), TINY)
    assert found.exit is Exit.AGREED, "the round had no window, whatever is in force"


def test_a_request_that_ends_within_a_round_of_zero_steps_has_no_row(tmp_path: Path) -> None:
    made = Recording(tmp_path / "r", engine="by hand")
    for name in "ab":
        made.admit(name, [1, 2])
        made.forward([name], [2], [0, 1], [1, 2], [[3]])
    made.forward("ab", [1, 1], [2, 2], [3, 3], None)
    made.finish("a")
    made.accepted({"a": [4], "b": [4]})
    row = {"request": "b", "kind": "decode", "root": 4}
    assert lines(tmp_path / "r" / "events.jsonl")[-1] == {"event": "forward", "rows": [row]}


PAGE, RECORD = (
    (Path(__file__).resolve().parents[2] / "docs" / f"{name}.md").read_text() for name in ("audit", "audit-record")
)
PAGE_FILE, MESSAGE, HOOKS = (
    re.search(f"```{kind}(.*?)```", PAGE + RECORD, re.S)[1] for kind in ("json\n", "text\n(?=DIVERGED)", "python\n")
)


MARGIN = re.compile(r"(?<=margin )\d+(?=, limit)")  # in units of the allowance, which is a draw


def margin(message: str) -> int:
    return int(MARGIN.findall(message)[0])


def test_file_of_the_page_gives_its_message(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text(PAGE_FILE)
    says = told(audit(file, TINY, dtype="float32"))
    assert MARGIN.sub("#", says) == MARGIN.sub("#", MESSAGE.rstrip())
    # The page shows one draw, which depends on machine and threads, but no verdict depends on it.
    assert margin(MESSAGE) / 3 < margin(says) < 3 * margin(MESSAGE)
    right = PAGE_FILE.replace("52, 44", "51, 44")
    file.write_text(right)
    assert right != PAGE_FILE and audit(file, TINY, dtype="float32").exit is Exit.AGREED


def test_calls_of_the_page_make_an_agreeing_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fixtures").symlink_to(Path("fixtures").resolve())
    monkeypatch.chdir(tmp_path)
    exec(compile(HOOKS, "docs/audit-record.md", "exec"), {})
    found = audit(Path("recording"), TINY)
    assert found.exit is Exit.AGREED and found.tokens.ties.made == 3 and found.told.accepted == 1


@pytest.mark.slow
def test_alarms_of_the_page_are_printed(tmp_path: Path) -> None:
    alarms = re.findall(r"^\| .*? \| `(.*?)` \|$", PAGE.partition("## See it fail")[2], re.M)
    assert alarms[0] in MESSAGE and len(alarms) == 4
    made = recorded(tmp_path / "r")
    tensors(made, 10, "state.a.0", lambda x: shown(made, 7)["state.a.0"])
    assert audit(made, TINY, events="10").replay.verdict.findings[0].diagnosis.startswith(alarms[2])
    commit = lines(made / "events.jsonl")[7]
    bonus = commit["accepted"][0]["bonus"]
    edited(made, 7, accepted=[{**commit["accepted"][0], "bonus": bonus + 2}])
    assert audit(made, TINY, level=1).verdict.findings[0].diagnosis == alarms[1]
    file = {"candidate_steps": [3, 7], "up_hysteresis": -9, "warmup_batches": 1, "update_interval": 1}
    stated(made, controller={"dialect": "sglang-0.5.12", "file": file}, num_steps=3)
    steps = [one.diagnosis for one in audit(made, TINY, level=1).verdict.findings if one.check == "step counts"]
    assert steps[0].startswith(f"{alarms[3]} (slot 1: count 7, average ")


def test_page_has_every_option_of_the_command() -> None:
    assert all(option in PAGE for option in ("--model", "--dtype", "--level", "--verbose")), json.dumps(PAGE[:80])
