"""The tensors of a finding, as found and as expected, and files of them for further study.

Leaves out: findings of earlier events, whose tensors are gone, and drawing (`report/html/replay.py`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save

from instep_reference.contract.answers import BLOCKS
from instep_reference.contract.place_names import Place

from ..player import Side
from ..verdict import Comparison
from ..watch.event_context import EventContext
from ..watch.rows_by_request import row_spans, rows
from .divergence_message import where

if TYPE_CHECKING:
    from ..run.replay import Outcome

MEMORY = (*BLOCKS, "keys", "values")  # components of a request's memory
LONGEST = 100  # bytes of a name that a file name takes at most
SAVED = 8  # findings per run whose tensors are written


def tensor_at(context: EventContext, side: Side, finding: Comparison) -> torch.Tensor | None:
    """The tensor of a side at the place and request of a finding; None if there is none."""
    place, request = finding.place, str(finding.request)
    if place.component in MEMORY:
        state = side.after.get(request)
        there: dict[Place, torch.Tensor] = {} if state is None else dict(state.parts())
        return there.get(place)
    span = next((span for span in row_spans(context, place.stage) if span.request == request), None)
    return None if span is None else rows(side, place, span)


def files(outcomes: Sequence[Outcome], folder: Path) -> dict[Path, bytes]:
    """A safetensors file for each of the first findings: `found`, `truth`, and `rounded` if that side ran."""
    made: dict[Path, bytes] = {}
    seen = Counter[str]()  # runs with the same name, as of several strategies, are numbered consecutively
    for outcome in outcomes:
        context, run = outcome.last, for_a_file(f"{outcome.name}-{outcome.plan.setting.name}")
        first = SAVED * seen[run.casefold()]
        seen[run.casefold()] += 1
        for number, finding in enumerate(outcome.verdict.findings[:SAVED], first):
            if context is None or context.index != finding.event or finding.request is None:
                continue
            sides = {"found": context.subject, "truth": context.truth, "rounded": context.rounded}
            tensors = {
                name: tensor.detach().cpu().contiguous() for name, side in sides.items()
                if side is not None and (tensor := tensor_at(context, side, finding)) is not None
            }
            if "found" in tensors:
                said = {"where": where(finding), "diagnosis": finding.diagnosis, "check": finding.check}
                made[folder / f"{run}-{number}-{finding.place.component}.safetensors"] = save(tensors, said)
    return made


def for_a_file(text: str) -> str:
    """A text as part of a file name, short enough for every file system. Two texts may give the same result."""
    return re.sub(r"[^\w.-]+", "-", text).encode()[:LONGEST].decode(errors="ignore").strip("-.")
