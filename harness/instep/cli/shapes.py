"""`instep shapes`: run a few layers of models in real shapes through a forced trace.

Leaves out: the run (`instep.campaign.shapes`) and the messages (`instep.report`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ..options import DRAFTER
from .finish_with_result import Annotate, Commit, Json, Sarif, finish, must_be_free
from .subject_options import Given, takes_setting

if TYPE_CHECKING:
    from rich.console import Console


@takes_setting(ops="Op set, or module:attribute; left out: triton.", drafter=DRAFTER)
def shapes(
    given: Given,
    name: Annotated[list[str] | None, typer.Argument(help="Shapes by name; default: all.")] = None,
    layers: Annotated[int, typer.Option(help="Number of layers of the model to keep.", min=1)] = 4,
    vocab: Annotated[int | None, typer.Option(help="Vocabulary size to keep; default: all.", min=1)] = None,
    until: Annotated[int | None, typer.Option(help="Stop after this event.", min=0)] = None,
    layer: Annotated[list[int] | None, typer.Option(help="Judge only this layer; may be repeated.", min=0)] = None,
    json: Json = None,
    sarif: Sarif = None,
    annotate: Annotate = None,
    commit: Commit = None,
) -> None:
    """Run an op set at the sizes of real models, with random weights; exit 0: all agree, 1: divergence, 3: nothing
    judged.
    """
    from ..campaign.shapes import NAMES
    from ..campaign.shapes.run_real_shape import shaped
    from ..report import outcome_data, terminal
    from ..run.replay import Outcome
    from .progress import trial_runner

    must_be_free((json, sarif))
    setting = given.setting(ops="triton")
    outcomes = list[Outcome]()
    with trial_runner("shapes") as run:
        for one in run.trials(name or NAMES, str):
            outcomes.append(shaped(one, setting, layers=layers, vocab=vocab, until=until, judged=layer))

    def show(console: Console) -> None:
        for outcome in outcomes:  # each has its own trace
            terminal.show([outcome], console)

    finish(outcome_data.of(outcomes, commit), json, show, interrupted=run.interrupted, sarif=sarif, annotate=annotate)
