"""The command line `instep`. Each line of the table below is a command, with the function that implements it.

Some commands are in other packages, which an installation may lack: these are listed as not installed.

Leaves out: torch, until a command needs it. Exit codes: 0 all agree, 1 divergence, 2 wrong usage or bad input,
3 inconclusive, 4 the harness itself failed. Bad input is one line on stderr, never a traceback.
"""

import gc
import io
import os
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, NoReturn

import typer
from typer.main import get_command

from .exit_process import Command, Outputs, Raised, leave

# Name, module:function, and the line in `instep --help`.
COMMANDS: tuple[tuple[str, str, str], ...] = (
    ("attach", "instep.cli.attach:attach", "Start an engine that records itself for an audit."),
    ("audit", "instep.cli.audit:audit", "Judge a recording of an engine that ran under its own scheduler."),
    ("bench", "instep_speed.commands.bench:bench", "Check every kind of work, then time it next to other kernels."),
    ("calibrate", "instep_proof.commands.calibrate:calibrate", "Count false alarms; find the smallest visible error."),
    ("demo", "instep_proof.commands.demo:demo", "Plant one fault, and show how it is found."),
    ("diff", "instep.cli.diff:diff", "Compare two results: new findings, and what is compared no longer."),
    ("doctor", "instep.cli.doctor:doctor", "Print the installed parts, and what is missing."),
    ("faults", "instep_proof.commands.faults:faults", "Plant known faults, and count the found and named ones."),
    ("fixtures", "instep.cli.fixtures:fixtures", "Write a small trained model, traces and an example suite."),
    ("fuzz", "instep.cli.fuzz:fuzz", "Draw legal events until the two sides differ."),
    ("gate", "instep_speed.commands.gate:gate", "Check two versions, then test whether the second is slower."),
    ("generate", "instep.cli.generate:generate", "Decode prompts with instep's engine, and check the text."),
    ("memory", "instep.cli.memory:memory", "Print the memory of a request by pool, for every commit strategy."),
    ("op", "instep.cli.op:op", "Check single ops against their contract and the reference."),
    ("page", "instep.cli.page:page", "Make an HTML page of a result file."),
    ("record", "instep.cli.record:record", "Record a trace with the reference."),
    ("relations", "instep.cli.relations:relations", "Run a trace with one thing varied; results must stay equal."),
    ("replay", "instep.cli.replay:replay", "Replay a trace through the reference and an engine."),
    ("shapes", "instep.cli.shapes:shapes", "Run an op set at the sizes of real models, with random weights."),
    ("shrink", "instep.cli.shrink:shrink", "Cut a failing trace down to the events that its finding needs."),
    ("show", "instep.cli.show:show", "Print the events of a trace, and its capacity."),
    ("soak", "instep.cli.soak:soak", "Serve drawn rounds on engines that keep running."),
    ("streams", "instep.cli.streams:streams", "Replay a trace on readable labels: whose tokens a state holds."),
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


def _register(name: str, at: str, help: str) -> None:
    """Add a command; if it is not installed, or cannot be imported, one that only reports this."""
    module, _, function = at.partition(":")
    why, broken = "not installed", None
    if find_spec(package := module.partition(".")[0]) is not None:
        try:
            app.command(name, cls=Command, short_help=help)(getattr(import_module(module), function))
            return
        except Exception as error:  # Python would end with 1, the exit code of a divergence
            why, broken = "cannot be imported", error

    def missing() -> None:
        from instep_reference.contract.errors import BadInput

        if broken is not None:
            raise broken
        raise BadInput(f"instep {name}", found=f"no package {package}",
                       expected="an installation with this package")  # fmt: skip

    app.command(
        name, cls=Command, short_help=f"{help} ({why})", help=f"{why.capitalize()}: this command needs {package}.",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(missing)


for _command in COMMANDS:
    _register(*_command)


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
