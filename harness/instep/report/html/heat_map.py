"""The heat map of a page as compact arrays: one cell per event and row.

A row is a layer, a draft step, or the rest of a stage:

    rows    the bookkeeping, the embedding, each layer of the trunk, the rows after the layers, each stage of the draft
    line    all comparisons of one check in one cell: their count, and the one that used most of its allowance
    cells   [events x rows], as differences of successive cell numbers; each cell has the numbers of its lines

Equal lines are stored once: most comparisons are exact, and exact ones carry no numbers. Leaves out: words and colours,
and which cells a trace computes (`timeline.py`).
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from instep_reference.contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place
from instep_reference.contract.recurrences import RECURRENCES

from ...verdict import Comparison
from ..divergence_message import NAMES, drafting
from ..outcome_data import EXACT

DETAILED = 200_000  # lines; with more, every cell keeps only the one that used most of its allowance
TABLE, HEAD, DRAFT = STAGE_LEVEL - 1, AFTER_LAYERS, 0  # levels of rows other than layers of the trunk


class Row(NamedTuple):
    """A row of the heat map. In stage "trunk", level is a layer or one of the above; a draft stage is one row."""

    stage: str
    level: int

    @classmethod
    def of(cls, place: Place) -> "Row":
        if place.stage != "trunk":
            return cls(place.stage, DRAFT)
        of_table = place.layer == STAGE_LEVEL and place.component in ("length", "root")
        return cls("trunk", TABLE if of_table else place.layer)

    def label(self, kinds: Sequence[str]) -> str:
        """The name of the row. kinds: those of the trunk's layers, as in the configuration."""
        if self.stage != "trunk":
            return drafting(self.stage).strip()
        named = {TABLE: "slots, pages, lengths", STAGE_LEVEL: "embedding", HEAD: "final rows, logits"}
        kind = kinds[self.level] if 0 <= self.level < len(kinds) else ""
        kind = kind.upper() if kind in RECURRENCES else kind
        return named.get(self.level) or f"layer {self.level} {kind}".strip()

    def order(self) -> tuple[int, ...]:
        return Place(self.stage, self.level, "length").order()[:3]


def rows_of(layers: int, compared: Iterable[Comparison], due: Iterable[Row]) -> list[Row]:
    """All rows of the model, of comparisons and of computations, in the order of the data flow."""
    trunk = [Row("trunk", level) for level in (TABLE, STAGE_LEVEL, *range(layers), HEAD)]
    return sorted({*trunk, *(Row.of(place) for place in {one.place for one in compared}), *due}, key=Row.order)


def data(compared: Sequence[Comparison], rows: Sequence[Row], requests: Mapping[str, int]) -> dict[str, Any]:
    """The cells as compact arrays. requests: name -> number."""
    row_of = _rows_of_places(compared, rows)
    grouped: dict[tuple[int, str], list[Comparison]] = {}
    for one in compared:
        grouped.setdefault((one.event * len(rows) + row_of[one.place], one.check), []).append(one)
    if len(grouped) > DETAILED:
        whole: dict[tuple[int, str], list[Comparison]] = {}
        for (at, _), ones in grouped.items():
            whole.setdefault((at, ""), []).extend(ones)
        grouped = whole
    table, lines, cells = _Names(), _Names(), dict[int, list[int]]()
    components = _Names()
    for (at, _), ones in grouped.items():
        cells.setdefault(at, []).append(lines.number(_line(ones, table, components, requests)))
    ordered = sorted(cells)
    return {
        "checks": list(table.numbers), "components": list(components.numbers), "lines": list(lines.numbers),
        "at": [at - before for at, before in zip(ordered, [0, *ordered], strict=False)],
        "of": [cells[at] for at in ordered],
    }


def not_judged(
    due: Mapping[int, Collection[Row]], rows: Sequence[Row], compared: Sequence[Comparison], events: int
) -> list[int]:
    """Cells in which a served event computes, but nothing was compared."""
    number = {row: index for index, row in enumerate(rows)}
    row_of = _rows_of_places(compared, rows)
    judged = {one.event * len(rows) + row_of[one.place] for one in compared}
    computed = {event * len(rows) + number[row] for event, there in due.items() if event < events for row in there}
    return sorted(computed - judged)


def _rows_of_places(compared: Iterable[Comparison], rows: Sequence[Row]) -> dict[Place, int]:
    number = {row: index for index, row in enumerate(rows)}
    return {place: number[Row.of(place)] for place in {one.place for one in compared}}


class _Names:
    """Numbers for values; equal values share one."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def number(self, name: Any) -> int:
        return self.numbers.setdefault(name, len(self.numbers))


def _line(
    ones: Sequence[Comparison], checks: _Names, components: _Names, requests: Mapping[str, int]
) -> tuple[object, ...]:
    """check, count, elements; then, unless all are exact: component, request, slot, worst, allowed, whether right."""
    worst = max(ones, key=lambda one: (not one.agrees, math.isnan(one.used), one.used))
    counts = (checks.number((worst.check, worst.tier.value)), len(ones), sum(one.elements for one in ones))
    if worst.agrees and (worst.tier in EXACT or not worst.allowed):
        return counts
    component = NAMES.get(worst.place.component, worst.place.component)
    return (
        *counts, components.number(component), requests.get(worst.request or "", -1),
        -1 if worst.slot is None else worst.slot, short(worst.worst), short(worst.allowed), int(worst.agrees),
    )


def short(number: float) -> float | str:
    """The number with four digits; as text if JSON has no number for it."""
    return float(f"{number:.4g}") if math.isfinite(number) else str(number)
