"""Pictures of docs/results.md, from a result of `instep bench`, drawn as by `--plots`.

Leaves out: which result (`readme.py`), and tables (`bench_tables.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree as xml

from instep_speed.bench import plots
from instep_speed.bench.bench_types import TOO

from .bench_tables import LAYERS, Results, rows_of


def pictures(result: Results) -> Mapping[str, str]:
    """Name of a file in `docs` -> its content."""
    drawn = {"strategies.svg": _strategies(result), "rounds.svg": _rounds(result)}
    return {name: _text(svg) for name, svg in drawn.items()}


def _strategies(result: Results) -> xml.Element:
    """Verify and commit against the batch, norms and gates computed on the way in every line."""
    rows = [dict(row, arms=_alike(row["arms"]))
            for row in rows_of(result, "strategies", window=4, heads=32, state="float32")]  # fmt: skip
    (svg,) = dict(plots.pictures(rows)).values()
    return svg


def _alike(arms: Mapping[str, Any]) -> dict[str, Any]:
    """Those that do all that a peer's kernel does inside, and the peers."""
    return {name.removesuffix(TOO): arm for name, arm in arms.items() if arm["peer"] or name.endswith(TOO)}


def _rounds(result: Results) -> xml.Element:
    """A bar for every batch: the kernels of a round by kind of work."""
    rows = rows_of(result, "rounds", layers=LAYERS)
    found = {f"batch {row['cell']['batch']}": work for row, arms in plots.works(rows) for work in arms.values()}
    return plots.bars(f"rounds of {LAYERS} layers in the 9B shape: us by kind of work", found)


def _text(svg: xml.Element) -> str:
    xml.indent(svg)
    return xml.tostring(svg, encoding="unicode") + "\n"
