"""`instep diff`: compare two results, for example before and after a change.

Leaves out: the comparison (`instep.report.result_difference`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .finish_with_result import Json, finish

if TYPE_CHECKING:
    from rich.console import Console

    from ..report.result_difference import Difference

SHOWN = 5  # findings of a run that are printed; a file has all


def diff(
    before: Annotated[Path, typer.Argument(help="A result, as --json writes it.")],
    after: Annotated[Path, typer.Argument(help="The result to compare it with.")],
    json: Json = None,
) -> None:
    """Compare two results; exit 0: no new finding, 1: new findings, 3: less was compared than before, or nothing."""
    from dataclasses import asdict

    from ..atomic_write import writable
    from ..report.result import Result, read
    from ..report.result_difference import difference

    for file in filter(None, (json,)):
        writable(file, before, after)
    found = difference(read(before), read(after), (str(before), str(after)))
    finish(Result(found.exit, "cpu", asdict(found)), json, lambda console: _show(found, console))


def _show(found: Difference, console: Console) -> None:
    from ..report import terminal_tables
    from ..report.terminal import cell, short
    from ..verdict import Exit

    for pair in found.pairs:
        made = terminal_tables.table(pair.name, {
            "tier": "word", "numbers before": "number", "after": "number", "allowance used before": "number",
            "after ": "number", "": "word",
        })  # fmt: skip
        for row in pair.rows:
            there = [cell(used) if count else "-" for count, used in zip(row.elements, row.used, strict=True)]
            notes = ["less compared"] * (row.elements[1] < row.elements[0]) + ["moved"] * row.moved
            made.add_row(row.name, *map(short, row.elements), *there, ", ".join(notes))
        terminal_tables.show(made, console)
        if pair.events[0] != pair.events[1]:
            terminal_tables.say(console, f"events: {pair.events[0]}, now {pair.events[1]}")
        for field, (one, other) in pair.changed.items():
            terminal_tables.say(console, f"{field}: {one}, now {other}", style="dim")
        if pair.cut:
            counts = ("more" if count is None else str(count) for count in pair.findings)
            terminal_tables.say(console, "list cut off: of {} findings, now {}, the first are listed".format(*counts))
        for title, findings in (("new", pair.new), ("new, or not listed before", pair.unlisted), ("gone", pair.gone)):
            for finding in findings[:SHOWN]:
                terminal_tables.say(console, f"{title}: {finding['where']}: {finding['diagnosis']}")
            if len(findings) > SHOWN:
                terminal_tables.say(console, f"{title}: {len(findings) - SHOWN} more")
    for title, names in zip(("only before", "only after"), found.only, strict=True):
        terminal_tables.say(console, *(f"{title}: {name}" for name in names))
    new = len(found.added) + sum(pair.more for pair in found.pairs)
    says = {
        Exit.AGREED: "no new finding, and nothing less was compared",
        Exit.DIVERGED: f"DIVERGED  new findings: {new}",
        Exit.INCONCLUSIVE: f"inconclusive: {'; '.join(found.why)}",
    }
    terminal_tables.say(console, says[found.exit])
