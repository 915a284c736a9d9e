"""The first steps of a user, in fresh processes outside the checkout: a Triton kernel under pytest, a pasted command.

Leaves out: what the kit and the plugin find (`test_kit.py`, `test_plugin.py`).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from instep_optimized.ops.import_by_name import attribute_at, module_at
from support.running.command import Runner, complaint
from support.running.covering import WHOLE, few
from support.running.installation import TOP, install

pytest.importorskip("triton")
PAIR = TOP / "fixtures" / "traces" / "faults" / "pair.jsonl"
Pytest = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return install(tmp_path_factory.mktemp("installed"))


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
        ('"fixed": "rounds"}', "}"), ("device=DEVICE)", "device=DEVICE, until=8)"),
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
    ("python -m pytest -q tests/test_mine.py", "instep op src/mine.py:OPS gdn --case "),
    (f"python -m pytest -q --instep-traces={PAIR} --instep-ops=mine:OPS", f"instep replay {PAIR} --ops src/mine.py:"),
    ("cd src && instep op mine:OPS gdn --drawn 0", "instep op mine:OPS gdn --case "),
    ("instep op src/mine.py:OPS gdn --drawn 0", "instep op src/mine.py:OPS gdn --case "),
], ids=("pytest", "plugin", "module", "file"))  # fmt: skip
def test_printed_command_runs_in_a_fresh_shell(wrong: Path, shell: dict[str, str], words: str, starts: str) -> None:
    def typed(line: str, folder: Path) -> tuple[int, str]:
        done = subprocess.run(["bash", "-c", line], cwd=folder, env=shell, capture_output=True, text=True, check=False,
                              timeout=240)  # fmt: skip
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
