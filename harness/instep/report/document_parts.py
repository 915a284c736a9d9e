"""Common parts of documents: findings and totals as tables, cells of a matrix, numbers as words.

Leaves out: the documents (`document_choice.py` lists them).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..verdict import Exit
from .document import VERDICTS, Listing
from .terminal import cell, short

Data = Mapping[str, Any]
Row = tuple[str, Mapping[str, Any]]  # row of a matrix: its name, and the details for a click: `lines`, `message`
LEVELS = [["ramp", ""], ["exact", "exact"], ["found", "finding"]]  # legend for the cells of `level`


def word(exit: int) -> str:
    """The word for a verdict in every command."""
    return VERDICTS[Exit(exit)][0]


def used(value: float | str | None) -> str:
    """The used part of an allowance in words; a file has infinite parts as text."""
    return cell(None if value is None else float(value))


def level(value: float | str | None, wrong: bool = False) -> float | str:
    """The used part of an allowance as a cell of a matrix."""
    if value is None or wrong:
        return "found" if wrong else "exact"
    return float(value) if float(value) <= 1 else "found"


def matrix(title: str, rows: Sequence[Row], columns: Sequence[str], cells: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """A plot. A cell: row, column, part of an allowance or kind (`FILLS` in plots.js), sign, words, its last column."""
    named = [{"name": name, "told": told} for name, told in rows]
    return {"form": "matrix", "title": title, "rows": named, "columns": columns, "cells": list(map(list, cells))}


def name_of(run: Data) -> str:
    """The name of a run: the fields that distinguish it from the others."""
    if "relation" in run:
        return str(run["relation"])
    parts = (run.get(field) for field in ("name", "engine", "ops", "strategy", "dtype"))
    return " ".join(str(part) for part in parts if part)


def findings(runs: Sequence[Data]) -> Listing:
    """The listed findings of all runs."""
    rows = [
        (name_of(run), one["where"], one["diagnosis"] or "differs", f"{one['worst']}, allowed {one['allowed']}",
         f"{one['tier']} {one['check']}", one.get("command") or "") for run in runs for one in run["findings"]
    ]
    heads = ("run", "where", "what it is", "measured", "check", *["command"] * any(row[-1] for row in rows))
    return Listing(heads, [row[: len(heads)] for row in rows], "Findings")


def totals(runs: Sequence[Data]) -> Listing:
    """How much every run compared, by tier."""
    rows = [
        (name_of(run), word(run.get("exit", 0)), one["tier"],
         *(short(one[count]) if count in one else "" for count in ("comparisons", "blocks")), short(one["elements"]),
         f"{short(one['undecided'])} of {short(one['pairs'])}" if one.get("pairs") else "", used(one.get("used")))
        for run in runs for one in run.get("tiers", ()) if isinstance(one, Mapping)
    ]
    heads = ("run", "verdict", "tier", "compared", "blocks", "elements", "undecided", "allowance used")
    return Listing(heads, rows, "How much was compared")


def messages(runs: Sequence[Data]) -> list[str]:
    return [run["message"] for run in runs if run.get("message")]
