"""Commit strategies by name: a line here and a file beside it.

Leaves out: their contents; see `base.py` for what a strategy is.
"""

from __future__ import annotations

from .base import Strategy
from .snapshot import SNAPSHOT

STRATEGIES: dict[str, Strategy] = {"snapshot": SNAPSHOT}
