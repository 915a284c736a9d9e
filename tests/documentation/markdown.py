"""Tables in Markdown.

Leaves out: their content.
"""

from collections.abc import Iterable, Sequence


def table(heads: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A line for the heads and one per row; a bar inside a cell is escaped."""

    def line(cells: Iterable[object]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(heads), "|---" * len(heads) + "|", *map(line, rows)])
