"""The tree that a drafter grows by itself, by the definition in `contract/grown_draft_tree.py`, each candidate alone.

Leaves out: the source of log-probabilities (`Model.best`), and the head (`eagle.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

ROOT = -1  # as the parent of a candidate


@dataclass(frozen=True)
class Candidate:
    """A token after a path: the number of the previous candidate, the step of the token, and its score."""

    parent: int
    token: int
    step: int
    score: float


class Growing:
    """All candidates so far, by number, and the beams of every step, as numbers of candidates.

    The head next runs on `tokens`, those of the beams; `step` takes its results for each of them.
    """

    def __init__(self, topk: int) -> None:
        self.topk = topk
        self.candidates: list[Candidate] = []
        self.beams: list[list[int]] = [[ROOT]]

    def step(self, said: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Add a step. said: the most probable tokens of every beam, and their log-probabilities."""
        first, number = len(self.candidates), len(self.beams)
        new = [
            Candidate(parent, token, number, self.score(parent, chance))
            for parent, children in zip(map(self.parent, range(len(self.beams[-1]))), said, strict=True)
            for token, chance in children
        ]
        self.candidates += new
        self.beams.append(self.highest(range(first, len(self.candidates)), self.topk))

    def parent(self, beam: int) -> int:
        """Return the candidate at a beam of the last step: the parent of what the head proposes there."""
        return self.beams[-1][beam]

    def score(self, parent: int, chance: float) -> float:
        return chance + (0.0 if parent == ROOT else self.candidates[parent].score)

    def highest(self, among: Sequence[int], count: int) -> list[int]:
        """Return the candidates with the highest scores, the highest first; on a tie the lower number first."""
        return sorted(among, key=lambda number: (-self.candidates[number].score, number))[:count]

    def tokens(self) -> list[int]:
        """Return the tokens of the beams of the last step."""
        return [self.candidates[beam].token for beam in self.beams[-1]]

    def chosen(self, drafts: int) -> list[int]:
        """Return the candidates of the window, in the order of its nodes."""
        return sorted(self.highest(range(len(self.candidates)), drafts))

    def tree(self, drafts: int) -> tuple[list[int], list[int]]:
        """Return tokens and parents of the drafts of a window."""
        chosen = self.chosen(drafts)
        node = {ROOT: 0} | {number: at for at, number in enumerate(chosen, start=1)}
        return ([self.candidates[number].token for number in chosen],
                [node[self.candidates[number].parent] for number in chosen])  # fmt: skip

    def path(self, number: int) -> tuple[int, ...]:
        """Return the tokens from the first step to a candidate."""
        if number == ROOT:
            return ()
        return (*self.path(self.candidates[number].parent), self.candidates[number].token)
