"""Print the results of `instep soak`: the totals of every op set, this session's share, and the findings.

Leaves out: counting (`soak.py`, `resume.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from ...report import terminal_tables
from ...report.divergence_message import divergence
from ...run.replay import Outcome
from ..fuzz.coverage import CONDITIONS
from .resume import Soaked


def show(runs: Sequence[Soaked], found: Outcome | None, console: Console) -> None:
    """A line per op set; then the conditions that were never met, and the finding of this session."""
    made = terminal_tables.table("soak, all sessions", {
        "ops": "word", "seed": "number", "rounds": "number", "events": "number", "elements": "number",
        "minutes": "number", "rounds a minute": "number", "sessions": "number", "found": "number",
    }, framed=True)  # fmt: skip
    for run in runs:
        minutes = run.seconds / 60
        counts = (run.rounds, run.events, run.elements)
        made.add_row(run.name, str(run.seed), *(f"{count:,}" for count in counts), f"{minutes:.1f}",
                     f"{run.rounds / minutes if minutes else 0:.0f}", str(len(run.sessions)), str(len(run.found)))
    terminal_tables.show(made, console)
    for name in dict.fromkeys(run.name for run in runs):
        those = [run for run in runs if run.name == name]
        never = [one for one in CONDITIONS if not any(run.conditions.get(one) for run in those)]
        if never:
            terminal_tables.say(console, f"{name}: never met: {', '.join(never)}", style="dim")
        held = [session.memory_mib for run in those for session in run.sessions[-1:] if session.memory_mib]
        if held:
            most = max(held, key=lambda mib: mib[-1] - mib[0])
            terminal_tables.say(console,
                                f"{name}, last sessions: the process that grew most held {most[0]} to {most[-1]} MiB",
                       style="dim")  # fmt: skip
    for run in runs:
        for finding in run.found:
            note = "" if finding.again else " (once: its trace alone does not show it; what came before it decides)"
            terminal_tables.say(console,
                                f"{run.name}, round {finding.round:,}: {finding.message}{note}", f"  {finding.trace}")
    if found is not None:
        terminal_tables.say(console, divergence(found))
