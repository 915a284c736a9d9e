"""The trees that a drafter grew: each follows from its own logits, and is the truth's but where the truth hardly chose.

A tree of labels is exact. Of numbers a score is a sum of log-probabilities. Let each logit of row r be off by at most
e_r. Then two candidates of one row change their difference by at most 2 e_r (the logarithm of the sum is the same for
both), and below the node where two paths part each row changes a sum by at most 2 e_r: its logit, and its logarithm.
Rows that both paths have in common change nothing. To that come the roundings of both sums (`log_prob_error`).
An order of scores that is closer than this is no divergence: it is a tie, as of picks, and the trace goes on with the
tree that was recorded. Leaves out: the logits themselves (T2, T3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from instep_reference.contract.engine import Draft, Drafted
from instep_reference.contract.place import AFTER_LAYERS, Place
from instep_reference.draft.growing import ROOT, Growing

from ..observe.context import EventContext
from ..observe.growth import Growth, Said, grown_of
from ..verdict import Comparison, Explained, Skipped, Tier
from .allowance import log_prob_error
from .base import exact, slot_of
from .judge import Chosen, Ties, granted
from .propagated import carried

PLACE = Place("chain.0", AFTER_LAYERS, "pick")
Path = tuple[int, ...]
Tree = tuple[list[int], list[int]]  # tokens and parents of drafts


class Grown:
    """T4 of trees; of labels T0."""

    name = "grown"
    tier = Tier.DECISIONS

    def __init__(self) -> None:
        self.ties = Ties("trees so far")

    def __call__(self, context: EventContext) -> Iterator[Comparison | Skipped]:
        event, answer, right = context.event, context.subject.answer, context.truth.answer
        if not isinstance(event, Draft) or context.expected.topk is None or not context.shown.has("draft"):
            return
        assert isinstance(answer, Drafted) and isinstance(right, Drafted) and right.own_parents is not None
        if answer.own_parents is None:
            yield exact(self, context, PLACE, "none", "one of each request", "parents of a grown tree are {}")
            return
        noise = {} if context.rounded is None else carried(context)
        for row, name in enumerate(event.requests):
            told: Tree = answer.own[row].tolist(), answer.own_parents[row].tolist()
            due: Tree = right.own[row].tolist(), right.own_parents[row].tolist()
            ours, truth = (grown_of(context, side, name) for side in (context.subject, context.truth))
            if ours is None or truth is None or not (ours.whole and truth.whole):
                yield exact(self, context, PLACE, told, due, "the grown tree is {}", name)
                continue
            mine = ours.growing.tree(context.expected.grown)
            if context.rounded is None:
                yield self._follows(context, name, told, due, 0.0, ours)
                continue
            yield self._follows(context, name, told, mine, _own_part(context, ours, told), ours)
            if told == mine:
                yield self._chosen(context, name, ours, truth, noise.get((name, False), 0.0))
        yield from self.ties.too_many("grown", context.index, context.kind, PLACE)

    def _follows(
        self, context: EventContext, name: str, told: Tree, due: Tree, part: float, ours: Growth
    ) -> Comparison:
        """The tree of an answer is the one that follows from the side's own logits; `part` of what may round away."""
        differs = told != due
        worst = (part or math.inf) if differs else 0.0
        why = mistake(context, name, ours, told) if worst > 1 else None
        said = f"the grown tree is {_spelled(told)}; its own logits give {_spelled(due)}" if worst > 1 else ""
        return Comparison(
            self.name, Tier.IDENTITY if context.rounded is None else self.tier, context.index, context.kind, PLACE,
            elements=len(due[0]) * 2, undecided=int(differs and worst <= 1), worst=worst, allowed=1.0, request=name,
            slot=slot_of(context, name), diagnosis=f"{said}: {why}" if why else said,
            explained=Explained("hypothesis", why) if why else None,
        )  # fmt: skip

    def _chosen(self, context: EventContext, name: str, ours: Growth, truth: Growth, noise: float) -> Comparison:
        """Beams step by step, then the window: a difference may lie where the truth's scores are close enough."""
        scores = Scores(truth, noise, _stored(context, ours))
        worst, said, differs = 0.0, "", False
        for step, (mine, right) in enumerate(zip(ours.growing.beams[1:-1], truth.growing.beams[1:-1], strict=True), 1):
            kept, theirs = _paths(ours, mine), _paths(truth, right)
            if kept != theirs:
                worst, differs = scores.disorder(kept, _level(truth, step), ordered=True), True
                said = f"beams of step {step} are {kept}; the truth's are {theirs}"
                break
        else:
            drafts = context.expected.grown
            kept, theirs = (_paths(one, one.growing.chosen(drafts)) for one in (ours, truth))
            if kept != theirs:
                everything = _paths(truth, range(len(truth.growing.candidates)))
                worst, differs = scores.disorder(kept, everything, ordered=False), True
                ours_alone, theirs_alone = sorted({*kept} - {*theirs}), sorted({*theirs} - {*kept})
                said = f"the window has the paths {ours_alone}, the truth's has {theirs_alone}"
        part = torch.tensor([worst])
        choices = Chosen(part, part, torch.tensor([differs]))
        self.ties.add(choices)
        return Comparison(
            self.name, self.tier, context.index, context.kind, PLACE, elements=2 * context.expected.grown,
            undecided=choices.ties, worst=worst, allowed=1.0, request=name, slot=slot_of(context, name),
            diagnosis=said if worst > 1 else "",
        )  # fmt: skip


@dataclass(frozen=True)
class Scores:
    """Scores of paths by a side's logits, and what their differences may be off by.

    noise  the relative error that T3 grants these logits; None: none, they are the engine's own
    """

    growth: Growth
    noise: float | None
    stored: torch.dtype

    def disorder(self, kept: Sequence[Path], among: Sequence[Path], *, ordered: bool) -> float:
        """How far the scores are from giving what was kept, in units of what is allowed; ordered: in this order."""
        others = [path for path in among if path not in kept]
        pairs = [(one, other) for one in kept for other in others]
        if ordered:
            pairs += [(one, other) for at, one in enumerate(kept) for other in kept[at + 1 :]]
        return max((self._part(one, other) for one, other in pairs), default=0.0)

    def _part(self, kept: Path, other: Path) -> float:
        short = self._score(other) - self._score(kept)
        if short <= 0:
            return 0.0
        most = self._error(kept, other)
        return short / most if most else math.inf

    def _score(self, path: Path) -> float:
        """From the root on; a path of which a row is unknown is impossible."""
        total = 0.0
        for at, token in enumerate(path):
            row = self._row(path[:at])
            if row is None or not 0 <= token < len(row):
                return -math.inf
            total += float(row.log_softmax(-1)[token])
        return total

    def _row(self, path: Path) -> torch.Tensor | None:
        """The logits behind a path: it is empty, or a beam."""
        if not path:
            return self.growth.logits[0][0]
        beams = _paths(self.growth, self.growth.growing.beams[len(path)]) if len(path) < len(self.growth.logits) else []
        return self.growth.logits[len(path)][beams.index(path)] if path in beams else None

    def _error(self, one: Path, other: Path) -> float:
        common = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
                      min(len(one), len(other)))  # fmt: skip
        apart = {path[:at] for path in (one, other) for at in range(common, len(path))}
        total = sum(self._granted(path) for path in apart)
        for path in (one, other):
            total += sum(self._rounding(path[:at]) for at in range(len(path)))
        return total

    def _granted(self, path: Path) -> float:
        row = self._row(path)
        if row is None or self.noise is None:
            return 0.0
        return float(granted(row.abs().amax(), torch.tensor(self.noise), self.stored))

    def _rounding(self, path: Path) -> float:
        """Of one log-probability, and of adding it."""
        row, eps = self._row(path), torch.finfo(_width(self.stored)).eps
        if row is None:
            return 0.0
        return log_prob_error(float(row.abs().amax()), len(row), eps) + eps * abs(self._score(path))


def _own_part(context: EventContext, ours: Growth, told: Tree) -> float:
    """How far its own scores are from a tree that it tells, in units of what their sums may round to."""
    paths = _told_paths(told)
    if paths is None:
        return math.inf
    everything = _paths(ours, range(len(ours.growing.candidates)))
    if not set(paths) <= set(everything) or len(set(paths)) != len(told[0]):
        return math.inf
    if [everything.index(path) for path in paths] != sorted(everything.index(path) for path in paths):
        return math.inf
    return Scores(ours, None, _stored(context, ours)).disorder(paths, everything, ordered=False)


def _told_paths(tree: Tree) -> list[Path] | None:
    lines: list[Path] = [()]
    for token, parent in zip(*tree, strict=True):
        if not 0 <= parent < len(lines):
            return None
        lines.append((*lines[parent], token))
    return lines[1:]


def _paths(growth: Growth, numbers: Sequence[int]) -> list[Path]:
    return [growth.growing.path(number) for number in numbers]


def _level(growth: Growth, step: int) -> list[Path]:
    """All candidates of a step."""
    known = growth.growing.candidates
    return _paths(growth, [number for number, one in enumerate(known) if one.step == step])


def _stored(context: EventContext, ours: Growth) -> torch.dtype:
    return context.subject.places[PLACE._replace(component="logits")].dtype


def _width(stored: torch.dtype) -> torch.dtype:
    return torch.float64 if stored is torch.float64 else torch.float32


def _spelled(tree: Tree) -> str:
    return " ".join(f"{token}<{parent}" for token, parent in zip(*tree, strict=True))


# -- known mistakes ------------------------------------------------------------------------------------


class _HigherTie(Growing):
    def highest(self, among: Sequence[int], count: int) -> list[int]:
        return sorted(among, key=lambda number: (-self.candidates[number].score, -number))[:count]


class _Unadded(Growing):
    def score(self, parent: int, chance: float) -> float:
        return chance


class _Chances(Growing):
    def score(self, parent: int, chance: float) -> float:
        return super().score(parent, math.exp(chance))


class _NextBeam(Growing):
    def parent(self, beam: int) -> int:
        beams = self.beams[-1]
        return beams[(beam + 1) % len(beams)]


class _BeamBefore(Growing):
    def parent(self, beam: int) -> int:
        return self.beams[-1][beam - 1]


class _LastStep(Growing):
    def chosen(self, drafts: int) -> list[int]:
        last = max(one.step for one in self.candidates)
        return sorted(self.highest([at for at, one in enumerate(self.candidates) if one.step == last], drafts))


class _FirstComes(Growing):
    def chosen(self, drafts: int) -> list[int]:
        return list(range(min(drafts, len(self.candidates))))


class _ByScore(Growing):
    def chosen(self, drafts: int) -> list[int]:
        return self.highest(range(len(self.candidates)), drafts)


MISTAKES: tuple[tuple[str, type[Growing]], ...] = (
    ("of equal scores the higher number comes first", _HigherTie),
    ("the score of the parent is not added", _Unadded),
    ("probabilities are added, not their logarithms", _Chances),
    ("a parent is the beam after the one that it should be", _NextBeam),
    ("a parent is the beam before the one that it should be", _BeamBefore),
    ("only candidates of the last step are taken", _LastStep),
    ("the first candidates are taken, not the best", _FirstComes),
    ("nodes are numbered by score, not as they came", _ByScore),
)


def mistake(context: EventContext, name: str, ours: Growth, told: Tree) -> str | None:
    """The known mistake that makes exactly this tree of what the head said; or whose logits do."""
    drafts, topk = context.expected.grown, ours.growing.topk
    for sentence, how in MISTAKES:
        if _regrown(how, topk, ours.said, drafts) == told:
            return sentence
    assert isinstance(context.event, Draft)
    for other in context.event.requests:
        theirs = grown_of(context, context.subject, other)
        if other != name and theirs is not None and _regrown(Growing, topk, theirs.said, drafts) == told:
            return f'it is the tree of request "{other}"'
    return None


def _regrown(how: Callable[[int], Growing], topk: int, said: Sequence[Said], drafts: int) -> Tree:
    growing = how(topk)
    for step in said:
        growing.step(step)
    chosen = growing.chosen(drafts)
    node = {ROOT: 0} | {number: at for at, number in enumerate(chosen, start=1)}
    return ([growing.candidates[number].token for number in chosen],
            [node.get(growing.candidates[number].parent, 0) for number in chosen])  # fmt: skip
