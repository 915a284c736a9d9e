"""T2d: whether the error of a state points to a known wrong state, per head and group of 8 columns of V.

A norm over a head hides one stale tile, and a norm that allows for bf16 storage hides an off-by-one. The direction of
the error hides neither. Leaves out: the wrong states (`wrong_state_bank.py`), and the size of other errors
(`recomputed_values.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice

import torch
from torch.nn import functional as F

from instep_reference.contract.declared_rounding import kept_in

from ..finding_problem import Code, Explained, Problem, WrongContent, sentence
from ..oracle.miscounted_states import handed_over, stale
from ..oracle.oracle import Oracle
from ..oracle.recomputation import Recomputation
from ..oracle.storage_rounding import kept_states
from ..tier_allowances import (
    COLUMNS,
    DITHERED,
    LEANING,
    MORE_DRAWS,
    NEAR,
    PROJECTION_ERROR,
    PROJECTION_LIMIT,
    UNDECIDED_CAP,
)
from ..verdict import UNDECIDABLE, Comparison, Skipped, Tier
from ..watch.event_context import EventContext
from .check_interface import compared
from .earlier_rounds import EarlierRounds
from .prefix_findings import RUNNING, of_prefix
from .wrong_ring_states import overfull
from .wrong_state_bank import branches, wrong_states
from .wrong_state_inputs import Scene, Wrong

UNIDENTIFIED: Code = "unidentified"
AT_ONCE = 64  # rare wrong states that are in memory at once
INDISTINCT = "no known wrong state can be distinguished from the right one"
WINDOWS = ("verify", "commit")  # kinds of rows whose updates may be kept


class Directed:
    """Judge the states after every event that writes them: decode, prefill chunk, commit."""

    name = "directed"
    tier = Tier.DIRECTED

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self.pairs = 0  # pairs of a block and a wrong state so far
        self.rounds = EarlierRounds(scene_of)

    def __call__(self, context: EventContext) -> Iterator[Comparison | Skipped]:
        pieces, undecided, pairs = self._pieces(context), 0, 0
        for piece in pieces:
            found = piece.left(context.subject).state.get(piece.layer)
            right, sampled = piece.truth.state, piece.yardsticks.state
            if found is None or right is None or sampled is None or found.shape != right.shape:
                continue  # T2 reports it
            scene = scene_of(piece, pieces)
            looked = look(found.to(right.device), scene, sampled, _again(piece), narrow=piece.narrow,
                          leaning=sampled[1::2] if piece.leans else None,
                          earlier=partial(self._rare, piece, scene))  # fmt: skip
            undecided, pairs = undecided + looked.undecided, pairs + looked.pairs
            self.pairs += looked.pairs
            if looked.blocks:
                yield of_prefix(piece.prefix, self._comparison(context, piece, found, looked))
            else:
                where = f"{piece.place('state')} of {piece.request}"
                yield Skipped(self.name, context.index, INDISTINCT, where)
        if undecided > UNDECIDED_CAP * pairs:
            said = f"{undecided} of {pairs} wrong states could not be distinguished from the right one"
            one = compared(self, context, pieces[-1].place("state"), pairs, undecided / pairs,
                           Problem("undecided", said), allowed=UNDECIDED_CAP, undecided=undecided)  # fmt: skip
            yield replace(one, check=UNDECIDABLE)

    def _rare(self, piece: Recomputation, scene: Scene) -> Iterator[Wrong]:
        """Wrong states that only name an error: of earlier rounds, and a state that is rounded as in a prefix."""
        yield from self.rounds.wrong_states(piece, scene)
        rounds = self.oracle.rounds
        for forward in (True, False) if not piece.prefix else ():
            if kept_in(rounds, forward=forward):
                yield Wrong(RUNNING.known(), kept_states(scene.right, rounds, forward=forward).to(scene.right))

    def remember(self, context: EventContext) -> None:
        """Take in an event that is not judged, for the wrong states of later events."""
        self._pieces(context)

    def _pieces(self, context: EventContext) -> list[Recomputation]:
        pieces = [piece for piece in self.oracle.at(context) if isinstance(piece, Recomputation) and piece.writes_state]
        self.rounds.add(pieces)
        return pieces

    def _comparison(
        self, context: EventContext, piece: Recomputation, found: torch.Tensor, looked: "Looked"
    ) -> Comparison:
        begin, elements = looked.group * COLUMNS, looked.blocks * COLUMNS * found.shape[1]
        return compared(
            self, context, piece.place("state"), min(elements, found.numel()), looked.worst, looked.problem,
            allowed=PROJECTION_LIMIT, request=piece.request, blocks=looked.blocks, undecided=looked.undecided,
            pairs=looked.pairs, head=looked.head, columns=(begin, min(begin + COLUMNS, found.shape[2]) - 1))


@dataclass(frozen=True)
class Looked:
    """The result of `look`.

    worst        the projection on the recognised wrong state, or the largest one if none is recognised
    head, group  the block with the largest projection, or the first block over the limit
    blocks       blocks in which some wrong state could be decided; the others were not compared
    pairs        pairs of a block and a wrong state; undecided: pairs that could not be decided
    """

    worst: float
    head: int
    group: int
    blocks: int
    pairs: int
    undecided: int
    problem: Problem | None

    @property
    def diagnosis(self) -> str:
        return "" if self.problem is None else sentence(self.problem)


Draw = Callable[[int], torch.Tensor]  # n -> up to n further correct states [draws, HV, K, V]


def look(
    found: torch.Tensor, scene: Scene, yardsticks: torch.Tensor, again: Draw | None = None, *, narrow: bool = False,
    leaning: torch.Tensor | None = None, earlier: Callable[[], Iterable[Wrong]] = tuple,
) -> Looked:
    """Project the error on every wrong state's difference, block by block.

        alpha_h = <x - o, o_h - o> / |o_h - o|^2         0: right; 1: wrong in the way of h

    x is the subject's state, o the correct one in fp64, o_h the wrong state of mistake h.

    Yardsticks are states that correct engines with the declared rounding compute. The standard error of alpha is the
    larger of two: that of an error of their size in a random direction, and the root mean square of their projections.
    If they share their roundings (`narrow`), further draws replace them. More draws are made before anything is called
    wrong. leaning: the yardsticks with truncated operands. Truncation biases the error, which no standard error
    covers, so the limit is raised by LEANING times that bias. earlier: further wrong states, which only name an error
    that none of the known ones explains.
    Shapes:  found x [HV, K, V]   yardsticks, leaning [draws, HV, K, V]
    """
    right = scene.right
    wrong = wrong_states(scene)
    towards = grouped(torch.stack([w.state for w in wrong]).sub_(right))  # [hypotheses, HV, groups, K * 8]
    error = grouped(found.to(right.dtype) - right)
    length = torch.linalg.vector_norm(towards, dim=-1).square_()
    alpha = torch.einsum("gbn,hgbn->hgb", error, towards) / length
    sampled = _spread(yardsticks - right, right, torch.finfo(found.dtype).eps) / length.sqrt()
    correct = yardsticks if again is None or not narrow else again(DITHERED)
    squares, draws, differs = _leaning(correct - right, towards) / length.square(), len(correct), length > 0
    most: torch.Tensor | float = PROJECTION_ERROR
    if leaning is not None:
        mean = torch.einsum("gbn,hgbn->hgb", grouped(leaning.mean(0) - right), towards) / length
        most = PROJECTION_ERROR * (1 - LEANING * mean.abs() / PROJECTION_LIMIT)
    while True:
        decides = differs & (torch.maximum(sampled, (squares / draws).sqrt()) <= most)
        largest = torch.where(decides, alpha, -torch.inf).amax(0)  # [HV, groups]
        largest = torch.where(error.isfinite().all(-1), largest, torch.nan)  # always wrong
        leans = ~(largest <= PROJECTION_LIMIT)
        if again is None or not (leans & ~largest.isnan()).any():
            break
        while draws < MORE_DRAWS and len(more := again(DITHERED)):
            squares = squares + _leaning(more - right, towards) / length.square()
            draws += len(more)
        again = None
    counts = int((decides.any(0) | leans).sum()), int(differs.sum()), int((differs & ~decides).sum())
    if not leans.any():
        worst, head, group = _worst(largest)
        return Looked(max(worst, 0.0), head, group, *counts, None)
    head, group = (int(i) for i in leans.nonzero()[0])
    wrong_count = int(leans.sum())
    differ = "differs" if wrong_count == 1 else "differ"
    where = f"; {wrong_count} of {leans.numel()} blocks {differ}" if not leans.all() else ""
    problem, projection, _ = _nearest(error[leans], towards[:, leans], wrong, where)
    if problem.code == UNIDENTIFIED:
        rare = chain(earlier(), overfull(scene))
        problem, projection = _rare(error[leans], rare, right, leans, len(wrong), where)
    worst = _worst(largest)[0] if projection is None else projection
    return Looked(worst, head, group, *counts, problem)


def grouped(state: torch.Tensor) -> torch.Tensor:
    """[..., HV, K, V] -> [..., HV, groups, K * 8]: a block is 8 columns of V; a last, narrower one is padded with 0."""
    key_dim, value_dim = state.shape[-2:]
    padded = F.pad(state, (0, -value_dim % COLUMNS)) if value_dim % COLUMNS else state
    tiles = padded.reshape(*padded.shape[:-1], -1, COLUMNS)
    return tiles.movedim(-2, -3).reshape(*state.shape[:-2], -1, key_dim * COLUMNS)


def scene_of(piece: Recomputation, pieces: Sequence[Recomputation]) -> Scene:
    """The scene of a state: the tokens of this request, and the states of other requests in the same layer."""
    folding = piece.folding
    assert folding is not None
    others, theirs, their_decays = list(folding.others), *(list[tuple[str, torch.Tensor]]() for _ in range(2))
    for other in pieces:
        if other.layer != piece.layer or other.request == piece.request or other.folding is None:
            continue
        if other.truth.state is not None:
            others.append((f'of request "{other.request}"', other.truth.state))
        if other.span.kind in WINDOWS:
            for kept, name in ((theirs, "update"), (their_decays, "log_decay")):
                kept.append((f'of request "{other.request}"', other.folding.tokens.of(name)))
    previous, handed, older = folding.previous, list[tuple[WrongContent, torch.Tensor]](), None
    pending: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    if previous is not None:
        handed = [(known, state()) for known, state in handed_over(folding.base, previous)]
        older = previous.tokens.of("update") if previous.tokens is not None and previous.verb == "accepted" else None
        if older is not None and previous.tokens is not None:
            was, log_decay = previous.tokens.of("k"), previous.tokens.of("log_decay")
            pending = was.repeat_interleave(older.shape[1] // was.shape[1], dim=1), log_decay, older
    committed = piece.span.kind == "commit" and folding.parents is not None
    path = list(piece.span.nodes) if committed else slice(None)
    k, v, log_decay, beta = (x[path] for x in folding.tokens.folded())
    shared = v.shape[1] // k.shape[1]
    verb = "tracked" if piece.prefix else "accepted" if piece.span.kind in WINDOWS else "given"
    return Scene(
        folding.base, k.repeat_interleave(shared, dim=1), v, log_decay, beta, folding.count,
        verb, None if previous is None else previous.base, others, handed, theirs, older, pending,
        branches(folding, piece.span.nodes) if committed else (), () if previous is None else previous.recent,
        piece.later_windows,
        tuple if previous is None or previous.last is None else partial(stale, folding.base, previous.last),
        folding.tokens.recalls, shared, folding.safe, their_decays, folding.tokens.skip,
    )  # fmt: skip


def _again(piece: Recomputation) -> Draw | None:
    dithered = piece.dithered

    def draw(draws: int) -> torch.Tensor:
        assert dithered is not None
        state = dithered(draws).state
        assert state is not None, "a piece that writes a state leaves it"
        return state

    return None if dithered is None else draw


def _leaning(correct: torch.Tensor, towards: torch.Tensor) -> torch.Tensor:
    """The squares of <r - o, o_h - o>, summed over draws.  correct [draws, HV, K, V]  ->  [hypotheses, HV, groups]"""
    return torch.einsum("dgbn,hgbn->dhgb", grouped(correct), towards).square().sum(0)


def _spread(correct: torch.Tensor, right: torch.Tensor, eps: float) -> torch.Tensor:
    """The standard deviation of a correct engine's error along one direction, per block [HV, groups]."""
    noise: torch.Tensor = torch.linalg.vector_norm(grouped(correct), dim=-1).amax(0)
    grain: torch.Tensor = torch.linalg.vector_norm(grouped(right), dim=-1) * (eps / 2)
    columns = (right.shape[-1] - COLUMNS * torch.arange(noise.shape[-1], device=noise.device)).clamp(max=COLUMNS)
    return (noise + grain) / (right.shape[-2] * columns).sqrt()


def _worst(largest: torch.Tensor) -> tuple[float, int, int]:
    """The largest of [HV, groups], NaN first, and its block."""
    block = int(largest.flatten().argmax())
    head, group = divmod(block, largest.shape[1])
    return float(largest[head, group]), head, group


def _rare(
    error: torch.Tensor, rare: Iterator[Wrong], right: torch.Tensor, leans: torch.Tensor, known: int, where: str
) -> tuple[Problem, float | None]:
    """The nearest of the wrong states that only name a state; a few at a time, as there may be many large ones."""
    count, least = known, float("inf")
    best: tuple[Problem, float | None] | None = None
    while some := list(islice(rare, AT_ONCE)):
        count += len(some)
        towards = grouped(torch.stack([w.state for w in some]).sub_(right))
        problem, projection, distance = _nearest(error, towards[:, leans], some, where)
        if problem.code != UNIDENTIFIED and distance < least:
            best, least = (problem, projection), distance
    return best or (Problem(UNIDENTIFIED, f"unknown: close to none of {count} wrong states{where}"), None)


def _nearest(
    error: torch.Tensor, towards: torch.Tensor, wrong: Sequence[Wrong], where: str
) -> tuple[Problem, float | None, float]:
    """The wrong state nearest to the found one over all blocks beyond the limit, the projection on it, its distance.

    States with equal bits count as one. The distance is relative to that of the right state.

    where: how many blocks differ, as the end of a clause

    Shapes:  error [blocks, elements]   towards [hypotheses, blocks, elements]
    """
    distance = torch.linalg.vector_norm((error - towards).flatten(1), dim=1)
    distance = torch.where(distance.isfinite(), distance, torch.inf)  # of a wrong state with poison
    if not error.isfinite().all():
        mistake = Explained("hypothesis", f"holds a number that is not finite{where}")
        return Problem("not_finite", mistake=mistake), None, 1.0
    nearest = int(distance.argmin())
    direction = towards[nearest]
    length = torch.linalg.vector_norm(direction)
    if distance[nearest].isinf() or distance[nearest] > NEAR * length:
        return Problem(UNIDENTIFIED, f"unknown: close to none of {len(wrong)} wrong states{where}"), None, 1.0
    equal = (w.known for w, t in zip(wrong, towards, strict=True) if torch.equal(t, direction))
    problem = Problem("identified", mistake=Explained.one_of(equal, where))
    return problem, float((error * direction).sum() / length.square()), float(distance[nearest] / length)
