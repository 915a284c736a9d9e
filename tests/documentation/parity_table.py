"""The file of parity figures, `fixtures/results/parity.json`, and the table of docs/results.md.

Leaves out: measuring (`parity.py`); so it needs neither torch nor transformers.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from . import markdown

RESULTS = Path(__file__).resolve().parents[2] / "fixtures" / "results" / "parity.json"
# Relative; what the reference is held to. Measured: up to 2e-14 and 2e-5, that is a few hundred units in the last place
# (1.1e-16, 6e-8), which is what sums in another order over 70 tokens and five layers make of it. The smallest slips
# planted in `test_oracle.py` come out above 1e-9.
ALLOWED = {"fp64": 1e-11, "fp32": 1e-4}


@dataclass(frozen=True)
class Parity:
    """Worst relative errors of a configuration, over all ways; `compared` counts numbers."""

    configuration: str
    width: str
    hidden: float
    logits: float
    memory: float | None
    allowed: float
    compared: int

    @property
    def worst(self) -> float:
        errors = [self.hidden, self.logits, 0.0 if self.memory is None else self.memory]
        # max() passes over a NaN that does not come first
        return math.nan if any(map(math.isnan, errors)) else max(errors)


def stored() -> list[Parity]:
    """The rows of the committed file."""
    return [Parity(**row) for row in json.loads(RESULTS.read_text())["rows"]]


def store(rows: Sequence[Parity], versions: Mapping[str, str]) -> None:
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    data = {"measured_with": dict(versions), "rows": [asdict(row) for row in rows]}
    RESULTS.write_text(json.dumps(data, indent=1) + "\n")


def table(rows: Sequence[Parity]) -> str:
    """Markdown, one line per configuration: the worst over hidden rows, logits and memory, in both widths."""
    worst = {(row.configuration, row.width): row.worst for row in rows}
    return markdown.table(("configuration", "fp64 (1e-11 allowed)", "fp32 (1e-4 allowed)"), (
        (name, *(f"{worst[name, width]:.1e}" for width in ALLOWED))
        for name in dict.fromkeys(row.configuration for row in rows)))
