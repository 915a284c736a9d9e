"""The result of a command as a document, for every writer: verdict, sentences, tables, messages, charts.

Leaves out: the writers (`terminal_tables.py`, `html/write_page.py`), and the content of each document (the modules in
`FAMILY`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

from instep_reference.contract.errors import BadInput

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

    omitted   what was left out of the judgement, a line each: always last, because it has not agreed
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
    omitted: Sequence[str] = ()
    made: Mapping[str, Any] = field(default_factory=dict)
    word: str = ""


# ---- common parts: findings and totals as tables, cells of a matrix, numbers as words

Data = Mapping[str, Any]
Row = tuple[str, Mapping[str, Any]]  # row of a matrix: its name, and the details for a click: `lines`, `message`
LEVELS = [["ramp", ""], ["exact", "exact"], ["found", "finding"]]  # legend for the cells of `level`


def word(exit: int) -> str:
    """The word for a verdict in every command."""
    return VERDICTS[Exit(exit)][0]


def used(value: float | str | None) -> str:
    """The used part of an allowance in words; a file has infinite parts as text."""
    return "exact" if value is None else f"{float(value):.3g}"


def short(count: int) -> str:
    """A count in at most four digits, as in 950, 12.3k, 408M."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)


def level(value: float | str | None, wrong: bool = False) -> float | str:
    """The used part of an allowance as a cell of a matrix."""
    if value is None or wrong:
        return "found" if wrong else "exact"
    return float(value) if float(value) <= 1 else "found"


def matrix(title: str, rows: Sequence[Row], columns: Sequence[str], cells: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """A plot. A cell: row, column, part of an allowance or kind (`FILLS` in plots.js), sign, words, its last column."""
    named = [{"name": name, "told": told} for name, told in rows]
    return {"form": "matrix", "title": title, "rows": named, "columns": columns, "cells": list(map(list, cells))}


def names_of(runs: Sequence[Data]) -> list[str]:
    """The name of each run: its relation, engine or op set, and the fields that distinguish it from the others."""
    several = [field for field in ("name", "strategy", "conv", "dtype") if len({run.get(field) for run in runs}) > 1]
    return [", ".join(filter(None, (
        f"{run.get('name')}: " * ("name" in several and "name" in run)
        + str(run.get("relation") or run.get("engine") or run.get("ops")),
        *(run.get(field) for field in several if field != "name"),
    ))) for run in runs]  # fmt: skip


def findings(runs: Sequence[Data]) -> Listing:
    """The listed findings of all runs."""
    rows = [
        (name, one["where"], one["diagnosis"] or "differs", f"{one['worst']}, allowed {one['allowed']}",
         f"{one['tier']} {one['check']}", one.get("command") or "")
        for name, run in zip(names_of(runs), runs, strict=True) for one in run["findings"]
    ]  # fmt: skip
    heads = ("run", "where", "what it is", "measured", "check", *["command"] * any(row[-1] for row in rows))
    return Listing(heads, [row[: len(heads)] for row in rows], "Findings")


def totals(runs: Sequence[Data], of: str = "") -> Listing:
    """How much every run compared, by tier.  of: the title's beginning"""
    rows = [
        (name, word(run.get("exit", 0)), one["tier"],
         *(short(one[count]) if count in one else "" for count in ("comparisons", "blocks")), short(one["elements"]),
         f"{short(one['undecided'])} of {short(one['pairs'])}" if one.get("pairs") else "", used(one.get("used")))
        for name, run in zip(names_of(runs), runs, strict=True) for one in run.get("tiers", ())
        if isinstance(one, Mapping)
    ]
    heads: dict[str, Kind] = {
        "run": "text", "verdict": "detail", "tier": "word",
        **dict.fromkeys(("compared", "blocks", "elements", "undecided", "allowance used"), "number"),
    }  # fmt: skip
    title = f"{of}: how much was compared" if of else "How much was compared"
    return Listing(heads, rows, title, groups=[row[0] for row in rows])


def messages(runs: Sequence[Data]) -> list[str]:
    return [run["message"] for run in runs if run.get("message")]


# ---- which module makes the document of a result

# Module of a document, and its function unless that is `document` -> the field that identifies its results; after
# `runs.`, a field that every run has.
FAMILY: Mapping[str, str] = {
    "instep.audit.result": "recording", "instep_speed.bench.result_document": "rates",
    "instep_proof.faults.result_data": "fired", "instep.campaign.fuzz.result_document": "campaigns",
    "instep_speed.gate.result_document": "judged",
    "instep_speed.gate.result_document:calibration_document": "trials",
    "instep.campaign.all_settings": "coverage",
    "instep.campaign.relations.result": "runs.relation", "instep.report.runs_document": "runs.findings",
}


def document_of(found: Mapping[str, Any]) -> Document:
    """The document of a result's data."""
    name = next((name for name, field in FAMILY.items() if _has(found, field)), None)
    if name is None:
        commands = "audit, bench, faults, fuzz, gate, op, relations, replay, shapes or streams"
        raise BadInput("result", found=f"what `{found.get('command')}` wrote", expected=f"a result of {commands}")
    if find_spec(package := name.partition(".")[0]) is None:
        raise BadInput("result", found=f"what `{found.get('command')}` wrote", expected=f"the package {package}")
    module, _, function = name.partition(":")
    make: Callable[[Mapping[str, Any]], Document] = getattr(import_module(module), function or "document")
    return replace(make(found), made=found)


def _has(found: Mapping[str, Any], field: str) -> bool:
    first, _, inner = field.partition(".")
    value = found.get(first)
    of_all = isinstance(value, list) and value and all(isinstance(one, dict) and inner in one for one in value)
    return first in found and (not inner or bool(of_all))
