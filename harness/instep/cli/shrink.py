"""`instep shrink`: cut a failing trace while its first finding stays, and write the smallest one.

Leaves out: the cuts and the runs (`instep.campaign.shrink`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from instep_reference.contract.errors import BadInput

from ..options import tiers_named
from ..verdict import Exit, tiers_of
from .finish_with_result import Files, writes
from .progress import trial_runner
from .replay import planned
from .subject_options import Given, Layers, TraceModel, Until, takes_setting


@writes("json", "html", "commit")
@takes_setting(
    several=("ops",), also=("engine", "ranks", "experts", "stages", "micro_batches", "dp"),
    ops="Op set, engine or module:attribute; left out: the first one in the trace's header that fails.",
)
def shrink(
    given: Given,
    files: Files,
    trace: Annotated[Path, typer.Argument(help="A trace, or a recording as `instep audit` takes it.")],
    checkpoint: TraceModel = None,
    until: Until = None,
    layer: Layers = None,
    tiers: Annotated[list[str] | None, typer.Option(metavar="T0,T2d,..", help="Judge only these tiers; may be "
                                                        "repeated.")] = None,
    swap: Annotated[list[str] | None, typer.Option(help="OP=SET: take this op from another set, as in gdn=plain; "
                                                      "may be repeated.")] = None,
    ladder: Annotated[bool, typer.Option("--ladder/--no-ladder", help="Run the smallest trace again with one thing "
                                                                      "changed, to find the cause.")] = True,
    minutes: Annotated[float | None, typer.Option(help="Time limit; the smallest trace so far is kept, as after "
                                                       "Ctrl-C.", min=0.0)] = None,
    out: Annotated[Path | None, typer.Option(help="File of the smaller trace, or folder of the smaller recording; "
                                                  "default: NAME-shrunk here.")] = None,
) -> None:
    """Cut a failing trace while its first finding stays; exit 1: it is smaller now, 2: nothing fails."""
    names = tiers_named(tiers or ())
    from ..audit.cut_recording import is_plain

    if trace.is_dir() or is_plain(trace):
        of_replay = {"--until": until, "--layer": layer, "--tiers": tiers, "--swap": swap}
        wrong = [option for option, typed in of_replay.items() if typed is not None]
        wrong += [f"--{name.replace('_', '-')}" for name in given.named if name != "dtype"]
        _of_a_recording(files, trace, checkpoint, out, minutes, given.named.get("dtype"), wrong)
    from dataclasses import replace

    from ..campaign.shrink import shrink
    from ..diagnose import diagnose
    from ..report import outcome_data
    from ..report.html.replay import charts_of
    from ..run.replay import Replay, must_reach
    from ..run.run_variants import Variant, swaps_of
    from ..trace.file import read, replaceable

    file = out or Path(f"{trace.stem}-shrunk.jsonl")
    files.must_be_free(trace, more=[file])
    replaceable(file)
    loaded = read(trace)
    must_reach(until, loaded)
    model = checkpoint or trace.parent / loaded.header.checkpoint.near
    judged, variant = tiers_of(names), Variant(swaps_of(swap or ()))
    with trial_runner("shrink", minutes) as run:
        for part in planned(loaded, given, until):
            setting = given.setting(ops=part.ops, strategy=part.strategy, conv=part.conv)
            found = shrink(Replay(loaded, setting, checkpoint=checkpoint), run, until=part.until, layers=layer,
                           tiers=judged, variant=variant, keep=lambda one: one.write(file, model))  # fmt: skip
            if found is not None:
                break
        else:
            raise BadInput(trace.name, found="no finding in any run", expected="a trace whose replay fails with these "
                           "options", hint="`instep replay` with the same options shows what it compares")
        written, remarks = read(file), [found.sentence]
        outcome = diagnose(Replay(written, setting, checkpoint=checkpoint), layers=layer, tiers=judged, variant=variant,
                           ladder=ladder and not found.interrupted)  # fmt: skip
    if outcome.verdict.exit is not Exit.DIVERGED:
        outcome = found.outcome
        remarks.append("found before, but not in a replay of the written trace: its cause is outside the trace")
    outcome = replace(outcome, remarks=(*outcome.remarks, *remarks))
    result = outcome_data.of([outcome], files.commit, claim=written.header.claim, warnings=loaded.warnings, shrunk={
        "file": file.name, "runs": found.runs, "minimal": found.minimal, "parts": found.kinds})
    files.finish(result, interrupted=found.interrupted, trace=file, charts=lambda: charts_of([outcome], written))


def _of_a_recording(
    files: Files, recording: Path, model: Path | None, out: Path | None, minutes: float | None, dtype: str | None,
    wrong: Sequence[str],
) -> NoReturn:
    """Shrink a recording, and end the command. wrong: typed options that only a replay has"""
    from dataclasses import replace
    from tempfile import TemporaryDirectory

    from ..audit.audit import text_of
    from ..audit.cut_recording import shrink_recording
    from ..audit.result import charts_of, of
    from ..report.command_lines import near

    if wrong:
        raise BadInput(wrong[0], found="a recording", expected="a trace: a recording has no engine to set up")
    if model is None:
        raise BadInput("--model", found="nothing", expected="the model of the recording, as `instep audit` takes it")
    place = out or Path(f"{recording.stem}-shrunk{recording.suffix}")
    files.must_be_free(recording, more=[place])
    if place.exists():
        raise BadInput(str(place), found="something there", expected="a new name", hint="--out names another place")
    with trial_runner("shrink", minutes) as run, TemporaryDirectory(prefix="instep-shrink-") as scratch:
        shrunk = shrink_recording(recording, model, place, Path(scratch), run, dtype=dtype)
    result = of(shrunk.found)
    notes = [shrunk.sentence, f"instep audit {near(place)} --model {near(model)}", *result.found["run_notes"]]
    result = replace(result, found={**result.found, "recording": place.name, "run_notes": notes})
    files.finish(result, interrupted=shrunk.interrupted, trace=text_of(place), charts=lambda: charts_of(shrunk.found))
