"""The command line `instep`. Each line of the table below is a command, implemented in the file of its name.

Leaves out: torch, until a command needs it. Exit codes: 0 all agree, 1 divergence, 2 wrong usage or bad input,
3 inconclusive, 4 the harness itself failed. Bad input is one line on stderr, never a traceback.
"""

from __future__ import annotations

import gc
import io
import os
import sys
from functools import cache
from importlib import import_module
from typing import Annotated, NoReturn

import typer
from typer.main import get_command

from .ending import Command, Outputs, Raised, leave

COMMANDS: tuple[str, ...] = (
    "audit",
    "bench",
    "calibrate",
    "demo",
    "diff",
    "doctor",
    "faults",
    "fixtures",
    "fuzz",
    "gate",
    "generate",
    "memory",
    "op",
    "page",
    "record",
    "relations",
    "replay",
    "shapes",
    "show",
    "soak",
    "streams",
)

WIDE = ("audit", "bench", "shapes")  # commands whose tensors are large enough for several threads

app = typer.Typer(
    name="instep", no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False,
    help="Does a fast engine for hybrid gated-delta-net models still compute the model?",
)
def _version(asked: bool) -> None:
    if asked:
        from ..report.machine import installed

        print(f"instep {installed('instep') or 'from source'}")
        raise typer.Exit


@app.callback()
def _every(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True,
                                          help="Print the version.")] = False,
) -> None:
    """Options of every command."""


for _name in COMMANDS:
    app.command(_name, cls=Command)(getattr(import_module(f".{_name}", __name__), _name))


_commands = cache(get_command)  # an app rebuilds all its commands at every call, which is slow


def main() -> NoReturn:
    """Run a command and turn its verdict, or its failure, into an exit code and one line."""
    outputs, code, error = Outputs(), 0, None
    for stream in (sys.stdout, sys.stderr):  # unprintable characters are shown escaped
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    gc.set_threshold(20_000, 20, 100)  # modules make 10^6 long-lived objects, and few of the others are cycles
    if sys.argv[1:2] not in [[name] for name in WIDE]:
        # A second thread makes small tensors three to thirty times slower. torch reads this when it is loaded.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        _commands(app)()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    except Raised as raised:
        error = raised.error
    except Exception as raised:
        error = raised
    leave(outputs, code, error)
