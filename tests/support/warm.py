"""Python in a process of its own that has imported torch already: for runs of other sources, which are many.

A server of processes, one per worker of pytest, imports what is nobody's of ours; each run is a fork of it.
Leaves out: a Python from its very start (`process.py`): for what pipes, signals and imports of torch are about.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from tempfile import TemporaryDirectory
from types import SimpleNamespace

from .process import ROOTS

THEIRS = ["torch", "numpy", "hypothesis.stateful", "msgspec", "pytest", "rich.console", "safetensors.torch", "typer"]
SERVER = get_context("forkserver")
SERVER.set_forkserver_preload(THEIRS)


@contextmanager
def warm_copies() -> Iterator[None]:
    """Within the block, copies of the source run in such processes (`instep.faults.plant`)."""
    import pytest  # here, as each process imports this module, and must import nothing of ours

    from instep.faults import plant

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plant, "subprocess", SimpleNamespace(run=run))
        yield


def run(
    words: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout: float, **_: bool
) -> CompletedProcess[str]:
    """As `subprocess.run`, of PYTHON [-P] -c or -m. The paths of `env` stand first, and none of this checkout's."""
    with TemporaryDirectory() as folder:
        said = [Path(folder) / name for name in ("out", "err")]
        asked = [word for word in words[1:] if word != "-P"]
        process = SERVER.Process(target=_python, args=(asked, cwd, dict(env), said))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            raise TimeoutExpired(list(words), timeout)
        out, err = (file.read_text() if file.exists() else "" for file in said)
        assert process.exitcode is not None
        return CompletedProcess(words, process.exitcode, out, err)


def _python(words: list[str], cwd: Path, env: dict[str, str], said: list[Path]) -> None:
    for descriptor, file in enumerate(said, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    first = env.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*first, *(path for path in sys.path if path not in ROOTS.split(os.pathsep))]
    for name in [name for name in sys.modules if name.partition(".")[0] == "support"]:
        del sys.modules[name]
    assert not {"instep", "instep_optimized", "instep_reference"} & sys.modules.keys(), "sources of ours are loaded"
    how, what, *rest = words
    sys.argv = [how, *rest]
    if how == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
