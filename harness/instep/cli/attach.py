"""`instep attach`: start an engine that records itself, and print where the recording is.

Leaves out: the recorder (`instep.attach`), and the judgement (`instep audit`).
"""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from instep_reference.contract.errors import BadInput

ENGINES = ("sglang", "vllm")
ALL = "all"
TRIGGERS = "switch,prefix,retraction"


def attach(
    engine: Annotated[str, typer.Argument(help=f"The engine: {', '.join(ENGINES)}.")],
    command: Annotated[list[str], typer.Argument(help="After --, the command that starts it.")],
    folder: Annotated[Path, typer.Option(help="The directory of the recording.")] = Path("recording"),
    layers: Annotated[str, typer.Option("--state-layers", help="Recurrent layers whose states are recorded, such as "
                                                               "0,4, or all; by default the first and the last.")] = "",
    requests: Annotated[str, typer.Option(help="Record only requests whose names begin so; several with commas.")] = "",
    triggers: Annotated[str, typer.Option(help="What makes states be written: a change of the step count, a prefix "
                                               "hit, a retraction.")] = TRIGGERS,
    every: Annotated[int, typer.Option(help="Write the states of every n-th event too; 0: none.", min=0)] = 32,
    logits: Annotated[bool, typer.Option("--logits", help="Write all logits; for small models.")] = False,
    final: Annotated[bool, typer.Option("--final", help="Write all final rows; for small models.")] = False,
) -> None:
    """Start an engine that records itself; exit 0: something was recorded, without a gap; 3: not so."""
    from .. import attach as room

    if engine not in ENGINES:
        raise BadInput("instep attach", found=repr(engine), expected=f"one of {', '.join(ENGINES)}")
    if not all(one.isdecimal() for one in layers.split(",")) and layers not in ("", ALL):
        raise BadInput("--state-layers", found=repr(layers), expected="numbers with commas, or all")
    if (folder / "recording.json").exists() or any(folder.glob("*/recording.json")):
        raise BadInput("--folder", found=f"{folder}, which has a recording", expected="a new directory")
    chosen: Any = None if not layers else () if layers == ALL else tuple(int(one) for one in layers.split(","))
    try:
        options = room.Options(
            str(folder.absolute()), layers=chosen, requests=tuple(filter(None, requests.split(","))),
            triggers=tuple(filter(None, triggers.split(","))), every=every, logits=logits, final=final,
        )  # fmt: skip
    except ValueError as error:
        raise BadInput("--triggers", found=str(error), expected=TRIGGERS) from None
    with room.attached(options, os.environ, elsewhere=True) as changed:
        code = _run(command, {**os.environ, **changed})
    raise typer.Exit(_report(folder, command, code))


def _run(command: list[str], environment: dict[str, str]) -> int:
    """Run the engine to its end. Ctrl-C reaches the engine by itself; a SIGTERM is passed on."""
    try:
        engine = subprocess.Popen(command, env=environment)
    except OSError as error:
        raise BadInput(shlex.join(command), found=error.strerror, expected="a command that starts an engine") from None
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, lambda number, frame: None),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, frame: engine.send_signal(number)),
    }
    try:
        return engine.wait()
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _report(folder: Path, command: list[str], code: int) -> int:
    """Print the recordings and the next command. 0: there are some, and all are without a gap."""
    found, whole = sorted(folder.rglob("recording.json")), True
    if code:
        print(f"{command[0]} ended with code {code}", file=sys.stderr)
    for one in found:
        attached = json.loads(one.read_text()).get("attached") or {}
        stopped = attached.get("stopped", "")
        whole = whole and not stopped
        print(f"recorded  {one.parent}" + (f"  (incomplete: {stopped})" if stopped else ""))
    if not found:
        print("nothing was recorded: no process of the engine that has the model ran a batch. Does it start by itself?",
              file=sys.stderr)  # fmt: skip
        return 3
    first = found[0].parent
    whole_engine = first.parent if first.name == "rank-0" else first  # an audit merges the recordings of all ranks
    print(f"next: instep audit {shlex.quote(str(whole_engine))} --model CHECKPOINT")
    return 0 if whole else 3
