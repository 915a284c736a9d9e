"""`instep diff`: compare two results, for example before and after a change.

Leaves out: the comparison (`instep.report.result_difference`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..report.document import Document, Kind, Listing, short, used
from ..verdict import Exit
from .finish_with_result import Files, writes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..report.result_difference import Difference, RunPair

SHOWN = 5  # findings of a run that are printed; a file has all


@writes("json")
def diff(
    before: Annotated[Path, typer.Argument(help="A result, as --json writes it.")],
    after: Annotated[Path, typer.Argument(help="The result to compare it with.")],
    files: Files,
) -> None:
    """Compare two results; exit 0: no new finding, 1: new findings, 3: less was compared than before, or nothing."""
    from dataclasses import asdict

    from ..report.result import Result, read
    from ..report.result_difference import difference

    files.must_be_free(before, after)
    found = difference(read(before), read(after), (str(before), str(after)))
    files.finish(Result(found.exit, "cpu", asdict(found)), _document(found))


def _document(found: Difference) -> Document:
    new = len(found.added) + sum(pair.more for pair in found.pairs)
    says = {
        Exit.AGREED: "no new finding, and nothing less was compared",
        Exit.DIVERGED: f"DIVERGED  new findings: {new}",
        Exit.INCONCLUSIVE: f"inconclusive: {'; '.join(found.why)}",
    }
    notes = [f"{pair.name}: " * (len(found.pairs) > 1) + line for pair in found.pairs for line in _changes(pair)]
    notes += [f"{title}: {name}" for title, names in zip(("only before", "only after"), found.only, strict=True)
              for name in names]  # fmt: skip
    return Document("difference", found.exit, [says[found.exit]], tables=[*map(_table, found.pairs)], notes=notes)


def _table(pair: RunPair) -> Listing:
    heads: dict[str, Kind] = {
        "tier": "word", "numbers before": "number", "after": "number", "allowance used before": "number",
        "after ": "number", "": "word",
    }  # fmt: skip
    rows = list[tuple[str, ...]]()
    for row in pair.rows:
        there = [used(one) if count else "-" for count, one in zip(row.elements, row.used, strict=True)]
        notes = ["less compared"] * (row.elements[1] < row.elements[0]) + ["moved"] * row.moved
        rows.append((row.name, *map(short, row.elements), *there, ", ".join(notes)))
    return Listing(heads, rows, pair.name)


def _changes(pair: RunPair) -> Iterator[str]:
    if pair.events[0] != pair.events[1]:
        yield f"events: {pair.events[0]}, now {pair.events[1]}"
    yield from (f"{field}: {one}, now {other}" for field, (one, other) in pair.changed.items())
    if pair.cut:
        counts = ("more" if count is None else str(count) for count in pair.findings)
        yield "list cut off: of {} findings, now {}, the first are listed".format(*counts)
    for title, findings in (("new", pair.new), ("new, or not listed before", pair.unlisted), ("gone", pair.gone)):
        yield from (f"{title}: {finding['where']}: {finding['diagnosis']}" for finding in findings[:SHOWN])
        if len(findings) > SHOWN:
            yield f"{title}: {len(findings) - SHOWN} more"
