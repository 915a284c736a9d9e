"""The result of a command as a document, for every writer: verdict, sentences, tables, messages, charts.

Leaves out: the writers (`terminal_tables.py`, `html/write_page.py`), and which document a result has
(`document_choice.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ..verdict import Exit

# Neither a number (right-justified) nor a word (a name) is cut or broken. A text is wrapped on a narrow console. A
# column of details is on the page only.
Kind = Literal["number", "word", "text", "detail"]
VERDICTS = {
    Exit.AGREED: ("agrees", "green"), Exit.DIVERGED: ("DIVERGED", "red"), Exit.INCONCLUSIVE: ("inconclusive", "yellow"),
}


class Listing(NamedTuple):
    """A table.

    heads   the heading of each column, with its kind; without kinds the table is on the page only
    bad     rows to mark as wrong;  groups: the group of each row: sections, and buttons that show one group
    """

    heads: Mapping[str, Kind] | Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    bad: Collection[int] = ()
    groups: Sequence[str] = ()


@dataclass(frozen=True)
class Document:
    """The content of a page, and of the output on the terminal.

    word      the verdict, if the command has its own word for it
    claim     the sentence that is proved; summary: the result, in sentences; notes: what was not compared, and why
    messages  the message of every run that diverged; it ends in its command
    tables    tables before the charts;  more: tables after them
    charts    the data of the charts: timeline, runs and findings of events; `plots`
    made      the head of the result: command, date, commit and machine
    """

    name: str
    exit: Exit
    summary: Sequence[str]
    claim: str = ""
    messages: Sequence[str] = ()
    tables: Sequence[Listing] = ()
    charts: Mapping[str, Any] = field(default_factory=dict)
    more: Sequence[Listing] = ()
    notes: Sequence[str] = ()
    made: Mapping[str, Any] = field(default_factory=dict)
    word: str = ""
