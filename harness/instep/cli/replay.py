"""`instep replay`: a trace through both sides, everything compared after every event.

Leaves out: how (`instep.rig`) and the words (`instep.report`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..checks import Check
    from ..rig.rig import Outcome
    from ..rig.variant import Variant
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
    drafter: Annotated[str | None, typer.Option(help="How drafts are made: eagle or vanilla.")] = None,
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
    from ..rig.alone import device_here, known_layout
    from ..rig.strategies import chosen
    from ..rig.variant import Variant, graft_of, swaps_of
    from ..trace.file import read
    from ..trace.header import Part
    from ..whole import writable, write_whole

    given = {"device": device_here(device), "dtype": dtype, "layout": known_layout(layout), "graphs": graphs}
    variant = Variant(swaps_of(swap or ()), tuple(map(graft_of, graft or ())))
    for file, other in ((json, trail), (trail, json)):
        if file is not None:
            writable(file, trace, other)
    loaded = read(trace)
    runs = [Part(name, until) for name in ops] if ops else _planned(loaded, until)
    if not runs:
        raise BadInput(f"{trace.name} line 1: replay", found="no op set", expected="one, or --ops to name it")
    trails = [Trail() for _ in runs]
    outcomes = [
        _run(loaded, run, checkpoint, given | chosen(
            strategy=strategy or run.strategy, conv=conv or run.conv, drafter=drafter or run.drafter,
        ), layer, variant, ladder, () if trail is None else (kept,))
        for run, kept in zip(runs, trails, strict=True)
    ]
    if trail is not None:
        lines = [f"{run.ops} {line}\n" for run, kept in zip(runs, trails, strict=True) for line in kept.lines]
        write_whole({trail: "".join(lines).encode()})
    if json is not None:
        data.of(outcomes, commit).write(json)
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
    trace: Trace, part: Part, checkpoint: Path | None, given: dict[str, Any], layers: list[int] | None,
    variant: Variant, ladder: bool, also: Sequence[Check],
) -> Outcome:
    from ..localise import locate
    from ..rig.rig import Rig
    from ..rig.variant import AS_IS
    from .progress import progress

    ops, until = part.ops, part.until
    rig = Rig(trace, checkpoint, ops=ops, **given)
    total = len(trace.events) if until is None else min(until + 1, len(trace.events))
    name = f"{trace.header.name} [{ops}]"
    with progress(name) as told:
        outcome = rig.run(
            until=until, layers=layers, progress=lambda index, event: told(name, index + 1, total), variant=variant,
            also=also,
        )
        if not (ladder and outcome.verdict.findings) or variant != AS_IS:
            return outcome
        told(f"{trace.header.name}: where it was made", 0, None)
        return replace(outcome, located=locate(rig, outcome, layers))
