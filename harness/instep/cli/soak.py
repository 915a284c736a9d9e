"""`instep soak`: serve drawn rounds on long-lived engines, for any time and in any number of sessions.

Leaves out: drawing, serving and counting (`instep.campaign.soak`), and shrinking, which `instep fuzz` does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..options import DRAFTER
from .finish import Commit, finish, must_be_free
from .setting import Given, takes_setting

if TYPE_CHECKING:
    from ..campaign.soak.soak import Soak


@takes_setting(
    several=("ops",), also=("engine",), ops="Op set, engine or module:attribute; left out: ledger, then plain.",
    strategy="How states are committed; left out: drawn with the engines.", conv="The same for conv windows.",
    drafter=DRAFTER,
)
def soak(
    given: Given,
    checkpoint: Annotated[Path | None, typer.Option(
        "--model", "--checkpoint", help="A Hugging Face checkpoint directory; default: instep's "
                                                         "model.")] = None,
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
    json: Annotated[Path | None, typer.Option(help="The result file; a soak in it is resumed.")] = None,
    join: Annotated[list[Path] | None, typer.Option(help="A soak with another seed, of another process or machine, "
                                                         "to merge into --json; may be repeated.")] = None,
    commit: Commit = None,
) -> None:
    """Serve drawn rounds until a time or a number; exit 0: all agree, 1: divergence, 3: nothing compared."""
    from instep_reference.contract.checkpoint import Checkpoint
    from instep_reference.contract.errors import BadInput

    from ..atomic_write import writable
    from ..bundled import model
    from ..campaign.fuzz.campaign import Settings
    from ..campaign.fuzz.draw import SAMPLED
    from ..campaign.soak import render, resume
    from ..campaign.soak.soak import Ask, Soak

    if join:
        if minutes is not None or rounds is not None:
            raise BadInput("--join", found="--minutes or --rounds, too", expected="one of them: to join serves nothing")
        return _join(join, json, commit)
    if minutes is None and rounds is None:
        raise BadInput("--minutes", found="neither a time nor --rounds", expected="how far to go: one of them, or both")
    if json is not None:
        writable(json)
    names, directory, found = given.subjects("ledger", "plain"), checkpoint or model(), None
    digest, device = Checkpoint.open(directory).digest, given.setting(ops=names[0]).device
    sampled = [name for name in SAMPLED if name not in given.named and "engine" not in given.named]
    ask, runs = Ask(rounds, None if minutes is None else 60 * minutes / len(names)), resume.read(json)

    def keep() -> None:
        if json is not None:
            resume.result(runs, device, commit).write(json)

    for name in names:
        settings = Settings(given.setting(ops=name), directory, 0, seed, out, sampled=sampled, command="soak")
        settled = settings.setting.data() | dict.fromkeys(sampled)
        run = resume.going_on(runs, resume.Soaked(settled, digest, seed, every, stretch), json)
        soaking = _session(Soak(settings, run, resume.Session.now(device, commit), ask), keep)
        found = soaking.found
        if found is not None or soaking.interrupted:
            break
    finish(resume.result(runs, device, commit), json, lambda console: render.show(runs, found, console))


def _join(others: list[Path], json: Path | None, commit: str | None) -> None:
    """Serve nothing: merge the runs of files into one file."""
    from instep_reference.contract.errors import BadInput

    from ..campaign.soak import render, resume

    if json is None:
        raise BadInput("--join", found="no --json", expected="the file that takes the others in")
    must_be_free((json,), *others)
    runs = resume.read(json)
    for path in others:
        resume.join(runs, path)
    devices = sorted({str(run.setting["device"]) for run in runs})
    finish(resume.result(runs, ", ".join(devices), commit), json, lambda console: render.show(runs, None, console))


def _session(soak: Soak, keep: Callable[[], None]) -> Soak:
    """Run the soak. The file is written after every stretch, so that a killed session loses no more than that."""
    from ..threads import threads_for
    from .progress import progress

    name = f"rounds of soak [{soak.soaked.name}], seed {soak.soaked.seed}"
    with progress(name) as advance, threads_for(soak.opened.config.hidden):
        soak.run(lambda: advance(name, soak.soaked.rounds, soak.ask.rounds), keep)
    return soak
