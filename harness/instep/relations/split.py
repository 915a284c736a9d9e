"""Split is whole: where a prompt is cut into chunks does not matter to what stands behind it.

Leaves out: bits, except for labels: products over a chunk are summed in another order than those over two.
"""

from __future__ import annotations

from ..verdict import Tier
from .arms import alike, no_trees
from .base import Case, Relation, Results
from .retold import Life, alone, chunked, just_begun

# Around the conv's width and the prefill kernels' 64 tokens at a time.
EDGES = (1, 2, 3, 63, 64, 65)


def hold(case: Case) -> Results:
    told = case.told("the trace's chunks", lambda: alone(case.trace, just_begun))
    whole = case.told("whole prompts", lambda: alone(case.trace, lambda life: chunked(())(just_begun(life))))
    cut = case.told(
        f"chunks of {', '.join(map(str, EDGES))}", lambda: alone(case.trace, lambda life: _at_edges(life))
    )
    for other in (whole, cut):
        yield from alike("split", case, told, other, exact=case.labels)


def _at_edges(life: Life) -> Life:
    return chunked(EDGES)(just_begun(life))


RELATION = Relation(
    "split", "a prompt in one chunk leaves what it leaves in any chunks", (Tier.BITWISE, Tier.PROPAGATED), hold,
    no_trees,
)
