"""Levels 0 and 1: whether every token is the model's own choice after the tokens before it.

Every token is judged after the tokens that the engine really chose, so one wrong token does not hide the next one. The
rule is that of T4 (`checks/decisions.py`): a token may differ if the truth's margin is within the error that the two
logits may have, which follows from the error of the declared width at this position. Together with accepted drafts and
bonuses this covers greedy acceptance, because rejected drafts do not change its result. A drawn token is drawn again
from the truth's logits with its own uniforms, in the presence of the window's other drafts. It may differ if logits
with as large an error would draw it (`checks/sampled_tokens.py`). Leaves out: given tokens, of which a recording does
not have how they were chosen.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from instep_reference.contract.checkpoint import OnDisk
from instep_reference.contract.errors import BadInput
from instep_reference.contract.place_names import AFTER_LAYERS, Place
from instep_reference.weights import Weights

from ..checks.sampled_tokens import SINGLE, Row, against, sure
from ..checks.tensor_and_choice_judgement import Chosen, Ties
from ..finding_problem import Problem
from ..tier_allowances import LUCK, MARGIN_ERRORS, REDRAWS, SCALE_FLOOR, granted
from ..verdict import TIES, Comparison, Exit, Tier, Verdict
from .layerwise_reference import EMBEDDING, HEADS, Advance, Precision, Read, drafted, silent, walk
from .token_origins import PICK, Text

DECIDED = 0.5  # part of the tokens that must be decidable: agreement of fewer means little


@dataclass(frozen=True)
class AtToken(Comparison):
    """A finding at one token. token: its number among the generated ones, from 0; position: in prompt and text."""

    token: int = -1
    position: int = -1


@dataclass
class Drafts:
    """The recorded drafts, compared with the model's draft head. A rejected draft changes no token: no findings.

    own        drafts that the head picks, too;  undecided: others, within the error that two logits may have
    others     the rest, in the order of events: event, request, number in its window, and a sentence
    """

    own: int = 0
    undecided: int = 0
    others: list[tuple[int, str, int, str]] = field(default_factory=list)


@dataclass
class Judged:
    """The judged tokens, and drafts if there are any and the model has a head that drafts in chains.

    decided: tokens with so large a margin of the truth that any other token would be wrong
    """

    verdict: Verdict = field(default_factory=Verdict)
    ties: Ties = field(default_factory=lambda: Ties("tokens"))
    decided: int = 0
    walks: int = 0
    drafts: Drafts | None = None

    @property
    def exit(self) -> Exit:
        if self.verdict.findings:
            return Exit.DIVERGED
        few = self.ties.made == 0 or self.decided < DECIDED * self.ties.made
        return Exit.INCONCLUSIVE if few else Exit.AGREED


def judged(
    disk: OnDisk, precision: Precision, texts: Sequence[Text], progress: Advance = silent
) -> Judged:
    """Judge all tokens of all texts."""
    _within(disk.config.vocab, texts)
    found, texts = Judged(), [text for text in texts if text.said and not text.given]
    if not texts:
        return found
    seen = _measured(disk, precision, texts, (0,), progress)
    found.walks = 1
    by_head = sum(int(one.own().sum()) for _, *drafts in seen for one in drafts)
    # Drafts of another drafter are doubtful nearly everywhere, and no further draw would make them the head's.
    first = 2 if 2 * by_head >= sum(len(window.picks) for text in texts for window in text.windows) else 1
    doubtful = [number for number, one in enumerate(seen) if any(map(Measured.doubtful, one[:first]))]
    if doubtful:  # the error of a single draw may be small by luck
        again = _measured(disk, precision, [texts[number] for number in doubtful], range(1, REDRAWS + 1), progress)
        found.walks = 2
        for number, one in zip(doubtful, again, strict=True):
            seen[number] = [before.softer(after) for before, after in zip(seen[number], one, strict=True)]
    for text, (tokens, *_) in zip(texts, seen, strict=True):
        found.verdict.add(_compared(text, tokens, found))
    found.verdict.add(found.ties.too_many(TIES, 0, "recording", PICK))
    if _heads(disk, texts):
        found.drafts = Drafts()
        for text, (_, *drafts) in zip(texts, seen, strict=True):
            _count(text, drafts, found.drafts)
        found.drafts.others.sort()
    return found


def _heads(disk: OnDisk, texts: Sequence[Text]) -> bool:
    """Whether there are drafts, and one MTP layer, which drafts in chains."""
    return disk.config.mtp_layers == HEADS and any(text.windows for text in texts)


@dataclass(frozen=True)
class Measured:
    """The truth's view of the tokens of one text.

    said     the engine's tokens;  right: its choices
    margin   by how much the logits of its choices exceed those of the engine's tokens
    part     the margin as a part of the allowance
    decides  the same for the runner-up, which is the smallest that a wrong token could have
    errors   the allowed error of a logit;  final: the truth's rows
    """

    said: torch.Tensor
    right: torch.Tensor
    margin: torch.Tensor
    part: torch.Tensor
    decides: torch.Tensor
    errors: torch.Tensor
    final: torch.Tensor

    def own(self) -> torch.Tensor:
        """Which tokens are its choices, too: two tokens of the same logit are both right."""
        return (self.said == self.right) | (self.margin <= 0)

    def doubtful(self) -> bool:
        """Whether a margin exceeds its allowance by so little that the allowance may be too small by luck."""
        return bool(((self.part > 1) & (self.part <= LUCK)).any())

    def softer(self, other: "Measured") -> "Measured":
        """With the larger of two allowances."""
        return replace(
            self, part=torch.minimum(self.part, other.part), decides=torch.minimum(self.decides, other.decides)
        )


def _measured(
    disk: OnDisk, precision: Precision, texts: Sequence[Text], draws: Sequence[int], progress: Advance
) -> list[list[Measured]]:
    """Per text its tokens, and then its drafts if it has any that can be judged."""
    heads = _heads(disk, texts)
    read = walk(disk, precision, texts, draws, progress, whole=heads)
    spoken = read.said(texts) if heads else read
    tokens = _scored(disk, precision, spoken, [list(text.said) for text in texts])
    found = [[_drawn(disk, precision, text, one) if any(text.drawn) else one] for text, one in
             zip(texts, tokens, strict=True)]  # fmt: skip
    if heads:
        picks = [[pick for window in text.windows for pick in window.picks] for text in texts]
        for mine, one in zip(found, _scored(disk, precision, drafted(disk, read, texts), picks), strict=True):
            mine.append(one)
    return found


def _scored(
    disk: OnDisk, precision: Precision, read: Read, said: Sequence[Sequence[int]]
) -> list[Measured]:
    """Per text its rows, each with the token that the engine chose there."""
    chosen = torch.tensor([token for mine in said for token in mine])
    scores: Scores = scored(disk, read, chosen)
    most = granted(scores.largest, scores.noise, precision.activation)
    margin = scores.best - scores.own
    whole = (chosen, scores.pick, margin, margin / most, (scores.best - scores.second) / most, most / MARGIN_ERRORS,
             read.final[None])  # fmt: skip
    parts = [torch.split(tensor, [len(mine) for mine in said]) for tensor in whole]
    return [Measured(*one) for one in zip(*parts, strict=True)]


def _drawn(disk: OnDisk, precision: Precision, text: Text, one: Measured) -> Measured:
    """The same with drawn tokens: the token that their uniforms draw, and the others that they could draw.

    The margin is then the error of a logit with which the token could be drawn.
    """
    width = torch.float64 if precision.activation is torch.float64 else SINGLE
    right, margin, part, decides = (x.clone() for x in (one.right, one.margin, one.part, one.decides))
    at = [number for number, how in enumerate(text.drawn) if how is not None and number >= text.known]
    for number, logits in zip(at, whole_rows(disk, one.final[at]), strict=True):
        row, error = Row(logits, *text.drawn[number]), float(one.errors[number])  # type: ignore[misc]
        right[number] = row.drawn
        (part[number],) = against([row], [row.drawn], [text.said[number]], [error], precision.activation)
        margin[number] = part[number] * error
        decides[number] = 2.0 if sure(row, error, width) else 0.0
    return replace(one, right=right, margin=margin, part=part, decides=decides)


def _compared(text: Text, one: Measured, found: Judged) -> Iterator[Comparison]:
    """A comparison for each wrong token, and one for all others."""
    rows = slice(text.known, None)
    differs = ~one.own()[rows]
    part = torch.where(differs, one.part[rows], 0.0)
    choices = Chosen(one.margin[rows], part, differs)
    found.ties.add(choices)
    wrong = differs & ~(part <= 1)
    found.decided += int((wrong | (~differs & (one.decides[rows] > 1))).sum())
    for row in wrong.nonzero().flatten().tolist():
        token, origin = row + text.known, text.origins[row + text.known]
        yield AtToken(
            "tokens", Tier.DECISIONS, origin.event, origin.kind, PICK, elements=1, worst=float(part[row]), allowed=1.0,
            request=text.request, token=token, position=len(text.prompt) + token,
            problem=Problem("differs", f"{origin.role} is {text.said[token]}; {_says(text, one, token)}"),
        )
    rest = len(part) - int(wrong.sum())
    if rest:
        worst = float(torch.where(wrong, 0.0, part).max())
        event, kind = text.origins[-1].event, text.origins[-1].kind
        yield Comparison(
            "tokens", Tier.DECISIONS, event, kind, PICK, elements=rest, blocks=rest, undecided=choices.ties,
            worst=worst, allowed=1.0, request=text.request,
        )


def _count(text: Text, drafts: Sequence[Measured], found: Drafts) -> None:
    """Count the drafts of a text."""
    numbered = [(window, number) for window in text.windows for number in range(1, len(window.picks) + 1)]
    for one in drafts:
        own, tied = one.own(), one.part <= 1
        found.own += int(own.sum())
        found.undecided += int((~own & tied).sum())
        for row in (~own & ~tied).nonzero().flatten().tolist():
            window, number = numbered[row]
            says = (f"draft {number} of {len(window.picks)} is {int(one.said[row])}; the model's head says "
                    f"{int(one.right[row])} by a margin of {float(one.margin[row]):.3g} logits")
            found.others.append((window.event, text.request, number, says))


def _says(text: Text, one: Measured, token: int) -> str:
    """The clause about the model's own choice."""
    right, margin = int(one.right[token]), float(one.margin[token])
    if any(text.drawn) and text.drawn[token] is not None:
        off = f"logits off by {margin:.3g} could draw it" if math.isfinite(margin) else "no logits near to them draw it"
        return f"with these uniforms the model's logits draw {right}, and {off}"
    return f"the model says {right} by a margin of {margin:.3g} logits"


def _within(vocab: int, texts: Sequence[Text]) -> None:
    for text in texts:
        if not text.prompt:
            raise BadInput(f'request "{text.request}": prompt', found="no token", expected="at least one")
        for name, tokens in (("prompt", text.prompt), ("tokens", text.said)):
            for number, token in enumerate(tokens):
                if not 0 <= token < vocab:
                    raise BadInput(
                        f'request "{text.request}": {name}[{number}]', found=f"token {token}",
                        expected=f"a token of the model's vocabulary, 0 to {vocab - 1}",
                    )


# ---- scores from the logits of many rows, without storing all logits: the output matrix is read in blocks of tokens

HEAD = "lm_head.weight"
TOKENS = 8192  # of the vocabulary, at once
LOGITS = Place("trunk", AFTER_LAYERS, "logits")


MOST = 1 << 28  # maximum size of whole rows of logits at a time, in bytes


def whole_rows(disk: OnDisk, final: torch.Tensor) -> Iterator[torch.Tensor]:
    """The truth's logits [vocab] of each of these final rows, for decisions that need all of them."""
    at_once = max(1, MOST // (8 * disk.config.vocab))
    for begin in range(0, len(final), at_once):
        rows = final[begin : begin + at_once]
        yield from torch.cat([rows @ stored.to(torch.float64).T for _, stored in _matrix(disk)], 1)


def _matrix(disk: OnDisk) -> Iterator[tuple[slice, torch.Tensor]]:
    """The output matrix in blocks of tokens."""
    vocab = disk.config.vocab
    spans = [slice(begin, min(begin + TOKENS, vocab)) for begin in range(0, vocab, TOKENS)]
    yield from zip(spans, disk.rows(EMBEDDING if disk.config.tied else HEAD, spans), strict=True)


@dataclass
class Scores:
    """The truth's scores of each row [rows], and the errors of draws.

    best, second   its two largest logits; pick: the token of the largest, the lowest one on a tie
    own            its logit of the engine's token;  largest: its largest logit by size
    noise          the largest relative error of any draw, of hidden rows or logits
    """

    best: torch.Tensor
    second: torch.Tensor
    pick: torch.Tensor
    own: torch.Tensor
    largest: torch.Tensor
    noise: torch.Tensor


def scored(disk: OnDisk, read: Read, said: torch.Tensor) -> Scores:
    """Score the rows. said [rows]: the token that the engine chose after each row."""
    config, final = disk.config, read.final
    rows = len(said)
    top, tokens = torch.full((rows, 2), -torch.inf, dtype=torch.float64), torch.zeros(rows, 2, dtype=torch.int64)
    own, size = (torch.zeros(rows, dtype=torch.float64) for _ in range(2))
    off = {draw: torch.zeros(2, rows, dtype=torch.float64) for draw in read.noise}  # sum of squares, largest
    squares = torch.zeros(rows, dtype=torch.float64)
    for span, stored in _matrix(disk):
        right = final[None] @ stored.to(torch.float64).T
        for draw, errors in off.items():
            each, weight = read.passes[draw], stored.to(read.passes[draw].width)
            with each.begin(Weights(config, weight, (), weight, weight, None), False):
                drawn = each.see(LOGITS, final[draw] @ weight.T).to(torch.float64)
            errors[0] += (drawn - right).square().sum(1)
            errors[1] = torch.maximum(errors[1], (drawn - right).abs().amax(1))
        squares += right.square().sum(1)
        size = torch.maximum(size, right.abs().amax(1))
        here = (said >= span.start) & (said < span.stop)
        own[here] = right[here].gather(1, (said[here] - span.start)[:, None])[:, 0]
        most = right.topk(min(2, right.shape[1]), dim=1)
        # Earlier blocks come first, so that the lower token stays on a tie.
        top, order = torch.cat([top, most.values], 1).sort(dim=1, descending=True, stable=True)
        top, tokens = top[:, :2], torch.cat([tokens, most.indices + span.start], 1).gather(1, order)[:, :2]
    scales = torch.stack([squares.sqrt(), size]).clamp_min(SCALE_FLOOR)
    noise = torch.stack([
        torch.maximum(read.noise[draw], torch.stack([errors[0].sqrt(), errors[1]]).div(scales).amax(0))
        for draw, errors in off.items()
    ]).amax(0)  # fmt: skip
    return Scores(top[:, 0], top[:, 1], tokens[:, 0], own, size, noise)
