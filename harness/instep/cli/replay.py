"""`instep replay`: a trace through both sides, everything compared after every event.

Leaves out: how (`instep.rig`) and the words (`instep.report`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..rig.rig import Outcome
    from ..trace.file import Trace
    from ..trace.header import Part


def replay(
    trace: Annotated[Path, typer.Argument(help="A trace: the .jsonl file.")],
    ops: Annotated[list[str] | None, typer.Option(help="Op set, engine or module:attribute; may be repeated. "
                                                     "Left out: the plan in the trace's header.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Activations: float32, bfloat16, float16 or float64.")] = "float32",
    layout: Annotated[str, typer.Option(help="Physical order of a state: VK or KV.")] = "VK",
    strategy: Annotated[str | None, typer.Option(help="How states are committed: snapshot, columns, rerun or "
                                                      "lazy_rerun.")] = None,
    conv: Annotated[str | None, typer.Option(help="How conv windows are committed: windows or widened.")] = None,
    graphs: Annotated[bool, typer.Option("--graphs", help="Hold rounds in graphs: CUDA's, or an emulator's.")] = False,
    checkpoint: Annotated[Path | None, typer.Option(help="The model; left out: where the trace says.")] = None,
    until: Annotated[int | None, typer.Option(help="Stop after this event.", min=0)] = None,
    layer: Annotated[list[int] | None, typer.Option(help="Judge this layer alone; may be repeated.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the result there, too.")] = None,
    commit: Annotated[str | None, typer.Option(help="Revision of the source, for the result file.")] = None,
) -> None:
    """Replay a trace through reference and engine; exit 0: all agree, 1: divergence, 3: nothing compared."""
    from rich.console import Console

    from instep_reference.contract.errors import BadInput

    from ..report import data, terminal
    from ..rig.alone import device_here, known_layout
    from ..rig.strategies import chosen
    from ..trace.file import read
    from ..trace.header import Part
    from ..whole import writable

    given = {"device": device_here(device), "dtype": dtype, "layout": known_layout(layout), "graphs": graphs}
    if json is not None:
        writable(json)
    loaded = read(trace)
    runs = [Part(name, until) for name in ops] if ops else _planned(loaded, until)
    if not runs:
        raise BadInput(f"{trace.name} line 1: replay", found="no op set", expected="one, or --ops to name it")
    outcomes = [
        _run(loaded, run, checkpoint, given | chosen(strategy=strategy or run.strategy, conv=conv or run.conv), layer)
        for run in runs
    ]
    if json is not None:
        data.write(json, outcomes, commit=commit)
    terminal.show(outcomes, Console())
    raise typer.Exit(int(data.worst(outcomes)))


def _planned(trace: Trace, until: int | None) -> list[Part]:
    """The header's plan, cut at `until`."""
    from msgspec.structs import replace

    return [
        replace(part, until=min((n for n in (part.until, until) if n is not None), default=None))
        for part in trace.header.replay
    ]


def _run(
    trace: Trace, part: Part, checkpoint: Path | None, given: dict[str, Any], layers: list[int] | None
) -> Outcome:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from ..rig.rig import Rig

    ops, until = part.ops, part.until
    rig = Rig(trace, checkpoint, ops=ops, **given)
    total = len(trace.events) if until is None else min(until + 1, len(trace.events))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"{trace.header.name} [{ops}]".replace("[", r"\["), total=total)
        return rig.run(until=until, layers=layers, progress=lambda index, event: bar.update(task, completed=index + 1))
