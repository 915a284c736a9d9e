"""Pictures of docs/results.md, from a result of `instep bench`, drawn as by `--plots`.

Leaves out: which result (`readme.py`), and tables (`bench_tables.py`).
"""

from collections.abc import Mapping
from typing import Any

from instep.report.svg import picture
from instep_speed.bench.bench_types import TOO
from instep_speed.bench.result_document import bars_of, works
from instep_speed.bench.result_document import pictures as plots_of

from .bench_tables import LAYERS, Results, rows_of


def pictures(result: Results) -> Mapping[str, str]:
    """Name of a file in `docs` -> its content."""
    drawn = {"strategies.svg": _strategies(result), "rounds.svg": _rounds(result)}
    return {name: picture(plot).decode() for name, plot in drawn.items()}


def _strategies(result: Results) -> dict[str, Any]:
    """Verify and commit against the batch, norms and gates computed on the way in every line."""
    rows = [dict(row, arms=_alike(row["arms"]))
            for row in rows_of(result, "strategies", window=4, heads=32, state="float32")]  # fmt: skip
    return plots_of(rows)[0]


def _alike(arms: Mapping[str, Any]) -> dict[str, Any]:
    """Those that do all that a peer's kernel does inside, and the peers."""
    return {name.removesuffix(TOO): arm for name, arm in arms.items() if arm["peer"] or name.endswith(TOO)}


def _rounds(result: Results) -> dict[str, Any]:
    """A bar for every batch: the kernels of a round by kind of work."""
    rows = rows_of(result, "rounds", layers=LAYERS)
    found = {f"batch {row['cell']['batch']}": work for row, arms in works(rows) for work in arms.values()}
    return bars_of(f"rounds of {LAYERS} layers in the 9B shape: us by kind of work", found)

