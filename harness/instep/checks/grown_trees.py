"""Trees that a drafter grew: each follows from its own logits, and is the truth's except in near ties.

Trees of labels are exact. With numbers the order of scores may differ from the truth's if scores are closer than the
derived error (`Scores`). That is a tie, as with picks, and no divergence; the trace continues with the recorded
tree. A wrong tree is compared with those of known mistakes: the definition with one thing changed. Leaves out: the
logits (T2, T3).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from instep_reference.contract.engine import Draft, Drafted
from instep_reference.contract.place_names import AFTER_LAYERS, Place
from instep_reference.draft.grow_draft_tree import Growing

from ..finding_problem import Explained, Mistake, NamedMistake, Problem, WrongContent
from ..tier_allowances import granted, log_prob_error
from ..verdict import Comparison, Skipped, Tier
from ..watch.event_context import EventContext
from ..watch.grown_tree import Growth, Said, grown_of
from .accumulated_errors import carried
from .check_interface import compared, exact, shared_by_all
from .tensor_and_choice_judgement import Chosen, Ties

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


PLACE = Place("chain.0", AFTER_LAYERS, "pick")
Path = tuple[int, ...]  # tokens from the root's child on


class Grown:
    """T4 of trees; of labels T0."""

    name = "grown"
    tier = Tier.DECISIONS

    def __init__(self) -> None:
        self.ties = Ties("trees so far")

    def __call__(self, context: EventContext) -> Iterator[Comparison | Skipped]:
        event, answer, right = context.event, context.subject.answer, context.truth.answer
        if not isinstance(event, Draft) or context.expected.topk is None or not context.shown.whole:
            return
        assert isinstance(answer, Drafted) and isinstance(right, Drafted) and right.own_parents is not None
        if answer.own_parents is None:
            yield exact(self, context, PLACE, "none", "one of each request", "parents of a grown tree are {}")
            return
        noise = {} if context.rounded is None else carried(context)
        trees, rights = _trees(event, answer), _trees(event, right)
        for name, told in trees.items():
            due = rights[name]
            ours, truth = (grown_of(context, side, name) for side in (context.subject, context.truth))
            if ours is None or truth is None or not (ours.whole and truth.whole):
                yield exact(self, context, PLACE, told, due, "the grown tree is {}", name)
                continue
            mine = ours.growing.tree(context.expected.grown)
            yield self._follows(context, name, trees, mine, _own_part(context, ours, told) if told != mine else 0.0)
            if context.rounded is None:
                at = Place(f"chain.{len(ours.logits) - 1}", *PLACE[1:])  # the finding of its logits sorts first
                yield exact(self, context, at, told, due, "the grown tree is {}", name)
            elif told == mine:
                yield self._chosen(context, name, ours, truth, noise.get((name, False), 0.0))
        yield from self.ties.too_many("grown", context.index, context.kind, PLACE)

    def _follows(
        self, context: EventContext, name: str, trees: Mapping[str, Tree], due: Tree, part: float
    ) -> Comparison:
        """Compare an answer's tree with the one from the side's own logits. part: error in units of the allowance."""
        told = trees[name]
        differs = told != due
        worst = (part or math.inf) if differs else 0.0
        why = mistake(context, name, _wrong(context, trees)) if worst > 1 else None
        said = f"the grown tree is {_spelled(told)}; its own logits give {_spelled(due)}" if worst > 1 else ""
        found = compared(self, context, PLACE, len(due[0]) * 2, worst, Problem.of(said, known=why), allowed=1.0,
                         request=name, undecided=int(differs and worst <= 1))  # fmt: skip
        return replace(found, tier=Tier.IDENTITY if context.rounded is None else self.tier)

    def _chosen(self, context: EventContext, name: str, ours: Growth, truth: Growth, noise: float) -> Comparison:
        """Compare the beams of each step, then the window; they may differ where the truth's scores are close."""
        scores = Scores(truth, noise, _stored(context, ours))
        worst, said, differs, at = 0.0, "", False, len(ours.logits) - 1
        for step, (mine, right) in enumerate(zip(ours.growing.beams[1:-1], truth.growing.beams[1:-1], strict=True), 1):
            kept, theirs = paths_of(ours, mine), paths_of(truth, right)
            if kept != theirs:
                worst, differs, at = scores.disorder(kept, _level(truth, step), ordered=True), True, step - 1
                said = f"beams of step {step} are {kept}; the truth's are {theirs}"
                break
        else:
            drafts = context.expected.grown
            kept, theirs = (paths_of(one, one.growing.chosen(drafts)) for one in (ours, truth))
            if kept != theirs:
                everything = paths_of(truth, range(len(truth.growing.candidates)))
                worst, differs = scores.disorder(kept, everything, ordered=False), True
                ours_alone, theirs_alone = sorted({*kept} - {*theirs}), sorted({*theirs} - {*kept})
                said = f"the window has the paths {ours_alone}, the truth's has {theirs_alone}"
        part = torch.tensor([worst])
        choices = Chosen(part, part, torch.tensor([differs]))
        self.ties.add(choices)
        return compared(
            self, context, PLACE._replace(stage=f"chain.{at}"), 2 * context.expected.grown, worst,
            Problem.of(said) if worst > 1 else None, allowed=1.0, request=name, undecided=choices.ties)


def _trees(event: Draft, answer: Drafted) -> dict[str, Tree]:
    """request -> its grown tree in an answer."""
    assert answer.own_parents is not None
    pairs = zip(answer.own.tolist(), answer.own_parents.tolist(), strict=True)
    return dict(zip(event.requests, pairs, strict=True))


def _wrong(context: EventContext, trees: Mapping[str, Tree]) -> dict[str, Tree]:
    """The trees that do not follow from the subject's own logits, whatever their rounding."""
    growths = {name: grown_of(context, context.subject, name) for name in trees}
    return {name: told for name, told in trees.items()
            if (ours := growths[name]) is None or (ours.growing.tree(context.expected.grown) != told
                                                   and (_own_part(context, ours, told) or math.inf) > 1)}  # fmt: skip


def _own_part(context: EventContext, ours: Growth, told: Tree) -> float:
    """The distance of a side's own scores from the tree in its answer, in units of the rounding of their sums."""
    paths = _told_paths(told)
    if paths is None:
        return math.inf
    everything = paths_of(ours, range(len(ours.growing.candidates)))
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


def _level(growth: Growth, step: int) -> list[Path]:
    """All candidates of a step."""
    known = growth.growing.candidates
    return paths_of(growth, [number for number, one in enumerate(known) if one.step == step])


def _stored(context: EventContext, ours: Growth) -> torch.dtype:
    return context.subject.places[PLACE._replace(component="logits")].dtype


def _spelled(tree: Tree) -> str:
    return " ".join(f"{token}<{parent}" for token, parent in zip(*tree, strict=True))


@dataclass(frozen=True)
class Scores:
    """Scores of paths from a side's logits, and the allowed error of their differences.

    Let each logit of row r have an error of at most e_r. Then the difference of two candidates of one row changes by at
    most 2 e_r, as the logarithm of the sum is the same for both. Below the node where two paths diverge each row
    changes a score by at most 2 e_r, for its logit and its logarithm. Rows that both paths share change nothing. The
    roundings of both sums are added (`log_prob_error`).

    noise  the relative error that T3 allows these logits; None means no error, for the engine's own logits
    """

    growth: Growth
    noise: float | None
    stored: torch.dtype

    def disorder(self, kept: Sequence[Path], among: Sequence[Path], *, ordered: bool) -> float:
        """The distance of the scores from the kept paths in units of the allowance. ordered: the order counts, too."""
        others = [path for path in among if path not in kept]
        pairs = [(one, other) for one in kept for other in others]
        if ordered:
            pairs += [(one, other) for at, one in enumerate(kept) for other in kept[at + 1 :]]
        return max((self._part(one, other) for one, other in pairs), default=0.0)

    def _part(self, kept: Path, other: Path) -> float:
        short = self._score(other) - self._score(kept)
        return 0.0 if short <= 0 else short / self._error(kept, other)  # NaN stays NaN, which no limit allows

    def _score(self, path: Path) -> float:
        """The score of a path from the root on; minus infinity if a row of it is unknown."""
        total = 0.0
        for at, token in enumerate(path):
            row = self._row(path[:at])
            if row is None or not 0 <= token < len(row):
                return -math.inf
            total += float(row.log_softmax(-1)[token])
        return total

    def _row(self, path: Path) -> torch.Tensor | None:
        """The logits after a path, which is empty or a beam."""
        if not path:
            return self.growth.logits[0][0]
        if len(path) >= len(self.growth.logits):
            return None
        beams = paths_of(self.growth, self.growth.growing.beams[len(path)])
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
        """The rounding of the log-probabilities of a path and of their sum."""
        row, eps = self._row(path), torch.finfo(_width(self.stored)).eps
        if row is None:
            return 0.0
        return log_prob_error(float(row.abs().amax()), len(row), eps) + eps * abs(self._score(path))


def paths_of(growth: Growth, numbers: Sequence[int]) -> list[Path]:
    return [growth.growing.path(number) for number in numbers]


def _width(stored: torch.dtype) -> torch.dtype:
    """The dtype in which scores are computed, also for narrower logits."""
    return torch.float64 if stored is torch.float64 else torch.float32
