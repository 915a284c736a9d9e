"""`instep streams`: replay a trace in stamps, so that every state shows its request and positions.

Leaves out: the replay (`instep.campaign.streams`) and the messages (`instep.report`).
"""

from pathlib import Path
from typing import Annotated

import typer

from instep_reference.contract.config import ModelConfig
from instep_reference.contract.errors import BadInput
from instep_reference.contract.recurrences import RECURRENCES

from .finish_with_result import Files, writes
from .progress import trial_runner
from .subject_options import Given, Layers, Until, takes_setting


@writes("json", "sarif", "annotate", "commit")
@takes_setting(
    several=("ops", "strategy"), without=("drafter",), ops="Op set, or module:attribute; left out: plain.",
    strategy="How states are committed; left out: every strategy.",
)
def streams(
    given: Given,
    files: Files,
    trace: Annotated[Path, typer.Argument(help="A trace: the .jsonl file; its model is not needed.")],
    level: Annotated[list[str] | None, typer.Option(
        metavar="op|model", help="op: the delta rule consumes whole labels, states are right "
                                                         "to the bit; model: to the nearest label. "
                                                         "Default: both.")] = None,
    recurrence: Annotated[str | None, typer.Option(help="Recurrence of the hand-made model: gdn or kda; left out: "
                                                        "that of the trace's model, if its folder is there.")] = None,
    until: Until = None,
    layer: Layers = None,
) -> None:
    """Replay a trace on readable labels; exit 0: all right, 1: a label is wrong, 3: nothing was read."""
    from ..campaign.streams.run_stamped_trace import LEVELS, streamed
    from ..campaign.streams.stamped_trace import STAMPED, USUAL, config
    from ..report import outcome_data
    from ..run.replay import Outcome, must_have, must_reach
    from ..trace.file import read

    chosen = [one for one in LEVELS if level is None or one in level]
    if len(chosen) < len(set(level or LEVELS)):
        raise BadInput("--level", found=", ".join(level or ()), expected=" or ".join(LEVELS))
    if recurrence not in (None, *STAMPED):
        raise BadInput("--recurrence", found=recurrence, expected=f"one of {', '.join(STAMPED)}")
    files.must_be_free(trace)
    loaded = read(trace)
    must_reach(until, loaded)
    file = loaded.path.parent / loaded.header.checkpoint.near / "config.json"
    if recurrence is None:
        recurrence = ModelConfig.from_file(file).recurrence.name if file.is_file() else USUAL
    if recurrence not in STAMPED:
        why = "in which codes of tokens add up" if recurrence in RECURRENCES else "which has no state"
        raise BadInput("the recurrence of the trace's model", found=f"{recurrence}, {why}",
                       expected=f"one by the delta rule; for the same events with another: --recurrence {USUAL}")
    must_have(layer or (), config(1))  # the same layers for any number of requests
    runs = [
        (given.setting(ops=served, strategy=how), one) for served in given.several("ops", "plain")
        for how in given.named.get("strategy") or given.setting(ops=served).strategies("strategy") for one in chosen
    ]
    last, outcomes = len(loaded.events) - 1, list[Outcome]()
    with trial_runner("streams") as run:
        for setting, one in run.trials(runs, lambda each: f"{each[1]} level [{each[0].name}, {each[0].strategy}], run "
                                                          f"{run.ended + 1} of {len(runs)}"):
            outcomes.append(streamed(loaded, setting, one, until=until, layers=layer, progress=run.events(until, last),
                                     recurrence=recurrence))
    files.finish(outcome_data.of(outcomes, files.commit), interrupted=run.interrupted, trace=trace)
