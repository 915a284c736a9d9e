"""The tree that a draft head grew in an event, computed from the logits that a side shows: its beams and its window.

The definition (`contract/grown_draft_tree.py`) runs on these logits in fp64. So it gives the rows on which the side
should have run, and the window that follows from them. Leaves out: judging a window (`checks/grown_trees.py`).
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from instep_reference.contract.engine import Draft
from instep_reference.contract.place_names import AFTER_LAYERS, Place
from instep_reference.draft.grow_draft_tree import ROOT, Growing
from instep_reference.label_mixing import most_named
from instep_reference.sampling import most_probable

from ..player import Side
from ..tier_allowances import log_prob_error
from .event_context import EventContext

KEPT = 64  # cached growths: every place of a draft needs them
Said = list[list[tuple[int, float]]]  # the most probable tokens of each row, with their log-probabilities


@dataclass(frozen=True)
class Growth:
    """A growth. growing: after as many steps as there are logits; logits: of each step, a row per beam, in fp64

    `said`   the input of `growing`
    whole    whether no step is missing
    parents  of the nodes of the head's rows: the root, then the beams of every step that it ran on
    tokens   of these nodes. They end before the first step whose beams the side's own rounding may have reordered
    """

    growing: Growing
    logits: list[torch.Tensor]
    said: list[Said]
    whole: bool
    parents: tuple[int, ...]
    tokens: tuple[int, ...]

    def path(self, node: int) -> tuple[int, ...]:
        """The tokens from the root's child to a node of the head's rows."""
        return () if not node else (*self.path(self.parents[node]), self.tokens[node - 1])


def grown_of(context: EventContext, side: Side, request: str) -> Growth | None:
    """Grow the tree; None: the drafter grows no trees, or the side shows no logits after the root."""
    event, topk = context.event, context.expected.topk
    if not isinstance(event, Draft) or topk is None or request not in event.requests:
        return None
    return _SHELF.of(side, event.requests.index(request), topk, context.expected.num_steps, context.rounded is None)


class _Shelf:
    """The last growths, by side and batch row; the side is held, so that its id is not reused."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[int, int], tuple[Side, Growth | None]] = OrderedDict()

    def of(self, side: Side, row: int, topk: int, num_steps: int, labels: bool) -> Growth | None:
        key = id(side), row
        if key not in self._kept or self._kept[key][0] is not side:
            self._kept[key] = side, _grown(side, row, topk, num_steps, labels)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return self._kept[key][1]


_SHELF = _Shelf()


def _grown(side: Side, row: int, topk: int, num_steps: int, labels: bool) -> Growth | None:
    growing, shown, heard, sure = Growing(topk), list[torch.Tensor](), list[Said](), 0
    for step in range(num_steps):
        logits, count = side.places.get(Place(f"chain.{step}", AFTER_LAYERS, "logits")), topk if step else 1
        if logits is None or len(logits) < (row + 1) * count or logits.isnan().any():
            break
        mine = logits[row * count : (row + 1) * count].double().cpu()
        heard.append(said_by(mine, topk, labels=labels))
        growing.step(heard[-1])
        shown.append(mine)
        if sure == step and (labels or _apart(growing, shown, logits.dtype)):
            sure += 1
    whole, steps = len(shown) == num_steps, min(len(shown), sure + 1)
    return None if not shown else Growth(growing, shown, heard, whole, *_rows(growing, steps))


def _apart(growing: Growing, logits: Sequence[torch.Tensor], stored: torch.dtype) -> bool:
    """Whether the beams of the last step keep their order if sums are rounded in the side's own width.

    Children of one beam are in the order of their logits. If their scores round to one value, the order is that of
    their numbers, which is the same.
    """
    eps = torch.finfo(torch.float64 if stored is torch.float64 else torch.float32).eps
    off = [max(log_prob_error(float(row.abs().amax()), len(row), eps) for row in rows) for rows in logits]
    last = [number for number, one in enumerate(growing.candidates) if one.step == len(logits)]
    order = [growing.candidates[number] for number in growing.highest(last, growing.topk + 1)]
    return all(
        one.parent == other.parent
        or one.score - other.score > 2 * (sum(off) + len(off) * eps * abs(other.score))
        for one, other in pairwise(order)
    )


def said_by(logits: torch.Tensor, topk: int, *, labels: bool) -> Said:
    """The head's most probable tokens in rows of logits [rows, vocab]."""
    if labels:
        return [most_named(token, topk, logits.shape[1]) for token in logits.argmax(-1).tolist()]
    return most_probable(logits, topk)


def _rows(growing: Growing, steps: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Parents and tokens of the head's rows: of the beams of all steps except the last known one."""
    node = {ROOT: 0}
    parents, tokens = [-1], list[int]()
    for beams in growing.beams[1:steps]:
        for beam in beams:
            parents.append(node[growing.candidates[beam].parent])
            tokens.append(growing.candidates[beam].token)
        node |= {beam: len(parents) - len(beams) + at for at, beam in enumerate(beams)}
    return tuple(parents), tuple(tokens)


@dataclass(frozen=True)
class HeadTree:
    """The nodes on which the draft head ran: their parents, the root's -1 first, and the tokens of the others."""

    parents: Sequence[int]
    tokens: Sequence[int]


def head_tree(context: EventContext, request: str, drafts: Sequence[int]) -> HeadTree | None:
    """The tree of the subject's head: the window with its given drafts, or the tree that it grew. None: it is not
    shown.
    """
    if context.expected.topk is None:
        return HeadTree(context.expected.parents[request], drafts)
    growth = grown_of(context, context.subject, request)
    return None if growth is None else HeadTree(growth.parents, growth.tokens)


def step_of(context: EventContext, node: int) -> int:
    """The step of a draft, from 1, in which the head runs on a node: one node a step, or all beams."""
    topk = context.expected.topk
    return node if topk is None else (node - 1) // topk + 1
