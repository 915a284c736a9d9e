"""Common parts of documents: findings and totals as tables, cells of a matrix, numbers as words.

Leaves out: the documents (`document_choice.py` lists them).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..verdict import Exit
from .document import VERDICTS, Kind, Listing

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
