"""Python in a separate process that has already imported torch, for the many runs of other sources.

A server of processes, one per worker of pytest, imports the packages of others; each run is a fork of it.
Leaves out: a Python from its start (`process.py`), for tests of pipes, signals and imports of torch.
"""

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .process import ROOTS

THEIRS = ["torch", "numpy", "hypothesis.stateful", "msgspec", "pytest", "rich.console", "safetensors.torch", "typer"]
SERVER = get_context("forkserver")
SERVER.set_forkserver_preload(THEIRS)


@contextmanager
def warm_copies() -> Iterator[None]:
    """Within the block, copies of the source and the arms of a gate are such processes."""
    import pytest  # here, as each process imports this module, and must import nothing of ours

    from instep_proof.faults import plant
    from instep_speed.gate import process

    ours = SimpleNamespace(**{name: getattr(subprocess, name) for name in ("PIPE", "TimeoutExpired")})
    with pytest.MonkeyPatch.context() as patch:
        for module in (plant, process):
            patch.setattr(module, "subprocess", SimpleNamespace(**vars(ours), run=run, Popen=Popen))
        yield


def run(words: Sequence[str], *, timeout: float, **given: Any) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run`, with its output as text."""
    given = {name: value for name, value in given.items() if name in ("cwd", "env")}
    with Popen(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **given) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
        return subprocess.CompletedProcess(words, process.returncode, out, err)


class Popen(subprocess.Popen[str]):
    """PYTHON [-P] -c or -m. The paths of `env` come first, and none is of this checkout."""

    def _execute_child(self, args: Sequence[str], *given: Any) -> None:
        cwd, env, pipes = given[4], given[5], given[9:15]
        words = list(args[1:])
        mine = [number if number != -1 else n for n, number in enumerate((pipes[0], pipes[3], pipes[5]))]
        self._process = _Started(words, cwd, dict(os.environ if env is None else env), mine)
        self._process.start()
        self.pid, self._child_created = self._process.pid, True
        self._close_pipe_fds(*pipes)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        self.returncode = self._process.exitcode
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.returncode = self._process.exitcode
        return self.returncode


class _Started(SERVER.Process):  # type: ignore[name-defined, misc]
    """A forked process, which receives its descriptors 0, 1 and 2."""

    def __init__(self, words: list[str], cwd: Path | None, env: dict[str, str], ends: list[int]) -> None:
        super().__init__()
        self.words, self.cwd, self.env, self.ends = words, cwd, env, ends

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"ends": [DupFd(end) for end in self.ends]}

    def run(self) -> None:
        for descriptor, end in enumerate(self.ends):
            os.dup2(end.detach(), descriptor)  # type: ignore[attr-defined]
        # Made anew: the first was closed when it began, the others take the file of before for what they write to.
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(end, mode, closefd=False) for end, mode in enumerate("rww"))
        if self.cwd is not None:
            os.chdir(self.cwd)
        os.environ.clear()
        os.environ.update(self.env)
        first = self.env.get("PYTHONPATH", "").split(os.pathsep)
        if self.words[0] == "-P":
            self.words.pop(0)
        else:
            first.insert(0, os.getcwd())
        sys.path[:] = [*first, *(path for path in sys.path if path not in ROOTS.split(os.pathsep))]
        for name in [name for name in sys.modules if name.partition(".")[0] == "support"]:
            del sys.modules[name]
        assert not {"instep", "instep_optimized", "instep_reference"} & sys.modules.keys(), "sources of ours are loaded"
        how, what, *rest = self.words
        sys.argv = [how, *rest]
        if how == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
