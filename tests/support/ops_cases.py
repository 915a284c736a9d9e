"""The shared op cases: one list on which every op set must agree.

Leaves out: how a case is built and judged (`ops_case.py`: `serve`, `agree`, `strays`). Used so:

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_triton_agrees_with_plain(case):
        assert agree(case, serve(PLAIN, case), serve(TRITON, case)) == []
"""

from __future__ import annotations

from .ops_case import Case, Outcome, agree, serve, strays
from .ops_grow_cases import GROW
from .ops_index_cases import INDEX
from .ops_paged_cases import ATTEND, MOVEMENT
from .ops_recurrent_cases import CONV, GDN
from .ops_row_cases import EXACT_ROWS, ROWS
from .ops_tree_cases import TREE_INDEX, TREE_ROWS

CASES: list[Case] = [*EXACT_ROWS, *ROWS, *INDEX, *CONV, *GDN, *MOVEMENT, *ATTEND, *TREE_INDEX, *TREE_ROWS,
                     *GROW]

__all__ = ["ATTEND", "CASES", "CONV", "EXACT_ROWS", "GDN", "GROW", "INDEX", "MOVEMENT", "ROWS", "TREE_INDEX",
           "TREE_ROWS", "Case", "Outcome", "agree", "serve", "strays"]
