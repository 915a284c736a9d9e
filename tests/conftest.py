"""Settings that hold before any test module is imported, and the fixture `golden` with its option.

Leaves out: other fixtures, which are in the folders of the tests that use them.
"""

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: a second thread costs more than it brings

import pytest
import torch

import instep_optimized.kernels  # noqa: F401  decides how Triton runs, before transformers imports it natively
from support.running.covering import left_out, mark_the_others
from support.running.golden import CHANGED, Golden
from support.running.processes import warm_copies

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell lets what it runs in the background ignore Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
LIBRARY = ctypes.CDLL(None)  # the C library, if it has `malloc_trim` and `mallopt`
TESTS = str(Path(__file__).parent)
# Last, as an installed package is: a printed command then names `support.wrong.kit_ops:OPS` and not its file.
sys.path[:] = [*(folder for folder in sys.path if folder != TESTS), TESTS]
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # as its malloc.h numbers them
LEFT = pytest.StashKey[int]()  # how many tests this process left to `make whole`


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden/ from the current output")
    parser.addoption("--whole", action="store_true", help="also run the tests that `make test` leaves to `make whole`")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Refuse a set of parameters: its order, and so the ids, differ between the workers of pytest-xdist."""
    for mark in metafunc.definition.iter_markers("parametrize"):
        assert not any(isinstance(values, set | frozenset) for values in mark.args[1:2]), (
            f"{metafunc.definition.nodeid} takes a set: sort it")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, None, None]:
    """Leave out the tests of `make whole`, and skip those of a GPU that is not here.

    A command line that names only traces runs all of these traces.
    """
    mark_the_others(items)  # before -m chooses by markers
    for item in items:
        if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))
    yield
    if any(isinstance(item, pytest.Function) for item in items):
        whole = bool(config.getoption("whole"))
        left = [item for item in items if left_out(item, whole=whole)]
        config.hook.pytest_deselected(items=left)
        config.stash[LEFT] = 0 if whole else sum(not left_out(item, whole=True) for item in left)
        items[:] = [item for item in items if not left_out(item, whole=whole)]


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.node, request.config.getoption("update_golden"))


def pytest_configure() -> None:
    """Let the C library keep freed memory: fresh pages are slow. It is given back between modules (below)."""
    for option in (MMAP_THRESHOLD, TRIM_THRESHOLD) if hasattr(LIBRARY, "mallopt") else ():
        LIBRARY.mallopt(option, 1 << 30)
    gc.set_threshold(20_000, 20, 100)  # imported objects stay, and hardly any object that a test makes is in a cycle


def pytest_collection_finish() -> None:
    """Freeze the 10^6 objects of imported modules: a collector that visits them again makes every test slower."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the number of tests that were left out from a worker of xdist, in which they were collected."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left"] = session.config.stash.get(LEFT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[LEFT] = getattr(node, "workeroutput", {}).get("left", 0)  # each worker collects all tests


def pytest_unconfigure(config: pytest.Config) -> None:
    """Print the number of tests that were left out as the last line, and let the collector see all objects again."""
    if (left := config.stash.get(LEFT, 0)) and not hasattr(config, "workeroutput"):
        print(f"`make whole` runs {left:,} more test{'s' if left > 1 else ''}.")
    gc.unfreeze()  # libraries that list their leaked objects at exit would list all of them


@pytest.fixture(scope="module")
def warm() -> Iterator[None]:
    """Copies of the source run in processes that need not import torch."""
    with warm_copies():
        yield


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Give back free memory between modules, so that a worker does not hold the maximum of all modules."""
    if (nextitem is None or nextitem.path != item.path) and hasattr(LIBRARY, "malloc_trim"):
        LIBRARY.malloc_trim(0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, shown in getattr(report, "user_properties", ()):
                if name == CHANGED and report.when == "call":
                    terminalreporter.write_line(f"{CHANGED} by {report.nodeid}\n{shown}")
