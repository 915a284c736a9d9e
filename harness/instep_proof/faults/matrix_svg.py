"""The matrix fault x check as SVG for light and dark pages, with a row per fault and a column per check.

It is made from the data that `--json` writes, as the page. It measures nothing: text has a fixed-width font.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from instep.report.document_parts import Data

from .result_document import SAYS, SIGNS, by_family, checks_of, mark, word

ROW, CELL, CHAR = 15, 17, 6.05  # pixels: a line, a cell, a character of the font at its size
FOOT, GAP, MARGIN = 40, 20, 8  # pixels: legend; space between families; margin
SLANT, RISE, RUN = -52, 0.79, 0.62  # degrees of the checks' names, and their sine and cosine
JUDGED = ("found", "named", "located")
NAMED = "named: ✓ by the check, b by the bank, h by a hypothesis"
LEGEND = (
    ("meant", SAYS["meant"]), ("also", SAYS["also"]), ("silent", SAYS["silent"]), ("", "blank: nothing to compare"),
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


def picture_of(found: Data) -> str:
    """The complete file."""
    rows, checks = found["results"], checks_of(found["results"])
    label = MARGIN + CHAR * max((len(one["id"]) for one in rows), default=0) + 10
    edges = list(_edges([*checks.values()], label + len(JUDGED) * CELL + 14))
    longest = CHAR * max((len(f"{check} ({tier})") for check, tier in checks.items()), default=len(JUDGED[-1]))
    head = longest * RISE + MARGIN + 4
    legend = len(LEGEND) * CELL + CHAR * (sum(len(words) + 3 for _, words in LEGEND) + len(NAMED))
    width = max((edges[-1] if edges else label) + CELL + longest * RUN, legend) + MARGIN
    height = head + ROW * len(rows) + GAP * len(by_family(found)) + FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" aria-label="{sum(one["found"] for one in rows)} of {len(rows)} planted '
        f'faults found, by {len(checks)} checks">',
        f"<style>{STYLE}</style>",
        *_head(checks, label, edges, head),
    ]
    y = head
    for family, members in by_family(found).items():
        parts += [
            f'<text class="family" x="{MARGIN}" y="{y + GAP - 6:.1f}">{escape(family)}</text>',
            f'<line x1="{MARGIN + CHAR * (len(family) + 1):.0f}" x2="{edges[-1] + CELL if edges else label:.0f}" '
            f'y1="{y + GAP - 9:.1f}" y2="{y + GAP - 9:.1f}"/>',
        ]
        y += GAP
        for one in members:
            parts += [
                f'<text x="{MARGIN}" y="{y + ROW - 4:.1f}">{escape(one["id"])}'
                f"<title>{escape(_title(one))}</title></text>",
                *_judged(one, label, y),
                *(_cell(mark(one, check), x, y, check) for x, check in zip(edges, checks, strict=True)),
            ]
            y += ROW
    return "\n".join([*parts, *_legend(y + FOOT / 2), "</svg>", ""])


def _edges(tiers: list[str], x: float) -> Iterator[float]:
    """The start of each column, with a little space between tiers."""
    for number, tier in enumerate(tiers):
        x += CELL * (number > 0) + 7 * (number > 0 and tiers[number - 1] != tier)
        yield x


def _head(checks: dict[str, str], label: float, edges: list[float], y: float) -> Iterator[str]:
    for number, name in enumerate(JUDGED):
        yield _slanted(name, label + number * CELL, y, "")
    for (check, tier), x in zip(checks.items(), edges, strict=True):
        yield _slanted(f"{check} ({tier})", x, y, "quiet")


def _slanted(name: str, x: float, y: float, kind: str) -> str:
    at = f"{x + CELL / 2 + 2:.1f} {y - 2:.1f}"
    return f'<text class="{kind}" transform="translate({at}) rotate({SLANT})">{escape(name)}</text>'


def _judged(one: Data, label: float, y: float) -> Iterator[str]:
    if one["void"]:
        why = escape(one["void"])
        yield f'<text class="void" x="{label:.1f}" y="{y + ROW - 4:.1f}">void<title>{why}</title></text>'
        return
    for number, name in enumerate(JUDGED):
        holds, said = one[name], word(one, name)
        kind, sign = {"-": ("quiet", "-"), "NO": ("bad", "✗")}.get(said, ("meant", SIGNS.get(said, "✓")))
        yield (f'<text class="{kind}" x="{label + number * CELL + CELL / 2:.1f}" y="{y + ROW - 4:.1f}" '
               f'text-anchor="middle">{sign}<title>{"" if holds else "not "}{name}</title></text>')  # fmt: skip


def _cell(kind: str, x: float, y: float, check: str) -> str:
    if not kind:
        return ""
    if kind == "silent":
        return f'<circle class="silent" cx="{x + CELL / 2:.1f}" cy="{y + ROW / 2:.1f}" r="1.5"/>'
    side = ROW - 4
    left = x + (CELL - side) / 2
    return (f'<rect class="{kind}" x="{left:.1f}" y="{y + 2:.1f}" width="{side}" height="{side}" rx="2">'
            f"<title>{escape(check)}</title></rect>")  # fmt: skip


def _title(one: Data) -> str:
    return f"{one['what']} [{one['origin']}]" if one["origin"] else str(one["what"])


def _legend(y: float) -> Iterator[str]:
    x: float = MARGIN
    for kind, words in LEGEND:
        yield _cell(kind, x - 3, y - ROW / 2, "")
        yield f'<text class="quiet" x="{x + CELL * bool(kind):.1f}" y="{y + 3.5:.1f}">{words}</text>'
        x += CELL * bool(kind) + CHAR * (len(words) + 3)
    yield f'<text class="quiet" x="{x:.1f}" y="{y + 3.5:.1f}">{NAMED}</text>'
