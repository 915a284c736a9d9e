"""`instep gate`: is AFTER slower than BEFORE? Refuses to time what does not pass. It can be asked how sure it is.

Leaves out: how (`instep.perf`).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from ..options import DRAFTER
from .finish import Html, Json, finish, must_be_free
from .setting import Given, takes_setting


@takes_setting(ops="The op set that a source tree runs.", drafter=DRAFTER)
def gate(
    given: Given,
    before: Annotated[str, typer.Argument(help="Op set, module:attribute, or a source tree.")],
    after: Annotated[str | None, typer.Argument(help="The same; what may have become slower.")] = None,
    case: Annotated[list[str] | None, typer.Option(help="verify or commit; may be repeated. Left out: both.")] = None,
    clock: Annotated[list[str] | None, typer.Option(help="wall, cpu or device: judge only these; may be repeated. "
                                                           "Left out: all.")] = None,
    pairs: Annotated[int, typer.Option(help="Interleaved pairs at least; under 60 nothing is concluded.")] = 60,
    allowed: Annotated[float, typer.Option(help="The slow-down that is allowed, as a part.")] = 0.03,
    checkpoint: Annotated[Path | None, typer.Option(
        "--checkpoint", "--model", help="The model that is run; left out: instep's own.")] = None,
    batch: Annotated[int, typer.Option(help="Requests in a batch.")] = 4,
    rounds: Annotated[int, typer.Option(help="Rounds of the course, which is checked, then timed.")] = 2,
    num_steps: Annotated[int, typer.Option(help="Drafts a round: the window is one wider.", min=1)] = 3,
    seed: Annotated[int, typer.Option(help="Of the bootstrap.")] = 0,
    patience: Annotated[float, typer.Option(help="Seconds after which a silent arm is given up.")] = 600.0,
    keep: Annotated[Path | None, typer.Option(help="A folder for the course, a trace, and the arms' logs.")] = None,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="No AFTER: how often is the gate wrong here? Trials "
                                                               "of A/A, and of one slowed by some 8%.")] = False,
    minutes: Annotated[float, typer.Option(help="Of --calibrate: so long it samples.")] = 10.0,
    baselines: Annotated[Path | None, typer.Option(help="Of --calibrate: a folder for this machine's file.")] = None,
    commit: Annotated[str | None, typer.Option(help="Revision of the source, for that file.")] = None,
    html: Html = None,
    json: Json = None,
) -> None:
    """Time two arms in interleaved pairs; exit 0: held, 1: slower or refused, 3: too noisy to tell."""
    from instep_reference.contract.errors import BadInput

    from ..carried import model
    from ..perf import baseline, render
    from ..perf.gate import gate as run
    from ..perf.power import measure
    from ..perf.question import Question
    from .progress import progress

    if calibrate is (after is not None):
        found = "AFTER beside --calibrate" if calibrate else "no AFTER"
        raise BadInput("gate", found=found, expected="BEFORE AFTER, or BEFORE --calibrate")
    if minutes <= 0:
        raise BadInput("--minutes", found=minutes, expected="more than 0")
    cases = tuple(dict.fromkeys(case)) if case else ("verify", "commit")
    question = Question(
        before, after or before, checkpoint or model(), cases, pairs, allowed, given.setting(), batch, rounds,
        num_steps, seed, patience, tuple(dict.fromkeys(clock or ())),
    )
    must_be_free((json, html, baselines and baseline.file_of(question, baselines)))
    with tempfile.TemporaryDirectory(prefix="instep-gate-") as aside, progress("gate") as said:
        folder = keep or Path(aside)
        folder.mkdir(parents=True, exist_ok=True)
        if calibrate:
            power = measure(question, folder, minutes, said)
            told = baseline.result(power, commit)
            if baselines is not None and not power.report.refused:
                told.write(baseline.file_of(question, baselines))
            finish(told, json, lambda console: render.show_power(power, console), html=html)
        report = run(question, folder, said)
    finish(render.of(report), json, lambda console: render.show(report, console), html=html)
