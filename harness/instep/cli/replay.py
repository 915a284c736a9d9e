"""`instep replay`: a trace through both sides, everything compared after every event.

Leaves out: how (`instep.rig`) and the words (`instep.report`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .setting import Given, takes_setting

if TYPE_CHECKING:
    from ..checks import Check
    from ..rig.rig import Outcome, Rig
    from ..rig.variant import Variant
    from ..trace.file import Trace
    from ..trace.header import Part


@takes_setting(several=("ops",), ops="Op set, engine or module:attribute; left out: the plan in the trace's header.")
def replay(
    given: Given,
    trace: Annotated[Path, typer.Argument(help="A trace: the .jsonl file.")],
    checkpoint: Annotated[Path | None, typer.Option(help="The model; left out: where the trace says.")] = None,
    until: Annotated[int | None, typer.Option(help="Stop after this event.", min=0)] = None,
    layer: Annotated[list[int] | None, typer.Option(help="Judge this layer alone; may be repeated.", min=0)] = None,
    swap: Annotated[list[str] | None, typer.Option(help="OP=SET: this op from another set, gdn=plain; may be "
                                                      "repeated.")] = None,
    graft: Annotated[list[str] | None, typer.Option(help="PLACE@EVENT: there the reference's tensor goes on, "
                                                       "trunk.2.core@17; may be repeated.")] = None,
    ladder: Annotated[bool, typer.Option("--ladder/--no-ladder", help="After a divergence, run again with one thing "
                                                                      "otherwise, to say where it was made.")] = True,
    json: Annotated[Path | None, typer.Option(help="Write the result there, too.")] = None,
    trail: Annotated[Path | None, typer.Option(help="Write a digest of every event's bytes there, for diff.")] = None,
    commit: Annotated[str | None, typer.Option(help="Revision of the source, for the result file.")] = None,
) -> None:
    """Replay a trace through reference and engine; exit 0: all agree, 1: divergence, 3: nothing compared."""
    from rich.console import Console

    from instep_reference.contract.errors import BadInput

    from ..observe.trail import Trail
    from ..report import data, terminal
    from ..rig.rig import Rig
    from ..rig.variant import Variant, graft_of, swaps_of
    from ..trace.file import read
    from ..trace.header import Part
    from ..whole import writable, write_whole

    given.setting()  # what is wrong with it is said before anything is read
    variant = Variant(swaps_of(swap or ()), tuple(map(graft_of, graft or ())))
    for file, other in ((json, trail), (trail, json)):
        if file is not None:
            writable(file, trace, other)
    loaded = read(trace)
    named = given.several("ops")
    runs = [Part(name, until) for name in named] if named else _planned(loaded, until)
    if not runs:
        raise BadInput(f"{trace.name} line 1: replay", found="no op set", expected="one, or --ops to name it")
    trails = [Trail() for _ in runs]
    outcomes = [
        _run(
            loaded, Rig(
                loaded, given.setting(ops=run.ops, strategy=run.strategy, conv=run.conv), checkpoint=checkpoint
            ), run.until, layer, variant, ladder, () if trail is None else (kept,),
        )
        for run, kept in zip(runs, trails, strict=True)
    ]
    if trail is not None:
        lines = [f"{run.ops} {line}\n" for run, kept in zip(runs, trails, strict=True) for line in kept.lines]
        write_whole({trail: "".join(lines).encode()})
    if json is not None:
        data.write(json, outcomes, commit=commit)
    terminal.show(outcomes, Console())
    raise typer.Exit(int(data.worst(outcomes)))


def _planned(trace: Trace, until: int | None) -> list[Part]:
    """The header's plan, cut at `until`."""
    from msgspec.structs import replace as with_fields

    return [
        with_fields(part, until=min((n for n in (part.until, until) if n is not None), default=None))
        for part in trace.header.replay
    ]


def _run(
    trace: Trace, rig: Rig, until: int | None, layers: list[int] | None, variant: Variant, ladder: bool,
    also: Sequence[Check],
) -> Outcome:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from ..localise import locate
    from ..rig.variant import AS_IS

    total = len(trace.events) if until is None else min(until + 1, len(trace.events))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"{trace.header.name} [{rig.plan.setting.ops}]".replace("[", r"\["), total=total)
        outcome = rig.run(
            until=until, layers=layers, progress=lambda index, event: bar.update(task, completed=index + 1),
            variant=variant, also=also,
        )
        if not (ladder and outcome.verdict.findings) or variant != AS_IS:
            return outcome
        bar.update(task, description=f"{trace.header.name}: where it was made", total=None)
        return replace(outcome, located=locate(rig, outcome, layers))
