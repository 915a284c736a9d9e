"""Op sets that are wrong in one op, found by the harness as `support.wrong_ops:NAME`.

Leaves out: whole engines that are wrong (`subjects.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from instep_optimized import load

PLAIN = load("plain")


def _stay(**given: Any) -> None:
    """A commit under `snapshot` that leaves the state where it was."""


def _swapped(**given: Any) -> Any:
    """Keys and values change places among the rows that are stored together; whole numbers do not."""
    rows = given["rows"]
    return PLAIN.store_rows(**{**given, "rows": rows.roll(1, 0) if rows.is_floating_point() else rows})


UNMOVED = replace(PLAIN, name="unmoved", move=_stay)
SWAPPED = replace(PLAIN, name="swapped", store_rows=_swapped)
