"""Compare two records: bit by bit, or with the allowance for the difference of two correct runs if bits may differ.

Leaves out: recording (`position_record.py`), the choice of the two records (each relation), and all other constants
(`tier_allowances.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch

from instep_reference.contract.engine import Region, RequestState
from instep_reference.contract.place_names import AFTER_LAYERS, Place

from ...checks.error_measurement import Spot, blocks, relative_error
from ...checks.tensor_and_choice_judgement import Ties, chosen, judge
from ...finding_problem import Problem
from ...tier_allowances import TRUTH_ERROR
from ...verdict import Comparison, Skipped, Tier
from ...watch.memory_changes import bits
from ...watch.pool_addresses import NO_LAYER, stands
from ...watch.visible_places import PROPAGATED
from .position_record import Block, Key, PositionRecord, Standing, Stopped

# The fields of a logical state that belong to no layer, and the place that computes each.
SINGLE = {
    "length": Place("trunk", AFTER_LAYERS, "length"),
    "root": Place("trunk", AFTER_LAYERS, "root"), "proposal": Place("extend", AFTER_LAYERS, "pick"),
    "proposal_hidden": Place("extend", AFTER_LAYERS, "final"),
}
WANTED = Place("trunk", AFTER_LAYERS, "length")  # of a requested step count
# The stage that computes each field of an answer; fields that are not listed are at the target's pick.
STAGE = {"drafts": "chain.1"}


def same(name: str, one: PositionRecord, other: PositionRecord) -> Iterator[Comparison | Skipped]:
    """Require equal bytes for every place, position and state that both runs have."""
    yield from stops(name, one, other)
    for block in one.blocks:
        matched, theirs = _theirs(block, other)
        if matched:
            yield in_bytes(name, block, _mine(block, matched), theirs, matched, one, other)
    for standing in one.standings:
        state = other.states.get((standing.request, standing.state.length))
        if state is not None and not standing.rebuilt:
            for place, mine, right in parts(standing.state, state, one.whole):
                at = Block(standing.event, standing.kind, standing.request, place, (), torch.empty(0))
                yield in_bytes(name, at, mine, right, (standing.state.length,), one, other)


def lengths(name: str, one: PositionRecord, other: PositionRecord) -> Iterator[Comparison]:
    """Require the same lengths after the same events."""
    theirs = {(standing.event, standing.request): standing.state.length for standing in other.standings}
    for standing in one.standings:
        at = Block(standing.event, standing.kind, standing.request, SINGLE["length"], (), torch.empty(0))
        found, right = standing.state.length, theirs.get((standing.event, standing.request))
        yield in_bytes(name, at, found, right, (found,), one, other)


def parts(one: RequestState, other: RequestState, whole: bool = True) -> Iterator[tuple[Place, Any, Any]]:
    """The components of two states by place. A component that one state lacks is None.

    whole: whether the engine itself reports the fields that belong to no layer
    """
    for name, place in SINGLE.items() if whole else ():
        if getattr(one, name) is not None or getattr(other, name) is not None:
            yield place, getattr(one, name), getattr(other, name)
    mine, theirs = dict(one.parts()), dict(other.parts())
    for place in {**mine, **theirs}:
        if all(place in held and not held[place].numel() for held in (mine, theirs)):
            continue  # no token yet
        yield place, mine.get(place), theirs.get(place)


def answer_parts(
    mine: Any, theirs: Any, requests: Sequence[str] = ()
) -> Iterator[tuple[Place, str, str | None, Any, Any]]:
    """The fields of two answers: the place, the name with its request, the request, and both values.

    requests: those of the event. A table has a row for each of them, and the first row that differs names its request.
    """
    if type(mine) is not type(theirs):
        yield WANTED, "type", None, type(mine).__name__, type(theirs).__name__
        return
    for each in fields(mine) if mine is not None else ():
        one, other = getattr(mine, each.name), getattr(theirs, each.name)
        place = Place(STAGE.get(each.name, "trunk"), AFTER_LAYERS, "pick")
        if isinstance(one, Mapping):
            for name in {**one, **other}:
                yield place, f"{each.name} of {name!r}", name, one.get(name), other.get(name)
        elif one is not None or other is not None:  # only a drafter that grows trees has `own_parents`
            yield place, each.name, _row(one, other, requests), one, other


def _row(one: Any, other: Any, requests: Sequence[str]) -> str | None:
    """The request of the first row that differs."""
    if not all(isinstance(each, torch.Tensor) and len(each) == len(requests) for each in (one, other)):
        return None
    return next((name for name, *pair in zip(requests, one, other, strict=True) if different(*pair)[1]), None)


def as_text(value: Any) -> str:
    """A value of an answer, with its numbers."""
    return str(value.tolist()) if isinstance(value, torch.Tensor) else str(value)


def different(one: Any, other: Any) -> tuple[int, int]:
    """Count the compared numbers and the bytes that differ; an integer or None counts as one number."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.shape == other.shape:
        if one.dtype != other.dtype:
            return one.numel(), one.numel() * one.element_size()
        unequal = bits(one) != bits(other)
        if not bool(unequal.any()):
            return one.numel(), 0
        pairs = (x[unequal].contiguous().view(torch.uint8) for x in (one, other))
        return one.numel(), int(torch.ne(*pairs).sum())
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return 1, 1
    return int(one is not None or other is not None), int(one != other)


def bitwise(
    relation: str, event: int, kind: str, place: Place, counts: tuple[int, int], says: str, request: str | None = None,
    slot: int | None = None,
) -> Comparison:
    """The comparison of two values. counts: of `different`; says: what differs, if anything does."""
    elements, wrong = counts
    return Comparison(
        relation, Tier.BITWISE, event, kind, place, elements=elements, worst=float(wrong), allowed=0.0,
        request=request, slot=slot, problem=Problem("differs", says) if wrong else None,
    )


def _mine(block: Block, matched: Sequence[Key]) -> torch.Tensor:
    if len(matched) == len(block.keys):
        return block.rows
    wanted = set(matched)
    return block.rows[[row for row, key in enumerate(block.keys) if key in wanted]]


def _theirs(block: Block, other: PositionRecord) -> tuple[tuple[Key, ...], torch.Tensor]:
    """The positions of the block that the other run has as well, and its rows there."""
    found = [(key, other.rows.get((block.request, block.place, key))) for key in block.keys]
    rows = [row for _, row in found if row is not None]
    matched = tuple(key for key, row in found if row is not None)
    return matched, torch.stack(rows) if rows else torch.empty(0)


def in_bytes(
    name: str, at: Block, mine: Any, theirs: Any, keys: Sequence[Key], one: PositionRecord, other: PositionRecord
) -> Comparison:
    """Compare two tensors, integers or None."""
    counts = different(mine, theirs)
    says = _apart(mine, theirs, keys, one, other) if counts[1] else ""
    return bitwise(name, at.event, at.kind, at.place, counts, says, at.request)


def _apart(mine: Any, theirs: Any, keys: Sequence[Key], one: PositionRecord, other: PositionRecord) -> str:
    """The positions at which two tensors differ and the largest difference; for integers, both values."""
    between = f'"{other.name}" and "{one.name}"'
    if not (isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor) and mine.shape == theirs.shape):
        return f"is {_spelled(theirs)} in {other.name}, {_spelled(mine)} in {one.name}"
    at = f"after {keys[0]} tokens"
    if mine.shape[:1] == (len(keys),) and mine.dim() > 1:
        rows = [position(key) for key, pair in zip(keys, zip(mine, theirs, strict=True), strict=True)
                if different(*pair)[1]]
        at = f"at position {rows[0]}" + (f" and {len(rows) - 1} further" if rows[1:] else "")
    most = float((mine.double() - theirs.double()).abs().nan_to_num(torch.inf).max())
    return f"{at} {between} differ, by at most {most:.3g}"


def position(key: Key) -> str:
    """The position of a key; for a draft row, the position that it drafts from."""
    return str(key) if isinstance(key, int) else f"{key[0] + len(key) - 2}"


def _spelled(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else str(value)


def stops(name: str, one: PositionRecord, other: PositionRecord) -> Iterator[Comparison | Skipped]:
    """Report runs that stopped early, and events that were served differently from the trace."""
    for record in (one, other):
        yield from (Skipped("played", event, said) for event, said in record.said)
        if record.stopped is not None:
            yield unserved(name, record.stopped, record.name)


def unserved(relation: str, stop: Stopped, run: str = "") -> Comparison:
    """A finding about an event that was not served; `run` names a run that stopped at a legal event."""
    return Comparison(
        relation, Tier.IDENTITY, stop.event, stop.kind, stop.place, elements=1, worst=1.0, allowed=0.0,
        problem=Problem("failed", f"{run}: {stop.why}; the event is legal" if run else stop.why),
    )


def pools(one: Sequence[Region], other: Sequence[Region]) -> Iterator[tuple[Place, torch.Tensor, torch.Tensor, str]]:
    """Yield each pool and red zone: its place, the contents in both engines, and the message if they differ."""
    for left, right in zip(one, other, strict=True):
        for mine, theirs, what in ((left.units, right.units, left.by), (left.gaps, right.gaps, "red zone")):
            if mine is not None and theirs is not None and mine.numel():
                place = stands(left).place
                if place == NO_LAYER:  # such pools follow from the layers, so they are reported after them
                    place = Place("trunk", AFTER_LAYERS, "root")
                unit = "" if mine.shape != theirs.shape else _first_unit(mine, theirs)
                yield place, mine, theirs, f"pool {left.name}, {what} {unit} differs"


def _first_unit(mine: torch.Tensor, theirs: torch.Tensor) -> str:
    """The number of the first unit that differs."""
    if torch.equal(bits(mine), bits(theirs)):
        return ""
    return str(int((bits(mine) != bits(theirs)).flatten(1).any(1).nonzero()[0, 0]))


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
