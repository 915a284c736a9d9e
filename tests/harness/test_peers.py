"""The runner of peers, against peers made up here; the loader of single modules; what an entry must say.

Leaves out: real peers (`make peers`), and their kernels (`test_peers_kernels.py`).
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import peers.__main__ as program
from documentation import peers_table
from instep.adapters.wheel_modules import Absent, bare
from instep_optimized.kernels.runtime import INTERPRETED
from instep_reference.contract.errors import BadInput
from peers import controllers
from peers.entry import Entry
from peers.environment import environment, install, unpack
from peers.kernels.recorded import FOLDER, MODELS, POLICIES
from peers.run import TOP, sentence, served
from peers.run import _told as told
from support.inputs.few_channels import few_channels
from support.running import processes
from support.running.covering import WHOLE
from support.running.processes import ENVIRONMENT

DIES = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
SPEAKS = "import os; print('a'); print('x > y failed', flush=True); os.abort()"
ODD = "import os; os.kill(os.getpid(), 40)"
BYTES = "import os; os.write(1, bytes([255, 10])); raise SystemExit(1)"
BORN = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"


def entry(command: str, **more: Any) -> Entry:
    return Entry.of({"name": "it", "package": "made-up", "version": "1", "door": "op", "command": command, **more})


def row(one: Entry, tmp_path: Path) -> dict[str, Any]:
    return served(one, ENVIRONMENT, tmp_path, sys.executable)


@pytest.mark.slow
@pytest.mark.parametrize(("code", "verdict", "finding"), [
    ("print('fine')", "agree", ""),
    ("print('a'); print('off by 3'); raise SystemExit(1)", "diverged", "off by 3"),
    ("raise SystemExit(3)", "nothing compared", ""),
    ("raise SystemExit(77)", "ends with 77", ""),
    (DIES, "dies", "the process died by SIGSEGV"),
    (SPEAKS, "dies", "the process died by SIGABRT: x > y failed"),
    (ODD, "dies", "the process died by signal 40"),
    (BYTES, "diverged", "\ufffd"),
    (BORN, "hangs", "runs past its limit of 1 s"),
], ids=["agrees", "diverges", "nothing", "oddly", "dies", "speaks", "a number", "bytes", "hangs"])  # fmt: skip
def test_peer_verdicts_are_correct(code: str, verdict: str, finding: str, tmp_path: Path) -> None:
    came = row(entry(f"python -c {json.dumps(code)}", seconds=1 if verdict == "hangs" else 60), tmp_path)
    assert (came["verdict"], came["finding"]) == (verdict, finding)
    assert came["met"] is (verdict == "agree")


@WHOLE
@pytest.mark.slow
def test_children_of_a_hanging_peer_end_with_it(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code = f"import subprocess as s, time; open('{file}', 'w').write(str(s.Popen(['sleep', '60']).pid)); time.sleep(60)"
    assert row(entry(f'python -c "{code}"', seconds=2), tmp_path)["verdict"] == "hangs"
    state = Path(f"/proc/{file.read_text()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


@pytest.mark.parametrize(("code", "expected", "met"), [
    ("off by 3", "diverged", True), ("off by 3", "off by; 3", True), ("off by 3", "off by 4", False),
    ("off by 3", "3; off by", False), ("off by 3", "agree", False), ("they do not agree: 3", "agree", False),
])  # fmt: skip
def test_a_known_finding_is_an_expectation(code: str, expected: str, met: bool, tmp_path: Path) -> None:
    one = entry(f"python -c \"raise SystemExit('{code}')\"", expected=expected)
    assert row(one, tmp_path)["met"] is met


def test_missing_or_failing_peer_is_no_agreement(tmp_path: Path) -> None:
    came = row(entry("python -c pass", modules=["json", "no_such_package"]), tmp_path)
    assert (came["verdict"], came["finding"], came["met"]) == ("missing", "no_such_package cannot be imported", False)
    known = row(entry("python -c pass", modules=["no_such_package"], expected="missing"), tmp_path)
    assert known["met"] is False, "what was not run met nothing"
    other = row(entry("python -c pass", needs=[f"pytest=={pytest.__version__}"], unpacked=["typer==0.1"]), tmp_path)
    assert other["verdict"] == "missing" and other["finding"].endswith("is installed, not 0.1"), other
    assert row(entry("python -c pass", needs=[f"pytest=={pytest.__version__}"]), tmp_path)["met"]
    failed = row(entry("no-such-program", expected="no-such-program"), tmp_path)
    assert failed["verdict"] == "the runner failed" and "no-such-program" in failed["finding"] and not failed["met"]


def test_an_agreement_about_no_event_is_none() -> None:
    ran = {"events": 3, "of": 3, "events_served": 0}
    assert told(None, "instep replay x", 0, "", {"runs": [ran]})["verdict"] == "nothing compared"
    assert told(None, "instep replay x", 0, "", {"runs": [ran, {**ran, "events_served": 1}]})["verdict"] == "agree"


@pytest.mark.parametrize(("said", "decided", "verdict"), [
    ("judged 3 of 4 tokens", 3, "agree"), ("judged 0 of 4 tokens", 0, "nothing compared"), ("", 0, "nothing compared"),
])  # fmt: skip
def test_recording_without_tokens_never_agrees(said: str, decided: int, verdict: str, tmp_path: Path) -> None:
    came = row(entry(f"python -c \"print('{said}'); print('last')\"", door="recording"), tmp_path)
    assert (came["verdict"], came["decided"], came["tiers"]) == (verdict, decided, ["T4"] if decided else [])
    assert came["met"] is (verdict == "agree")


@pytest.mark.slow
@pytest.mark.parametrize(("ops", "verdict"), [("plain", "agree"), ("peer:OPS", "diverged")])
def test_replay_row_has_events_tiers_and_the_finding(
    ops: str, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer whose scatter takes the count for the index. The processes have imported torch already."""
    ready = SimpleNamespace(**{**vars(subprocess), "Popen": processes.Popen})
    monkeypatch.setattr("peers.run.subprocess", ready)
    (tmp_path / "peer.py").write_text(
        "from dataclasses import replace\n"
        "from instep_optimized import load\n"
        "from instep_optimized.memory_addresses import Address\n"
        "PLAIN = load('plain')\n"
        "def move(*, source, target):\n"
        "    if source.column is not None:\n"
        "        source = Address(source.pool, source.units, (source.column + 1).clamp(max=source.pool.shape[1] - 1))\n"
        "    PLAIN.move(source=source, target=target)\n"
        "OPS = replace(PLAIN, name='peer', move=move)\n"
    )
    roots = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([ENVIRONMENT["PYTHONPATH"], str(tmp_path)])}
    trace = str(few_channels("short", 2).path)
    one = entry(f"instep replay {{trace}} --ops {ops} --strategy snapshot --no-ladder", traces=[trace],
                expected="agree" if verdict == "agree" else "diverged; commit; slot")  # fmt: skip
    came = served(one, roots, tmp_path, sys.executable)
    assert came["verdict"] == verdict and came["of"] == 8 and "T2d" in came["tiers"], came
    assert came["events"] == 8 if verdict == "agree" else came["finding"].startswith("event 5 commit"), came
    assert came["met"] and came["command"] == f"instep replay {trace} --ops {ops} --strategy snapshot --no-ladder"


@pytest.mark.parametrize(("traces", "expected", "verdict", "met"), [
    ("010", "agree", "diverged", False), ("010", "diverged", "diverged", True), ("00", "diverged", "agree", False),
    ("15", "diverged", "ends with 5", False), ("015", "ends with 5", "diverged", False),
    ("135", "agree", "ends with 5", False),
])  # fmt: skip
def test_the_worst_run_is_the_rows(traces: str, expected: str, verdict: str, met: bool, tmp_path: Path) -> None:
    code = "import sys; sys.exit(int(sys.argv[1]))"
    came = row(entry(f'python -c "{code}" {{trace}}', traces=list(traces), expected=expected), tmp_path)
    assert (came["verdict"], came["met"], len(came["runs"])) == (verdict, met, len(traces))
    assert came["command"] == came["runs"][0]["command"]


@pytest.mark.parametrize(("given", "said"), [
    ({"colour": "red"}, "'colour' in 'it'"), ({"command": "instep replay {trace}"}, "none for 'it'"),
])  # fmt: skip
def test_a_wrong_entry_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        entry(**{"command": "true", **given}).runs()


def test_every_entry_can_be_read_and_names_traces_that_are_there() -> None:
    known = program.entries()
    names = [Path(name).name for name in (*POLICIES, "prompts")]
    recorded = [f"{{unpacked}}/{FOLDER}/{kind}-{name}.jsonl" for kind in MODELS for name in names]
    assert len({(one.title, one.command) for one in known}) == len(known) > 20
    for one in known:
        assert all((TOP / trace).is_file() or trace in recorded for trace in one.runs() if trace), one
        scripts = [word for word in one.command.split() if word.startswith("docs/")]
        assert all((TOP / script).is_file() for script in scripts), one
        assert set(scripts) <= {str(path.relative_to(TOP)) for path in (TOP / "docs" / "found").iterdir()}


def test_the_program_writes_what_it_ran_and_fails_where_something_is_unexpected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fine, wrong = entry("python -c pass"), entry("python -c 'raise SystemExit(1)'", version="2")
    monkeypatch.setattr(program, "entries", lambda: [fine, wrong])
    monkeypatch.setattr(program, "python_of", lambda folder: folder.mkdir() or Path(sys.executable))
    file = tmp_path / "peers.json"
    assert program.main(["--venv", str(tmp_path / "a"), "--json", str(file), "--commit", "abc"]) == 1
    result = json.loads(file.read_text())
    assert [one["met"] for one in result["rows"]] == [True, False] and (result["exit"], result["commit"]) == (1, "abc")
    assert "! made-up 2 it: diverged" in capsys.readouterr().out
    assert program.main(["--venv", str(tmp_path / "b"), "--json", str(file), "--only", "made-up 1"]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(one["version"], one.get("commit")) for one in rows] == [("1", None), ("2", "abc")], "the other row stays"
    monkeypatch.setattr(program, "entries", lambda: [fine])
    assert program.main(["--venv", str(tmp_path / "d"), "--json", str(file), "--only", "made-up 1"]) == 0
    assert len(json.loads(file.read_text())["rows"]) == 1, "a row without an entry is dropped"
    assert program.main(["--venv", str(tmp_path / "c"), "--only", "nobody", "--json", str(file)]) == 1, "none ran"


def test_a_wheel_is_unpacked_once_and_what_goes_wrong_is_a_line(tmp_path: Path) -> None:
    assert unpack(Path("/no/python"), tmp_path, "made-up==1") is not None
    (tmp_path / "made-up-1").mkdir()
    assert unpack(Path("/no/python"), tmp_path, "made-up==1") is None
    assert install(Path("/no/python"), []) is None
    assert str(tmp_path) in environment([tmp_path])["PYTHONPATH"]


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that cannot be imported as a whole, with two modules that can be."""
    inside = tmp_path / "madeup" / "ops"
    inside.mkdir(parents=True)
    for name, text in {
        "madeup/__init__.py": "import something_that_nobody_has\n",
        "madeup/ops/__init__.py": "from . import broken\n",
        "madeup/ops/kernel.py": "from madeup.utils import is_cuda, VERSION\nfrom .op import twice\nCUDA = is_cuda()\n",
        "madeup/ops/op.py": "def twice(x):\n    return 2 * x\n",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "madeup"]:
        del sys.modules[name]


def test_a_module_loads_without_what_its_package_needs(wheel: Path) -> None:
    bare("madeup", wheel, keep=("madeup.ops",), names={"madeup.utils": {"VERSION": 7}})
    kernel: Any = import_module("madeup.ops.kernel")
    assert kernel.twice(4) == 8 and kernel.VERSION == 7 and not kernel.CUDA
    assert isinstance(import_module("madeup.anything").name, Absent)
    with pytest.raises(ModuleNotFoundError):
        import_module("madeup.ops.gone")
    with pytest.raises(ImportError):
        exec("from madeup.ops import gone")


PRODUCT = """
import triton
import triton.language as tl

@triton.jit
def product(x, y, out):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(y + at)))
"""


@pytest.mark.interpreted
@pytest.mark.skipif(not INTERPRETED, reason="Triton's interpreter is off")
def test_an_interpreted_product_of_bf16_operands_is_one_of_their_values(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    monkeypatch.setattr(InterpreterBuilder, "create_dot", InterpreterBuilder.create_dot)  # put back after the test
    (wheel / "madeup" / "ops" / "product.py").write_text(PRODUCT)
    bare("madeup", wheel, keep=("madeup.ops",))
    x, y, out = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16(), torch.zeros(16, 16)
    import_module("madeup.ops.product").product[(1,)](x, y, out)
    torch.testing.assert_close(out, x.float() @ y.float(), rtol=1e-5, atol=1e-5)


def test_a_package_that_is_nowhere_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="no madeup in"):
        bare("madeup", tmp_path, keep=())


def test_message_sentence_has_place_and_diagnosis() -> None:
    message = "DIVERGED  a\n  event 4 commit, slot 3\n  holds another's state   (T2d)\n  2 more\n"
    assert sentence(message) == "event 4 commit, slot 3; holds another's state (T2d)"


def test_the_table_has_a_line_per_row() -> None:
    one = {"name": "f", "package": "p", "version": "1", "door": "op", "tiers": ["T1", "T2d"], "events": 5, "of": 8,
           "met": True, "verdict": "diverged", "finding": "event 4 | lost", "command": "instep replay x",
           "since": "0.9"}  # fmt: skip
    lines = peers_table.table({"rows": [one, {**one, "verdict": "agree", "finding": "", "met": False}]}).splitlines()
    assert len(lines) == 4 and all(line.count(" | ") == lines[0].count(" | ") for line in lines[2:])
    assert "event 4 \\| lost (since 0.9)" in lines[2] and "not as expected" in lines[3]


@pytest.mark.parametrize("file", sorted((TOP / "docs" / "found").glob("*.py")), ids=lambda file: file.stem)
def test_maintainer_script_has_thirty_lines_or_a_reason(file: Path) -> None:
    lines = file.read_text().splitlines()
    first = next((line for line in lines if line.startswith("#")), "")
    assert len(lines) <= 30 or first.startswith("# Longer than 30 lines: "), len(lines)


# A release made up here: slots as ours, behind the names of the released module.
MADE_UP = '''
import json
from pathlib import Path
from instep_reference.contract.adaptive_controller_file import DEFAULT_FILES
from instep_reference.contract.controllers import Controlled
from instep_reference.controllers import controller
from sglang.srt.utils import log_info_on_rank0

DEFAULT_ADAPTIVE_CONFIG = DEFAULT_FILES["0.5.20"]

class Slot:
    def __init__(self, standing):
        self.current_steps, self.ema_accept_len = standing

class AdaptiveSpeculativeParams:
    def __init__(self, initial, path):
        self.initial, self.file, self.sizes = initial, json.loads(Path(path).read_text()), ()
        self.make()
    def make(self):
        try:
            self.ours = controller(Controlled("sglang-0.5.14", self.sizes, file=self.file), self.initial)
        except Exception as error:
            raise ValueError(str(error))
    def set_cuda_graph_bs(self, sizes):
        self.sizes = tuple(sizes or ())
        self.make()
    def get_steps_for_batch(self, batch):
        return self.ours.next_num_steps(batch, batch)
    def on_verify_complete(self, accepted, batch):
        self.ours.committed(accepted)
    @property
    def _slots(self):
        return {key: Slot(standing) for key, standing in self.ours.slots.items()}

def resolve_candidate_steps_from_config(path):
    return [0, 1, 3, 5, 7]
'''


@pytest.mark.parametrize(("old", "new", "right"), [
    ("", "", True), ("committed(accepted)", "committed(accepted[:-1] or accepted)", False),
    ("self.sizes = tuple(sizes or ())", "self.sizes = ()", False), ('["0.5.20"]', '["0.5.14"]', False),
    ("[0, 1, 3, 5, 7]", "[0, 1, 5, 7]", False),
], ids=["as ours", "a request too few", "no padding", "another default file", "another start"])  # fmt: skip
def test_released_controller_is_compared_bit_for_bit(old: str, new: str, right: bool) -> None:
    (row,) = controllers.rows({("sglang", "0.5.23"): MADE_UP.replace(old, new)}, runs=12)
    assert row["right"] is right, row
    assert "sglang.srt.utils" not in sys.modules, "stubs leave no trace"


def test_row_is_right_only_if_every_mistake_is_seen() -> None:
    row = {"package": "vllm", "dialect": "vllm-table", "expected": ["vllm-table"],
           "differ": {"reference": 0, "optimized": 0}, "mistakes": {"padding left out": 3}}  # fmt: skip
    assert controllers.right(row) is True
    for wrong in ({"mistakes": {"padding left out": 0}}, {"refused by one": 1}, {"dialect": "none"},
                  {"differ": {"reference": 0, "optimized": 1}}, {"starts alike": False}):  # fmt: skip
        assert controllers.right({**row, **wrong}) is False, wrong
