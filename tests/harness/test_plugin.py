"""The pytest plugin: every trace is an item, a failure prints the message, and an empty comparison is no pass.

Leaves out: what replaying finds (its own tests). A session runs within the test's own; one of other roots in a process.
"""

import os
import re
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import pytest

from instep import plugin
from instep.cli.record import make
from instep.options import OPTIONS
from instep.report.html.failure_folder import folder_of
from instep.trace.header import Room
from instep.trace.policy import Arrival, Policy
from instep_proof.faults.catalogue.fault import Edit
from instep_proof.faults.plant import planted
from support.inputs.checkpoints import write
from support.running import processes
from support.running.command import Ran
from support.running.covering import WHOLE
from support.running.golden import Golden

pytestmark = pytest.mark.slow  # whole replays or commands

TOP = Path(__file__).resolve().parents[2]
ROOTS = ":".join(str(TOP / root) for root in ("reference", "optimized", "harness"))
# Plugins that an inner session does not need; the last of them collects garbage, twice a session.
LEAN = [word for name in ("cacheprovider", "faulthandler", "unraisableexception") for word in ("-p", f"no:{name}")]

OFF_BY_ONE = Edit(
    "instep_optimized/commit/snapshot.py",
    "source=pair.snapshots.at(accepted.rows, accepted.nodes),",
    "source=pair.snapshots.at(accepted.rows, (accepted.nodes - 1).clamp(min=0)),",
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's project: a model, a folder of traces and a test."""
    folder = tmp_path_factory.mktemp("home")
    traces = folder / "traces"
    traces.mkdir()
    policy = Policy(
        name="short", claim="two requests, ragged acceptance", capacity=Room((2, 1), tuple(range(1, 20)), 4, 32),
        arrivals=(Arrival("a", "p", max_new=8), Arrival("b", "q", chunks=(1,), max_new=6)), num_steps=2,
        accept=(1, 2, 0), rounds=2,
    )
    model = write(folder / "model", num_hidden_layers=2, full_attention_interval=2)
    make(model, {"p": (1, 2, 3, 4, 5), "q": (6, 7)}, policy, traces / "short.jsonl")
    (folder / "test_own.py").write_text("def test_own():\n    pass\n")
    return folder


def session(home: Path, *args: str, roots: str = "") -> Ran:
    """Run pytest with no other plugin than this one. roots: source folders of a separate process."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        for name in [name for name in os.environ if name.startswith(("PYTHON", "PYTEST"))]:
            patch.delenv(name)
        for name, value in {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "80"}.items():
            patch.setenv(name, value)
        patch.chdir(home)
        if roots:
            words = [sys.executable, "-P", "-m", "pytest", "-p", "instep.plugin", "-p", "no:cacheprovider", *args]
            patch.setenv("PYTHONPATH", roots)
            done = processes.run(words, cwd=home, env=os.environ, timeout=120)
            return Ran(done.returncode, done.stdout, done.stderr)
        patch.setattr(sys, "path", [*sys.path])
        code = pytest.main([*LEAN, *args], [plugin])
        sys.modules.pop("test_own", None)  # the next project has another one
    return Ran(int(code), out.getvalue(), err.getvalue())


TRACES, WRONG = "--instep-traces=traces", "--instep-ops=support.wrong."
ENGINE = "--instep-engine=support.wrong.engines:"
SESSIONS = {  # options, exit code, what is printed, and what is not
    "an item per op set": (f"{TRACES} --instep-ops=ledger --instep-ops=plain -v", 0, (
        "short.jsonl::ledger PASSED", "short.jsonl::plain PASSED", "2 passed"), "test_own"),
    "the trace decides if none is named": (f"{TRACES} -v", 0, ("short.jsonl::plan PASSED", "1 passed"), "test_own"),
    "an op set alone gets the traces of instep": (
        "--instep-ops=ledger --collect-only -q", 0, ("traces/adaptive.jsonl::ledger",), "test_own"),
    "the summary names the compared tiers": (f"{TRACES} {WRONG}subjects:LOUDER --instep-tiers=T0,T1", 0, (
        "1 passed", "instep: compared only T0,T1, because of --instep-tiers"), "Traceback"),
    "no such tier": (f"{TRACES} {WRONG}subjects:LOUDER --instep-tiers=T7", 4, ("tiers: found 'T7'",), "passed"),
    "an error of the subject has its line and traceback": (f"{TRACES} {WRONG}raising:IN_AN_OP", 1, (
        "op attend (trunk.", "raised IndexError", "support/wrong/raising.py", 'given["query"][:, 99]'),
        "guarded_calls.py"),
    "an unsupported run is skipped": (f"{TRACES} {WRONG}subjects:declining --instep-ops=ledger -rs", 0, (
        "1 passed, 1 skipped", "declining: state layout VK"), "Traceback"),
    "no such device": (f"{TRACES} --instep-ops=ledger --instep-device=cuda:64 -rs", 0, (
        "1 skipped", "this machine has no CUDA device 64"), "Traceback"),
    "no trace in a folder": ("--instep-traces=model", 4, ("no trace (*.jsonl)",), "Traceback"),
    "no such folder": ("--instep-traces=elsewhere", 4, ("does not exist",), "Traceback"),
    "an engine with verbs is an item": (f"{TRACES} {ENGINE}right -v", 0, (
        "short.jsonl::support.wrong.engines:right PASSED", "support.wrong.engines:right: served ",
        "it shows no kv, draft"), "Traceback"),
    "a wrong engine": (f"{TRACES} {ENGINE}no_rollback", 1, ("holds the window after",), "Traceback"),
    "no such engine": (f"{TRACES} {ENGINE}absent", 4, ("--instep-engine",), "passed"),
    "an op set together with an engine": (
        f"{TRACES} {ENGINE}right --instep-ops=plain", 4, ("--instep-engine: found --instep-ops as well",), "passed"),
}


@pytest.mark.parametrize("kind", [
    kind if words.endswith(("-q", "plain")) else pytest.param(kind, marks=pytest.mark.slow)
    for kind, (words, *_) in SESSIONS.items()
])
def test_options_are_followed_and_what_is_found_is_printed(home: Path, kind: str) -> None:
    words, code, says, hides = SESSIONS[kind]
    done = session(home, *words.split())
    said = done.out + done.err
    assert done.code == code and all(part in said for part in says) and hides not in said, said


def test_other_paths_and_settings_add_to_each_other(home: Path) -> None:
    both = session(home, "test_own.py", "--instep-traces=traces/short.jsonl", "--instep-ops", "ledger", "-v")
    assert "2 passed" in both.out and "test_own.py::test_own" in both.out, both.out + both.err
    (home / "set.ini").write_text("[pytest]\naddopts = --instep-traces traces --instep-ops ledger\n")
    kept = session(home, "-c", "set.ini", "--rootdir", ".", "-v")
    assert "2 passed" in kept.out and "test_own.py::test_own" in kept.out, kept.out + kept.err
    assert "1 passed" in session(home).out


def test_failure_prints_the_message_without_a_stack(home: Path, tmp_path: Path, golden: Golden) -> None:
    folder = planted(tmp_path / "planted", OFF_BY_ONE)
    done = session(home, "--instep-traces", "traces", "--instep-ops", "ledger", "-q", "-rN", roots=str(folder))
    assert done.code == 1, done.out + done.err
    assert " commit, request " in done.out and "Traceback" not in done.out
    golden("plugin-failure", done.out, r"\d+\.\d+s")


def test_run_that_compares_nothing_fails(home: Path, tmp_path: Path) -> None:
    looks = "return (Identity(), Grown(), Labels(), Bytes(), *structure())"
    blind = Edit("instep/checks/__init__.py", looks, "return ()")
    folder = planted(tmp_path / "planted", blind)
    done = session(home, "--instep-traces", "traces", "--instep-ops", "ledger", roots=str(folder))
    assert done.code == 1 and "INCONCLUSIVE" in done.out, done.out + done.err


def test_bad_input_is_one_line(home: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(b"".join((home / "traces" / "short.jsonl").read_bytes().splitlines(keepends=True)[:3]))
    done = session(home, "--instep-traces", str(cut), "--instep-traces", "traces", "--instep-ops=ledger")
    assert done.code == 1 and "1 failed, 1 passed" in done.out and "Traceback" not in done.out, done.out
    assert "the trace was cut" in done.out


def test_ini_options_apply_unless_a_path_is_named(home: Path) -> None:
    (home / "set.ini").write_text("[pytest]\ninstep_traces = traces\ninstep_ops = ledger\ninstep_checkpoint = model\n")
    (home / "set.toml").write_text('[tool.pytest.ini_options]\ninstep_traces = ["traces"]\ninstep_ops = ["ledger"]\n')
    for file in ("set.ini", "set.toml"):
        both = session(home, "-c", file, "--rootdir", ".", "-v")
        assert "2 passed" in both.out and "short.jsonl::ledger PASSED" in both.out, both.out + both.err
    own = session(home, "-c", "set.ini", "--rootdir", ".", "test_own.py::test_own")
    assert "1 passed" in own.out and "jsonl" not in own.out
    (home / "set.ini").write_text("[pytest]\ninstep_traces = elsewhere\n")
    nowhere = session(home, "-c", "set.ini", "--rootdir", ".")
    assert nowhere.code == 4 and "elsewhere does not exist" in nowhere.err


def test_printed_name_of_an_item_runs_it(home: Path) -> None:
    named = "instep_optimized.ops.ledger_label_ops:LEDGER"
    root = "--rootdir=."  # names are relative to it
    options = (root, "--instep-traces=traces", "--instep-ops=ledger", f"--instep-ops={named}")
    listed = session(home, *options, "--collect-only", "-q").out.splitlines()
    ids = [line for line in listed if "::" in line]
    assert ids == ["traces/short.jsonl::ledger", f"traces/short.jsonl::{named}"]
    for node, given in zip(ids, (options, (root,)), strict=True):
        again = session(home, node, *given, "-v")
        assert "1 passed" in again.out and f"{node} PASSED" in again.out, again.out + again.err
    plan = session(home, "traces/short.jsonl", root, "-v")
    assert "1 passed" in plan.out and "short.jsonl::plan PASSED" in plan.out, plan.out + plan.err


def test_printed_name_runs_a_trace_outside_the_root_folder(home: Path) -> None:
    (home / "root").mkdir()
    listed = session(home / "root", "--rootdir=.", "--instep-traces=../traces", "--instep-ops=ledger", "-q", "--co")
    (node,) = [line for line in listed.out.splitlines() if "::" in line]
    again = session(home / "root", "--rootdir=.", node, "-v")
    assert "1 passed" in again.out and f"{node} PASSED" in again.out, again.out + again.err


def test_jsonl_file_of_another_plugin_is_no_trace(home: Path, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"schema": 1, "level": "info"}\n')
    done = session(home, str(tmp_path / "log.jsonl"), "test_own.py")
    assert "instep" not in done.out + done.err and "1 failed" not in done.out, done.out


@WHOLE
def test_configuration_of_another_root_folder_is_a_warning(home: Path, tmp_path: Path) -> None:
    """pytest's rule: the root is the common parent folder with an ini file of all words on the command line.

    It looks before it knows a plugin's options, but for a plugin that was there before: so, in processes.
    """
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    for folder in (mine, theirs):
        folder.mkdir()
        (folder / "pytest.ini").write_text("[pytest]\n")
    shutil.copytree(home / "traces", theirs / "traces")
    words = ("--instep-ops=ledger", f"--instep-checkpoint={home / 'model'}")
    wrong = session(mine, "--instep-traces", str(theirs / "traces"), *words, roots=ROOTS)
    assert f"rootdir: {theirs}" in wrong.out and "1 passed" in wrong.out, wrong.out + wrong.err
    assert "PytestConfigWarning" in wrong.out and "--instep-traces=PATH" in wrong.out
    right = session(mine, f"--instep-traces={theirs / 'traces'}", *words, roots=ROOTS)
    assert f"rootdir: {mine}" in right.out and "1 passed" in right.out and "Warning" not in right.out
    (theirs / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    strict = session(mine, "--instep-traces", str(theirs / "traces"), *words, roots=ROOTS)
    assert strict.code == 4 and "--instep-traces=PATH" in strict.err and "Traceback" not in strict.err


@pytest.mark.parametrize(("words", "says"), [
    (("--instep-device=tpu",), "--instep-device: found tpu, expected cpu or cuda"),
    (("--instep-dtype=int3",), "--instep-dtype: found int3, expected one of float64"),
    (("--instep-strategy=nope",), "--instep-strategy: found 'nope'"),
    (("--instep-state-dtype=int3",), "--instep-state-dtype: found int3, expected one of float64"),
    (("-o", "instep_state_dtype=int3"), "--instep-state-dtype: found int3, expected one of float64"),
    (("--instep-state_dtype=bfloat16",), "unrecognized arguments: --instep-state_dtype=bfloat16"),
    (("--instep-checkpoint=nowhere",), "--instep-checkpoint: "),
    (("--instep-layout=KVV", "--instep-ops=plan"), "--instep-layout: found KVV, expected VK or KV"),
])  # fmt: skip
def test_unknown_setting_is_one_usage_error_for_all_traces(home: Path, words: tuple[str, ...], says: str) -> None:
    every = ("--instep-traces=traces", "--instep-ops=ledger", "--instep-ops=plain", "test_own.py")
    done = session(home, *every, *words)
    assert done.code == 4 and done.err.count("ERROR: ") == 1 and says in done.err, done.out + done.err
    assert "passed" not in done.out and "failed" not in done.out


def test_options_have_the_names_of_the_commands_options(home: Path) -> None:
    said = session(home, "--help").out
    assert set(re.findall(r"^ *--(?:no-)?instep-([\w-]+)", said, re.M)) >= {name.replace("_", "-") for name in OPTIONS}
    assert set(re.findall(r"^ *instep_(\w+) \(", said, re.M)) >= {*OPTIONS}


def test_failure_writes_a_folder_junit_properties_and_a_summary(home: Path, tmp_path: Path) -> None:
    """A trace and a test with the fixture, in one session; -m selects one of them."""
    (home / "test_fixture.py").write_text(
        "from instep import kit\n"
        "def test_mine(instep_replayed):\n"
        "    for last in (7, 8):\n"
        "        done = instep_replayed(kit.small(), 'support.wrong.kit_ops:FORGETFUL', until=last)\n"
        "    done.must_agree()\n")
    wrong = "support.wrong.kit_ops:FORGETFUL"
    words = ("--instep-traces=traces", f"--instep-ops={wrong}", "--instep-ops=ledger")
    xml, out = tmp_path / "j.xml", tmp_path / "out"
    try:
        done = session(home, "test_fixture.py", *words, f"--junitxml={xml}", f"--instep-out={out}", "-q")
        marked = session(home, "test_fixture.py", *words, "-m", "not instep", "--collect-only", "-q")
    finally:
        (home / "test_fixture.py").unlink()
    assert done.code == 1 and "2 failed, 1 passed" in done.out, done.out + done.err
    assert re.search(r"^instep: 3 DIVERGED, 1 agrees: [\d,]+ numbers compared, in one place beyond every allowance$",
                     done.out, re.M), done.out
    folders = sorted(out.iterdir())
    assert [re.sub(r"-[0-9a-f]{8}\b", "-#", folder.name) for folder in folders] == [
        "test_fixture.py-test_mine-#", "test_fixture.py-test_mine-#-2",
        "traces-short.jsonl-support.wrong.kit_ops-FORGETFUL-#"]
    for folder, name in zip(folders, ("small", "small", "short"), strict=True):
        assert f"instep: {folder}/page.html" in done.out
        assert {"page.html", "result.json", "message.txt", f"{name}.jsonl", f"{name}.safetensors", "tensors"} <= {
            file.name for file in folder.iterdir()}
        assert "DIVERGED" in (folder / "message.txt").read_text() and list((folder / "tensors").iterdir())
    properties = {(one.get("name"), one.get("value")) for one in ElementTree.parse(xml).iter("property")}
    assert {("instep_verdict[ledger]", "agrees"), ("instep_artifacts", str(folders[0]))} <= properties
    assert any(name == f"instep_T2d[{wrong}]" and "numbers, " in value for name, value in properties)
    assert {f"instep_used[{wrong}]", "instep_elements[ledger]"} <= {name for name, _ in properties}
    assert "test_mine" in marked.out and "jsonl" not in marked.out


def test_folder_of_a_failure_has_a_unique_and_portable_name(tmp_path: Path) -> None:
    """On file systems that ignore case and limit names to 255 bytes."""
    long = "test_x.py::test_mine[" + "ü" * 300
    nodes = ["t.py::x[a/b]", "t.py::x[a:b]", "t.py::x[A/B]", "t.py::x a-b", long, f"{long}1", "::", ".."]
    names = {folder_of(node, tmp_path, number).name.casefold() for node in nodes for number in (0, 1)}
    assert len(names) == 2 * len(nodes) and all((tmp_path / name).mkdir() is None for name in names)
    assert max(len(name.encode()) for name in names) < 200 and not any(name.startswith((".", "-")) for name in names)
    assert folder_of(nodes[0], tmp_path).name.startswith("t.py-x-a-b-"), "it can still be read"


def test_fixture_uses_the_model_of_the_session(home: Path, tmp_path: Path) -> None:
    for file in (home / "traces").glob("short.*"):
        shutil.copy(file, tmp_path)
    (tmp_path / "test_model.py").write_text(
        "from instep import kit\n"
        "def test_mine(instep_replayed):\n"
        "    assert instep_replayed('short.jsonl', 'ledger', until=2).must_agree()\n"
        "    assert instep_replayed(kit.small(), 'ledger', until=2).must_agree()  # it has another model\n")
    done = session(tmp_path, "test_model.py", f"--instep-checkpoint={home / 'model'}")
    assert done.code == 0 and "1 passed" in done.out, done.out


@pytest.mark.parametrize("ops", ["leger", "test_own:NOTHING"])
def test_unknown_op_set_is_one_usage_error_before_any_run(home: Path, ops: str) -> None:
    shutil.copy(home / "traces" / "short.jsonl", home / "traces" / "second.jsonl")
    shutil.copy(home / "traces" / "short.safetensors", home / "traces" / "second.safetensors")
    try:
        for words in (("--instep-traces=traces", f"--instep-ops={ops}"), (f"traces/short.jsonl::{ops}",)):
            done = session(home, "test_own.py", *words)
            assert done.code == 4 and "passed" not in done.out and "failed" not in done.out, done.out
            assert done.err.count("ERROR: --instep-ops: ops: found") == 1 and ops in done.err, done.err
            assert ("module:attribute" in done.err) is (ops == "leger") and "Traceback" not in done.err
    finally:
        for file in ("second.jsonl", "second.safetensors"):
            (home / "traces" / file).unlink()


@pytest.mark.parametrize(("ini", "typed", "served", "said"), [
    ("instep_ops = ledger", "--instep-engine=support.wrong.engines:right", "support.wrong.engines:right",
     "--instep-engine overrides instep_ops of the ini file"),
    ("instep_engine = support.wrong.engines:right", "--instep-ops=ledger", "ledger",
     "--instep-ops overrides instep_engine of the ini file"),
])  # fmt: skip
def test_command_line_overrides_the_ini_file_with_a_note(
    home: Path, ini: str, typed: str, served: str, said: str
) -> None:
    from_file = ("-c", "who.ini", "--rootdir", ".")  # no pytest.ini: the next test would read it too
    (home / "who.ini").write_text(f"[pytest]\n{ini}\n")
    done = session(home, *from_file, "--instep-traces=traces", typed, "-v")
    assert done.code == 0 and f"short.jsonl::{served} PASSED" in done.out and "1 passed" in done.out, done.out
    assert f"instep: {said}" in done.out
    (home / "who.ini").write_text("[pytest]\ninstep_ops = ledger\ninstep_engine = support.wrong.engines:right\n")
    both = session(home, *from_file, "--instep-traces=traces")
    assert both.code == 4 and "instep_engine: found instep_ops as well" in both.out + both.err
