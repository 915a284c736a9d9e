"""Fixtures: `instep` runs a command of the tool, `plant` makes the engine wrong, both in the test's own process.

Every test must leave all function modes of torch: one that remains makes every later test slower.

Leaves out: installation; the entry point is called as the installed script calls it.
"""

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from instep.cli import main
from instep_proof.faults.catalogue.fault import Edit, Wrap
from support.inputs.bench_runs import MACHINE
from support.inputs.checkpoints import TWO_LAYERS, write
from support.inputs.traces import brief, first, recording
from support.running.browser import BROWSER, Browser, browser
from support.running.command import Ran, Runner
from support.running.planting import planted_here


@pytest.fixture(autouse=True)
def modes() -> Iterator[None]:
    yield
    assert torch._C._len_torch_function_stack() == 0, "a function mode is still entered"


# A trace of a small model: a save, a preemption, a resume, an abort, a load, and rounds of every kind.
trace = recording(brief())


# Its first rounds: windows of 2, 4 and 1 tokens in pools for 4, of which one rejects all; slot 2 is never used.
four_rounds = recording(first(4))


four_rounds_bf16 = recording(first(4), dtype=torch.bfloat16)


# A trace for tests that need more rounds than a `brief` one has.
longer = recording()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with two layers."""
    return write(tmp_path_factory.mktemp("model"), **TWO_LAYERS)


@pytest.fixture
def instep(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runner:
    """`instep("replay", path, "--ops", "plain")` -> exit code and both outputs."""

    def run(*words: object) -> Ran:
        monkeypatch.setattr("sys.argv", ["instep", *map(str, words)])
        monkeypatch.setenv("COLUMNS", "120")
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return Ran(int(ended.value.code or 0), said.out, said.err)

    return run


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rates of the machine are given to `instep bench`, not measured."""
    monkeypatch.setattr("instep_speed.bench.run.rates", lambda device, dtype: MACHINE)


@pytest.fixture
def copy(right: Path, tmp_path: Path) -> Path:
    """A copy of a file's recording `right`, which a test may change."""
    return Path(shutil.copytree(right, tmp_path / "copy"))


@pytest.fixture
def plant() -> Iterator[Callable[..., None]]:
    """`plant(Wrap(...), Edit(...))`: they hold until the test ends."""
    with ExitStack() as until:

        def put(*edits: Edit | Wrap) -> None:
            until.enter_context(planted_here(*edits))

        yield put


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`mine(text, old, new)`: write this module, with one change, so that `--ops mine:OPS` finds it."""

    def write_module(text: str, old: str = "", new: str = "") -> None:
        assert not old or text.count(old) == 1
        (tmp_path / "mine.py").write_text(text.replace(old, new) if old else text)

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    yield write_module
    sys.modules.pop("mine", None)


@pytest.fixture(scope="module")
def looked() -> Iterator[Browser]:
    """A browser, where one is installed."""
    if BROWSER is None:
        pytest.skip("no chromium or google-chrome is installed")
    with browser() as opened:
        yield opened
