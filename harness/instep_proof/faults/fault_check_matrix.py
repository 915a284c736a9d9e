"""The matrix fault x check: what every check did at the event at which a fault's run stopped.

Leaves out: drawing it (`render.py` as text, `matrix_svg.py` as a picture).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .catalogue import FAMILIES
from .compare_with_control import TIERS, Judged, Result

FAMILY_OF = {fault.id: family for family, faults in FAMILIES.items() for fault in faults}


class Mark(Enum):
    """The result of one check."""

    MEANT = "it is meant to see the fault, and does"
    ALSO = "it sees the fault, too"
    SILENT = "it compared, and saw nothing"
    ABSENT = "it had nothing to compare at that event"


@dataclass(frozen=True)
class Column:
    """A check with its tier."""

    check: str
    tier: str


@dataclass(frozen=True)
class Row:
    judged: Judged
    marks: tuple[Mark, ...]  # one per column


@dataclass(frozen=True)
class Matrix:
    """columns by tier; families -> rows, in the catalogue's order."""

    columns: tuple[Column, ...]
    families: dict[str, tuple[Row, ...]]

    @classmethod
    def of(cls, result: Result) -> Matrix:
        tiers: dict[str, str] = {}
        for one in result.judged:
            tiers |= {**one.control.looked, **one.arm.looked, **one.seen}
        columns = tuple(
            Column(check, tier) for check, tier in sorted(tiers.items(), key=lambda each: (TIERS.index(each[1]), each))
        )
        families: dict[str, tuple[Row, ...]] = {}
        for one in result.judged:
            family = FAMILY_OF.get(one.fault.id, "not in the catalogue")
            families[family] = (*families.get(family, ()), Row(one, tuple(mark(one, each.check) for each in columns)))
        return cls(columns, families)


def mark(judged: Judged, check: str) -> Mark:
    if check in judged.seen:
        return Mark.MEANT if check in judged.fault.seen_by else Mark.ALSO
    return Mark.SILENT if check in judged.arm.looked else Mark.ABSENT
