"""T2 of drawn choices: each token is the one that the subject's own logits and the event's uniforms draw.

Whether logits within some error can draw a token follows from bounds of all cumulative sums. Let each logit have an
error of at most e. Then a score x / temperature has an error of d = e / temperature, and a weight exp(score) a factor
within exp(-d) .. exp(d). The part F of some tokens in the total is smallest if their weights are the smallest and all
others the largest, and largest in the opposite case. A uniform can draw another token than the truth only between these
two. Tokens at a cut of top-k or top-p whose logits are closer than 2e may be on either side of the cut, so their
smallest weight is 0.
Leaves out: whether the logits are right (T2, T3), the allowed errors (`tier_allowances.py`), and whether the truth
draws the same tokens (`decisions.py`).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import torch

from instep_reference.acceptance import draws
from instep_reference.contract.engine import Forward
from instep_reference.contract.place_names import AFTER_LAYERS, Place
from instep_reference.contract.sampling import Sampling
from instep_reference.sampling import Drawing, drawn, fp32, probabilities

from ..finding_problem import Explained, Mistake, NamedMistake, Problem, WrongContent
from ..tier_allowances import SCORE_ULPS, sums_error
from ..trace.tree_shape import depths
from ..verdict import Comparison, Tier
from ..watch.event_context import EventContext, RowSpan
from ..watch.rows_by_request import row_spans, rows
from .check_interface import compared, shared_by_all

FARTHEST = 2.0**20  # multiple of the allowance beyond which a token counts as impossible
HALVINGS = 10


@dataclass(frozen=True)
class Row:
    """One row of a draw: its logits [vocab] in fp64, its sampling and uniforms. children: each token once."""

    logits: torch.Tensor
    drawing: Drawing
    node: int

    @classmethod
    def every(cls, logits: torch.Tensor, drawing: Drawing) -> "list[Row]":
        """The rows of a window with logits [T, vocab]."""
        return [cls(row, drawing, node) for node, row in enumerate(logits)]

    @property
    def drawn(self) -> int:
        """The token that these logits draw, which depends on no other row."""
        probs, how = probabilities(self.logits[None], self.drawing.sampling), self.drawing
        uniforms = self.logits.new_tensor([*how.at_nodes, how.final])
        return draws(how.tokens, how.parents, probs.expand(len(how.tokens), -1), uniforms[:-1], uniforms[-1])[self.node]

    @property
    def children(self) -> list[int]:
        tokens = (self.drawing.tokens[at] for at, parent in enumerate(self.drawing.parents) if parent == self.node)
        return list(dict.fromkeys(tokens))


def part(row: Row, token: int, error: float, width: torch.dtype) -> float:
    """The smallest multiple of the allowance with which the token can be drawn; 1 is the limit.

    error: the error of one logit.  width: the dtype of weights and sums
    """
    if not (0 <= token < len(row.logits) and reachable(row, token, error, width, FARTHEST)):
        return math.inf
    high = 1.0
    while not reachable(row, token, error, width, high):
        high *= 2
    low = high / 2 if high > 1 else 0.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if reachable(row, token, error, width, middle) else (middle, high)
    return high


def reachable(row: Row, token: int, error: float, width: torch.dtype, factor: float = 1.0) -> bool:
    """Whether the token can be drawn if all errors are at most `factor` times the allowance."""
    error, eps = error * factor, torch.finfo(width).eps * factor
    weights, slack = _Weights.of(row, error, eps), sums_error(len(row.logits), eps)
    first, last = row.drawing.at_nodes[row.node], row.drawing.final
    children = row.children
    if token in children:
        before = children[: children.index(token)]
        _, most = weights.share([*before, token])
        least, _ = weights.share(before)
        return bool(weights.high[token] > 0) and least * (1 - slack) <= first < most * (1 + slack)
    if weights.share(children)[0] * (1 - slack) > first:
        return False
    rest = weights.without(children)
    least, _ = rest.share(slice(0, token))
    _, most = rest.share(slice(0, token + 1))
    return bool(rest.high[token] > 0) and least * (1 - slack) <= last < most * (1 + slack)


def sure(row: Row, error: float, width: torch.dtype) -> bool:
    """Whether only one token can be drawn within the allowance."""
    eps = torch.finfo(width).eps
    weights, slack = _Weights.of(row, error, eps), sums_error(len(row.logits), eps)
    children = row.children
    can = sum(reachable(row, child, error, width) for child in children)
    if weights.share(children)[0] * (1 - slack) <= row.drawing.at_nodes[row.node]:
        rest, last = weights.without(children), row.drawing.final
        low, high = (torch.cat([part.new_zeros(1), part.cumsum(0)]) for part in (rest.low, rest.high))
        # The smallest and the largest part of all tokens up to each one.
        least = low / (low + high[-1] - high).clamp(min=torch.finfo(low.dtype).tiny)
        most = high / (high + low[-1] - low).clamp(min=torch.finfo(low.dtype).tiny)
        there = (rest.high > 0) & (least[:-1] * (1 - slack) <= last) & (last < most[1:] * (1 + slack))
        can += int(there.sum())
    return can == 1


@dataclass(frozen=True)
class _Weights:
    """The smallest and the largest value of each weight, [vocab] each."""

    low: torch.Tensor
    high: torch.Tensor

    @classmethod
    def of(cls, row: Row, error: float, eps: float) -> "_Weights":
        sampling, x = row.drawing.sampling, row.logits
        heat = float(fp32(sampling.temperature, x))
        off = error / heat + SCORE_ULPS * eps * (float(x.abs().amax()) / heat + 1)
        bare = ((x - x.amax()) / heat).exp()
        low, high = bare * math.exp(-min(off, 700.0)), bare * math.exp(min(off, 700.0))
        falling, order = x.sort(descending=True, stable=True)
        rank = order.argsort()
        if sampling.top_k is not None:
            sure, may = _before(falling, error)
            low = torch.where((may < sampling.top_k)[rank], low, 0.0)
            high = torch.where((sure < sampling.top_k)[rank], high, 0.0)
        if sampling.top_p is not None and (edge := float(fp32(sampling.top_p, x))) < 1:
            sure, may = _before(falling, error)
            slack = sums_error(len(x), eps)
            some, most = (torch.cat([weight.new_zeros(1), weight[order].cumsum(0)]) for weight in (low, high))
            # The least and the largest part of all tokens before a token, which itself belongs to the rest.
            least = some[sure] / (some[sure] + most[-1] - most[sure]).clamp(min=torch.finfo(x.dtype).tiny)
            others = (some[-1] - some[(may + 1).clamp(max=len(x))]).clamp(min=0) + low[order]
            largest = most[may] / (most[may] + others).clamp(min=torch.finfo(x.dtype).tiny)
            low = torch.where((largest * (1 + slack) < edge)[rank], low, 0.0)
            high = torch.where((least * (1 - slack) < edge)[rank], high, 0.0)
        return cls(low, high)

    def share(self, tokens: list[int] | slice) -> tuple[float, float]:
        """The smallest and the largest part of these tokens in the total."""
        low, high = float(self.low[tokens].sum()), float(self.high[tokens].sum())
        over, under = float(self.high.sum()) - high, float(self.low.sum()) - low
        return low / (low + over) if low else 0.0, high / (high + max(under, 0.0)) if high else 0.0

    def without(self, tokens: list[int]) -> "_Weights":
        low, high = self.low.clone(), self.high.clone()
        low[tokens], high[tokens] = 0.0, 0.0
        return _Weights(low, high)


def _before(falling: torch.Tensor, error: float) -> tuple[torch.Tensor, torch.Tensor]:
    """In the order of falling logits: how many tokens are certainly before each one, and how many may be."""
    if not error:
        rank = torch.arange(len(falling), device=falling.device)
        return rank, rank
    rising = -falling
    sure = torch.searchsorted(rising, rising - 2 * error, right=False)
    may = torch.searchsorted(rising, rising + 2 * error, right=True) - 1
    return sure, may


PICK = Place("trunk", AFTER_LAYERS, "pick")
LOGITS = PICK._replace(component="logits")
SINGLE = torch.float32  # the narrowest dtype in which probabilities are computed, also for narrower logits


class Said(NamedTuple):
    """The tokens that the subject drew for a request, and their logits. width: the dtype of the logits."""

    span: RowSpan
    drawing: Drawing
    logits: torch.Tensor
    own: list[int]
    width: torch.dtype


class Draws:
    """A token may differ only if a uniform or a cut is closer to a cumulative sum than the rounding of the sum."""

    name = "draws"
    tier = Tier.DERIVED

    def __call__(self, context: EventContext) -> Iterator[Comparison]:
        if not context.shown.whole:
            return  # the harness drew these itself
        said: list[Said] = []
        beside: dict[str, Drawing | None] = {}
        for span in row_spans(context, "trunk"):
            drawing = beside[span.request] = drawing_of(context, span)
            own, logits = (rows(context.subject, place, span) for place in (PICK, LOGITS))
            if drawing is None or span.request in context.shown.gone or own is None or logits is None:
                continue
            if len(own) == len(logits) == span.logit_rows and not logits.isnan().any():
                said.append(Said(span, drawing, logits.double().cpu(), own.tolist(), logits.dtype))
        before = context.earlier.forward
        rights = [drawn(one.logits, one.drawing) for one in said]
        parts = [against(Row.every(one.logits, one.drawing), right, one.own, [0.0] * len(one.own), one.width)
                 for one, right in zip(said, rights, strict=True)]
        wrong = [one for one, its in zip(said, parts, strict=True) if max(its) > 1]
        earlier = {} if before is None else before.uniforms
        for one, right, its in zip(said, rights, parts, strict=True):
            why = wrong_way(one, wrong, beside, earlier) if max(its) > 1 else None
            yield self._drawn(context, one, right, its, why)

    def _drawn(
        self, context: EventContext, one: Said, right: Sequence[int], parts: Sequence[float], why: Explained | None
    ) -> Comparison:
        span, own = one.span, one.own
        row = max(range(len(own)), key=parts.__getitem__)
        told = ""
        if parts[row] > 1:
            told = f"row {row} drew {own[row]}; its own logits and uniforms draw {right[row]}"
        return compared(self, context, PICK, len(own), parts[row], Problem.of(told, known=why), allowed=1.0,
                        request=span.request, blocks=len(own), undecided=sum(0 < one <= 1 for one in parts))


def drawing_of(context: EventContext, span: RowSpan) -> Drawing | None:
    """The sampling and uniforms of a request's rows at this event; None if it takes the argmax."""
    event, expected = context.event, context.expected
    sampling = expected.sampling.get(span.request)
    if sampling is None or not isinstance(event, Forward) or not span.logit_rows:
        return None
    uniforms = next(row.uniforms for row in event.rows if row.request == span.request)
    if span.kind != "verify":
        return Drawing.alone(sampling, uniforms)
    return Drawing(sampling, expected.windows[span.request], expected.parents[span.request], uniforms)


def against(
    drawn_from: Sequence[Row], right: Sequence[int], own: Sequence[int], errors: Sequence[float], width: torch.dtype,
) -> list[float]:
    """The distance of each row's token from the draw of its logits, 0 if they are equal; 1 is the limit.

    errors: the allowed error of each row's logits.  width: the dtype of the subject's logits
    """
    width = torch.float64 if width is torch.float64 else SINGLE
    return [
        0.0 if token == due else part(row, token, error, width)
        for row, due, token, error in zip(drawn_from, right, own, errors, strict=True)
    ]


# -- known mistakes ------------------------------------------------------------------------------------


Beside = Mapping[str, Drawing | None]  # request of the event -> its sampling and uniforms


CHILDREN: tuple[Mistake[Mapping[str, bool]], ...] = (
    Mistake("children-stay", "the tokens of the children stay in the remaining distribution", {"kept": True}),
    Mistake("children-not-accumulated", "the children's probabilities are not accumulated", {"restarted": True}),
    Mistake("later-drafts-as-children", "all later drafts of the window are candidates after a node", {"later": True}),
    Mistake("weights-without-their-total", "the uniform is compared with weights that are not divided by their sum",
            {"whole": True}),
    Mistake("final-uniform-of-the-node", "the final draw takes the uniform of its node", {"by_node": True}),
)
UNIFORMS_OF = NamedMistake("uniforms-of-another-request", 'with the uniforms of request "{}"')
SAMPLING_OF = NamedMistake("sampling-of-another-request", 'with the temperature, top-k and top-p of request "{}"')
ARGMAX = NamedMistake("argmax", "it took the argmax")
ZEROS = NamedMistake("uniforms-of-zero", "with uniforms of 0")
LAST_ROUND = NamedMistake("uniforms-of-the-round-before", "with the uniforms that it had in the forward before")
TURNED: tuple[Mistake[Callable[[Drawing], tuple[float, ...]]], ...] = (
    Mistake("uniform-of-the-node-after", "each node takes the uniform of the node after it",
            lambda of: (*of.uniforms[1:-1], of.uniforms[0], of.uniforms[-1])),
    Mistake("uniform-of-the-node-before", "each node takes the uniform of the node before it",
            lambda of: (of.uniforms[-2], *of.uniforms[:-2], of.uniforms[-1])),
    Mistake("uniform-of-the-depth", "each node takes the uniform of its depth",
            lambda of: (*(of.uniforms[depth] for depth in depths(of.parents)), of.final)),
    Mistake("uniform-of-the-root", "each node takes the uniform of the root",
            lambda of: (*[of.uniforms[0]] * len(of.tokens), of.final)),
    Mistake("uniforms-after-a-zero", "each node takes the uniform of the node before it, and the root takes 0",
            lambda of: (0.0, *of.uniforms[:-2], of.final)),
)
CHANGED: tuple[Mistake[Callable[[Sampling], Sampling]], ...] = (
    Mistake("no-temperature", "the temperature is not applied", lambda of: Sampling(1.0, of.top_k, of.top_p)),
    Mistake("no-top-k", "top-k is not applied", lambda of: Sampling(of.temperature, None, of.top_p)),
    Mistake("no-top-p", "top-p is not applied", lambda of: Sampling(of.temperature, of.top_k)),
    Mistake("temperature-inverted", "the logits are multiplied by the temperature",
            lambda of: Sampling(1 / of.temperature, of.top_k, of.top_p)),
)
TOP_P_FIRST = NamedMistake("top-p-first", "top-p is applied before the temperature")
KNOWN = (*CHILDREN, UNIFORMS_OF, SAMPLING_OF, ARGMAX, ZEROS, LAST_ROUND, *TURNED, *CHANGED, TOP_P_FIRST)


def wrong_way(
    one: Said, wrong: Sequence[Said], beside: Beside, earlier: Mapping[str, tuple[float, ...]] = MappingProxyType({}),
) -> Explained | None:
    """The known mistakes that draw exactly the tokens of this request and of all other wrong requests of the event.

    A few tokens may fit several mistakes; then the first ones are printed.
    wrong: the requests with impossible tokens;  earlier: uniforms of the forward before
    """
    return shared_by_all(_fitting(one, beside, earlier), [_fitting(other, beside, earlier) for other in wrong])


def _fitting(one: Said, beside: Beside, earlier: Mapping[str, tuple[float, ...]]) -> list[WrongContent]:
    return [known for known, tokens in _mistakes(one, beside, earlier.get(one.span.request, ())) if tokens == one.own]


def _mistakes(
    one: Said, beside: Beside, earlier: tuple[float, ...]
) -> Iterator[tuple[WrongContent, list[int]]]:
    span, drawing, x, own, _ = one
    sampling = drawing.sampling
    right = probabilities(x, sampling)
    for mistake in CHILDREN:
        yield mistake.known(), choices(right, drawing, **mistake.wrong)
    for other, theirs in beside.items():
        if other != span.request:
            one_like = replace(drawing, uniforms=_laid_out(theirs.uniforms if theirs else (), len(own)))
            yield UNIFORMS_OF.known(other), drawn(x, one_like)
            like = x.argmax(-1).tolist() if theirs is None else drawn(x, replace(drawing, sampling=theirs.sampling))
            yield SAMPLING_OF.known(other), like
    yield ARGMAX.known(), x.argmax(-1).tolist()
    yield ZEROS.known(), drawn(x, replace(drawing, uniforms=_laid_out((), len(own))))
    if earlier:
        yield LAST_ROUND.known(), drawn(x, replace(drawing, uniforms=_laid_out(earlier, len(own))))
    for turned in TURNED if len(own) > 1 else ():
        yield turned.known(), drawn(x, replace(drawing, uniforms=turned.wrong(drawing)))
    for changed in CHANGED:
        if (wrong := changed.wrong(sampling)) != sampling:
            yield changed.known(), drawn(x, replace(drawing, sampling=wrong))
    if sampling.top_p is not None:
        kept = probabilities(x, Sampling(1.0, sampling.top_k, sampling.top_p)) > 0
        scores = torch.where(kept, x / fp32(sampling.temperature, x), -torch.inf)
        yield TOP_P_FIRST.known(), choices(scores.softmax(-1), drawing)


def choices(
    probs: torch.Tensor, drawing: Drawing, *, kept: bool = False, restarted: bool = False, by_node: bool = False,
    whole: bool = False, later: bool = False,
) -> list[int]:
    """Draw once more with a mistake: children stay in the rest, sums restart, or the node's uniform is used.

    whole: the weights of the children are not divided by their sum; the largest weight is 1
    later: the tokens of all later nodes are candidates after a node
    """
    said = []
    for node, row in enumerate(probs):
        left, passed, chosen = row.clone(), 0.0, -1
        uniform, final = drawing.at_nodes[node], drawing.final
        behind = tuple(dict.fromkeys(drawing.tokens[node + 1 :]))
        for child in behind if later else Row(row, drawing, node).children:
            passed = float(row[child]) + (0.0 if restarted else passed)
            chosen = child if chosen < 0 and uniform * (float(row.max()) if whole else 1.0) < passed else chosen
            left[child] = row[child] if kept else 0.0
        if chosen < 0:
            along = left.cumsum(0)
            over = (along > (uniform if by_node else final) * along[-1]).nonzero()
            chosen = int(over[0]) if len(over) else -1
        said.append(chosen)
    return said


def _laid_out(uniforms: Sequence[float], nodes: int) -> tuple[float, ...]:
    """The uniforms of a launch with that many nodes: zeros where there are none, the final one last."""
    *at_nodes, final = uniforms or (0.0,)
    return *(*at_nodes, *(0.0,) * nodes)[:nodes], final
