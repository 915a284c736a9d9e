"""Write a plot of a document as SVG, for light and dark pages: a matrix, curves or bars.

The data is that of the plots of a page (`html/assets/plots.js`). Every mark has its numbers as a title. Nothing is
measured: text has a fixed-width font. Leaves out: intervals, which only pages have.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any
from xml.etree import ElementTree as xml

Plot = Mapping[str, Any]
WIDTH, HEIGHT, LEFT, TOP, LEGEND = 560, 340, 64, 42, 250
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#f0027f",
           "#9467bd", "#7f7f00", "#17becf", "#ff69b4")  # fmt: skip
ROW, CELL, CHAR, GAP, MARGIN = 15, 17, 6.05, 20, 8  # of a matrix: a line, a cell, a character, space above a group
SLANT, RISE, RUN = -52, 0.79, 0.62  # degrees of a column's name, and their sine and cosine
SIGNS = {"yes": "✓", "no": "✗"}  # kinds of cells that are a sign, if a cell has no own one
STYLE = """
  text { font: 10px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #24292f }
  .quiet { fill: #6e7781 } .group { font-weight: bold } .no { fill: #cf222e }
  .meant, .yes { fill: #1a7f37 } .also { fill: #1a7f37; fill-opacity: .35 } .silent { fill: #8c959f }
  .void { fill: #bf8700 } line { stroke: #8c959f; stroke-opacity: .35 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .quiet { fill: #8d96a0 } .no { fill: #f85149 }
    .meant, .yes { fill: #3fb950 } .also { fill: #3fb950; fill-opacity: .4 } .silent { fill: #6e7681 }
    .void { fill: #d29922 }
  }
"""


def picture(plot: Plot) -> bytes:
    """The whole file."""
    svg = {"matrix": matrix, "curves": curves, "bars": bars}[plot["form"]](plot)
    xml.indent(svg, space="")
    return xml.tostring(svg, encoding="unicode").encode() + b"\n"


def matrix(plot: Plot) -> xml.Element:
    """Cells by row and column. `groups` of rows have headings, `gaps` are columns with space before them."""
    columns, rows, groups = plot["columns"], plot["rows"], plot.get("groups", ())
    left = MARGIN + CHAR * _longest([row["name"] for row in rows]) + 10
    edges = [left + CELL * number + 7 * sum(gap <= number for gap in plot.get("gaps", ()))
             for number in range(len(columns))]  # fmt: skip
    top = CHAR * _longest(columns) * RISE + MARGIN + 4
    width = max([left, *edges]) + CELL + CHAR * _longest(columns) * RUN + MARGIN
    svg = _canvas(plot["title"], width, top + ROW * len(rows) + GAP * (len(set(groups)) + 2))
    for name, x in zip(columns, edges, strict=True):
        at = f"translate({x + CELL / 2 + 2:.1f} {top - 2:.1f}) rotate({SLANT})"
        _add(svg, "text", name, transform=at)
    marks: dict[int, list[Sequence[Any]]] = {}
    for cell in plot["cells"]:
        marks.setdefault(cell[0], []).append(cell)
    y = top
    for number, row in enumerate(rows):
        if groups and groups[number] != (groups[number - 1] if number else None):
            _add(svg, "text", groups[number], x=MARGIN, y=y + GAP - 6, kind="group")
            y += GAP
        told = " ".join(filter(None, (row.get("told") or {}).get("lines", ())))
        _add(_add(svg, "text", row["name"], x=MARGIN, y=y + ROW - 4), "title", told)
        for _, column, kind, *sign in marks.get(number, ()):
            mark = _cell(svg, kind, "".join(sign[:1]), edges[column], y)
            if kind != "silent":
                _add(mark, "title", f"{columns[column]}: {kind}")
        y += ROW
    x = float(MARGIN)
    for kind, words, *sign in plot.get("legend", ()):
        _cell(svg, kind, "".join(sign), x, y + ROW)
        _add(svg, "text", words, x=x + CELL + 2, y=y + 2 * ROW - 4, kind="quiet")
        x += CELL + CHAR * (len(words) + 3)
    _resize(svg, max(width, x), y + 2 * ROW + MARGIN)
    return svg


def _cell(svg: xml.Element, kind: str, sign: str, x: float, y: float) -> xml.Element:
    if sign or kind in (*SIGNS, "void"):
        said = sign or SIGNS.get(kind, kind)
        return _add(svg, "text", said, x=x + CELL / 2, y=y + ROW - 4, kind=kind, anchor="middle")
    if kind == "silent":
        return _add(svg, "circle", cx=x + CELL / 2, cy=y + ROW / 2, r=1.5, kind=kind)
    return _add(svg, "rect", x=x + 3, y=y + 2, width=ROW - 4, height=ROW - 4, rx=2, kind=kind)


def curves(plot: Plot) -> xml.Element:
    """Lines with logarithmic scales; that of a floor is dashed and grey."""
    every = [(x, y) for line in plot["lines"] for x, y, *_ in line["points"] if x > 0 and y > 0]
    (left, right), (low, high) = (_span([point[axis] for point in every]) for axis in (0, 1))
    svg = _canvas(plot["title"], LEFT + WIDTH + LEGEND, TOP + HEIGHT + 44)

    def place(x: float, y: float) -> tuple[float, float]:
        part = math.log(x / left) / math.log(right / left), math.log(y / low) / math.log(high / low)
        return LEFT + part[0] * WIDTH, TOP + (1 - part[1]) * HEIGHT

    for at in sorted({x for x, _ in every}):
        _add(svg, "text", f"{at:g}", x=place(at, low)[0], y=TOP + HEIGHT + 16, anchor="middle")
    power = 10.0 ** math.floor(math.log10(low))
    for at in (step * power * 10.0**more for more in range(9) for step in (1, 2, 5)):
        if low <= at <= high:
            y = place(left, at)[1]
            _add(svg, "line", x1=LEFT, x2=LEFT + WIDTH, y1=y, y2=y)
            _add(svg, "text", f"{at:g}", x=LEFT - 6, y=y + 4, anchor="end")
    _add(svg, "text", plot["x"], x=LEFT + WIDTH / 2, y=TOP + HEIGHT + 34, anchor="middle")
    _add(svg, "text", plot["y"], x=4, y=TOP - 8)
    for number, (line, colour) in enumerate(zip(plot["lines"], _colours(plot["lines"]), strict=False)):
        spots = [(*place(x, y), x, y) for x, y, *_ in line["points"] if x > 0 and y > 0]
        dashed = {"stroke-dasharray": "5 4"} if line.get("base") else {}
        _add(svg, "polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y, *_ in spots), fill="none", stroke=colour,
             **dashed)  # fmt: skip
        for x, y, at, value in spots:
            mark = _add(svg, "circle", cx=x, cy=y, r=3, fill=colour)
            _add(mark, "title", f"{line['name']}, {plot['x']} {at:g}: {value:.4g} {plot['y']}")
        _legend(svg, number, line["name"], colour)
    return svg


def bars(plot: Plot) -> xml.Element:
    """A bar for every name, divided by part."""
    names, parts, values = plot["names"], plot["parts"], plot["values"]
    most = max((sum(values[part][row] for part in parts) for row in range(len(names))), default=0.0) or 1.0
    high = min(60.0, HEIGHT / max(1, len(names)))
    svg = _canvas(plot["title"], LEFT + WIDTH + LEGEND, TOP + max(int(high * len(names)), 18 * len(parts)) + 14)
    for row, name in enumerate(names):
        x, y = float(LEFT), TOP + row * high
        _add(svg, "text", name, x=LEFT, y=y + 10)
        for part, colour in zip(parts, cycle(COLOURS), strict=False):
            if value := values[part][row]:
                bar = _add(svg, "rect", x=x, y=y + 14, width=value / most * WIDTH, height=high * 0.5, fill=colour)
                _add(bar, "title", f"{name}, {part}: {value:.4g} {plot['x']}")
                x += value / most * WIDTH
    for number, (part, colour) in enumerate(zip(parts, cycle(COLOURS), strict=False)):
        _legend(svg, number, part, colour)
    return svg


def _colours(lines: Sequence[Plot]) -> Iterator[str]:
    colours = cycle(COLOURS)
    yield from ("#888" if line.get("base") else next(colours) for line in lines)


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values, default=1.0), max(values, default=1.0)
    return (low, high) if high > low else (low / 2, high * 2)


def _longest(names: Sequence[str]) -> int:
    return max(map(len, names), default=0)


def _canvas(title: str, wide: float, high: float) -> xml.Element:
    svg = xml.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img", "aria-label": title})
    _resize(svg, wide, high)
    _add(svg, "style", STYLE)
    _add(svg, "text", title, x=MARGIN, y=16, kind="group")
    return svg


def _resize(svg: xml.Element, wide: float, high: float) -> None:
    svg.attrib.update(viewBox=f"0 0 {wide:.0f} {high:.0f}", width=f"{wide:.0f}", height=f"{high:.0f}")


def _legend(svg: xml.Element, number: int, name: str, colour: str) -> None:
    x, y = LEFT + WIDTH + 14, TOP + 14 + 18 * number
    _add(svg, "rect", x=x, y=y - 9, width=10, height=10, fill=colour)
    _add(svg, "text", name, x=x + 16, y=y)


def _add(
    parent: xml.Element, tag: str, text: str = "", *, kind: str = "", anchor: str = "", **given: Any
) -> xml.Element:
    named = {"class": kind, "text-anchor": anchor, **given}
    made = xml.SubElement(parent, tag, {
        name: f"{value:.1f}" if isinstance(value, float) else str(value) for name, value in named.items() if value != ""
    })  # fmt: skip
    made.text = text or None
    return made
