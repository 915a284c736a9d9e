"""Trees that are treated as chains, in conv and recurrence or in positions.

Leaves out: states of other nodes, which T2d recognises (`checks/wrong_tree_states.py`).
"""

from collections.abc import Iterator

import torch

from instep_reference.attention import rotate

from ...oracle.single_layer_run import LayerWork
from ...trace.tree_shape import depths
from .finding_case import Case, Explanation

BACKWARDS = ("mixed", "core", "update", "attended")


def trees(case: Case) -> Iterator[Explanation]:
    work = None if case.piece is None else case.piece.work
    if not isinstance(work, LayerWork) or work.parents is None:
        return
    if case.component in BACKWARDS:
        says = "continues from the row before, not from its parent: the tree is taken for a chain"
        yield from case.made(says, parents=None)
    elif case.component in ("query", "key"):
        number = torch.arange(len(work.parents))
        by = number - torch.tensor(depths(work.parents))
        right = case.right.to("cpu", torch.float64)
        yield Explanation("is rotated by the number of its node, not by its depth",
                          rotate(right, by, case.weights.config))  # fmt: skip
