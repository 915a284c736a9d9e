"""`instep show`: print a trace event by event, without a model.

Leaves out: serving it (`replay`).
"""

from pathlib import Path
from typing import Annotated

import typer

from instep_reference.contract.errors import BadInput

from ..bundled import trace as own_trace


def show(
    trace: Annotated[Path | None, typer.Argument(help="A trace: the .jsonl file; default: the main trace.")] = None,
    request: Annotated[list[str] | None, typer.Option(help="Only events that name this request; may be "
                                                         "repeated.")] = None,
    stamp: Annotated[bool, typer.Option("--stamp", help="Write the trace again with a digest of its tensors. Its "
                                                        "events stay as they are.")] = False,
) -> None:
    """Print the events of a trace, and its capacity."""
    from rich.console import Console

    from instep_reference.contract.event_facts import named

    from ..report import terminal_tables
    from ..trace import file
    from ..trace.event_text import count, told

    loaded = (file.stamp if stamp else file.read)(own_trace() if trace is None else trace)
    lines, console, header = list(told(loaded)), Console(), loaded.header
    everybody = dict.fromkeys(name for event in loaded.events for name in named(event))
    for name in request or ():
        if name not in everybody:
            raise BadInput("--request", found=name, expected=f"one of {', '.join(everybody)}")
    made = terminal_tables.table(header.name, {"event": "number", "kind": "word", "what": "text"})
    for index, kind, text in lines:
        if not request or {*request} & {*named(loaded.events[index])}:
            made.add_row(str(index), kind, text)
    terminal_tables.show(made, console)
    room = header.capacity
    steps = ", ".join(map(str, header.candidates))
    nodes = "" if room.num_draft_tokens is None else f", trees of {room.num_draft_tokens} nodes at most"
    if room.track_interval is not None:
        most = "" if room.tracked is None else f" (at most {room.tracked} on the device)"
        nodes += f", prefixes tracked every {room.track_interval} tokens{most}"
    terminal_tables.say(
        console, header.claim, f"{count(len(loaded.events), 'event')}, {count(len(everybody), 'request')}",
        f"room  {count(len(room.slots), 'slot')}, {count(len(room.pages), 'page')} of {room.page_size} tokens, "
        f"{room.max_tokens} tokens a step", f"steps {steps} (first {header.num_steps})"
        f"{'' if header.controller is None else f', controller {header.controller.dialect}'}{nodes}; drafter "
        f"{header.recording.drafter}", *loaded.warnings)
