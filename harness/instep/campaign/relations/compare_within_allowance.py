"""Compare two records whose bits may differ, with the allowance for the difference of two correct runs.

Leaves out: records that must have equal bits (`compare_bitwise.py`), and all other constants (`tier_allowances.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ...checks.error_measurement import Spot, blocks, relative_error
from ...checks.tensor_and_choice_judgement import Ties, chosen, judge
from ...finding_problem import Problem
from ...tier_allowances import TRUTH_ERROR
from ...verdict import Comparison, Skipped, Tier
from ...watch.visible_places import PROPAGATED
from .compare_bitwise import in_bytes, parts, position, stops
from .position_record import Block, Key, PositionRecord, Standing

# Places with propagated errors are compared, and all memory.
ARMS = 2.0  # each of the two runs may be off by T3's allowance
DRAWS = 3  # draws of the rounded run; fewer than T3's, because correct pairs use only a fifth of the allowance


@dataclass
class Yardstick:
    """The allowed difference of two correct runs: ARMS times T3's allowance for the rounded reference's error.

    runs: number of runs that take turns in `rounded`. It is 2 if states are stored narrower than they are computed and
    the two runs store them after different tokens: a state that is rounded after every token has a larger error than
    one that is rounded after every round. Each run x then obeys |x - o| <= 3 e + 4 ulp with the error e of the rounded
    reference on its own events, so the two may differ by the sum; the larger error counts twice.

    The rounded reference's error at a single place may be small by luck. So the yardstick is its largest error in
    hidden rows, final rows and logits at the same positions; for memory, at all positions up to there, because memory
    accumulates them. Before a difference is reported the rounded run is drawn again, as in T3.
    """

    name: str
    truth: PositionRecord
    rounded: Callable[[int], PositionRecord]
    one: PositionRecord
    other: PositionRecord
    runs: int = field(default=1, kw_only=True)
    drawn: frozenset[str] = frozenset()  # requests that sample: `checks/sampled_tokens.py` judges their choices
    ties: Ties = field(default_factory=Ties)
    _noise: dict[tuple[int, str, bool, tuple[Key, ...]], float] = field(default_factory=dict)

    def compare(self) -> Iterator[Comparison | Skipped]:
        """Compare every place at which both runs and the truth have the same tokens."""
        yield from stops(self.name, self.one, self.other)
        for block in self.one.blocks:
            picks = block.place.component == "pick" and not (
                block.request.partition("/")[0] in self.drawn and block.place.stage == "trunk")
            if block.place.component in PROPAGATED or picks:
                yield from self._block(block)
        for standing in self.one.standings:
            yield from self._standing(standing)

    def _block(self, block: Block) -> Iterator[Comparison]:
        held = tuple(key for key in block.keys if self._everywhere(block, key))
        if not held:
            return
        mine, theirs, right = (self._rows(record, block, held) for record in (self.one, self.other, self.truth))
        if block.place.component == "pick":
            yield self._choices(block, held, mine, theirs)
            yield from self.ties.too_many(self.name, block.event, block.kind, block.place)
        else:
            yield self._judged(block, mine, theirs, right, lambda draw: (
                self._rows(self.rounded(draw), block, held), self._carried(draw, block, held)
            ), held)

    def _standing(self, standing: Standing) -> Iterator[Comparison]:
        key = standing.request, standing.state.length
        states = [record.states.get(key) for record in (self.other, self.truth, self.rounded(0))]
        if any(state is None for state in states):
            return
        theirs, right, _ = states
        assert theirs is not None and right is not None, "just looked"
        true = {place: tensor for place, tensor, _ in parts(right, right)}
        for place, mine, other in parts(standing.state, theirs):
            if not isinstance(mine, torch.Tensor):
                continue
            at = Block(standing.event, standing.kind, standing.request, place, (), torch.empty(0))
            sampled = partial(self._sampled_state, key, at)
            yield self._judged(at, mine, other, true[place], sampled, (standing.state.length,))

    def _sampled_state(self, key: tuple[str, int], at: Block, draw: int) -> tuple[torch.Tensor, float]:
        state = self.rounded(draw).states[key]
        noise = self._carried(draw, at, tuple(range(state.length)))
        return next(tensor for place, tensor, _ in parts(state, state) if place == at.place), noise

    def _judged(
        self, at: Block, mine: torch.Tensor, theirs: Any, right: torch.Tensor,
        sampled: Callable[[int], tuple[torch.Tensor, float]], keys: Sequence[Key],
    ) -> Comparison:
        """Require |x - y| / |o| <= 2 (3 e_r + 4 ulp) for every head, in the norm and the largest element."""
        if not isinstance(theirs, torch.Tensor) or theirs.shape != mine.shape:
            return in_bytes(self.name, at, mine, theirs, keys, self.one, self.other)
        x, y, o = (tensor.to("cpu", torch.float64) for tensor in (mine, theirs, right))
        spot = Spot(self.name, Tier.PROPAGATED, at.event, at.kind, at.place, at.request, None)
        draws = (sampled(draw) for draw in range(DRAWS * self.runs))
        result = judge(spot, o, draws, o + (y - x), factor=ARMS, stored=mine.dtype, least_draws=self.runs)
        if result.agrees:
            return result
        x, y, o = (blocks(at.place.component, tensor) for tensor in (x, y, o))
        return replace(result, problem=Problem("differs", self._sentence(x, y, o, keys)))

    def _sentence(self, x: torch.Tensor, y: torch.Tensor, o: torch.Tensor, keys: Sequence[Key]) -> str:
        """A sentence that names the run that is further from the truth."""
        far = {record.name: float(relative_error(run, o).max()) for record, run in ((self.one, x), (self.other, y))}
        wrong = max(far, key=lambda name: (far[name] != far[name], far[name]))
        apart = ", ".join(f"{name} {error:.1e}" for name, error in far.items())
        return f"up to position {position(keys[-1])} {wrong} is further from the truth ({apart})"

    def _choices(self, at: Block, keys: tuple[Key, ...], mine: torch.Tensor, theirs: torch.Tensor) -> Comparison:
        """Let choices differ if the truth's margin is smaller than the allowed difference of the two runs' logits."""
        score = at.place._replace(component="logits")
        logits = torch.stack([self.truth.rows[at.request, score, key] for key in keys])
        stored = self.one.rows[at.request, score, keys[0]].dtype
        choices = chosen(logits, mine, theirs, self._carried(0, at, keys), stored, factor=ARMS)
        self.ties.add(choices)
        says = f"{self.other.name} chose {theirs.tolist()}, {self.one.name} {mine.tolist()}"
        return Comparison(
            self.name, Tier.DECISIONS, at.event, at.kind, at.place, elements=len(mine), worst=choices.worst,
            allowed=1.0, request=at.request, problem=None if choices.worst <= 1 else Problem("differs", says),
            undecided=choices.ties,
        )

    def _everywhere(self, block: Block, key: Key) -> bool:
        at = block.request, block.place, key
        return all(at in record.rows for record in (self.other, self.truth, self.rounded(0)))

    def _rows(self, record: PositionRecord, block: Block, keys: Sequence[Key]) -> torch.Tensor:
        return torch.stack([record.rows[block.request, block.place, key] for key in keys])

    def _carried(self, draw: int, at: Block, keys: tuple[Key, ...]) -> float:
        """The rounded runs' largest error at these positions, in the target or in the draft head."""
        trunk, first = at.place.stage == "trunk", draw - draw % self.runs
        known = first, at.request, trunk, keys
        if known not in self._noise:
            errors = [self._errors(one).get((at.request, trunk), {}) for one in range(first, first + self.runs)]
            self._noise[known] = max((each.get(key, 0.0) for each in errors for key in keys), default=0.0)
        return max(self._noise[known], TRUTH_ERROR)

    def _errors(self, draw: int) -> dict[tuple[str, bool], dict[Key, float]]:
        """Map (request, target or head) and position to the rounded run's largest error; cached in the record."""
        record = self.rounded(draw)
        if not record.errors:
            for (request, place, key), row in record.rows.items():
                right = self.truth.rows.get((request, place, key))
                if place.component in PROPAGATED and right is not None:
                    off = float(relative_error(row.double()[None], right.double()[None]).max())
                    at = record.errors.setdefault((request, place.stage == "trunk"), {})
                    at[key] = max(at.get(key, 0.0), off)
        return record.errors

