"""`instep shapes`: models in real shapes, a few layers each, through a course that no whole reference could follow.

Leaves out: how (`instep.shapes`) and the words (`instep.report`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ..options import DRAFTER
from .finish import Annotate, Commit, Json, Sarif, finish, must_be_free
from .setting import Given, takes_setting

if TYPE_CHECKING:
    from rich.console import Console


@takes_setting(ops="Op set, or module:attribute; left out: triton.", drafter=DRAFTER)
def shapes(
    given: Given,
    name: Annotated[list[str] | None, typer.Argument(help="Shapes by name; left out: all that there are.")] = None,
    layers: Annotated[int, typer.Option(help="How many layers of the model are kept.", min=1)] = 4,
    vocab: Annotated[int | None, typer.Option(help="How many tokens are kept; left out: all.", min=1)] = None,
    until: Annotated[int | None, typer.Option(help="Stop after this event.", min=0)] = None,
    layer: Annotated[list[int] | None, typer.Option(help="Judge this layer alone; may be repeated.", min=0)] = None,
    json: Json = None,
    sarif: Sarif = None,
    annotate: Annotate = None,
    commit: Commit = None,
) -> None:
    """Run an op set at the sizes of real models, weights drawn; exit 0: all agree, 1: divergence, 3: nothing judged."""
    from ..report import data, terminal
    from ..shapes import NAMES
    from ..shapes.run import shaped

    must_be_free((json, sarif))
    setting = given.setting(ops="triton")
    outcomes = [
        shaped(one, setting, layers=layers, vocab=vocab, until=until, judged=layer) for one in name or NAMES
    ]

    def show(console: Console) -> None:
        for outcome in outcomes:  # each is of a trace of its own
            terminal.show([outcome], console)

    finish(data.of(outcomes, commit), json, show, sarif=sarif, annotate=annotate)
