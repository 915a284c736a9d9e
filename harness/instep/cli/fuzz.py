"""`instep fuzz`: draw sequences of legal events until the sides differ, and write the finding as a trace.

Leaves out: drawing, shrinking, counting and printing (`instep.campaign.fuzz`).
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from instep_reference.contract.errors import BadInput

from ..bundled import model
from ..options import DRAFTER
from ..verdict import Exit
from .farm_options import Farming, takes_farm
from .finish_with_result import Files, writes
from .progress import trial_runner
from .subject_options import Given, Model, takes_setting

if TYPE_CHECKING:
    from ..campaign.fuzz.campaign import Result

EXAMPLES = 400  # for each op set, if neither a number nor a time is given
ROUNDS = 5  # of the soak for each of these runs: as many as a run of chains has
SOAK = "soak"
SEEDS = 2**31
A_TRIAL = 200  # runs of a trial of --farm; the second 100 are drawn towards what the first did not meet


@writes("json", "html", "commit")
@takes_farm()
@takes_setting(
    several=("ops",), also=("engine", "ranks", "experts", "stages", "micro_batches", "dp"),
    ops="Op set, engine or module:attribute; left out: a soak of ledger, ledger, then plain.",
    strategy="How states are committed; left out: drawn by run.", conv="The same for conv windows.",
    drafter=DRAFTER,
)
def fuzz(
    given: Given,
    files: Files,
    farm: Farming,
    checkpoint: Model = None,
    examples: Annotated[int | None, typer.Option(help="Runs per op set; 400 unless a time is given.", min=1)] = None,
    minutes: Annotated[float | None, typer.Option(help="Time limit, shared by the op sets.", min=0.0)] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed draws the same runs; default: random.", min=0)] = None,
    shrink: Annotated[float, typer.Option(help="Seconds for shrinking a finding.", min=0.0)] = 60.0,
    trees: Annotated[int, typer.Option(help="Use tree windows of up to this many nodes; 0: chains.", min=0,
                                       max=63)] = 0,
    transfers: Annotated[bool, typer.Option(help="Draw a second engine, and move requests between the two.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the trace of a finding.")] = Path("fuzz"),
) -> None:
    """Draw legal events until the sides differ; exit 0: they never did, 1: divergence, 3: nothing compared."""
    from hypothesis.configuration import set_hypothesis_home_dir

    from ..campaign.fuzz.campaign import Result, Settings, campaign
    from ..campaign.fuzz.draw_events import SAMPLED
    from ..campaign.fuzz.result_document import joined, of
    from ..campaign.soak import soak

    files.must_be_free()
    directory, sampled = checkpoint or model(), given.left_to_draw(SAMPLED)
    if transfers and trees:
        raise BadInput("--transfers", found="--trees, too", expected="one of them: windows of two engines are chains")
    count = examples or (EXAMPLES if minutes is None else None)
    if farm.farm is not None:
        served = farm.serve_seeds(given, "examples", count, A_TRIAL, seed or 0, minutes)
        files.finish(joined(served.paths, served.machines, files.commit), interrupted=not served.complete)
    start = random.SystemRandom().randrange(SEEDS) if seed is None else seed
    print(f"seed {start}", flush=True)  # printed first, so that a killed run can be repeated
    results = list[Result]()
    with tempfile.TemporaryDirectory(prefix="instep-fuzz-") as scratch, trial_runner(
        "fuzz", minutes, files.json, lambda: of(results, files.commit)
    ) as run:
        set_hypothesis_home_dir(scratch)  # leaves no file in the user's folder
        for name in run.shares(given.subjects(*[SOAK] * (not trees and not transfers), "ledger", "plain")):
            setting = given.setting(ops="ledger" if name == SOAK else name)
            settings = Settings(setting, directory, count, start, out, shrink, sampled, trees, transfers)
            rounds = None if count is None else ROUNDS * count
            results.append(soak.campaign(settings, run, rounds) if name == SOAK else campaign(settings, run))
            run.keep()
            if results[-1].exit is Exit.DIVERGED:
                break
    files.finish(of(results, files.commit), charts=lambda: _charts(results[-1]))


def _charts(result: Result) -> Mapping[str, Any]:
    """The events of the finding."""
    from ..campaign.fuzz.campaign import place
    from ..report.html.replay import charts_of
    from ..trace.file import read

    return {} if result.found is None else charts_of([result.found], read(place(result.settings)))
