"""The page of `instep faults`: which planted faults were found, located and named, by family, and which check saw them.

Leaves out: planting and judging (`instep_proof.faults`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from instep.report.html.document import Listing, Page
from instep.report.html.page_parts import Data, matrix
from instep.verdict import Exit

from .compare_with_control import TIERS
from .matrix_svg import SIGNS
from .render import said

JUDGED = ("found", "located", "named")
SAYS = {
    "meant": "sees it, as it should", "also": "sees it, too", "silent": "compared, saw nothing",
    "yes ✓": "yes; named by the check", "yes b": "named by the bank", "yes h": "named by a hypothesis", "yes": "yes",
    "no": "no", "void": "void: no verdict",
}


def page(found: Data) -> Page:
    every = found["results"]
    families = list(dict.fromkeys(_family(one) for one in every))
    return Page(
        "Planted faults", Exit(found["exit"]), [said(found)],
        "Every fault is an edit of the source, after a bug of a real engine. Its control is the same run without it.",
        found["failures"], [_counts(every, families)], {
            "plots": [_plot(family, [one for one in every if _family(one) == family]) for family in families],
            "says": SAYS, "legend": [[*kind.split(" ")[:1], words, *kind.split(" ")[1:]] for kind, words in SAYS.items()
                                     if kind != "yes"],
        }, [_table(every)], word={Exit.DIVERGED: "FAILED", Exit.AGREED: "all found"}.get(Exit(found["exit"]), ""),
    )  # fmt: skip


def _family(one: Data) -> str:
    return one.get("family") or "not in the catalogue"


def _counts(every: list[Data], families: list[str]) -> Listing:
    rows = []
    for family in (*families, "all"):
        mine = [one for one in every if family in ("all", _family(one))]
        void = sum(bool(one["void"]) for one in mine)
        rows.append((family, *map(str, (len(mine), void, *(sum(bool(one[what]) for one in mine) for what in JUDGED)))))
    return Listing(("family", "faults", "void", *JUDGED), rows, "By family")


def _table(every: list[Data]) -> Listing:
    heads = ("fault", "family", *JUDGED, "seen by", "where", "what it does, or why it is void")
    rows = [(
        one["id"], _family(one), *(_word(one, what) for what in JUDGED), ", ".join(one["seen"]),
        one["first"]["where"] if one["first"] else one.get("error") or "",
        f"void: {one['void']}" if one["void"] else one["what"],
    ) for one in every]
    bad = [number for number, one in enumerate(every) if not (one["void"] or (one["found"] and one["located"]))]
    return Listing(heads, rows, "Every fault", bad, [_family(one) for one in every])


def _word(one: Data, what: str) -> str:
    if one["void"]:
        return "void"
    if what == "named" and not one["expected"].get("says"):
        return "-"  # not every numeric error has a name
    return (one.get("named_by") if what == "named" else "") or ("yes" if one[what] else "NO")


def _plot(family: str, mine: list[Data]) -> dict[str, Any]:
    tiers = {check: tier for one in mine for check, tier in {**one.get("looked", {}), **one["seen"]}.items()}
    checks = sorted(tiers, key=lambda check: (TIERS.index(tiers[check]), check))
    rows = [(one["id"], {
        "lines": [one["what"], f"void: {one['void']}" if one["void"] else "", _origin(one)], "message": one["message"],
    }) for one in mine]  # fmt: skip
    cells = [(row, column, *cell) for row, one in enumerate(mine) for column, cell in _cells(one, checks)]
    columns = [*JUDGED, *(f"{check} ({tiers[check]})" for check in checks)]
    return {**matrix(f"{family}: faults and checks", rows, columns, cells), "group": family}


def _origin(one: Data) -> str:
    return f"as in {one['origin']}" if one.get("origin") else ""


def _cells(one: Data, checks: list[str]) -> Iterator[tuple[int, tuple[str, ...]]]:
    for column, what in enumerate(JUDGED):
        holds = _word(one, what)
        if holds != "-":
            kind = {"void": "void", "NO": "no"}.get(holds, "yes")
            yield column, (kind, SIGNS[holds]) if holds in SIGNS else (kind,)
    for column, check in enumerate(checks, len(JUDGED)):
        if check in one["seen"]:
            yield column, ("meant" if check in one["expected"]["seen_by"] else "also",)
        elif check in one.get("looked", ()):
            yield column, ("silent",)
