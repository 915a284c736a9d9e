"""The page of the benchmark: which arms its plots draw, and how much slower or faster they are than peers.

Leaves out: the page in a browser (`test_page_family.py`).
"""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from instep.report.html.write_page import page_of_file
from support.running.pages import Read

TIMES = Path("fixtures/results/bench-native.json")


@pytest.fixture(scope="module")
def timed() -> tuple[Mapping[str, Any], list[dict[str, Any]]]:
    """The committed times of the benchmark, and the plots of their page."""
    return json.loads(TIMES.read_text()), Read(page_of_file(TIMES).decode()).data["plots"]


def test_plots_of_the_benchmark_have_four_lines_at_most(timed: tuple[Mapping[str, Any], list[dict[str, Any]]]) -> None:
    """Arms with wrong answers are in a plot all the same."""
    found, plots = timed
    curves = [plot for plot in plots if plot["form"] == "curves"]
    assert len(curves) > 20 and max(len(plot["lines"]) for plot in curves) == 4
    wrong = {(row["kind"], arm) for row in found["rows"] for arm, told in row["arms"].items() if told["finding"]}
    drawn = {(plot["group"], line["name"]) for plot in curves for line in plot["lines"]
             if any(bad for _, _, bad, _ in line["points"])}  # fmt: skip
    cells = Counter((row["kind"], arm) for row in found["rows"] for arm, told in row["arms"].items() if "us" in told)
    assert drawn == {one for one in wrong if cells[one] > 1} and len(drawn) >= 3, "a single cell is no curve"


def test_benchmark_page_draws_ours_as_multiples_of_the_fastest_right_peer(
    timed: tuple[Mapping[str, Any], list[dict[str, Any]]]
) -> None:
    found, plots = timed
    against = {plot["title"]: {line["name"]: line for line in plot["lines"]} for plot in plots
               if plot["title"].endswith("ours / fastest peer")}  # fmt: skip
    lines = against["decode, heads 32, state float32: ours / fastest peer"]
    assert lines["fastest peer"]["base"] and {y for _, y, *_ in lines["fastest peer"]["points"]} == {1}
    (name,), (row,) = lines.keys() - {"fastest peer"}, [
        row for row in found["rows"] if row["kind"] == "decode"
        and row["cell"] == {"batch": 32, "heads": 32, "state": "float32"}]  # fmt: skip
    right = [arm["mean"] for arm in row["arms"].values() if arm["peer"] and "us" in arm and not arm["finding"]]
    (y,) = [y for x, y, *_ in lines[name]["points"] if x == 32]
    assert y == pytest.approx(row["arms"][name]["mean"] / min(right)) and y < 1
    first = plots[0]
    assert first["form"] == "intervals" and "decode" in [row["name"] for row in first["rows"]]
    (kind,) = [row for row in first["rows"] if row["name"] == "decode"]
    assert kind["low"] <= y <= kind["high"] and y in kind["dots"]
