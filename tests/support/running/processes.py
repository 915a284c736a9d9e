"""Processes in which tests run instep: forks that have imported torch, a Python from its start, and an installed one.

A server of processes, one per worker of pytest, imports the packages of others; each run is a fork of it. A shell gets
such processes by commands of the same names, first on its PATH. A Python from its start is for tests of pipes, signals
and imports of torch. Leaves out: the fixture `instep`, which runs a command within the test's process and is much
faster.
"""

import atexit
import json
import os
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection, get_context
from multiprocessing.reduction import DupFd
from pathlib import Path
from threading import Lock, Thread
from types import SimpleNamespace
from typing import Any

TOP = Path(__file__).resolve().parents[3]
ROOTS = os.pathsep.join(str(TOP / root) for root in ("reference", "optimized", "harness", "tests"))
ENVIRONMENT = {"PYTHONPATH": ROOTS, "OMP_NUM_THREADS": "1"}
THEIRS = ["torch", "numpy", "hypothesis.stateful", "msgspec", "pytest", "rich.console", "safetensors.torch", "typer"]
SERVER = get_context("forkserver")
SERVER.set_forkserver_preload(THEIRS)


@contextmanager
def warm_copies() -> Iterator[None]:
    """Within the block, copies of the source and the arms of a gate are such processes."""
    import pytest  # here, as each process imports this module, and must import nothing of ours

    from instep_proof.faults import plant
    from instep_speed.gate import process

    names = ("CompletedProcess", "PIPE", "TimeoutExpired")
    ours = SimpleNamespace(**{name: getattr(subprocess, name) for name in names})
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
    """A forked process, which receives its descriptors 0, 1 and 2. paths: `sys.path` after those of `env`."""

    def __init__(self, words: list[str], cwd: Path | str | None, env: dict[str, str], ends: list[int],
                 paths: list[str] | None = None) -> None:  # fmt: skip
        super().__init__()
        self.words, self.cwd, self.env, self.ends, self.paths = words, cwd, env, ends, paths

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"ends": [DupFd(end) for end in self.ends]}

    def run(self) -> None:
        for descriptor, end in enumerate(self.ends):
            os.dup2(end.detach(), descriptor)  # type: ignore[attr-defined]
        # Made anew: the first was closed when it began, the others take the file of before for what they write to.
        unbuffered = 1 if self.env.get("PYTHONUNBUFFERED") else -1  # a line at a time, as stderr always is
        sys.stdin, sys.stdout, sys.stderr = (
            os.fdopen(end, mode, buffering, closefd=False)
            for end, (mode, buffering) in enumerate([("r", -1), ("w", unbuffered), ("w", 1)])
        )
        if self.cwd is not None:
            os.chdir(self.cwd)
        os.environ.clear()
        os.environ.update(self.env)
        sys.dont_write_bytecode = bool(self.env.get("PYTHONDONTWRITEBYTECODE"))
        first = [os.path.abspath(path) for path in self.env.get("PYTHONPATH", "").split(os.pathsep) if path]
        if self.words[0] == "-P":
            self.words.pop(0)
        elif self.words[0] in ("-m", "-c"):
            first.insert(0, os.getcwd() if self.words[0] == "-m" else "")
        else:
            first.insert(0, str(Path(self.words[0]).resolve().parent))
        if self.paths is None:
            self.paths = [path for path in sys.path if path not in ROOTS.split(os.pathsep)]
        sys.path[:] = [*first, *self.paths]
        for name in [name for name in sys.modules if name.partition(".")[0] == "support"]:
            del sys.modules[name]
        assert not {"instep", "instep_optimized", "instep_reference"} & sys.modules.keys(), "sources of ours are loaded"
        try:
            self._execute()
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
            sys.exit(1)
        finally:
            atexit._run_exitfuncs()

    def _execute(self) -> None:
        if self.words[0] not in ("-m", "-c"):
            sys.argv = self.words
            runpy.run_path(sys.argv[0], run_name="__main__")
            return
        how, what, *rest = self.words
        sys.argv = [how, *rest]
        if how == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


@contextmanager
def warm_shell(installed: Path = Path(sys.executable).parent) -> Iterator[Path]:
    """A folder for the PATH of a shell, in which `instep` and `python` are commands that run in such processes.

    A process has the paths of this Python. installed: the folder with the script `instep`
    """
    with tempfile.TemporaryDirectory() as made, socket.socket(socket.AF_UNIX) as server:
        folder = Path(made)
        server.bind(f"{folder}/server")
        server.listen()
        for name, words in (("python", []), ("instep", [str(installed / "instep")])):
            (folder / name).write_text(_FORWARDED.format(python=sys.executable, server=f"{folder}/server", words=words))
            (folder / name).chmod(0o755)
        Thread(target=_serve, args=(server,), daemon=True).start()
        yield folder
        server.shutdown(socket.SHUT_RDWR)  # ends the thread


_FORWARDED = """#!{python} -I
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({server!r})
    socket.send_fds(server, [b"."], [0, 1, 2])
    given = {{"words": {words} + sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ), "paths": sys.path}}
    server.sendall(json.dumps(given).encode() + b"\\n")
    code = int(server.makefile().readline())
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


_LOCK = Lock()  # a start also reads the exit codes of others that have ended, and each can be read once


def _serve(server: socket.socket) -> None:
    """Run what each connection sends, until the server is closed."""
    with suppress(OSError):
        while True:
            Thread(target=_answer, args=(server.accept()[0],), daemon=True).start()


def _answer(client: socket.socket) -> None:
    """Run one command, and send its exit code; a client that ends first ends the command."""
    with client:
        _, ends, *_ = socket.recv_fds(client, 1, 3)
        process = _Started(ends=ends, **json.loads(client.makefile().readline()))
        with _LOCK:
            process.start()
        for end in ends:
            os.close(end)
        connection.wait([process.sentinel, client])
        with _LOCK:
            if process.exitcode is None:
                process.kill()
            process.join()
        with suppress(OSError):
            client.sendall(f"{process.exitcode}\n".encode())


def start(*words: object, cold: bool = False, **given: Any) -> subprocess.Popen[str]:
    """`instep WORDS`; stdout and stderr are pipes unless something else is given. cold: as a shell starts it."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-m", "instep", *map(str, words)]
    how = {**pipes, "env": {**os.environ, **ENVIRONMENT}, **given}
    return (subprocess.Popen if cold else Popen)(command, text=True, **how)


def install(folder: Path) -> dict[str, str]:
    """Install into the folder -> the environment of a shell that has this installation and not the checkout.

    As a wheel would: packages, fixtures, entry points and the command. Its content is read from
    `pyproject.toml`; building one needs hatchling.
    """
    project = tomllib.loads((TOP / "pyproject.toml").read_text())
    wheel, about = project["tool"]["hatch"]["build"]["targets"]["wheel"], project["project"]
    site, scripts = folder / "site", folder / "bin"
    for package in wheel["packages"]:
        shutil.copytree(TOP / package, site / Path(package).name)
    for source, target in wheel["force-include"].items():
        (site / target).parent.mkdir(parents=True, exist_ok=True)
        (site / target).symlink_to(TOP / source)
    info = site / f"{about['name']}-{about['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n")
    (info / "entry_points.txt").write_text("".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in about["entry-points"].items()))
    scripts.mkdir()
    for name, value in about["scripts"].items():
        module, _, function = value.partition(":")
        (scripts / name).write_text(f"#!{sys.executable}\nfrom {module} import {function}\n{function}()\n")
        (scripts / name).chmod(0o755)
    (scripts / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')  # a link would lose the environment
    (scripts / "python").chmod(0o755)
    own = ("PYTHON", "PYTEST", "TRITON", "GITHUB")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    return {**kept, "PYTHONPATH": str(site), "PATH": f"{scripts}{os.pathsep}{kept['PATH']}", "OMP_NUM_THREADS": "1",
            "COLUMNS": "120"}  # fmt: skip
