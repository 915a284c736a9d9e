"""A process that has imported torch but none of our packages, and forks itself for every requested run.

It is started by its path, with a socket (`run_in_forks.py`). Each run sends it three descriptors: a socket of that run,
stdout and stderr. The run's socket carries the words after `python -P`, the environment and the folder; the reply is
the run's process id, and in the end its exit code and its processor seconds. Leaves out: the caller.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

THEIRS = ("torch", "numpy", "msgspec", "rich.console", "rich.table", "safetensors.torch", "typer")
OURS = {"instep", "instep_optimized", "instep_reference"}


def serve(control: socket.socket) -> None:
    """Serve until the caller has gone."""
    for name in THEIRS:
        with suppress(ImportError):
            import_module(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers need no wait
    interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends the runs and the caller
    while True:
        said, received, _, _ = socket.recv_fds(control, 1, 3)
        if not said:
            return
        if os.fork() == 0:
            control.close()
            its, out, err = received
            keep(socket.socket(fileno=its), out, err, interrupted)
        for descriptor in received:
            os.close(descriptor)


def keep(told: socket.socket, out: int, err: int, interrupted: Any) -> NoReturn:
    """In a separate process: run the request, wait for it, and report how it ended. interrupted: the handler of
    SIGINT.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request = json.loads(told.makefile().readline())
    pid = os.fork()
    if pid == 0:
        told.close()
        signal.signal(signal.SIGINT, interrupted)
        begin(request, out, err)
    told.sendall(f"{pid}\n".encode())
    _, status, used = os.wait4(pid, 0)
    told.sendall(json.dumps([os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime]).encode() + b"\n")
    os._exit(0)


def begin(request: dict[str, Any], out: int, err: int) -> NoReturn:
    """Start like a new Python: with these descriptors, this environment, these first paths, and an exit code."""
    for number, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), out, err)):
        os.dup2(descriptor, number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(end, mode, closefd=False) for end, mode in enumerate("rww"))
    code = 1
    try:
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.path[:0] = request["environment"]["PYTHONPATH"].split(os.pathsep)
        assert not OURS & {name.partition(".")[0] for name in sys.modules}, "sources of ours are loaded"
        how, what, *rest = request["words"]
        sys.argv = [how, *rest]
        if how == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if not isinstance(ended.code, int | None):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
