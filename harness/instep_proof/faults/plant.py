"""Plant source edits in a temporary copy of the packages, and run that copy in a separate process.

The product itself is never changed, and contains no switch that makes it wrong. On Linux the process may be a fork of
one that has imported torch, which saves about a second. Elsewhere a fork of such a large process is unsafe, and every
run is a new Python. Leaves out: the faults.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from unittest.mock import patch

from instep.run.replay import source_digest
from instep_reference.contract.errors import BadInput

from .catalogue.fault import Edit, ExactText, Wrap
from .syntax_edit import first_line, replaced, wrapped

PACKAGES = ("instep_reference", "instep_optimized", "instep")  # may have edits; a result has their digests
ENGINE = tuple(f"{package}/" for package in PACKAGES if package != "instep")  # files of an engine begin so
COPIED = (*PACKAGES, "instep_proof")  # runs of faults are in the last one
TIMEOUT_S = 300.0
forks: "Forks | None" = None  # makes the processes of runs (`warm`); None: each is a new Python


def source(package: str) -> Path:
    """The folder from which a package would be imported, without importing it."""
    found = importlib.util.find_spec(package)
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def planted(folder: Path, *edits: Edit | Wrap) -> Path:
    """Make a folder with a copy of the packages and the edits; without edits, the control."""
    for package in COPIED:
        # Compiled files are copied as well: they are valid for sources with the same modification time. Other files of
        # a wheel are not copied.
        shutil.copytree(source(package), folder / package, ignore=shutil.ignore_patterns("fixtures"))
    for edit in edits:
        path = folder / edit.file
        path.write_text(edited(path.read_text(), edit))
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()
    return folder


def edited(text: str, edit: Edit | Wrap) -> str:
    """Apply the edit to a text; refuse it unless its old text is in the syntax tree, or in the text, exactly once."""
    if isinstance(edit, ExactText):
        begins = [at for at in range(len(text)) if edit.old and text.startswith(edit.old, at)]
        if len(begins) != 1:
            lines = [str(text.count("\n", 0, at) + 1) for at in begins]
            there = f"{len(lines)} times, in lines {', '.join(lines)}" if lines else "nowhere"
            raise BadInput(f"planting in {edit.file}", found=f"{first_line(edit.old)!r}, which is {there}",
                           expected="a text that is there exactly once",
                           hint="a longer text is there once" if lines else "the source or its layout has changed")
        return text.replace(edit.old, edit.new)
    return wrapped(text, edit) if isinstance(edit, Wrap) else replaced(text, edit.old, edit.new, edit.file)


def digests(folder: Path) -> dict[str, str]:
    """Map each package to the sha256 of its source in that folder, as `served` in a result file."""
    return {package: source_digest(folder / package) for package in PACKAGES}


def run(
    folder: Path, *args: str, cwd: Path | None = None, traceback: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `instep ARGS` with the packages of that folder alone, as a user would. traceback: of any error, on stderr."""
    return run_python(folder, "-c", "from instep.cli import main; main()", *args, cwd=cwd, traceback=traceback)


def run_python(
    folder: Path, *args: str, cwd: Path | None = None, traceback: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGS` with the packages of that folder first (`-P`: not the working directory)."""
    env = environment() | {"PYTHONPATH": str(folder)} | ({"INSTEP_TRACEBACK": "1"} if traceback else {})
    if forks is not None:
        return forks.run(args, cwd or folder, env, TIMEOUT_S)
    return subprocess.run(
        [sys.executable, "-P", *args], capture_output=True, text=True, check=False, cwd=cwd or folder, env=env,
        timeout=TIMEOUT_S,
    )


def environment() -> dict[str, str]:
    """The environment of a run: the user's, without the variables that configure this process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    return kept | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}


THEIRS = ["torch", "numpy", "msgspec", "rich.console", "rich.table", "safetensors.torch", "typer"]
SERVER = get_context("forkserver")
ENDS_IN = 0.5  # seconds
LOST = 255  # the exit code of a fork whose server has ended
# In a fork, which has imported nothing of ours: it starts like a new Python with these words, files and environment.
BEGIN = """
import atexit, os, resource, runpy, sys
assert not {"instep", "instep_optimized", "instep_reference"} & {name.partition(".")[0] for name in sys.modules}
for number, file in enumerate((os.devnull, folder + "/out", folder + "/err")):
    os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), number)
sys.stdin, sys.stdout, sys.stderr = (os.fdopen(end, mode, closefd=False) for end, mode in enumerate("rww"))
os.chdir(cwd)
os.environ.clear()
os.environ.update(environment)
sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
how, what, *rest = words
sys.argv = [how, *rest]
try:
    if how == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
finally:
    atexit._run_exitfuncs()
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    with open(folder + "/spent", "w") as file:
        file.write(str(sum(each.ru_utime + each.ru_stime for each in used)))
"""


@contextmanager
def warm() -> Iterator[None]:
    """Within the block `run_python` makes forks."""
    global forks
    if sys.platform != "linux":
        yield
        return
    SERVER.set_forkserver_preload(THEIRS)
    forks = Forks()
    try:
        yield
    finally:
        forks = None


class Forks:
    """Forks of the server. spent: processor seconds of the runs that have ended."""

    def __init__(self) -> None:
        self.spent, self._lock = 0.0, threading.Lock()  # `multiprocessing` is used by one thread at a time

    def run(
        self, words: Sequence[str], folder: Path, environment: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run like `subprocess.run` of `python -P WORDS`, with output as text."""
        with TemporaryDirectory() as files:
            given = {"words": [*words], "cwd": str(folder), "environment": {**environment}, "folder": files}
            process = SERVER.Process(target=exec, args=(BEGIN, given), daemon=True)
            # The main module would be imported in the fork. The server takes the number of threads from its start.
            with self._lock, patch.dict("sys.modules", __main__=ModuleType("__main__")), patch.dict(
                    "os.environ", OMP_NUM_THREADS="1"):
                try:
                    process.start()
                except ConnectionError:  # the server was about to end; a new one is started when it has
                    time.sleep(ENDS_IN)
                    process.start()
            ended = wait([process.sentinel], timeout)
            with self._lock:
                if not ended:
                    process.kill()
                process.join()
                code, spent = process.exitcode or 0, Path(files, "spent")
                self.spent += float(spent.read_text()) if spent.exists() else 0.0
            if not ended:
                raise subprocess.TimeoutExpired([*words], timeout)
            said = [file.read_text(errors="replace") if (file := Path(files, end)).exists() else ""
                    for end in ("out", "err")]  # fmt: skip
            if code == LOST:
                said[1] += "the process that every run is forked from has ended: is there enough memory?\n"
            return subprocess.CompletedProcess([*words], code, *said)
