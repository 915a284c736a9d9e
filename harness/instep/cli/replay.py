"""`instep replay`: run a trace on both sides, and compare everything after every event.

Leaves out: the replay (`instep.run`) and the messages (`instep.report`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from instep_reference.contract.errors import BadInput

from ..atomic_write import folder_for, write_atomically
from ..bundled import trace as own_trace
from ..options import SOMETIMES, tiers_named
from ..verdict import tiers_of
from .finish_with_result import Files, writes
from .progress import trial_runner
from .subject_options import Given, Layers, TraceModel, Until, takes_setting

if TYPE_CHECKING:
    from ..report.result import Result
    from ..run.replay import Outcome
    from ..setting import Setting
    from ..trace.file import Trace
    from ..trace.header import Part
    from ..verdict import Tier


@writes("json", "html", "sarif", "annotate", "commit")
@takes_setting(
    several=("ops",), also=SOMETIMES,
    ops="Op set, engine or module:attribute; left out: the plan in the trace's header.",
)
def replay(
    given: Given,
    files: Files,
    trace: Annotated[Path | None, typer.Argument(help="A trace: the .jsonl file; default: the main trace.")] = None,
    checkpoint: TraceModel = None,
    until: Until = None,
    layer: Layers = None,
    tiers: Annotated[list[str] | None, typer.Option(metavar="T0,T2d,..", help="Judge only these tiers; may be "
                                                        "repeated.")] = None,
    swap: Annotated[list[str] | None, typer.Option(help="OP=SET: take this op from another set, as in gdn=plain; "
                                                      "may be repeated.")] = None,
    graft: Annotated[list[str] | None, typer.Option(help="PLACE@EVENT: use the reference's tensor there, as in "
                                                       "trunk.2.core@17; may be repeated.")] = None,
    ladder: Annotated[bool, typer.Option("--ladder/--no-ladder", help="After a divergence, run again with one thing "
                                                                      "changed, to find its cause.")] = True,
    trail: Annotated[Path | None, typer.Option(help="Write a digest of every event's bytes, for diff.")] = None,
    save_tensors: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the tensors of the first findings "
                                                                          "to this folder, as safetensors.")] = None,
    settings: Annotated[str | None, typer.Option(metavar="all|each|NAMES", help="Run the trace in all settings that "
                                                 "have no value here: every pair of values is in a run; each: every "
                                                 "value; or all of some settings: graphs,ranks,dp.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Time limit of this session of --settings; with --json the next "
                                                       "one goes on.", min=0.0)] = None,
) -> None:
    """Replay a trace through reference and engine; exit 0: all agree, 1: divergence, 3: nothing compared."""
    names = tiers_named(tiers or ())
    from ..diagnose import diagnose
    from ..report import outcome_data
    from ..report.html.replay import charts_of
    from ..run.replay import Outcome, Replay, must_reach
    from ..run.run_variants import Variant, patch_of, swaps_of
    from ..trace.file import read
    from ..watch.event_digests import EventDigests

    if save_tensors is not None:
        folder_for(save_tensors, "--save-tensors")
    for served in given.several("ops", "plain"):
        given.setting(ops=served)  # errors in it are reported before anything is read
    judged, variant = tiers_of(names), Variant(swaps_of(swap or ()), tuple(map(patch_of, graft or ())))
    asked = own_trace() if trace is None else trace
    files.must_be_free(asked, more=[trail])
    loaded = read(asked)
    must_reach(until, loaded)
    runs = planned(loaded, given, until)
    if settings is not None:
        others = {"--swap": swap, "--graft": graft, "--trail": trail, "--save-tensors": save_tensors}
        for option, typed in others.items():
            if typed:
                raise BadInput(option, found="--settings, too", expected="one of the two")
        _in_all_settings(given, files, loaded, runs, settings, minutes, checkpoint, tiers=judged, layers=layer,
                         ladder=ladder)  # fmt: skip
    if minutes is not None:
        raise BadInput("--minutes", found="no --settings", expected="both: one replay runs to its end")
    outcomes, lines = list[Outcome](), list[str]()
    with trial_runner("replay") as run:
        for part in run.trials(runs, lambda part: f"{loaded.header.name} [{part.ops}]"):
            setting = given.setting(ops=part.ops, strategy=part.strategy, conv=part.conv)
            kept, last = EventDigests(), len(loaded.events) - 1
            outcomes.append(diagnose(
                Replay(loaded, setting, checkpoint=checkpoint), until=part.until, layers=layer, variant=variant,
                progress=run.events(part.until, last), also=[kept] * (trail is not None), tiers=judged, ladder=ladder,
                before_ladder=lambda: run.advance(f"{loaded.header.name}: where it was made", 0, None),
            ))  # fmt: skip
            lines += [f"{setting.name} {line}\n" for line in kept.lines]
    if trail is not None:
        write_atomically({trail: "".join(lines).encode()})
    if save_tensors is not None:
        from ..report.finding_tensors import files as tensor_files

        write_atomically(tensor_files(outcomes, save_tensors))
    result = outcome_data.of(outcomes, files.commit, claim=loaded.header.claim, warnings=loaded.warnings)
    files.finish(result, interrupted=run.interrupted, trace=loaded.path, charts=lambda: charts_of(outcomes, loaded))


def _in_all_settings(
    given: Given, files: Files, trace: Trace, parts: list[Part], settings: str, minutes: float | None,
    checkpoint: Path | None, *, tiers: frozenset[Tier], layers: list[int] | None, ladder: bool,
) -> NoReturn:
    """Run the trace with each op set in all settings, and end the command."""
    from ..campaign import all_settings
    from ..diagnose import diagnose
    from ..report.result import Session
    from ..run.replay import Replay

    names = all_settings.named(settings, given.left_to_draw(all_settings.FACTORS))
    kept, found, sums = all_settings.read(files.json)
    several, parts = list[all_settings.AllSettings](), list({part.ops: part for part in reversed(parts)}.values())[::-1]

    def result() -> Result:
        return all_settings.result(trace, several, kept, found, sums, files.commit)

    for part in parts:
        base = Replay(trace, given.setting(ops=part.ops), checkpoint=checkpoint)
        factors = all_settings.factors_of(base.plan.setting, trace, names,
                                          experts=bool(base.plan.checkpoint.config.experts))  # fmt: skip
        if settings not in all_settings.SIZES and (alone := [name for name in names if name not in factors]):
            raise BadInput("--settings", found=alone[0], expected=f"settings with several values: {part.ops} with this "
                           "trace has one value of it")  # fmt: skip
        base.refuse(base.plan.setting)
        rows = all_settings.new_rows(base, settings, part.until, tiers, layers, factors)
        several.append(all_settings.AllSettings(base, all_settings.begun(kept, rows, files.json), factors))
    with trial_runner("replay", minutes, files.json, result) as run:
        for part, each in run.shares(list(zip(parts, several, strict=True))):
            def play(setting: Setting, until: int | None = part.until) -> Outcome:
                return diagnose(Replay(trace, setting, checkpoint=checkpoint), until=until, tiers=tiers, layers=layers,
                                ladder=ladder, progress=run.events(until, len(trace.events) - 1))  # fmt: skip

            each.run(run, play, found, Session.now(each.base.plan.setting.device, files.commit))
    files.finish(result(), interrupted=run.interrupted, trace=trace.path)


def planned(trace: Trace, given: Given, until: int | None) -> list[Part]:
    """Runs of the named op sets, or the header's plan, cut at `until`; one run for an external engine."""
    from msgspec.structs import replace as with_fields

    from ..trace.header import Part

    named = given.subjects()
    if not named and not trace.header.replay:
        raise BadInput(f"{trace.path.name} line 1: replay", found="no op set", expected="one, or --ops to name it")
    return [Part(name, until) for name in named] or [
        with_fields(part, until=min((n for n in (part.until, until) if n is not None), default=None))
        for part in trace.header.replay
    ]
