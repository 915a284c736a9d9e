"""Documents, tables and lines on the terminal. No number is cut and no line is broken, however narrow the console is.

Leaves out: their content.
"""

from collections.abc import Mapping

from rich.box import HEAVY_HEAD, SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from .document import VERDICTS, Document, Kind, Listing

NARROWEST_TEXT = 8
UNFRAMED = (0, 0, 0, 1)  # padding of a table without a frame
ENDLESS = 10_000  # columns of a console that is wide enough for everything


def write(document: Document, console: Console) -> None:
    """Print a document: its tables, notes and summary, and last the messages, which end in a command."""
    for listing in (*document.tables, *document.more):
        if listing.rows and isinstance(listing.heads, Mapping):
            show(table_of(listing, listing.heads), console)
    say(console, *document.notes, style="dim")
    say(console, *document.summary, style=VERDICTS[document.exit][1])
    say(console, *document.messages)
    say(console, *document.omitted, style="yellow")


def table_of(listing: Listing, heads: Mapping[str, Kind]) -> Table:
    shown = [number for number, kind in enumerate(heads.values()) if kind != "detail"]
    columns: dict[str, Kind] = {head: kind for head, kind in heads.items() if kind != "detail"}
    made, styles = table(listing.title, columns, framed=len({*listing.groups}) > 1), dict(VERDICTS.values())
    for number, row in enumerate(listing.rows):
        cells = (Text(row[column], styles.get(row[column], "")) for column in shown)
        ends = listing.groups[number : number + 1] != listing.groups[number + 1 : number + 2]
        made.add_row(*cells, style="red" if number in listing.bad else None, end_section=ends)
    return made


def say(console: Console, *lines: str | Text, style: str = "") -> None:
    """Print each line unchanged: without line breaks, without markup, in `style`."""
    for line in lines:
        console.print(Text(line, style=style) if isinstance(line, str) else line, soft_wrap=True)


def table(title: str, columns: Mapping[str, Kind], *, framed: bool = False) -> Table:
    """A table without rows. framed: for a table whose rows form sections; a narrow console shows it without a frame."""
    box, padding = (HEAVY_HEAD, (0, 1)) if framed else (SIMPLE_HEAD, UNFRAMED)
    made = Table(title=Text(title, style="bold"), box=box, pad_edge=framed, padding=padding)
    for name, kind in columns.items():
        made.add_column(
            Text(name), justify="right" if kind == "number" else "left", overflow="fold",
            min_width=NARROWEST_TEXT if kind == "text" else None,
        )
    return made


def show(made: Table, console: Console) -> None:
    """Print a table. On a narrow console it loses its frame, then headings are broken between words, then texts.

    If that is not enough, the table is wider than the console.
    """
    if made.title:
        say(console, made.title)  # rich would break it at the table's width
        made.title = None
    endless = console.options.update(width=ENDLESS)
    if Measurement.get(console, endless, made).maximum > console.width:
        made.box, made.pad_edge, made.padding = SIMPLE_HEAD, False, UNFRAMED
        for column in made.columns:
            if column.min_width is None:
                cells = max((Measurement.get(console, endless, cell).maximum for cell in column.cells), default=0)
                column.width = max(cells, Measurement.get(console, endless, column.header).minimum)
        made.width = max(console.width, Measurement.get(console, endless, made).minimum)
    console.print(made, crop=False)
