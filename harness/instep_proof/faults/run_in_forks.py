"""Run copies of the source as forks of a process that has imported torch, which saves about a second each.

Only on Linux: elsewhere a fork of such a large process is unsafe, and every run is a new Python.
"""

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

from . import plant

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
    """Within the block `plant.run_python` makes forks."""
    if sys.platform != "linux":
        yield
        return
    SERVER.set_forkserver_preload(THEIRS)
    plant.forks = Forks()
    try:
        yield
    finally:
        plant.forks = None


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
