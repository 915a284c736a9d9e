"""Known mistakes of a drafter that grows a tree: the definition with one thing changed.

Leaves out: whether the tree is wrong (`grown_trees.py`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from instep_reference.contract.engine import Draft
from instep_reference.draft.grow_draft_tree import Growing

from ..finding_problem import Explained, Mistake, NamedMistake, WrongContent
from ..watch.event_context import EventContext
from ..watch.grown_tree import Said, grown_of
from .check_interface import shared_by_all

Tree = tuple[list[int], list[int]]  # tokens and parents of drafts


class _Wrong(Growing):
    def tree(self, drafts: int) -> Tree:
        """The tree of the chosen candidates; a child whose parent is not chosen follows the root."""
        chosen = self.chosen(drafts)
        node = {number: at for at, number in enumerate(chosen, start=1)}
        taken = [self.candidates[number] for number in chosen]
        return [one.token for one in taken], [node.get(one.parent, 0) for one in taken]


class _HigherTie(_Wrong):
    def highest(self, among: Sequence[int], count: int) -> list[int]:
        return sorted(among, key=lambda number: (-self.candidates[number].score, -number))[:count]


class _Unadded(_Wrong):
    def score(self, parent: int, chance: float) -> float:
        return chance


class _Chances(_Wrong):
    def score(self, parent: int, chance: float) -> float:
        return super().score(parent, math.exp(chance))


class _NextBeam(_Wrong):
    def parent(self, beam: int) -> int:
        beams = self.beams[-1]
        return beams[(beam + 1) % len(beams)]


class _BeamBefore(_Wrong):
    def parent(self, beam: int) -> int:
        return self.beams[-1][beam - 1]


class _ParentAlone(_Wrong):
    def step(self, said: Sequence[Sequence[tuple[int, float]]]) -> None:
        beams, first = self.beams[-1], len(self.candidates)
        super().step(said)
        beside = dict(zip(beams, [beams[-1], *beams[:-1]], strict=True))
        self.candidates[first:] = [replace(one, parent=beside[one.parent]) for one in self.candidates[first:]]


class _LastStep(_Wrong):
    def chosen(self, drafts: int) -> list[int]:
        last = max(one.step for one in self.candidates)
        return sorted(self.highest([at for at, one in enumerate(self.candidates) if one.step == last], drafts))


class _FirstComes(_Wrong):
    def chosen(self, drafts: int) -> list[int]:
        return list(range(min(drafts, len(self.candidates))))


class _ByScore(_Wrong):
    def chosen(self, drafts: int) -> list[int]:
        return self.highest(range(len(self.candidates)), drafts)


MISTAKES: tuple[Mistake[type[Growing]], ...] = (
    Mistake("ties-by-higher-number", "equal scores are ordered by the higher number first", _HigherTie),
    Mistake("score-without-parent", "the score of the parent is not added", _Unadded),
    Mistake("probabilities-added", "probabilities are added, not their logarithms", _Chances),
    Mistake("parent-one-beam-too-high", "a parent is one beam too high", _NextBeam),
    Mistake("parent-one-beam-too-low", "a parent is one beam too low", _BeamBefore),
    Mistake("parent-of-another-score", "a parent is the beam before the one whose score was added", _ParentAlone),
    Mistake("last-step-alone", "only candidates of the last step are taken", _LastStep),
    Mistake("first-candidates", "the first candidates are taken, not the best", _FirstComes),
    Mistake("nodes-by-score", "nodes are numbered by score, not in the order of their creation", _ByScore),
)
OF_ANOTHER = NamedMistake("tree-of-another-request", 'it is the tree of request "{}"')


def mistake(context: EventContext, name: str, wrong: Mapping[str, Tree]) -> Explained | None:
    """The known mistakes that give exactly this tree and all other wrong trees of the event.

    A small tree may fit several mistakes; then the first ones are returned. wrong: wrong trees by request
    """
    fitting = {other: _fitting(context, other, told) for other, told in wrong.items()}
    return shared_by_all(fitting.get(name, []), fitting.values())


def _fitting(context: EventContext, name: str, told: Tree) -> list[WrongContent]:
    ours, drafts = grown_of(context, context.subject, name), context.expected.grown
    if ours is None:
        return []
    found = [
        one.known() for one in MISTAKES
        if not (one.wrong is _Chances and context.rounded is None)  # labels have no probabilities
        and _regrown(one.wrong, ours.growing.topk, ours.said, drafts) == told
    ]
    assert isinstance(context.event, Draft)
    for other in context.event.requests:
        theirs = grown_of(context, context.subject, other)
        if other != name and theirs is not None and theirs.growing.tree(drafts) == told:
            found.append(OF_ANOTHER.known(other))
    return found


def _regrown(how: type[Growing], topk: int, said: Sequence[Said], drafts: int) -> Tree:
    growing = how(topk)
    for step in said:
        growing.step(step)
    return growing.tree(drafts)
