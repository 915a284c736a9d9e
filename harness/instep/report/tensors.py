"""The tensors that a finding is about, as found and as expected; and as files, for whoever wants to look further.

Leaves out: findings of earlier events, whose tensors are gone, and drawing (`page/maps.py`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save

from instep_reference.contract.place import Place

from ..observe.context import EventContext
from ..observe.rows import row_spans, rows
from ..player import Side
from ..verdict import Comparison
from .words import where

if TYPE_CHECKING:
    from ..replay.replay import Outcome

MEMORY = ("state", "conv", "keys", "values")  # components of a request's memory
LONGEST = 100  # bytes of a name in that of a file
SAVED = 8  # findings whose tensors are written, of every run


def tensor_at(context: EventContext, side: Side, finding: Comparison) -> torch.Tensor | None:
    """What a side has at the place of a finding, for its request; None: nothing that is a tensor of a request."""
    place, request = finding.place, str(finding.request)
    if place.component in MEMORY:
        state = side.after.get(request)
        there: dict[Place, torch.Tensor] = {} if state is None else dict(state.parts())
        return there.get(place)
    span = next((span for span in row_spans(context, place.stage) if span.request == request), None)
    return None if span is None else rows(side, place, span)


def files(outcomes: Sequence[Outcome], folder: Path) -> dict[Path, bytes]:
    """A safetensors file for each of the first findings: `found`, `truth`, and `rounded` where that side ran."""
    made: dict[Path, bytes] = {}
    seen = Counter[str]()  # runs of one name, as of several strategies: their numbers go on
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
    """A text as part of a file's name, short enough for every file system. Two texts may give the same."""
    return re.sub(r"[^\w.-]+", "-", text).encode()[:LONGEST].decode(errors="ignore").strip("-.")
