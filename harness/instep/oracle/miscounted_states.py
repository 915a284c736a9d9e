"""States that a miscounted step may have left for the next step.

Leaves out: the other wrong states (`checks/hypotheses.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from .folding import PreviousStep, Run
from .recomputation import again, fold


def handed_over(base: torch.Tensor, previous: PreviousStep) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Wrong states that a miscounted step may have left instead of `base`: a sentence, and the state."""
    tokens = previous.tokens
    if tokens is None:
        return
    count = len(tokens.of("beta"))
    twice = "counts the tokens of the previous step twice"
    yield twice, partial(_folded, tokens, base, range(count))
    if previous.verb == "accepted":
        yield twice, partial(again, tokens, base)
    for some in range(1, count):
        said = f"{some} token{'s' * (some > 1)} of the previous step; {count} tokens were {previous.verb}"
        yield f"was continued from the state after {said}", partial(_folded, tokens, previous.base, range(some))


def _folded(tokens: Run, base: torch.Tensor, nodes: Sequence[int]) -> torch.Tensor:
    return fold(tokens, base, nodes, read=False)[0]
