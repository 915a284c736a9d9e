"""The cost of an addition to instep: a copy of the packages gets it and runs, and the changed files are counted.

Leaves out: how sharply a new strategy is looked at
(`harness/test_new_strategy.py`); what a gate per channel computes (`reference/test_gdn.py`).
"""

import ast
import difflib
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import pytest

from instep.bundled import fixtures
from instep.trace.file import Trace
from instep_proof.faults.plant import COPIED, planted, run, run_python, source
from instep_reference.contract.engine import AnyEvent, Idle, Row
from instep_reference.contract.event_facts import FACTS, ROW_FACTS
from support.inputs import new_strategy
from support.inputs.traces import brief, recording
from support.running.covering import WHOLE

EVENT_LINES = 60
EVENT_FILES = 8  # that a new event with memory may cost at most; none of them a check
COMMIT, CHECKS = "instep_optimized/commit", "instep/checks"
PACKAGES = (*COPIED, "instep_speed")
Text = tuple[str, str, str]  # file, text that occurs there once, text that replaces it

STRATEGY: tuple[Text, ...] = (
    (f"{COMMIT}/__init__.py", "from .rerun import RERUN\n", "from .put_by import PUT_BY\nfrom .rerun import RERUN\n"),
    (f"{COMMIT}/__init__.py", "STRATEGIES: dict[str, StrategySpec] = {\n",
     'STRATEGIES: dict[str, StrategySpec] = {\n    "put_by": PUT_BY,\n'),
)  # fmt: skip
IDLENESS = '''"""T0: no event is idle. It is wrong on purpose, so that a run shows that the check runs."""

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
TABLE, PLAIN_RULE = "instep_reference/contract/recurrences.py", "instep_optimized/ops/plain/gdn.py"
KIND_FILES, KIND_LINES = 8, 20  # that a new kind of recurrence may cost at most, on both sides together
KIND: tuple[Text, ...] = (
    (TABLE, 'types=("qwen3_5", "qwen3_next", ', 'types=("qwen3_next", '),
    (TABLE, '    Recurrence("kda"', '    Recurrence("toy", "channel", types=("qwen3_5",)),\n    Recurrence("kda"'),
    ("instep_optimized/ops/op_protocols.py", "    kda: Recur | None = None\n",
     "    kda: Recur | None = None\n    toy: Recur | None = None\n"),
    (PLAIN_RULE, "kda = gdn", "toy = kda = gdn"),
    ("instep_optimized/ops/ledger_label_ops.py", "kda = gdn", "toy = kda = gdn"),
)  # fmt: skip
# The engine decays channel i with the decay of channel i - 1.
ANOTHER_CHANNEL = (PLAIN_RULE, "    S *= decay[(", "    S *= decay.roll(1, -1)[(")
ANSWERS, PLACES, MIXER = (f"instep_reference/contract/{name}.py" for name in ("answers", "place_names", "recurrences"))
RULE, LABELS, LAYER = "instep_reference/gdn.py", "instep_reference/label_ledger.py", "instep_optimized/model/gdn.py"
COMPONENT_FILES, COMPONENT_LINES = 6, 30  # that a new component of memory may cost at most, on both sides together
# A second short conv, of the rows a, with its own history in every layer.
COMPONENT: tuple[Text, ...] = (
    (ANSWERS, '    final: torch.Tensor | None = field(default=None, kw_only=True)\n',
     '    echo: dict[int, torch.Tensor] = field(default_factory=dict, metadata=ComponentFacts("block", ("HV", "W-1"))'
     '.of_field)\n    final: torch.Tensor | None = field(default=None, kw_only=True)\n'),
    (PLACES, '    "a_low", ', '    "echoed",\n    "echo",\n    "a_low", '),
    (MIXER, 'memory: tuple[str, ...] = ("conv", "state")', 'memory: tuple[str, ...] = ("echo", "conv", "state")'),
    (MIXER, '**gates, "mixed"', '**gates, "echoed": ("HV",), "mixed"'),
    (RULE, "    window: torch.Tensor\n    state: torch.Tensor\n",
     "    window: torch.Tensor\n    state: torch.Tensor\n    echo: torch.Tensor\n"),
    (RULE, "        state=torch.zeros(config.lengths(config.recurrence.state), dtype=dtype, device=device),\n",
     "        state=torch.zeros(config.lengths(config.recurrence.state), dtype=dtype, device=device),\n"
     "        echo=torch.zeros(config.lengths((\"HV\", \"W-1\")), dtype=dtype, device=device),\n"),
    (RULE, "rows, z, window = _rows(config, weights, normed, memory.window, at",
     "rows, z, window = _rows(config, weights, normed, (memory.window, memory.echo), at"),
    (RULE, "rows, _, _ = _rows(config, weights, normed, memory.window, at",
     "rows, _, _ = _rows(config, weights, normed, (memory.window, memory.echo), at"),
    (RULE, "GdnMemory(window, state[0])", "GdnMemory(window[0], state[0], window[1])"),
    (RULE, "    convolved, window = conv(qkv, weights.conv, window)",
     "    window, echo = window\n"
     "    a, echo = conv(a, weights.A_log[:, None].repeat(1, weights.conv.shape[1]), echo)\n"
     '    a = at("echoed", F.silu(a))\n'
     "    convolved, window = conv(qkv, weights.conv, window)"),
    (RULE, '"write": write}, z, window\n', '"write": write}, z, (window, echo)\n'),
    (LABELS, "    ngram: tuple[int, ...] = ()\n", "    ngram: tuple[int, ...] = ()\n    echo: tuple[int, ...] = ()\n"),
    (LABELS, "fresh = GdnLabels((0,) * (self.config.conv_width - 1))",
     "fresh = GdnLabels((0,) * (self.config.conv_width - 1), echo=(0,) * (self.config.conv_width - 1))"),
    (LABELS, "            tail={} if tail is None else",
     '            echo={layer: expand(kept.echo, _shape("a", config)).T.contiguous() for layer, kept in gdn.items()},\n'
     "            tail={} if tail is None else"),
    (LABELS, "    mixed, taps = _mixed(tell, layer, qkv, memory.taps)",
     '    gates[-1], echo = _mixed(tell, layer, gates[-1], memory.echo, "echoed")\n'
     "    mixed, taps = _mixed(tell, layer, qkv, memory.taps)"),
    (LABELS, "rows: Labels, before: tuple[int, ...]) ->",
     'rows: Labels, before: tuple[int, ...], place: str = "mixed") ->'),
    (LABELS, 'tell.show(layer, "mixed", [_conv(tell, layer, taps[t : t + width]) for',
     "tell.show(layer, place, [_conv(tell, layer, taps[t : t + width], place) for"),
    (LABELS, "replace(memory, taps=taps, chain=chain)", "replace(memory, taps=taps, chain=chain, echo=echo)"),
    (LAYER, "        windows = bound.conv(self.layer)\n",
     "        windows = bound.conv(self.layer)\n"
     "        taps = weights.A_log[:, None].expand(-1, weights.conv.shape[1])\n"
     '        a = ops.conv(x=a, weight=taps, parts=bound.parts("echo", self.layer), to=at("echoed"))\n'),
)  # fmt: skip
FORGETS_ECHO = (f"{COMMIT}/strategy_pair.py", "            if name in self.of:\n",
                '            if name in self.of and name != "echo":\n')
REWIND = '''class Rewind(Event, frozen=True):
    """The request goes back to the state that it had when it was saved under `name`."""

    request: str
    name: str

    def on(self, engine: Engine) -> None:
        engine.rewind(self.request, self.name)


'''
IDLE = "    def idle(self) -> None:\n"
FACT = '''    e.Rewind: EventFacts((Phase.PREFILLING, Phase.READY), pages="copy", copy="restore", when="late",
                       covers="rewound", shown='{request} to "{name}", back to {now}'),
'''
OURS, THEIRS, CONTRACT = "instep_optimized", "instep_reference", "instep_reference/contract"
EVENT: tuple[Text, ...] = (
    # what it is, and its one description
    (f"{CONTRACT}/engine.py", "AnyEvent = (\n    ", f"{REWIND}AnyEvent = (\n    Rewind | "),
    (f"{CONTRACT}/engine.py", "    def idle(self) -> None: ...\n",
     "    def idle(self) -> None: ...\n    def rewind(self, request: str, name: str) -> None: ...\n"),
    (f"{CONTRACT}/event_facts.py", "    e.Resume: Event", f"{FACT}    e.Resume: Event"),
    (f"{CONTRACT}/__init__.py", "        Resume,\n", "        Resume,\n        Rewind,\n"),
    (f"{CONTRACT}/__init__.py", '"Resume", ', '"Resume", "Rewind", '),
    # the two sides
    (f"{THEIRS}/speculative_rounds.py", IDLE,
     "    def rewind(self, request: str, name: str) -> None:\n        self.load(request, name)\n\n" + IDLE),
    (f"{OURS}/engine.py", IDLE, """\
    def rewind(self, request: str, name: str) -> None:
        self._refusals.load(request, name, PREFILLING, READY)
        self._give(request, name)

""" + IDLE),
    (f"{OURS}/engine.py", "import Refusals\n", "import PREFILLING, READY, Refusals\n"),
    (f"{OURS}/refusals.py", "def load(self, name: str, under: str) -> None:\n"
     '        self._must_be("load", [name], WAITING)\n',
     "def load(self, name: str, under: str, *phases: str) -> None:\n"
     '        self._must_be("load", [name], *(phases or (WAITING,)))\n'),
    (f"{OURS}/commit/write_set.py", "case e.Load() | e.Resume():", "case e.Load() | e.Resume() | e.Rewind():"),
    (f"{OURS}/commit/write_set.py", "isinstance(event, e.Load) else preempted",
     "isinstance(event, e.Load | e.Rewind) else preempted"),
    (f"{OURS}/commit/write_set.py", "isinstance(event, e.Load) else units",
     "isinstance(event, e.Load | e.Rewind) else units"),
)  # fmt: skip
# The engine's record goes back, and its conv windows and states stay.
FORGETS = (f"{OURS}/engine.py", "READY)\n        self._give(request, name)", "READY)\n        self._requests["
           "request] = self._saved[name][0].given_to(self._requests[request])")


class Member(NamedTuple):
    """A new member of a family: its file, and the lines that its tables need. cost: tables, and lines in them."""

    file: str
    text: str
    lines: tuple[Text, ...]
    cost: tuple[int, int]


RELATIONS, BENCH, FAULTS = "instep/campaign/relations", "instep_speed/bench", "instep_proof/faults/catalogue"
CONTROLLED = '''"""The dialect one-less: one draft less than at first."""

from {base} import Controller


class OneLess(Controller):
    def next_num_steps(self, batch: int, scheduled: int) -> int:
        return self.initial - 1


def controller({parameters}) -> OneLess:
    return OneLess({initial}, ({initial} - 1,))
'''
AGAIN = '"""The drafter eagle under another name."""\n\nfrom .eagle import Eagle\n\n\nclass Again(Eagle):\n    pass\n'
MEMBERS = {
    "op set": Member(
        f"{OURS}/ops/renamed.py", "from dataclasses import replace\n\nfrom .plain import PLAIN\n\n"
        'RENAMED = replace(PLAIN, name="renamed")\n',
        ((f"{OURS}/ops/__init__.py", '    "plain": "instep',
          '    "renamed": "instep_optimized.ops.renamed:RENAMED",\n    "plain": "instep'),), (1, 1)),
    "adapter": Member(
        "instep/adapters/borrowed.py",
        "from dataclasses import replace\n\nfrom instep_optimized.ops.plain import PLAIN\n\n"
        'OPS = replace(PLAIN, name="borrowed")\n',
        (("instep/adapters/__init__.py", 'HERE = {"fla"',
          'HERE = {"borrowed": "instep.adapters.borrowed:OPS", "fla"'),),
        (1, 1)),
    "relation": Member(
        f"{RELATIONS}/never_idle.py", '''"""No event is idle: wrong on purpose, so that a run shows that it runs."""

from ...finding_problem import Problem
from ...verdict import Comparison, Tier
from ...checks.check_interface import NOWHERE
from .case import Relation


def hold(case):
    for index, event in enumerate(case.trace.events):
        if type(event).__name__ == "Idle":
            yield Comparison("never_idle", Tier.BITWISE, index, "idle", NOWHERE, elements=1, worst=1.0, allowed=0.0,
                             problem=Problem.of("an idle event"))


RELATION = Relation("never_idle", "No event is idle.", "an idle event", (Tier.BITWISE,), hold)
''',
        ((f"{RELATIONS}/__init__.py", "from .overlapped",
          "from .never_idle import RELATION as NEVER\nfrom .overlapped"),
         (f"{RELATIONS}/__init__.py", "*PAIRWISE, OVER", "*PAIRWISE, NEVER, OVER")), (1, 2)),
    "fault": Member(
        f"{FAULTS}/smaller.py", '''from instep.setting import Setting

from .fault import Edit, Fault

FAULTS = (Fault("eps-of-a-hundredth", "norm-eps", "The gated norm is given a hundredth of the epsilon.", (
    Edit.of("instep_optimized/model/gdn.py", "eps=config.core_eps{ => / 100}, gate=config.output_gate"),
), "accepted", Setting(), ("derived",)),)
''',
        ((f"{FAULTS}/__init__.py", '    "others": ', '    "smaller": "smaller",\n    "others": '),), (1, 1)),
    "kind of benchmark": Member(
        f"{BENCH}/kinds/nothing.py", '''from ..bench_types import Arm, Cell, Kind

KIND = Kind("a call", lambda ground, size: iter([{"rows": 1}]),
            lambda ground, at: Cell([Arm(name, lambda: None, lambda: "") for name in ground.sets]), x="rows")
''',
        ((f"{BENCH}/__init__.py", '    "pick": "the', '    "nothing": "no work at all",\n    "pick": "the'),), (1, 1)),
    "controller of the reference": Member(
        f"{THEIRS}/controllers/one_less.py", CONTROLLED.format(
            base=".base", parameters="controlled, num_steps, lag", initial="num_steps"),
        ((f"{THEIRS}/controllers/__init__.py", "from . import constant, sglang",
          "from . import constant, one_less, sglang"),
         (f"{THEIRS}/controllers/__init__.py", '    "constant": ',
          '    "one-less": one_less.controller,\n    "constant": '),
         (f"{CONTRACT}/adaptive_controller_file.py", '"vllm-table", "constant"]',
          '"vllm-table", "constant", "one-less"]')),
        (2, 3)),
    "controller": Member(
        f"{OURS}/controllers/one_less.py", CONTROLLED.format(
            base=".base", parameters="made", initial="made.num_steps"),
        ((f"{OURS}/controllers/__init__.py", "from .sglang_0_5_12",
          "from .one_less import controller as one_less\nfrom .sglang_0_5_12"),
         (f"{OURS}/controllers/__init__.py", '    "constant": ', '    "one-less": one_less,\n    "constant": ')),
        (1, 2)),
    "drafter of the reference": Member(
        f"{THEIRS}/draft/again.py", AGAIN,
        ((f"{THEIRS}/draft/__init__.py", "from .eagle", "from .again import Again\nfrom .eagle"),
         (f"{THEIRS}/draft/__init__.py", '    "eagle": Eagle,', '    "again": Again, "eagle": Eagle,'),
         (f"{CONTRACT}/drafters.py", '    "eagle": Draf', '    "again": DrafterFacts(heads=True),\n    "eagle": Draf')),
        (2, 3)),
    "drafter": Member(
        f"{OURS}/draft/again.py", AGAIN,
        ((f"{OURS}/draft/__init__.py", "from .eagle", "from .again import Again\nfrom .eagle"),
         (f"{OURS}/draft/__init__.py", '= {"eagle": Eagle.of,', '= {"again": Again.of, "eagle": Eagle.of,')),
        (1, 2)),
}  # fmt: skip
RECORD_OTHERS = """
import sys
from pathlib import Path
sys.path.append(sys.argv[1])
import msgspec
from instep.cli.record import make
from instep.setting import Setting
from instep.trace.policy import ScheduledAction
from instep_reference.contract.controllers import Controlled
from support.inputs.traces import PROMPTS, TWO_LAYERS, VOCAB, brief
from support.inputs.checkpoints import write
told = msgspec.structs.replace(brief(), controller=Controlled("one-less"), adaptive=None, steps=(), follow=True,
                                deeds=(ScheduledAction(4, "idle"),))
model = write(Path("model"), vocab_size=VOCAB, **TWO_LAYERS)
make(model, PROMPTS, told, Path("small.jsonl"), Setting(drafter="again", dtype="float64"))
"""
# In the copy's own process: a policy that requests it is recorded.
RECORD = """
import sys
from pathlib import Path
sys.path.append(sys.argv[1])
import msgspec
from support.inputs.traces import brief, recorded
from instep.trace.policy import Policy, ScheduledAction
wanted = (ScheduledAction(1, "save", "a", name="first"), ScheduledAction(3, "rewind", "a", name="first"))
told = msgspec.json.encode(msgspec.structs.replace(brief(), deeds=wanted))
recorded(Path.cwd(), msgspec.json.decode(told, type=Policy))
"""
# A model of that kind, in the copy's own process.
RECORD_KIND = """
import sys
from pathlib import Path
sys.path.append(sys.argv[1])
from instep_reference.contract.checkpoint import Checkpoint
from support.inputs.traces import brief, recorded
trace = recorded(Path.cwd(), brief())
config = Checkpoint.open(Path("model")).config
assert config.recurrence.name == "toy" and config.recurrent, config
"""
# A trace with saves, prefixes, offloads, commits and moves to an engine with two ranks.
RECORD_COMPONENT = """
import sys
from pathlib import Path
sys.path.append(sys.argv[1])
import msgspec
from instep.bundled import fixtures
from instep.trace.policy import Policy
from support.inputs.traces import recorded
text = (fixtures() / "traces/faults/transfer.policy.json").read_text()
for prompt, own in (("again", "more"), ("twice", "few"), ("new", "one")):
    text = text.replace(f'"prompt": "{prompt}"', f'"prompt": "{own}"')
recorded(Path.cwd(), msgspec.json.decode(text, type=Policy))
"""
# Fuzz draws it, whether it is legal or not.
DRAWN = """
from instep.campaign.fuzz import coverage, draw_events, hypothesis_machine
assert "rewind" in draw_events.UPKEEP and "rewound" in coverage.CONDITIONS, "fuzz does not know it"
assert any(one.args[0].__name__ == "Rewind" for one in hypothesis_machine.KINDS if hasattr(one, "args"))
"""


pytestmark = pytest.mark.usefixtures("warm")


trace = recording(brief())


def added(folder: Path, texts: tuple[Text, ...], **files: str) -> Path:
    """A copy of the packages with other texts and new files in it."""
    planted(folder)
    shutil.copytree(source("instep_speed"), folder / "instep_speed")
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


def replayed(folder: Path, trace: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit code of `instep replay` in the copy, and its runs."""
    done = run(folder, "replay", str(trace), *options, "--no-ladder", "--json", "found.json")
    assert (folder / "found.json").exists(), done.stdout + done.stderr
    runs = json.loads((folder / "found.json").read_text())["runs"]
    assert isinstance(runs, list)
    return done.returncode, runs




@pytest.mark.slow
def test_a_commit_strategy_is_a_file_and_a_line_of_the_table(tmp_path: Path, trace: Trace) -> None:
    file = f"{COMMIT}/put_by.py"
    copy = added(tmp_path / "copy", STRATEGY, **{file: Path(new_strategy.__file__).read_text()})
    assert touched(copy) == {file: 0, f"{COMMIT}/__init__.py": 2}, "its import, and its line"
    code, (one,) = replayed(copy, trace.path, "--ops", "plain", "--strategy", "put_by")
    assert (code, one["strategy"], one["findings"], one["events"]) == (0, "put_by", [], len(trace.events))


def test_a_check_is_a_file_and_a_line_of_the_table(tmp_path: Path, trace: Trace) -> None:
    file, idle = f"{CHECKS}/idleness.py", next(n for n, event in enumerate(trace.events) if isinstance(event, Idle))
    copy = added(tmp_path / "copy", CHECK, **{file: IDLENESS})
    assert touched(copy) == {file: 0, f"{CHECKS}/__init__.py": 2}, "its import, and its place in the order"
    code, runs = replayed(copy, trace.path, "--ops", "ledger", "--ops", "plain", "--until", str(idle))
    assert code == 1
    for one in runs:
        assert one["looked"]["idleness"] == "T0"
        (found,) = one["findings"]
        assert (found["check"], found["event"], found["diagnosis"]) == ("idleness", idle, "no request was served")


@WHOLE
def test_members_of_other_families_are_a_file_and_a_line(tmp_path: Path) -> None:
    """All are added to one copy, and run there: a trace is recorded with them, replayed, related, planted and timed."""
    members = MEMBERS.values()
    (tmp_path / "fixtures").symlink_to(fixtures())
    copy = added(tmp_path / "copy", tuple(text for one in members for text in one.lines),
                 **{one.file: one.text for one in members})
    tables = {file for one in members for file, *_ in one.lines}
    assert touched(copy).keys() == {*tables, *(one.file for one in members)}
    assert sum(touched(copy).values()) == sum(one.cost[1] for one in members)
    for family, one in MEMBERS.items():
        assert (len({file for file, *_ in one.lines}), len(one.lines)) == one.cost, family
    done = run_python(copy, "-c", RECORD_OTHERS, str(Path(__file__).parent))
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"dialect":"one-less"' in (copy / "small.jsonl").read_text()
    _, runs = replayed(copy, copy / "small.jsonl", "--ops", "renamed", "--ops", "borrowed")
    assert [(one["ops"], one["exit"], one["findings"]) for one in runs] == [("renamed", 0, []), ("borrowed", 0, [])]
    related = run(copy, "relations", "small.jsonl", "never_idle", "--ops", "plain")
    assert related.returncode == 1 and "an idle event" in related.stdout, related.stdout + related.stderr
    planted = run(copy, "faults", "eps-of-a-hundredth", "--no-text", "--jobs", "1")
    assert "1 of 1 faults found" in planted.stdout, planted.stdout + planted.stderr
    timed = run(copy, "bench", "--kind", "nothing", "--ops", "plain", "--json", "bench.json", "--minutes", "1")
    assert timed.returncode == 0, timed.stdout + timed.stderr


def test_a_recurrence_is_a_row_and_a_line_of_each_op_set(tmp_path: Path) -> None:
    """Serve a model with it in labels and in numbers. Then the engine mistakes the channels of its decays."""
    copy = added(tmp_path / "copy", KIND)
    files = touched(copy)
    assert len(files) <= KIND_FILES and sum(files.values()) <= KIND_LINES, files
    done = run_python(copy, "-c", RECORD_KIND, str(Path(__file__).parent))
    assert done.returncode == 0, done.stdout + done.stderr
    code, runs = replayed(copy, copy / "small.jsonl", "--ops", "ledger", "--ops", "plain")
    assert (code, [one["findings"] for one in runs]) == (0, [[], []])
    file, right, wrong = ANOTHER_CHANNEL
    (copy / file).write_text((copy / file).read_text().replace(right, wrong))
    code, (one,) = replayed(copy, copy / "small.jsonl", "--ops", "plain", "--until", "3")
    assert code == 1 and one["findings"][0]["layer"] == 0
    assert "decays each channel as the one before" in {found["diagnosis"] for found in one["findings"]}


@WHOLE
def test_a_component_costs_at_most_six_files_and_no_mover(tmp_path: Path) -> None:
    """Serve it in labels and numbers, in graphs, with every mover. Then plant a commit that forgets it."""
    (tmp_path / "fixtures").symlink_to(fixtures())
    copy = added(tmp_path / "copy", COMPONENT)
    files = touched(copy)
    assert len(files) <= COMPONENT_FILES and sum(files.values()) <= COMPONENT_LINES, files
    assert not any(file.startswith("instep/") for file in files), "no check names it"
    done = run_python(copy, "-c", RECORD_COMPONENT, str(Path(__file__).parent))
    assert done.returncode == 0, done.stdout + done.stderr
    text = (copy / "small.jsonl").read_text()
    assert all(f'"event":"{event}"' in text for event in ("save", "load", "offload", "fetch", "evict", "commit"))
    code, runs = replayed(copy, copy / "small.jsonl", "--ops", "ledger", "--ops", "plain", "--graphs", "--until", "30")
    assert (code, [one["findings"] for one in runs]) == (0, [[], []])
    file, right, wrong = FORGETS_ECHO
    (copy / file).write_text((copy / file).read_text().replace(right, wrong))
    commit = next(at for at, line in enumerate(text.splitlines()) if '"event":"commit"' in line) - 1
    code, (one,) = replayed(copy, copy / "small.jsonl", "--ops", "ledger", "--until", str(commit + 3))
    first = one["findings"][0]
    assert (code, first["event"], first["component"], first["layer"]) == (1, commit, "echo", 0), first
    assert first["explained"]["says"] == "holds what it held before the event", first


@WHOLE
def test_an_event_with_memory_costs_at_most_eight_files_and_no_check(tmp_path: Path) -> None:
    """Record it from a policy, replay it with two op sets, and see a fault in it named by checks that exist."""
    copy = added(tmp_path / "copy", EVENT)
    files = touched(copy)
    assert len(files) <= EVENT_FILES and not any(file.startswith("instep/") for file in files), files
    assert sum(files.values()) <= EVENT_LINES, files
    done = run_python(copy, "-c", RECORD, str(Path(__file__).parent))
    assert done.returncode == 0, done.stdout + done.stderr
    text = (copy / "small.jsonl").read_text()
    event = '{"event":"rewind","request":"a","name":"first"}'
    assert event in text
    code, runs = replayed(copy, copy / "small.jsonl", "--ops", "ledger", "--ops", "plain")
    assert (code, [one["events"] for one in runs]) == (0, [text.count('{"event"')] * 2)
    shown = run(copy, "show", "small.jsonl")
    assert 'a to "first", back to ' in shown.stdout
    drawn = run_python(copy, "-c", DRAWN)
    assert drawn.returncode == 0, drawn.stderr
    file, right, wrong = FORGETS
    (copy / file).write_text((copy / file).read_text().replace(right, wrong))
    code, (one,) = replayed(copy, copy / "small.jsonl", "--ops", "plain")
    at, first = text.splitlines().index(event) - 1, one["findings"][0]
    assert (code, first["check"], first["event"], first["component"]) == (1, "bytes", at, "conv")
    assert "comes back different from what was saved" in first["diagnosis"]
    assert one["findings"][1]["component"] == "state"
    assert first["explained"]["says"] == "holds what it held before the event"


def test_events_with_memory_are_named_in_few_files() -> None:
    """Leaves out: requests for an event by name, as the scheduler and the relations make them."""
    files = {event: naming(event.__name__) for event in FACTS}
    assert len(files) == len(get_args(AnyEvent)) and all(len(found) >= 3 for found in files.values())
    for event, found in files.items():
        if FACTS[event].copy:
            judging = [file for file in found if file.startswith((CHECKS, "instep/watch", "instep/oracle"))]
            assert len(found) <= 1 + EVENT_FILES and not judging, (event, found)


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
