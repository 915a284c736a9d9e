"""A forward's rows as spans of tokens, and for which of them logits are asked for.

Leaves out: device metadata (`batch.py`) and what happens to the requests afterwards (`engine.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from instep_reference.contract.engine import Row

from .batch import Span, begins_of
from .request import Request


def spans_of(rows: Sequence[Row], requests: Mapping[str, Request]) -> list[Span]:
    """A span per row; its number in the batch is the snapshot row of its window."""
    spans = []
    for number, row in enumerate(rows):
        request = requests[row.request]
        if row.kind == "prefill":
            tokens = request.tokens[request.length : request.length + row.tokens]
        else:
            tokens = request.window()
        spans.append(Span(row.request, row.kind, tokens, request.length, number))
    return spans


def asked(span: Span, request: Request) -> int:
    """How many rows of a span logits are asked for; they are its last ones: all nodes of a window, one for a decode
    and for the last chunk of a prompt, none for an unfinished prompt."""
    if span.kind == "verify":
        return span.count
    return 0 if span.before + span.count < len(request.prompt) else 1


def asked_rows(spans: Sequence[Span], requests: Mapping[str, Request]) -> list[int]:
    """The packed rows for which logits are asked for, in batch order."""
    return [
        row
        for span, begin in zip(spans, begins_of(spans), strict=True)
        for row in range(begin + span.count - asked(span, requests[span.request]), begin + span.count)
    ]


def shifted(span: Span, request: Request) -> torch.Tensor:
    """The tokens one place further on than a span's: of the prompt, and the root once it is known."""
    known = request.tokens[span.before + 1 : span.before + span.count + 1]
    return known if request.root is None else torch.cat([known, request.root])
