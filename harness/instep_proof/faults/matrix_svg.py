"""The matrix as SVG for light and dark pages, with a row per fault and a column per check.

The picture measures nothing: text has a fixed-width font. Leaves out: the matrix itself (`fault_check_matrix.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from .compare_with_control import Judged
from .fault_check_matrix import Column, Mark, Matrix

ROW, CELL, CHAR = 15, 17, 6.05  # pixels: a line, a cell, a character of the font at its size
FOOT, GAP, MARGIN = 40, 20, 8  # pixels: legend; space between families; margin
SLANT, RISE, RUN = -52, 0.79, 0.62  # degrees of the checks' names, and their sine and cosine
JUDGED = ("found", "named", "located")
SIGNS = {"check": "✓", "bank": "b", "hypothesis": "h"}  # who names a fault
NAMED = "named: ✓ by the check, b by the bank, h by a hypothesis"
LEGEND = (
    (Mark.MEANT, "sees it, as it should"), (Mark.ALSO, "sees it, too"), (Mark.SILENT, "compared, saw nothing"),
    (Mark.ABSENT, "blank: nothing to compare"),
)

STYLE = """
  text { font: 10px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #24292f }
  .quiet { fill: #6e7781 } .family { font-weight: bold } .bad { fill: #cf222e }
  .meant { fill: #1a7f37 } .also { fill: #1a7f37; fill-opacity: .35 } .silent { fill: #8c959f }
  .void { fill: #bf8700 } line { stroke: #8c959f; stroke-opacity: .35 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .quiet { fill: #8d96a0 } .bad { fill: #f85149 }
    .meant { fill: #3fb950 } .also { fill: #3fb950; fill-opacity: .4 } .silent { fill: #6e7681 } .void { fill: #d29922 }
  }
"""


def picture_of(matrix: Matrix) -> str:
    """The complete file."""
    rows = [row for family in matrix.families.values() for row in family]
    label = MARGIN + CHAR * max((len(row.judged.fault.id) for row in rows), default=0) + 10
    edges = list(_edges(matrix.columns, label + len(JUDGED) * CELL + 14))
    longest = CHAR * max((len(_spelled(column)) for column in matrix.columns), default=len(JUDGED[-1]))
    head = longest * RISE + MARGIN + 4
    legend = len(LEGEND) * CELL + CHAR * (sum(len(words) + 3 for _, words in LEGEND) + len(NAMED))
    width = max((edges[-1] if edges else label) + CELL + longest * RUN, legend) + MARGIN
    height = head + ROW * len(rows) + GAP * len(matrix.families) + FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" aria-label="{_label(matrix)}">',
        f"<style>{STYLE}</style>",
        *_head(matrix.columns, label, edges, head),
    ]
    y = head
    for family, members in matrix.families.items():
        parts += [
            f'<text class="family" x="{MARGIN}" y="{y + GAP - 6:.1f}">{escape(family)}</text>',
            f'<line x1="{MARGIN + CHAR * (len(family) + 1):.0f}" x2="{edges[-1] + CELL if edges else label:.0f}" '
            f'y1="{y + GAP - 9:.1f}" y2="{y + GAP - 9:.1f}"/>',
        ]
        y += GAP
        for row in members:
            parts += [
                f'<text x="{MARGIN}" y="{y + ROW - 4:.1f}">{escape(row.judged.fault.id)}'
                f"<title>{escape(_title(row.judged))}</title></text>",
                *_judged(row.judged, label, y),
                *(_cell(mark, x, y, check) for mark, x, check in zip(row.marks, edges, matrix.columns, strict=True)),
            ]
            y += ROW
    return "\n".join([*parts, *_legend(y + FOOT / 2), "</svg>", ""])


def _label(matrix: Matrix) -> str:
    """A description of the picture for readers who cannot see it."""
    faults = [row.judged for family in matrix.families.values() for row in family]
    return f"{sum(one.found for one in faults)} of {len(faults)} planted faults found, by {len(matrix.columns)} checks"


def _edges(columns: tuple[Column, ...], x: float) -> Iterator[float]:
    """The start of each column, with a little space between tiers."""
    for number, column in enumerate(columns):
        x += CELL * (number > 0) + 7 * (number > 0 and columns[number - 1].tier != column.tier)
        yield x


def _head(columns: tuple[Column, ...], label: float, edges: list[float], y: float) -> Iterator[str]:
    for number, name in enumerate(JUDGED):
        yield _slanted(name, label + number * CELL, y, "")
    for column, x in zip(columns, edges, strict=True):
        yield _slanted(_spelled(column), x, y, "quiet")


def _spelled(column: Column) -> str:
    return f"{column.check} ({column.tier})"


def _slanted(name: str, x: float, y: float, kind: str) -> str:
    at = f"{x + CELL / 2 + 2:.1f} {y - 2:.1f}"
    return f'<text class="{kind}" transform="translate({at}) rotate({SLANT})">{escape(name)}</text>'


def _judged(one: Judged, label: float, y: float) -> Iterator[str]:
    if one.void:
        yield f'<text class="void" x="{label:.1f}" y="{y + ROW - 4:.1f}">void<title>{escape(one.void)}</title></text>'
        return
    for number, name in enumerate(JUDGED):
        holds = getattr(one, name)
        unnamed = name == "named" and not one.fault.says  # an error has a size and a place, but not always a name
        sign = SIGNS[one.named_by] if name == "named" and holds else "✓"
        kind, sign = ("meant", sign) if holds else ("quiet", "-") if unnamed else ("bad", "✗")
        yield (f'<text class="{kind}" x="{label + number * CELL + CELL / 2:.1f}" y="{y + ROW - 4:.1f}" '
               f'text-anchor="middle">{sign}<title>{"" if holds else "not "}{name}</title></text>')  # fmt: skip


def _cell(mark: Mark, x: float, y: float, column: Column) -> str:
    if mark is Mark.ABSENT:
        return ""
    if mark is Mark.SILENT:
        return f'<circle class="silent" cx="{x + CELL / 2:.1f}" cy="{y + ROW / 2:.1f}" r="1.5"/>'
    side = ROW - 4
    left = x + (CELL - side) / 2
    return (f'<rect class="{mark.name.lower()}" x="{left:.1f}" y="{y + 2:.1f}" width="{side}" height="{side}" rx="2">'
            f"<title>{escape(column.check)}</title></rect>")  # fmt: skip


def _title(one: Judged) -> str:
    origin = f" [{one.fault.origin}]" if one.fault.origin else ""
    return f"{one.fault.what}{origin}"


def _legend(y: float) -> Iterator[str]:
    x: float = MARGIN
    for mark, words in LEGEND:
        yield _cell(mark, x - 3, y - ROW / 2, Column("", ""))
        yield f'<text class="quiet" x="{x + CELL * (mark is not Mark.ABSENT):.1f}" y="{y + 3.5:.1f}">{words}</text>'
        x += CELL * (mark is not Mark.ABSENT) + CHAR * (len(words) + 3)
    yield f'<text class="quiet" x="{x:.1f}" y="{y + 3.5:.1f}">{NAMED}</text>'
