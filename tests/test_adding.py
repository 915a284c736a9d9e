"""The cost of an addition to instep: a copy of the packages gets it and runs, and the changed files are counted.

Leaves out: op sets, faults and relations, which their own catalogues test; how sharply a new strategy is looked at
(`harness/test_new_strategy.py`); what a gate per channel computes (`reference/test_gdn.py`).
"""

from __future__ import annotations

import ast
import difflib
import json
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from instep.trace.file import Trace
from instep_proof.faults.plant import PACKAGES, planted, run, run_python, source
from instep_reference.contract.engine import AnyEvent, Idle, Row
from instep_reference.contract.event_facts import FACTS, ROW_FACTS
from support.build import new_strategy
from support.build.traces import brief, recorded
from support.running.covering import WHOLE

EVENT_FILES = 6  # that a new event type may cost; none of them a check
COMMIT, CHECKS = "instep_optimized/commit", "instep/checks"
Text = tuple[str, str, str]  # file, text that occurs there once, text that replaces it

STRATEGY: tuple[Text, ...] = (
    (f"{COMMIT}/__init__.py", "from .rerun import RERUN\n", "from .put_by import PUT_BY\nfrom .rerun import RERUN\n"),
    (f"{COMMIT}/__init__.py", "STRATEGIES: dict[str, StrategySpec] = {\n",
     'STRATEGIES: dict[str, StrategySpec] = {\n    "put_by": PUT_BY,\n'),
)  # fmt: skip
IDLENESS = '''"""T0: no event is idle. It is wrong on purpose, so that a run shows that the check runs."""

from __future__ import annotations

from collections.abc import Iterator

from ..verdict import Comparison, Tier
from ..watch.event_context import EventContext
from .check_interface import NOWHERE, said_of


class Idleness:
    name = "idleness"
    tier = Tier.IDENTITY

    def __call__(self, context: EventContext) -> Iterator[Comparison]:
        yield said_of(self, context, NOWHERE, 1, ["no request was served"] if context.kind == "idle" else [])
'''
CHECK: tuple[Text, ...] = (
    (f"{CHECKS}/__init__.py", "from .kept_copies import Copies\n",
     "from .idleness import Idleness\nfrom .kept_copies import Copies\n"),
    (f"{CHECKS}/__init__.py", "return (Bounds(), ", "return (Bounds(), Idleness(), "),
)  # fmt: skip
SCALAR = "decay, beta = log_decay[None, :, :, None], "
ALIKE, FALLING = "", " * torch.arange(1, K + 1)"  # all channels of a head forget alike; each one more than the last
PAUSE = '''class Pause(Event, frozen=True):
    """A step in which nothing happens."""

    def on(self, engine: Engine) -> None:
        engine.pause()


'''
METHOD = "    def pause(self) -> None:\n        return None\n\n    def idle(self) -> None:\n"
EVENT: tuple[Text, ...] = (
    # what it is, and the two sides
    ("instep_reference/contract/engine.py", "AnyEvent = (\n    ", f"{PAUSE}AnyEvent = (\n    Pause | "),
    ("instep_reference/contract/engine.py", "    def idle(self) -> None: ...\n",
     "    def idle(self) -> None: ...\n    def pause(self) -> None: ...\n"),
    ("instep_reference/speculative_rounds.py", "    def idle(self) -> None:\n", METHOD),
    ("instep_optimized/engine.py", "    def idle(self) -> None:\n", METHOD),
    # when it is legal, and what it may write
    ("instep_reference/contract/event_facts.py", "    Load,\n", "    Load,\n    Pause,\n"),
    ("instep_reference/contract/event_facts.py", "    Idle: Event", "    Pause: EventFacts(),\n    Idle: Event"),
    # how a policy asks for it
    ("instep/trace/policy.py", '"abort", "idle", ', '"abort", "idle", "pause", '),
    ("instep/trace/event_scheduler.py", '"idle", "offload", "evict")', '"idle", "offload", "evict", "pause")'),
)  # fmt: skip
# An event that fuzz also draws, and that the contract's package exports, changes three more files.
BESIDE = {
    "instep/campaign/fuzz/coverage.py", "instep/campaign/fuzz/draw_events.py", "instep_reference/contract/__init__.py",
}
# In the copy's own process: a policy that asks for it is recorded, and the trace is replayed.
RECORD_AND_REPLAY = """
import sys
from pathlib import Path
sys.path.append(sys.argv[1])
import msgspec
from support.build.traces import brief, recorded
from instep.trace.policy import Policy, ScheduledAction
asked = msgspec.json.encode(msgspec.structs.replace(brief(), deeds=(ScheduledAction(2, "pause"),)))
recorded(Path.cwd(), msgspec.json.decode(asked, type=Policy))
from instep.cli import main
sys.argv[1:] = ["replay", "small.jsonl", "--ops", "ledger", "--ops", "plain", "--no-ladder", "--json", "found.json"]
main()
"""


pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return recorded(tmp_path_factory.mktemp("trace"), brief())


def added(folder: Path, texts: tuple[Text, ...], **files: str) -> Path:
    """A copy of the packages with other texts and new files in it."""
    planted(folder)
    for file, old, new in texts:
        text = (folder / file).read_text()
        assert text.count(old) == 1, f"{file}: {old!r} stands there {text.count(old)} times"
        (folder / file).write_text(text.replace(old, new))
    for file, text in files.items():
        assert not (folder / file).exists()
        (folder / file).write_text(text)
    return folder


def touched(folder: Path) -> dict[str, int]:
    """File -> lines that the copy has and the product has not; of a new file 0, as none of its lines was touched."""
    found = {}
    for package in PACKAGES:
        root = source(package)
        for path in (folder / package).rglob("*.py"):
            was = root / path.relative_to(folder / package)
            if not was.exists():
                found[str(path.relative_to(folder))] = 0
            elif was.read_bytes() != path.read_bytes():
                lines = difflib.unified_diff(was.read_text().splitlines(), path.read_text().splitlines(), n=0)
                found[str(path.relative_to(folder))] = sum(line.startswith("+") for line in list(lines)[2:])
    return found


def replayed(folder: Path, trace: Trace, *options: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit code of `instep replay` in the copy, and its runs."""
    done = run(folder, "replay", str(trace.path), *options, "--no-ladder", "--json", "found.json")
    assert (folder / "found.json").exists(), done.stdout + done.stderr
    return done.returncode, runs_of(folder)


def runs_of(folder: Path) -> list[dict[str, Any]]:
    runs = json.loads((folder / "found.json").read_text())["runs"]
    assert isinstance(runs, list)
    return runs


def test_a_commit_strategy_is_a_file_and_a_line_of_the_table(tmp_path: Path, trace: Trace) -> None:
    file = f"{COMMIT}/put_by.py"
    copy = added(tmp_path / "copy", STRATEGY, **{file: Path(new_strategy.__file__).read_text()})
    assert touched(copy) == {file: 0, f"{COMMIT}/__init__.py": 2}, "its import, and its line"
    code, (one,) = replayed(copy, trace, "--ops", "plain", "--strategy", "put_by")
    assert (code, one["strategy"], one["findings"], one["events"]) == (0, "put_by", [], len(trace.events))


def test_a_check_is_a_file_and_a_line_of_the_table(tmp_path: Path, trace: Trace) -> None:
    file, idle = f"{CHECKS}/idleness.py", next(n for n, event in enumerate(trace.events) if isinstance(event, Idle))
    copy = added(tmp_path / "copy", CHECK, **{file: IDLENESS})
    assert touched(copy) == {file: 0, f"{CHECKS}/__init__.py": 2}, "its import, and its place in the order"
    code, runs = replayed(copy, trace, "--ops", "ledger", "--ops", "plain", "--until", str(idle))
    assert code == 1
    for one in runs:
        assert one["looked"]["idleness"] == "T0"
        (found,) = one["findings"]
        assert (found["check"], found["event"], found["diagnosis"]) == ("idleness", idle, "no request was served")


@pytest.mark.parametrize(("channels", "right"), [(ALIKE, 0), (FALLING, 1)], ids=["alike", "falling"])
def test_a_decay_per_channel_is_a_line_of_the_layer(tmp_path: Path, trace: Trace, channels: str, right: int) -> None:
    """The reference alone has it: it agrees with an engine of scalar gates exactly if the channels are alike."""
    wide = f"decay, beta = log_decay[None, :, :, None].expand(-1, -1, -1, K){channels}, "
    copy = added(tmp_path / "copy", (("instep_reference/gdn.py", SCALAR, wide),))
    assert touched(copy) == {"instep_reference/gdn.py": 1}
    code, (one,) = replayed(copy, trace, "--ops", "plain", "--until", "3")
    assert code == right
    # The first place that shows it comes after the rule: the yardstick's chunks read the decay from its place, which is
    # unchanged, so the allowance of the read-out and the state includes the difference of truth and yardstick.
    assert [(found["layer"], found["component"]) for found in one["findings"][:1]] == [(0, "gated")] * right


@WHOLE
def test_an_event_type_costs_six_files_and_no_check(tmp_path: Path) -> None:
    """Record it from a policy that requests it, and replay it with two op sets. Leaves out: the files in BESIDE."""
    copy = added(tmp_path / "copy", EVENT)
    files = touched(copy)
    assert len(files) == EVENT_FILES and not any(file.startswith(CHECKS) for file in files)
    assert sum(files.values()) == 19, files
    assert naming("Idle") - files.keys() == BESIDE
    done = run_python(copy, "-c", RECORD_AND_REPLAY, str(Path(__file__).parent))
    assert done.returncode == 0, done.stdout + done.stderr
    assert '{"event":"pause"}' in (copy / "small.jsonl").read_text()
    assert [(one["ops"], one["exit"], one["of"]) for one in runs_of(copy)] == [
        (ops, 0, (copy / "small.jsonl").read_text().count('{"event"')) for ops in ("ledger", "plain")
    ]


def test_an_event_without_a_special_rule_is_named_in_few_files() -> None:
    files = {event.__name__: naming(event.__name__) for event in get_args(AnyEvent)}
    assert len(files) == len(get_args(AnyEvent)) and all(len(found) >= 5 for found in files.values())
    idle = files["Idle"]
    assert len(idle) <= EVENT_FILES + 1 and not any(file.startswith(CHECKS) for file in idle)


def test_every_event_is_in_the_table_of_facts() -> None:
    assert set(FACTS) == set(get_args(AnyEvent)) and set(ROW_FACTS) == set(get_args(get_type_hints(Row)["kind"]))


def naming(name: str) -> set[str]:
    """The files of the product in which a class is defined, imported or used."""
    return {
        f"{package}/{path.relative_to(source(package))}"
        for package in PACKAGES for path in source(package).rglob("*.py") if name in named(path)
    }


@cache
def named(path: Path) -> frozenset[Any]:
    """All names in a file: variables, attributes, definitions and imports."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    return frozenset(getattr(node, field, None) for node in nodes for field in ("id", "attr", "name"))
