"""What the host knows of a live request; chosen tokens stay on the device.

Leaves out: where its memory stands (`memory/`) and everything about other requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from instep_reference.contract.engine import RequestState

from .memory.saved import Kept


@dataclass(frozen=True)
class Flight:
    """A verified window that is not committed yet.

    tokens [T] int64: root, drafts;  picks [T] int64: the target's argmax at every node;  final [T, D]: its final
    hidden rows (a view on the forward's);  row: the snapshot row that holds the window's states
    """

    tokens: torch.Tensor
    picks: torch.Tensor
    final: torch.Tensor
    row: int

    @property
    def width(self) -> int:
        return self.tokens.shape[0]


@dataclass
class Request:
    """One request between its admission and its end.

    tokens    [P] int64, the prompt on the device
    length    committed tokens, L
    root      [1] int64, or None while the prompt is unfinished
    proposal  [1] int64, draft 1 as draft extend proposes it; proposal_hidden [1, D] the head's y behind it
    drafts    [n] int64, the drafts of this round; empty between rounds
    flight    its verified window, between verify and commit
    """

    name: str
    prompt: tuple[int, ...]
    tokens: torch.Tensor
    length: int = 0
    root: torch.Tensor | None = None
    proposal: torch.Tensor | None = None
    proposal_hidden: torch.Tensor | None = None
    drafts: torch.Tensor | None = None
    flight: Flight | None = None

    def window(self) -> torch.Tensor:
        """Root, then the drafts of this round: what a verify row runs on."""
        assert self.root is not None, f"request {self.name!r} has no root: its prompt is unfinished"
        return self.root if self.drafts is None else torch.cat([self.root, self.drafts])


def logical(request: Request, kept: Kept) -> RequestState:
    """What the host knows and copies of what memory holds, as the contract's logical state."""
    hidden = request.proposal_hidden
    return RequestState(
        length=request.length,
        root=_number(request.root),
        proposal=_number(request.proposal),
        proposal_hidden=None if hidden is None else hidden[0].clone(),
        conv=kept.conv,
        state=kept.state,
        keys=kept.keys,
        values=kept.values,
        draft_keys=kept.draft_keys,
        draft_values=kept.draft_values,
    )


def roots(requests: Sequence[Request]) -> dict[str, int]:
    """The roots that are known, in one host read."""
    known = {request.name: request.root for request in requests if request.root is not None}
    return dict(zip(known, torch.cat(list(known.values())).tolist(), strict=True)) if known else {}


def _number(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else int(tensor)
