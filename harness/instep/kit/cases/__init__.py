"""The cases of single ops: idle and padded requests, fresh memory, ragged batches, red zones, skipped stores.

Leaves out: how a case is built (`case.py`), and the right answers (`kit/expected_results.py`).
"""

from .case import Case, Outcome, serve, strays
from .conv_and_gdn import CONV, RECURRENT
from .grown_trees import GROW
from .integer_ops import INDEX
from .paged_kv import ATTEND, MOVEMENT
from .rows import EXACT_ROWS, ROWS
from .trees import TREE_INDEX, TREE_ROWS

CASES: list[Case] = [*EXACT_ROWS, *ROWS, *INDEX, *CONV, *RECURRENT, *MOVEMENT, *ATTEND, *TREE_INDEX, *TREE_ROWS, *GROW]

__all__ = ["ATTEND", "CASES", "CONV", "EXACT_ROWS", "GROW", "INDEX", "MOVEMENT", "RECURRENT", "ROWS",
           "TREE_INDEX", "TREE_ROWS", "Case", "Outcome", "serve", "strays"]
