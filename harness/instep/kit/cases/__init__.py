"""The cases of single ops: idle and padded requests, fresh memory, ragged batches, red zones, skipped stores.

Leaves out: how a case is built (`case.py`), and the right answers (`kit/expected.py`).
"""

from __future__ import annotations

from .case import Case, Outcome, serve, strays
from .grown import GROW
from .index import INDEX
from .paged import ATTEND, MOVEMENT
from .recurrent import CONV, GDN
from .rows import EXACT_ROWS, ROWS
from .trees import TREE_INDEX, TREE_ROWS

CASES: list[Case] = [*EXACT_ROWS, *ROWS, *INDEX, *CONV, *GDN, *MOVEMENT, *ATTEND, *TREE_INDEX, *TREE_ROWS, *GROW]

__all__ = ["ATTEND", "CASES", "CONV", "EXACT_ROWS", "GDN", "GROW", "INDEX", "MOVEMENT", "ROWS", "TREE_INDEX",
           "TREE_ROWS", "Case", "Outcome", "serve", "strays"]
