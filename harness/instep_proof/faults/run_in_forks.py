"""Run copies of the source as forks of a process that has imported torch, which saves about a second each.

Only on Linux: elsewhere a fork of such a large process is unsafe, and every run is a new Python.
Leaves out: the forking process (`fork_server.py`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

from . import plant

SERVER = Path(__file__).with_name("fork_server.py")


@contextmanager
def warm() -> Iterator[None]:
    """Within the block `plant.run_python` makes forks."""
    if sys.platform != "linux":
        yield
        return
    with Forks() as plant.forks:
        try:
            yield
        finally:
            plant.forks = None


class Forks:
    """The server. spent: processor seconds of the runs that have ended."""

    def __init__(self) -> None:
        self.spent, self._lock = 0.0, threading.Lock()
        self._control, end = socket.socketpair()
        with end:
            self._server = subprocess.Popen(
                [sys.executable, "-P", str(SERVER), str(end.fileno())], pass_fds=(end.fileno(),),
                stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=plant.environment(),
            )  # fmt: skip

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *failed: object) -> None:
        self._control.close()
        self._server.wait()

    def run(
        self, words: Sequence[str], folder: Path, environment: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run like `subprocess.run` of `python -P WORDS`, with output as text. Raises if the server has ended."""
        try:
            return self._run(words, folder, environment, timeout)
        except (OSError, ValueError):  # the other end is closed, or silent
            with suppress(subprocess.TimeoutExpired):
                self._server.wait(5)
            if (code := self._server.returncode) is None:
                raise
            said = f"the process that every run is forked from has ended with {code}: is there enough memory?\n"
            return subprocess.CompletedProcess([*words], code or 1, "", said)

    def _run(
        self, words: Sequence[str], folder: Path, environment: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        mine, its = socket.socketpair()
        with mine, TemporaryFile() as out, TemporaryFile() as err:
            with its, self._lock:
                socket.send_fds(self._control, [b"."], [its.fileno(), out.fileno(), err.fileno()])
            request = {"words": [*words], "folder": str(folder), "environment": {**environment}}
            mine.sendall(json.dumps(request).encode() + b"\n")
            answer = mine.makefile()
            pid = int(answer.readline())
            mine.settimeout(timeout)
            try:
                code, seconds = json.loads(answer.readline())
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired([*words], timeout) from None
            with self._lock:
                self.spent += seconds
            said = []
            for file in (out, err):
                file.seek(0)
                said.append(file.read().decode(errors="replace"))
            return subprocess.CompletedProcess([*words], code, *said)
