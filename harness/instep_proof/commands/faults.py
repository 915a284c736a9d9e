"""`instep faults`: plant historical faults one by one; all must be found, and 95% of them located.

Leaves out: planting and judging (`instep_proof.faults`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from instep.atomic_write import write_atomically
from instep.cli.farm_options import Farming, takes_farm
from instep.cli.finish_with_result import Files, joins_alone, writes
from instep.cli.progress import trial_runner
from instep.cli.subject_options import Given, takes_setting
from instep_reference.contract.errors import BadInput

if TYPE_CHECKING:
    from rich.console import Console

    from ..faults.catalogue.fault import Fault

A_TRIAL = 12  # faults of a trial of --farm


@writes("json", "html", "commit")
@takes_farm(jobs=False)
@takes_setting(without=("ops",))
def faults(
    given: Given,
    files: Files,
    farm: Farming,
    names: Annotated[list[str] | None, typer.Argument(help="Faults by name; default: all.")] = None,
    catalogue: Annotated[Path | None, typer.Option(metavar="DIR", help="Plant the faults of the JSON files in this "
                                                   "folder instead of instep's own.")] = None,
    draw: Annotated[int | None, typer.Option(help="Draw this many small edits of the engine into --catalogue, and end.",
                                             min=1)] = None,
    seed: Annotated[int, typer.Option(help="The same seed draws the same edits.", min=0)] = 0,
    family: Annotated[list[str] | None, typer.Option(help="Only of this family; may be repeated.")] = None,
    ops: Annotated[list[str] | None, typer.Option(help="Only those of this op set; may be repeated.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(
        "--model", "--checkpoint", help="Record the traces again with this model, for example one with "
                                                         "experts; default: the shipped traces.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Parallel processes; default: the number of cores. With --farm: "
                                                  "trials at once; 0: run none, merge the results.", min=0)] = None,
    missing: Annotated[bool, typer.Option("--missing", help="Plant faults that the --json file lacks or has as void; "
                                                            "its other rows stay.")] = False,
    no_text: Annotated[bool, typer.Option("--no-text", help="Skip the free runs of the texts.")] = False,
    join: Annotated[list[Path] | None, typer.Option(help="A result of another process or machine to merge into "
                                                         "--json; may be repeated. A row that is not void takes "
                                                         "precedence, then the latest.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the matrix of faults and checks there, as SVG.")] = None,
    update: Annotated[bool, typer.Option("--update", help="Keep the first findings as those that are expected.")]
    = False,
    list_only: Annotated[bool, typer.Option("--list", help="List names, kinds and effects, and what is planted and not "
                                                           "named, or named and not planted; plant none.")] = False,
) -> None:
    """Plant faults in copies of the source; exit 0: all found, 95% located, 1: not so, 3: a run was void."""
    import os
    from contextlib import nullcontext
    from dataclasses import replace
    from tempfile import TemporaryDirectory

    from msgspec import UNSET
    from msgspec.json import encode
    from rich.console import Console

    from instep.report import svg
    from instep_reference.contract.checkpoint import Checkpoint

    from ..faults import result_data
    from ..faults.campaign import campaign
    from ..faults.catalogue import FAMILIES, TRACES
    from ..faults.catalogue.fault import EXPECTED, recorded
    from ..faults.compare_with_control import Judged, Result, updated
    from ..faults.outside_catalogue import families
    from ..faults.plant import warm
    from ..faults.rerecord import retraced
    from ..faults.result_data import matrix_of

    if join:
        more = names or family or ops or farm.farm or missing or checkpoint or list_only or update or given.named
        joins_alone(join, "faults", "plants", json=files.json, with_options=bool(more))
    if missing and files.json is None:
        raise BadInput("--missing", found="no --json", expected="the file that holds the other rows")
    if update and (checkpoint or given.named or farm.farm):
        raise BadInput("--update", found="another model or setting, or --farm", expected="those of the catalogue")
    if catalogue is not None and (checkpoint or update):
        raise BadInput("--catalogue", found="--checkpoint or --update, too",
                       expected="one of them: a catalogue names its traces and its expected findings")  # fmt: skip
    if draw is not None:
        from ..faults.draw_mutants import write_catalogue

        if catalogue is None:
            raise BadInput("--draw", found="no --catalogue", expected="the folder that the faults are written to")
        if (names or family or ops or farm.farm or missing or list_only or picture or files.json or files.html
                or given.named):
            raise BadInput("--draw", found="options of a campaign, too", expected="--catalogue and --seed alone, "
                           "as it plants nothing")  # fmt: skip
        print(f"{write_catalogue(catalogue, draw, seed)}: {draw} faults")
        raise typer.Exit(0)
    if farm.farm is None and jobs == 0:
        raise BadInput("--jobs", found="0 without --farm", expected="at least 1")
    files.must_be_free(*join or (), more=[picture])
    known = FAMILIES if catalogue is None else families(catalogue)
    kept = files.json if missing or join else None
    there = [result_data.read(kept)] if kept is not None and kept.is_file() else []
    there += [result_data.read(path) for path in join or ()]
    chosen = [] if join else _chosen(known, names, family, ops)
    if missing:
        here = {one.fault.id for result in there for one in result.fired}
        chosen = [fault for fault in chosen if fault.id not in here]
    if list_only:
        _list(chosen, Console())
        raise typer.Exit(0)
    served, count = None, (os.cpu_count() or 1) if jobs is None else jobs
    if farm.farm is not None and chosen:
        trials, varied = _trials(chosen), ("names", "family", "ops", "missing")
        served = replace(farm, jobs=count).serve(lambda: trials, varied=varied, total=len(trials))
        there += [result_data.read(path) for path in served.paths]
        chosen = []
    model = UNSET if checkpoint is None else Checkpoint.open(checkpoint).digest
    judged = list[Judged]()
    result_data.of_one_model(there, None if join else model)
    if chosen and not TRACES.is_dir():
        raise BadInput(str(TRACES), found="no such folder", expected="the traces of the faults, which come with instep")
    chosen = [replace(fault, how=replace(fault.how, **given.named)) for fault in chosen]

    order = [fault.id for faults in known.values() for fault in faults]

    def result() -> Result:
        return result_data.joined(*there, Result(tuple(judged)), order=order)

    with (TemporaryDirectory(prefix="instep-traces-") as folder, warm() if chosen else nullcontext(),
          trial_runner("faults", None, files.json, lambda: result_data.of(result(), files.commit)) as run):
        if checkpoint is not None:
            retraced(TRACES, (fault.trace for fault in chosen), checkpoint, Path(folder))
        traces = TRACES if checkpoint is None else Path(folder)
        for one in campaign(chosen, traces, run, jobs=count, text=not no_text, commit=files.commit, model=model):
            judged.append(one)  # one by one: the file is written in between
    told = result_data.of(result(), files.commit)
    if update:
        expected = updated(recorded(), judged)
        lines = (f'"{id}": {encode(one).decode()}' for id, one in expected.items())
        write_atomically({EXPECTED: ("{\n" + ",\n".join(lines) + "\n}\n").encode()})
    if picture is not None:
        write_atomically({picture: svg.picture(matrix_of(told.data()))})
    files.finish(told, interrupted=run.interrupted or (served is not None and not served.complete))


def _chosen(
    catalogue: Mapping[str, tuple[Fault, ...]], names: list[str] | None, families: list[str] | None,
    ops: list[str] | None,
) -> list[Fault]:
    """The chosen faults in the catalogue's order."""
    known = {fault.id: fault for faults in catalogue.values() for fault in faults}
    op_sets = sorted({fault.how.ops for fault in known.values()})
    asked = ("fault", names, known), ("--family", families, catalogue), ("--ops", ops, op_sets)
    for option, given, all_known in asked:
        for name in given or ():
            if name not in all_known:
                expected = _near(name, list(all_known)) if option == "fault" else ", ".join(all_known)
                raise BadInput(option, found=name, expected=f"one of {expected}",
                               hint="`instep faults --list` names all" if option == "fault" else "")
    found = [
        fault for family, faults in catalogue.items() if not families or family in families for fault in faults
        if (not names or fault.id in names) and (not ops or fault.how.ops in ops)
    ]
    if not found:
        where = {fault.id: f"{fault.id} ({family}, {fault.how.ops})" for family, faults in catalogue.items()
                 for fault in faults if fault.id in (names or ())}
        all_of = [", ".join(where.values())] * bool(where)
        all_of += [f"{option} {' '.join(given)}" for option, given in (("--family", families), ("--ops", ops)) if given]
        raise BadInput("faults", found=f"no fault that is all of: {'; '.join(all_of)}", expected="at least one")
    return found


def _trials(chosen: list[Fault]) -> list[dict[str, Any]]:
    """The trials of --farm: faults that share a control are in one trial, or in consecutive ones."""
    first: dict[tuple[str, ...], int] = {}
    order = sorted(chosen, key=lambda one: first.setdefault((one.trace, *one.how.words()), len(first)))
    groups = [order[begin : begin + A_TRIAL] for begin in range(0, len(order), A_TRIAL)]
    return [{"names": [fault.id for fault in group], "jobs": 1} for group in groups]


def _list(chosen: list[Fault], console: Console) -> None:
    """A line for each: its name, its kind, what it does. Then the gaps, and how many have a sentence of which kind."""
    from instep.diagnose.mistakes import CATALOGUE
    from instep.report.terminal_tables import say

    from ..faults.catalogue import by_id

    say(console, *(f"{fault.id}  {fault.kind}  {fault.what}" for fault in chosen))
    unnamed = [fault for fault in chosen if not fault.says]
    written = sum(bool(fault.mistake and fault.says) for fault in chosen)
    if unnamed:
        say(console, "", "Planted and not named:", *(f"  {fault.id}  {fault.what}" for fault in unnamed), "")
    if len(chosen) == len(by_id()):
        gaps = [one for name, one in CATALOGUE.items() if name not in {fault.mistake for fault in chosen}]
        say(console, f"Named and not planted, {len(gaps)} of {len(CATALOGUE)} mistakes:",
            *(f"  {one.name}  {one.sentence}" for one in gaps), "")  # fmt: skip
    say(console, f"{len(chosen)} faults: {written} named by a mistake of the catalogue, "
        f"{len(chosen) - len(unnamed) - written} by a general explanation, {len(unnamed)} not named")  # fmt: skip


def _near(name: str, known: list[str]) -> str:
    """The most similar names; all, if none is similar."""
    from difflib import get_close_matches

    return ", ".join(get_close_matches(name, known, n=5, cutoff=0.4) or known)
