"""The command line: `instep`. A line of the table below is a command; its file beside this one does the work.

Leaves out: torch, until a command needs it. Exit codes: 0 all agree, 1 divergence, 2 wrong usage or bad input,
3 inconclusive, 4 the harness itself failed. Bad input is one line on stderr, never a traceback.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any, NoReturn

import typer

COMMANDS: tuple[str, ...] = (
    "calibrate",
    "doctor",
    "faults",
    "fuzz",
    "gate",
    "generate",
    "memory",
    "record",
    "relations",
    "replay",
    "shapes",
    "streams",
)

app = typer.Typer(
    name="instep", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Does a fast engine for hybrid gated-delta-net models still compute the model?",
)
for _name in COMMANDS:
    app.command(_name)(getattr(import_module(f".{_name}", __name__), _name))


def main() -> None:
    """Run a command and turn what goes wrong into an exit code and one line."""
    try:
        app()
    except Exception as error:
        _report(error)


def _report(error: Exception) -> None:
    from instep_reference.contract.errors import InstepError

    guard = sys.modules.get("instep.rig.guard")  # not loaded: then no subject was called yet
    if guard is not None and isinstance(error, guard.SubjectFailed):
        _subject_failed(error)
    if os.environ.get("INSTEP_TRACEBACK"):
        raise error
    if isinstance(error, InstepError):
        print(f"instep: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    said = " ".join(str(error).split())
    print(f"instep: the harness itself failed: {type(error).__name__}: {said}; INSTEP_TRACEBACK=1 shows where",
          file=sys.stderr)
    sys.exit(4)


def _subject_failed(error: Any) -> NoReturn:
    """The engine under test raised where no event is told apart: its finding all the same."""
    from ..report.words import trace
    from ..rig.failures import failure

    found = failure(0, "", error)
    print("\n".join([f"DIVERGED  {found.diagnosis}", *trace(found.raised)]))
    sys.exit(1)
