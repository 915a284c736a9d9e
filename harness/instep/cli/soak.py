"""`instep soak`: serve drawn rounds on long-lived engines, for any time and in any number of sessions.

Leaves out: drawing, serving and counting (`instep.campaign.soak`), and shrinking, which `instep fuzz` does.
"""

from pathlib import Path
from typing import Annotated

import typer

from instep_reference.contract.errors import BadInput

from ..bundled import model
from ..options import DRAFTER
from .farm_options import Farming, takes_farm
from .finish_with_result import Files, joins_alone, writes
from .progress import trial_runner
from .subject_options import Given, Model, takes_setting

A_TRIAL = 2000  # rounds of a trial of --farm: as long as engines live, with the default of --stretch


@writes("commit", json="The result file; a soak in it is resumed.")
@takes_farm()
@takes_setting(
    several=("ops",), also=("engine", "ranks", "experts", "stages", "micro_batches", "dp"),
    ops="Op set, engine or module:attribute; left out: ledger, then plain.",
    strategy="How states are committed; left out: drawn with the engines.", conv="The same for conv windows.",
    drafter=DRAFTER,
)
def soak(
    given: Given,
    files: Files,
    farm: Farming,
    checkpoint: Model = None,
    minutes: Annotated[float | None, typer.Option(help="Time limit of this session, shared by the op sets.",
                                                  min=0.0)] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds per op set and seed, including earlier sessions.",
                                               min=1)] = None,
    seed: Annotated[int, typer.Option(help="The same seed draws the same rounds.", min=0)] = 0,
    every: Annotated[int, typer.Option(help="Recompute one of this many events (T2); T0, T1 and T2d judge all.",
                                       min=1)] = 20,
    stretch: Annotated[int, typer.Option(help="Rounds after which all requests leave; a finding's trace starts "
                                              "there.", min=1)] = 200,
    out: Annotated[Path, typer.Option(help="Folder for the trace of a finding.")] = Path("soak"),
    join: Annotated[list[Path] | None, typer.Option(help="A soak with another seed, of another process or machine, "
                                                         "to merge into --json; may be repeated.")] = None,
) -> None:
    """Serve drawn rounds until a time or a number; exit 0: all agree, 1: divergence, 3: nothing compared."""
    from instep_reference.contract.checkpoint import Checkpoint

    from ..campaign.fuzz.campaign import Settings
    from ..campaign.fuzz.draw_events import SAMPLED
    from ..campaign.soak import totals
    from ..campaign.soak.soak import Soak
    from ..report.result import Result
    from ..threads import threads_for

    if join:
        joins_alone(join, "soak", "serves", json=files.json, with_options=minutes is not None or rounds is not None)
    elif minutes is None and rounds is None:
        raise BadInput("--minutes", found="neither a time nor --rounds", expected="how far to go: one of them, or both")
    files.must_be_free(*join or ())
    served = None
    if farm.farm is not None and not join:
        served = farm.serve_seeds(given, "rounds", rounds, A_TRIAL, seed, minutes)
    joins = join if served is None else served.paths
    runs, found = [] if served is not None else totals.read(files.json), None
    for path in joins or ():
        totals.join(runs, path)

    def result() -> Result:
        return totals.result(runs, files.commit)

    subjects, directory = () if joins else given.subjects("ledger", "plain"), checkpoint or model()
    opened, sampled = Checkpoint.open(directory), given.left_to_draw(SAMPLED)
    with trial_runner("soak", minutes, files.json, result) as run, threads_for(opened.config.hidden):
        for name in run.shares(subjects):
            settings = Settings(given.setting(ops=name), directory, 0, seed, out, sampled=sampled, command="soak")
            settled = settings.setting.data() | dict.fromkeys(sampled)
            soaked = totals.going_on(runs, totals.Soaked(settled, opened.digest, seed, every, stretch), files.json)
            session = totals.Session.now(settings.setting.device, files.commit)
            soaking = Soak(settings, soaked, session, run, rounds)
            soaking.run()
            if (found := soaking.found) is not None:
                break
    files.finish(result(), totals.document(runs, found), interrupted=served is not None and not served.complete)
