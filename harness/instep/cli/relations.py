"""`instep relations`: run a trace again with one thing varied, and check that results stay equal.

Leaves out: the relations (`instep.campaign.relations`), and the comparison with the reference (`instep replay`).
"""

from pathlib import Path
from typing import Annotated

import typer

from .finish_with_result import Files, writes
from .progress import trial_runner
from .subject_options import Given, TraceModel, Until, takes_setting


@writes("json", "html", "sarif", "annotate", "commit")
@takes_setting(also=("engine", "ranks", "experts", "stages", "micro_batches", "dp", "stress"))
def relations(
    given: Given,
    files: Files,
    trace: Annotated[Path, typer.Argument(help="A trace: the .jsonl file.")],
    name: Annotated[list[str] | None, typer.Argument(help="Relations to check; default: all.")] = None,
    checkpoint: TraceModel = None,
    until: Until = None,
    bitwise: Annotated[bool, typer.Option("--bitwise", help="Require equal bits as the op set `invariant` promises.")]
    = False,
    tokens: Annotated[int, typer.Option(help="Length of the drift run, in tokens.", min=64,
                                           max=2**20)] = 2048,
) -> None:
    """Check relations between runs of one trace; exit 0: all agree, 1: divergence, 3: one of them compared nothing."""
    from ..campaign import relations as table
    from ..campaign.relations import result as relations_result
    from ..campaign.relations.case import Case
    from ..run.replay import Replay, must_reach
    from ..trace.file import read

    wanted = table.relations(name or ())
    files.must_be_free(trace)
    given.subjects()  # refuses an op set together with an engine
    loaded = read(trace)
    must_reach(until, loaded)
    replay = Replay(loaded, given.setting(), checkpoint=checkpoint)
    case = Case.of(replay.trace, replay.plan, until=until, bitwise=bitwise, tokens=tokens)
    found = list[table.Held]()
    with trial_runner("relations") as run:
        for relation in run.trials(wanted, lambda one: one.name):
            found.append(table.hold(case, relation))
    told = relations_result.Run(trace, checkpoint, until, case, tuple(found))
    files.finish(relations_result.of(told, files.commit), interrupted=run.interrupted, trace=trace)
