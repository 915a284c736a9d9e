"""What must be settled before any test module is imported, and the fixture `golden` with its option.

Leaves out: other fixtures; those stand beside the tests that use them.
"""

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: a second thread costs more than it brings

import pytest

import instep_optimized.kernels  # noqa: F401  decides how Triton runs, before transformers imports it natively
from support.covering import left_to_the_whole
from support.golden import CHANGED, Golden
from support.warm import warm_copies

LIBRARY = ctypes.CDLL(None)  # the C library, where this is one with `malloc_trim` and `mallopt`
TESTS = str(Path(__file__).parent)
# Last, as an installed package is: a printed command then names `support.kit_ops:OPS` and not its file.
sys.path[:] = [*(folder for folder in sys.path if folder != TESTS), TESTS]
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # as its malloc.h numbers them


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden-anew", action="store_true", help="write tests/golden/ from what is printed now")
    parser.addoption("--whole", action="store_true", help="also what `make test` leaves to `make whole`")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Traces that are asked for beside no test are all meant."""
    if not config.getoption("whole") and any(isinstance(item, pytest.Function) for item in items):
        left = [item for item in items if left_to_the_whole(item)]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if not left_to_the_whole(item)]


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.node, request.config.getoption("golden_anew"))


def pytest_configure() -> None:
    """The C library keeps what is freed: tensors come and go, and fresh pages are slow. Modules give back (below)."""
    for option in (MMAP_THRESHOLD, TRIM_THRESHOLD) if hasattr(LIBRARY, "mallopt") else ():
        LIBRARY.mallopt(option, 1 << 30)
    gc.set_threshold(20_000, 20, 100)  # what is imported stays, and of what tests make hardly anything is in a cycle


def pytest_collection_finish() -> None:
    """Some 10^6 objects of imported modules live on: a collector that looks at them again makes every test slower."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """What was set aside is seen again: libraries whose objects are left at the end print all of them."""
    gc.unfreeze()


@pytest.fixture(scope="module")
def warm() -> Iterator[None]:
    """Copies of the source run in processes that need not import torch."""
    with warm_copies():
        yield


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Between modules the C library gives back what is free: else a worker holds the most that any module needed."""
    if (nextitem is None or nextitem.path != item.path) and hasattr(LIBRARY, "malloc_trim"):
        LIBRARY.malloc_trim(0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, shown in getattr(report, "user_properties", ()):
                if name == CHANGED and report.when == "call":
                    terminalreporter.write_line(f"{CHANGED} by {report.nodeid}\n{shown}")
