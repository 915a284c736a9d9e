"""`instep audit`: judge a recording of an engine with its own scheduler.

Leaves out: the judgement (`instep.audit`).
"""

from pathlib import Path
from typing import Annotated

import typer

from .finish_with_result import Files, writes
from .progress import progress


@writes("json", "html", "sarif", "annotate")
def audit(
    files: Files,
    recording: Annotated[Path, typer.Argument(help="A recording: its directory, a directory of SGLang's dumper, or a "
                                                   "file of JSON lines of prompts and answers.")],
    model: Annotated[Path, typer.Option(
        "--model", "--checkpoint", help="The Hugging Face checkpoint directory; it may be larger than memory.")],
    dtype: Annotated[str | None, typer.Option(help="The engine's dtype, if the recording has none; by default the "
                                                   "checkpoint's.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Judge at most this many tokens of each request.", min=1)] = None,
    level: Annotated[int, typer.Option(help="The highest level: 1 tokens and counts, 2 logits and rows, 3 states.",
                                       min=1, max=3)] = 3,
    verbose: Annotated[bool, typer.Option("--verbose", help="List everything that was not judged.")] = False,
    events: Annotated[str | None, typer.Option(
        metavar="A:B", help="Judge only these events, both included; A or B may be left out.")] = None,
    first: Annotated[bool, typer.Option("--first", help="Stop at the first event with a wrong row or state.")] = False,
    from_start: Annotated[bool, typer.Option(
        "--from-start", help="Judge states from position 0, not one step from the recorded state before.")] = False,
    minutes: Annotated[float | None, typer.Option(
        help="Time limit; the result covers the events up to there, as after Ctrl-C.", min=0.0)] = None,
) -> None:
    """Judge a recording; exit 0: right; 1: the model disagrees; 3: fewer than half of the tokens decidable."""
    from ..audit.audit import audit as run
    from ..audit.audit import text_of
    from ..audit.result import charts_of, of
    from ..lru_cache import EVENTS, closed

    files.must_be_free()
    with closed(EVENTS), progress("read the recording") as advance:  # one run computes nothing twice
        found = run(recording, model, dtype=dtype, tokens=tokens, level=level, progress=advance, events=events,
                    first=first, from_start=from_start, minutes=minutes)
    result = of(found, verbose=verbose)
    files.finish(result, trace=text_of(recording), charts=lambda: charts_of(found))
