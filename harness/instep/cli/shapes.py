"""`instep shapes`: run a few layers of models in real shapes through a forced trace.

Leaves out: the run (`instep.campaign.shapes`) and the messages (`instep.report`).
"""

from typing import Annotated

import typer

from ..options import DRAFTER
from .finish_with_result import Files, writes
from .progress import trial_runner
from .subject_options import Given, Layers, Until, takes_setting


@writes("json", "sarif", "annotate", "commit")
@takes_setting(ops="Op set, or module:attribute; left out: triton.", drafter=DRAFTER)
def shapes(
    given: Given,
    files: Files,
    name: Annotated[list[str] | None, typer.Argument(help="Shapes by name; default: all.")] = None,
    layers: Annotated[int, typer.Option(help="Number of layers of the model to keep.", min=1)] = 4,
    vocab: Annotated[int | None, typer.Option(help="Vocabulary size to keep; default: all.", min=1)] = None,
    until: Until = None,
    layer: Layers = None,
) -> None:
    """Run an op set at the sizes of real models, with random weights; exit 0: all agree, 1: divergence, 3: nothing
    judged.
    """
    from ..campaign.shapes import NAMES
    from ..campaign.shapes.run_real_shape import shaped
    from ..report import outcome_data
    from ..run.replay import Outcome

    files.must_be_free()
    setting = given.setting(ops="triton")
    outcomes = list[Outcome]()
    with trial_runner("shapes") as run:
        for one in run.trials(name or NAMES, str):
            outcomes.append(shaped(one, setting, layers=layers, vocab=vocab, until=until, judged=layer))
    files.finish(outcome_data.of(outcomes, files.commit), interrupted=run.interrupted)
