"""What the host knows of a live request; tokens, lengths and windows stand on the device (`memory/slot_table.py`).

Leaves out: where its memory stands (`memory/`) and everything about other requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from instep_reference.contract.engine import RequestState

from .memory.saved import Kept
from .transfer.to_host import Length


@dataclass
class Request:
    """One request between its admission and its end.

    tokens  [P] int64, the prompt on the device
    rooted  whether its slot's window begins with a root
    drafts  how many drafts stand behind the root; 0 between rounds
    row     its batch row in the verify that is not committed yet
    """

    name: str
    prompt: tuple[int, ...]
    tokens: torch.Tensor
    length: Length = field(default_factory=Length)
    rooted: bool = False
    drafts: int = 0
    row: int | None = None

    def between_rounds(self) -> Request:
        """The same, its length settled; a round in flight is not part of it."""
        return Request(self.name, self.prompt, self.tokens, Length(self.length.exact), self.rooted)


def logical(request: Request, kept: Kept) -> RequestState:
    """What the host knows and copies of what memory holds, as the contract's logical state."""
    drafting = request.rooted and kept.proposal is not None
    return RequestState(
        length=request.length.exact,
        root=int(kept.root) if request.rooted else None,
        proposal=int(kept.proposal[0]) if drafting and kept.proposal is not None else None,
        proposal_hidden=kept.proposed if drafting else None,
        conv=kept.conv,
        state=kept.state,
        keys=kept.keys,
        values=kept.values,
        draft_keys=kept.draft_keys,
        draft_values=kept.draft_values,
    )
