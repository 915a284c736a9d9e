"""The first steps of a user: a Triton kernel under pytest, a pasted command, `instep demo`, and shipped fixtures.

They work in fresh processes, from any folder, without a clone. Leaves out: what the kit and the plugin find
(`test_kit.py`, `test_plugin.py`), and building a wheel: its contents are read from `pyproject.toml`.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from documentation.blocks import blocks_of, missing
from instep import bundled
from instep.threads import SMALL, threads_for
from instep_optimized.ops.import_by_name import attribute_at, module_at
from instep_proof.commands import demo
from instep_proof.faults.catalogue import by_id
from instep_proof.faults.plant import PACKAGES, digests, source
from support.running.command import Runner, complaint
from support.running.covering import WHOLE, few
from support.running.processes import TOP, install, warm_shell

pytest.importorskip("triton")
PAIR = TOP / "fixtures" / "traces" / "faults" / "pair.jsonl"
Pytest = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return install(tmp_path_factory.mktemp("installed"))


@pytest.fixture(scope="module")
def commands(shell: dict[str, str]) -> Iterator[Path]:
    """The commands of this shell, in processes that need not import torch."""
    with warm_shell(Path(shell["PATH"].split(os.pathsep)[0])) as folder:
        yield folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository of a user with a Triton kernel in `mine.py`."""
    shutil.copy(TOP / "tests" / "support" / "kernels" / "delta_rule_triton.py", tmp_path / "mine.py")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider -p no:benchmark\n")
    return tmp_path


@pytest.fixture
def run(project: Path, shell: dict[str, str]) -> Pytest:
    def run_pytest(*words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-q", *map(str, words)]
        return subprocess.run(command, cwd=project, env=shell, capture_output=True, text=True, check=False, timeout=240)

    return run_pytest


@pytest.fixture
def imports() -> Iterator[None]:
    """Modules and folders that a test imports from are forgotten after it."""
    folders, modules = [*sys.path], {*sys.modules}
    yield
    sys.path[:] = folders
    for name in {*sys.modules} - modules:
        del sys.modules[name]


def kernel_test(project: Path) -> None:
    """`docs/kit/test_gdn_kernels.py` with the kernel of `mine.py` as a value, on the shorter of its traces."""
    text = (TOP / "docs" / "kit" / "test_gdn_kernels.py").read_text()
    for old, new in (
        ("from instep.adapters.sglang import DEVICE\nfrom instep.adapters.sglang_commit import KERNELS\n",
         "from mine import OPS\n\nDEVICE, KERNELS = 'cpu', {'mine': 'rerun'}\n"),
        ('f"instep.adapters.{kernel}"', "OPS"),
        ('"fixed": "rounds"}', "}"), ("device=DEVICE)", "device=DEVICE, until=2)"),
    ):  # fmt: skip
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (project / "test_gdn_kernels.py").write_text(text)


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kit leaves Triton native")
def test_triton_kernel_runs_under_pytest_without_a_setting(project: Path, run: Pytest) -> None:
    kernel_test(project)
    done = run("test_gdn_kernels.py")
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


@WHOLE
@pytest.mark.interpreted
def test_triton_kernel_runs_under_the_plugin_without_a_setting(project: Path, run: Pytest) -> None:
    # The module of this test uses Triton and not instep; pytest imports it before the plugin imports `mine`.
    (project / "test_own.py").write_text("import triton.language\n\ndef test_own():\n    pass\n")
    done = run("test_own.py", f"--instep-traces={PAIR}", "--instep-ops=mine:OPS")
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


@WHOLE
@pytest.mark.interpreted
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kit leaves Triton native")
def test_triton_imported_too_early_names_the_variable_to_set(project: Path, run: Pytest) -> None:
    kernel_test(project)
    (project / "conftest.py").write_text("import triton.language\n")
    done = run("test_gdn_kernels.py")
    assert done.returncode == 1 and "start Python with TRITON_INTERPRET=1" in done.stdout, done.stdout + done.stderr


# ---- printed commands ------------------------------------------------------------------------------------------


WRONG = ("S *= log_decay[row].exp()[:, None, None]", "pass")  # the kernel forgets nothing


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    """A repository of a user whose kernel is wrong: `src/mine.py`, which pytest puts on its path, and a test."""
    text = (TOP / "fixtures" / "example" / "mine.py").read_text()
    assert text.count(WRONG[0]) == 1
    for folder in ("src", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "src" / "mine.py").write_text(text.replace(*WRONG))
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = src\naddopts = -p no:cacheprovider -p no:benchmark\n")
    (tmp_path / "tests" / "test_mine.py").write_text(
        "from mine import OPS\n\nfrom instep import kit\n\n\ndef test_kernel():\n"
        "    kit.served(kit.op_cases('gdn', case='decode-r1-KV-float32'), OPS).must_agree()\n")
    return tmp_path


@few(1)
@pytest.mark.slow
@pytest.mark.parametrize(("words", "starts"), [
    ("cd src && instep op mine:OPS gdn --drawn 0", "instep op mine:OPS gdn --case "),
    (f"python -m pytest -q --instep-traces={PAIR} --instep-ops=mine:OPS", f"instep replay {PAIR} --ops src/mine.py:"),
    ("instep op src/mine.py:OPS gdn --drawn 0", "instep op src/mine.py:OPS gdn --case "),
    ("python -m pytest -q tests/test_mine.py", "instep op src/mine.py:OPS gdn --case "),
], ids=("module", "plugin", "file", "pytest"))  # fmt: skip
def test_printed_command_runs_in_a_fresh_shell(
    wrong: Path, shell: dict[str, str], words: str, starts: str, request: pytest.FixtureRequest
) -> None:
    """The first row runs the installed commands from their start."""
    path = shell["PATH"]
    if not words.startswith("cd src"):
        path = f"{request.getfixturevalue('commands')}{os.pathsep}{path}"

    def typed(line: str, folder: Path) -> tuple[int, str]:
        done = subprocess.run(["bash", "-c", line], cwd=folder, env=shell | {"PATH": path}, capture_output=True,
                              text=True, check=False, timeout=240)  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    code, said = typed(words, wrong)
    (command,) = {line.strip() for line in said.splitlines() if line.strip().startswith(starts)}
    again, found = typed(command, wrong / "src" if words.startswith("cd src") else wrong)
    assert code == again == 1 and "DIVERGED" in said and "DIVERGED" in found, said + found


@pytest.mark.parametrize(("address", "says"), [
    ("nowhere:OPS", "No module named 'nowhere'), expected a module in "),
    ("src/nothing.py:OPS", "src/nothing.py is not in "),
    ("src/mine.py:NONE", "has no attribute 'NONE'), expected a name that src/mine.py defines"),
    ("src/broken.py:OPS", "(ModuleNotFoundError: No module named 'gone', at src/broken.py line 2), expected a module "),
])  # fmt: skip
def test_address_that_finds_nothing_gives_the_error_of_the_import(
    wrong: Path, imports: None, instep: Runner, monkeypatch: pytest.MonkeyPatch, address: str, says: str
) -> None:
    (wrong / "src" / "broken.py").write_text("import os\nimport gone\n")
    monkeypatch.chdir(wrong)
    line = complaint(instep("op", address, "gdn"))
    assert says in line and "module:attribute" not in line


@WHOLE
def test_current_directory_is_searched_unless_python_runs_with_the_option_p(wrong: Path, shell: dict[str, str]) -> None:
    """`python -P`, as copies with a planted fault run, finds only what its path has."""
    for option, code in (("-P", "missing"), ("-u", "found")):
        program = ("from instep_optimized.ops.import_by_name import attribute_at\n"
                   "try: print('found', attribute_at('short:X'))\nexcept ModuleNotFoundError: print('missing')\n")
        (wrong / "short.py").write_text("X = 1\n")
        done = subprocess.run([sys.executable, option, "-c", program], cwd=wrong, env=shell, capture_output=True,
                              text=True, check=False)  # fmt: skip
        assert done.stdout.split()[0] == code, done


def test_file_of_a_package_is_imported_as_its_module(
    tmp_path: Path, imports: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("pack/__init__.py", ""), ("pack/two.py", "X = 2\n"), ("pack/one.py", "from .two import X\n"),
                       ("types.py", "X = 3\n"), ("other/types.py", "X = 4\n")):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert attribute_at("pack/one.py:X") == 2 and sys.modules["pack.one"] is module_at("pack/one.py")
    assert attribute_at("types.py:X") == 3 and attribute_at("other/types.py:X") == 4, "types is a module of Python"
    assert attribute_at("types:SimpleNamespace") and module_at("types.py") is module_at(str(tmp_path / "types.py"))


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_demo_plants_in_a_copy_and_prints_what_the_readme_shows(
    instep: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.chdir(tmp_path)
    before = {package: digests(source(package).parent)[package] for package in PACKAGES}
    fault, (shown, *_) = by_id()[demo.FAULT], [one for one in blocks_of(TOP / "README.md") if one.language == "text"]
    ran = instep("demo", "--html", "page.html", "--open")
    assert ran.code == 0 and missing(shown.text, ran.out) == [], ran
    assert fault.what in ran.out and "  + " in ran.out and fault.edits[0].file in ran.out
    assert f"  event {fault.event} " in ran.out and fault.says in ran.out and "instep replay " in ran.out
    assert opened == [(tmp_path / "page.html").as_uri()] and "DIVERGED" in (tmp_path / "page.html").read_text()
    assert before == {package: digests(source(package).parent)[package] for package in PACKAGES}


@WHOLE
@pytest.mark.usefixtures("warm")
def test_printed_command_shows_the_fault_in_a_kept_copy(
    instep: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --keep it prints that the command agrees, because the copy is gone."""
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    copy, page = tmp_path / "a copy", tmp_path / "page.html"
    ran = instep("demo", "row-for-slot", "--html", page, "--keep", copy)
    (line,) = [line for line in ran.out.splitlines() if "PYTHONPATH=" in line]
    done = subprocess.run(line, shell=True, check=False, capture_output=True, text=True)
    assert ran.code == 0 and done.returncode == 1 and "DIVERGED" in done.stdout, done
    assert '<section class="made"><pre>instep replay ' in page.read_text()
    assert "not empty" in complaint(instep("demo", "--keep", copy))
    assert "That command agrees here" in instep("demo", "row-for-slot", "--html", page).out


def test_unknown_fault_is_refused_and_a_missed_one_fails(
    instep: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "instep faults --list" in complaint(instep("demo", "no-such-fault"))
    assert demo.FAULT in by_id() and by_id()[demo.FAULT].relation is None
    monkeypatch.setattr("instep_proof.faults.plant.planted", lambda folder, *edits: folder)
    monkeypatch.setattr("instep_proof.faults.plant.run", lambda *words, **how: type("Done", (), {
        "returncode": 0, "stdout": "small agrees", "stderr": ""}))
    assert instep("demo").code == 3


def test_a_wheel_carries_what_commands_ask_for() -> None:
    wheel = tomllib.loads((TOP / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {f"fixtures/{name}": f"instep/fixtures/{name}" for name in bundled.CARRIED}
    assert all((bundled.fixtures() / name).exists() for name in bundled.CARRIED)


def test_an_installed_package_uses_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "instep"
    (package / "fixtures").mkdir(parents=True)
    monkeypatch.setattr(bundled, "__file__", str(package / "carried.py"))
    assert bundled.trace() == package / "fixtures" / "traces" / "adaptive.jsonl"


@pytest.mark.slow
def test_replay_without_a_trace_replays_the_main_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instep: Runner
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = instep("replay", "--ops", "ledger", "--until", "3")
    assert ran.code == 0, ran.err
    assert "4 of 115 events" in ran.out and "adaptive" in ran.out


def test_fixtures_are_written_to_a_new_folder_only(tmp_path: Path, instep: Runner) -> None:
    folder = tmp_path / "here"
    ran = instep("fixtures", str(folder))
    assert ran.code == 0, ran.err
    written = {file.relative_to(folder) for file in folder.rglob("*") if file.is_file()}
    some = ("mine.py", "pytest.ini", "tiny/model.safetensors", "traces/adaptive.jsonl")
    assert {Path(name) for name in some} <= written
    assert (folder / "tiny/model.safetensors").read_bytes() == (TOP / "fixtures/tiny/model.safetensors").read_bytes()
    assert "an empty one" in complaint(instep("fixtures", str(folder)))
    assert {file.relative_to(folder) for file in folder.rglob("*") if file.is_file()} == written
    assert "DIR" in complaint(instep("fixtures", str(folder / "mine.py" / "below")))
    assert "DIR" in complaint(instep("fixtures", "x" * 300)), "too long a name to be looked for"
    assert f"cd '{tmp_path / 'two words'}' &&" in " ".join(instep("fixtures", str(tmp_path / "two words")).out.split())


def test_the_example_is_the_one_of_the_page() -> None:
    code = re.search(r"```python\n(.*?)```", (TOP / "docs" / "adapters.md").read_text(), re.S)
    assert code is not None
    assert (TOP / "fixtures" / "example" / "mine.py").read_text().endswith(code[1])


def test_small_models_get_one_thread_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        with threads_for(SMALL - 1):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with threads_for(SMALL):
            assert torch.get_num_threads() == 2
        monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "2")
        with threads_for(1):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
