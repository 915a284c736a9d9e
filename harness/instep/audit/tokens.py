"""Levels 0 and 1: is every token that was said what the model says behind the tokens before it?

Every token is judged behind what was really said, so one wrong token does not hide the next one. The rule is T4's
(`checks/decisions.py`): a token may differ while the truth's margin is within what the two logits may be off by, which
follows from the error of the declared width at this very position. With accepted drafts and bonuses that is all of a
greedy acceptance: rejected drafts have no part in what it accepts. A drawn token is drawn again from the truth's logits
with its own uniforms, beside the window's other drafts; it may be another one where logits that are off by as much
would draw that (`checks/reach.py`). Leaves out: text that was drawn with uniforms that nobody recorded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from instep_reference.contract.checkpoint import OnDisk
from instep_reference.contract.errors import BadInput

from ..checks.allowance import LUCK, MARGIN_ERRORS, REDRAWS
from ..checks.draws import SINGLE, against
from ..checks.judge import Chosen, Ties, granted
from ..checks.reach import Row, sure
from ..problem import Problem
from ..verdict import Comparison, Exit, Tier, Verdict
from .scores import Scores, scored, whole_rows
from .texts import PICK, Text
from .walk import Advance, Precision, silent, walk

DECIDED = 0.5  # at least this part of the tokens must be decidable: of fewer, agreement says little


@dataclass(frozen=True)
class AtToken(Comparison):
    """token: which of those that the request said, from 0; position: where it stands in prompt and text."""

    token: int = -1
    position: int = -1


@dataclass
class Judged:
    """decided: tokens of which the truth's margin is large enough that any other token would be called wrong."""

    verdict: Verdict = field(default_factory=Verdict)
    ties: Ties = field(default_factory=lambda: Ties("tokens"))
    decided: int = 0
    walks: int = 0

    @property
    def exit(self) -> Exit:
        if self.verdict.findings:
            return Exit.DIVERGED
        few = self.ties.made == 0 or self.decided < DECIDED * self.ties.made
        return Exit.INCONCLUSIVE if few else Exit.AGREED


def judged(
    disk: OnDisk, precision: Precision, texts: Sequence[Text], progress: Advance = silent
) -> Judged:
    """All tokens of all texts."""
    _within(disk.config.vocab, texts)
    found, texts = Judged(), [text for text in texts if text.said]
    if not texts:
        return found
    seen = list(_measured(disk, precision, texts, (0,), progress))
    found.walks = 1
    doubtful = [number for number, one in enumerate(seen) if bool(((one.part > 1) & (one.part <= LUCK)).any())]
    if doubtful:  # one draw's error may be small by luck
        again = _measured(disk, precision, [texts[number] for number in doubtful], range(1, REDRAWS + 1), progress)
        found.walks = 2
        for number, one in zip(doubtful, again, strict=True):
            seen[number] = seen[number].softer(one)
    for text, one in zip(texts, seen, strict=True):
        found.verdict.add(_compared(text, one, found))
    found.verdict.add(found.ties.too_many("ties", 0, "recording", PICK))
    return found


@dataclass(frozen=True)
class Measured:
    """The tokens of one text: the truth's choice, its margin over what was said as a part of what is granted, and the
    runner-up's, which is the least that a wrong token would have had. errors: what a logit may be off by; final: the
    truth's rows."""

    right: torch.Tensor
    margin: torch.Tensor
    part: torch.Tensor
    decides: torch.Tensor
    errors: torch.Tensor
    final: torch.Tensor

    def softer(self, other: Measured) -> Measured:
        """With the larger of two allowances."""
        return replace(
            self, part=torch.minimum(self.part, other.part), decides=torch.minimum(self.decides, other.decides)
        )


def _measured(
    disk: OnDisk, precision: Precision, texts: Sequence[Text], draws: Sequence[int], progress: Advance
) -> Iterator[Measured]:
    read = walk(disk, precision, texts, draws, progress)
    said = torch.tensor([token for text in texts for token in text.said])
    scores: Scores = scored(disk, read, said)
    most = granted(scores.largest, scores.noise, precision.activation)
    margin = scores.best - scores.own
    whole = (scores.pick, margin, margin / most, (scores.best - scores.second) / most, most / MARGIN_ERRORS,
             read.final[None])  # fmt: skip
    parts = [torch.split(tensor, [len(text.said) for text in texts]) for tensor in whole]
    for text, *one in zip(texts, *parts, strict=True):
        yield _drawn(disk, precision, text, Measured(*one)) if any(text.drawn) else Measured(*one)


def _drawn(disk: OnDisk, precision: Precision, text: Text, one: Measured) -> Measured:
    """The same where tokens were drawn: by what their uniforms draw, and what else they could. The margin is then the
    error of a logit with which the token could be drawn."""
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
    """A comparison per wrong token, and one for all others."""
    said = torch.tensor(text.said)
    rows = slice(text.known, None)
    differs = ((said != one.right) & (one.margin > 0))[rows]  # two tokens of the same logit are both right
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


def _says(text: Text, one: Measured, token: int) -> str:
    """What the model says instead."""
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
