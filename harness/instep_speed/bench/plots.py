"""Draw results as SVG: time against an axis with floor and peers, and a round's time by kind of work.

Two scales, marks and a legend need no library. Every mark has its numbers as a title. Leaves out: tables
(`result_document.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as xml

from instep.atomic_write import folder_for, writable, write_atomically

from . import kind
from .bench_types import key
from .run import Bench, Row

WIDTH, HEIGHT, LEFT, TOP, LEGEND = 560, 340, 64, 34, 230
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#000000",
           "#9467bd", "#7f7f00", "#17becf", "#ff69b4")  # fmt: skip
Points = list[tuple[float, float]]


def ready(folder: Path, kinds: Sequence[str], *others: Path | None) -> None:
    """Make the folder, or refuse it, before anything is measured. others: files that the command reads or writes."""
    folder_for(folder, "--plots")
    for name in kinds:
        for file in {folder / f"{name}.svg", *folder.glob(f"{name}-*.svg")}:
            writable(file, *others)


def write(found: Bench, folder: Path) -> list[Path]:
    """Write one file for every plot and return their paths."""
    drawn = dict(pictures(found.rows))
    folder_for(folder, "--plots")
    files = {folder / f"{name}.svg": xml.tostring(picture) for name, picture in drawn.items()}
    if files:
        write_atomically(files)
    return list(files)


def pictures(rows: Sequence[Row]) -> Iterator[tuple[str, xml.Element]]:
    """A plot for every kind and every combination of its other axes that has at least two points."""
    for row, work in works(rows):
        which = f"{row['kind']}, {key(row['cell'])}"
        yield _name(which, "work"), bars(f"{which}: us by kind of work", work)
    for (name, rest), mine in grouped(rows).items():
        lines: dict[str, Points] = {"floor": []}
        x = kind(name).x
        for row in mine:
            if row["floor_us"]:
                lines["floor"].append((row["cell"][x], row["floor_us"]))
            for arm, told in row["arms"].items():
                if "us" in told:
                    lines.setdefault(arm, []).append((row["cell"][x], told["us"]))
        if len({at for points in lines.values() for at, _ in points}) > 1:
            yield _name(name, rest), curves(f"{name}, {rest}".strip(", "), x, f"us, {kind(name).unit}", lines)


def works(rows: Sequence[Row]) -> Iterator[tuple[Row, dict[str, dict[str, float]]]]:
    """Rows whose arms have times by kind of work, in the order of the plotted axis: arm -> kind of work -> us."""
    for row in sorted(rows, key=lambda row: float(row["cell"].get(kind(row["kind"]).x, 0))):
        if work := {name: arm["work"] for name, arm in row["arms"].items() if "work" in arm}:
            yield row, work


def grouped(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """Group rows that differ in the plotted axis alone, by kind and the other axes, in the order of that axis."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        x = kind(row["kind"]).x
        if x in row["cell"]:
            rest = key({name: value for name, value in row["cell"].items() if name != x})
            groups.setdefault((row["kind"], rest), []).append(row)
    return {group: sorted(mine, key=lambda row: float(row["cell"][kind(row["kind"]).x]))
            for group, mine in groups.items()}


def _name(*words: str) -> str:
    return "-".join("".join(letter if letter.isalnum() else " " for letter in " ".join(words)).split())


def curves(title: str, across: str, up: str, lines: Mapping[str, Points]) -> xml.Element:
    """Draw lines with logarithmic scales. The line `floor` is dashed and grey."""
    every = [point for points in lines.values() for point in points if min(point) > 0]
    (left, right), (low, high) = (_span([point[axis] for point in every]) for axis in (0, 1))
    svg = _canvas(title)

    def place(x: float, y: float) -> tuple[float, float]:
        part = math.log(x / left) / math.log(right / left), math.log(y / low) / math.log(high / low)
        return LEFT + part[0] * WIDTH, TOP + (1 - part[1]) * HEIGHT

    for at in sorted({point[0] for point in every}):
        _text(svg, place(at, low)[0], TOP + HEIGHT + 16, f"{at:g}", "middle")
    power = 10.0 ** math.floor(math.log10(low))
    for at in (step * power * 10.0**more for more in range(9) for step in (1, 2, 5)):
        if low <= at <= high:
            y = place(left, at)[1]
            _add(svg, "line", x1=LEFT, x2=LEFT + WIDTH, y1=y, y2=y, stroke="#ddd")
            _text(svg, LEFT - 6, y + 4, f"{at:g}", "end")
    _text(svg, LEFT + WIDTH / 2, TOP + HEIGHT + 34, across, "middle")
    _text(svg, 4, TOP - 8, up)
    for number, (name, points) in enumerate(lines.items()):
        colour = "#888" if name == "floor" else COLOURS[(number - 1) % len(COLOURS)]
        spots = [(*place(x, y), x, y) for x, y in points if min(x, y) > 0]
        dashed = {"stroke-dasharray": "5 4"} if name == "floor" else {}
        _add(svg, "polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y, *_ in spots), fill="none", stroke=colour,
             **dashed)  # fmt: skip
        for x, y, at, value in spots:
            mark = _add(svg, "circle", cx=x, cy=y, r=3, fill=colour)
            _add(mark, "title").text = f"{name}, {across} {at:g}: {value:.4g} us"
        _legend(svg, number, name, colour)
    return svg


def bars(title: str, arms: Mapping[str, Mapping[str, float]]) -> xml.Element:
    """Draw a bar for every arm, divided by kind of work."""
    most = max((sum(parts.values()) for parts in arms.values()), default=1.0) or 1.0
    names = list(dict.fromkeys(name for parts in arms.values() for name in parts))
    high = min(60.0, HEIGHT / max(1, len(arms)))
    svg = _canvas(title, max(int(high * len(arms)), 18 * len(names)) + 14)
    for row, (arm, parts) in enumerate(arms.items()):
        x, y = float(LEFT), TOP + row * high
        _text(svg, LEFT, y + 10, arm)
        for name, value in parts.items():
            wide = value / most * WIDTH
            colour = COLOURS[names.index(name) % len(COLOURS)]
            bar = _add(svg, "rect", x=x, y=y + 14, width=wide, height=high * 0.5, fill=colour)
            _add(bar, "title").text = f"{arm}, {name}: {value:.4g} us"
            x += wide
    for number, name in enumerate(names):
        _legend(svg, number, name, COLOURS[number % len(COLOURS)])
    return svg


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values, default=1.0), max(values, default=1.0)
    return (low, high) if high > low else (low / 2, high * 2)


def _canvas(title: str, tall: int = HEIGHT + 44) -> xml.Element:
    wide, high = LEFT + WIDTH + LEGEND, TOP + tall
    svg = xml.Element("svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {wide} {high}", width=str(wide),
                      height=str(high))  # fmt: skip
    _add(svg, "rect", width=wide, height=high, fill="#fff")
    _text(svg, LEFT, 16, title)
    return svg


def _legend(svg: xml.Element, number: int, name: str, colour: str) -> None:
    x, y = LEFT + WIDTH + 14, TOP + 14 + 18 * number
    _add(svg, "rect", x=x, y=y - 9, width=10, height=10, fill=colour)
    _text(svg, x + 16, y, name)


def _text(parent: xml.Element, x: float, y: float, text: str, anchor: str = "start") -> None:
    made = _add(parent, "text", x=x, y=y)
    made.set("text-anchor", anchor)
    made.set("font-size", "12")
    made.set("font-family", "sans-serif")
    made.text = text


def _add(parent: xml.Element, tag: str, **attributes: Any) -> xml.Element:
    told = {name: f"{value:.2f}" if isinstance(value, float) else str(value) for name, value in attributes.items()}
    return xml.SubElement(parent, tag, told)
