"""The document of `instep soak`: the totals of every op set, this session's share, and the findings.

Leaves out: counting (`soak.py`, `resume.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ...report.divergence_message import divergence
from ...report.document import Document, Kind, Listing
from ...run.replay import Outcome
from ...verdict import Exit
from ..fuzz.coverage import CONDITIONS
from .resume import Soaked

ONCE = " (once: its trace alone does not show it; what came before it decides)"


def document(runs: Sequence[Soaked], found: Outcome | None) -> Document:
    """A line per op set; then the conditions that were never met, and the finding of this session."""
    counts = ("seed", "rounds", "events", "elements", "minutes", "rounds a minute", "sessions", "found")
    heads: dict[str, Kind] = {"ops": "word", **dict.fromkeys(counts, "number")}
    rows, notes = list[tuple[str, ...]](), list[str]()
    for run in runs:
        minutes = run.seconds / 60
        rows.append((run.name, str(run.seed), f"{run.rounds:,}", f"{run.events:,}", f"{run.elements:,}",
                     f"{minutes:.1f}", f"{run.rounds / minutes if minutes else 0:.0f}", str(len(run.sessions)),
                     str(len(run.found))))  # fmt: skip
    for name in dict.fromkeys(run.name for run in runs):
        those = [run for run in runs if run.name == name]
        never = [one for one in CONDITIONS if not any(run.conditions.get(one) for run in those)]
        notes += [f"{name}: never met: {', '.join(never)}"] * bool(never)
        held = [session.memory_mib for run in those for session in run.sessions[-1:] if session.memory_mib]
        if held:
            most = max(held, key=lambda mib: mib[-1] - mib[0])
            notes.append(f"{name}, last sessions: the process that grew most held {most[0]} to {most[-1]} MiB")
    messages = [
        f"{run.name}, round {one.round:,}: {one.message}{'' if one.again else ONCE}\n  {one.trace}"
        for run in runs for one in run.found
    ]  # fmt: skip
    messages += [] if found is None else [divergence(found)]
    bad = [number for number, run in enumerate(runs) if run.found]
    return Document("soak", Exit.worst(run.exit for run in runs), (), messages=messages, notes=notes,
                    tables=[Listing(heads, rows, "soak, all sessions", bad)])  # fmt: skip
