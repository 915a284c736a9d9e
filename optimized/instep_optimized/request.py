"""What the host knows of a live request. Lengths and windows themselves stand on the device (`memory/slot_table.py`).

Leaves out: where the request's memory stands (`memory/`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from instep_reference.contract.engine import MEMORY, RequestState
from instep_reference.contract.sampling import Sampling

from .memory.saved import Kept
from .memory.units import Copied, shown
from .transfer.to_host import Length


@dataclass
class Request:
    """One request between its admission and its end.

    tokens  [P] int64, the prompt on the device
    sampling  how its tokens are drawn; its slot's line has the same
    rooted  whether its slot's window begins with a root
    parents of every draft behind the root, the node that it continues; empty between rounds
    row     its batch row in the verify that is not committed yet
    """

    name: str
    prompt: tuple[int, ...]
    tokens: torch.Tensor
    sampling: Sampling | None = None
    length: Length = field(default_factory=Length)
    rooted: bool = False
    parents: tuple[int, ...] = ()
    row: int | None = None

    @property
    def drafts(self) -> int:
        """How many drafts stand behind the root."""
        return len(self.parents)

    def between_rounds(self) -> Request:
        """A copy without the round in flight, and with its exact length: waits for the accepted counts."""
        return Request(self.name, self.prompt, self.tokens, self.sampling, Length(self.length.exact), self.rooted)


def logical(request: Request, kept: Kept) -> RequestState:
    """The contract's logical state, made of what the host knows and of copies of the memory."""
    drafting = request.rooted and kept.proposal is not None
    return RequestState(
        length=request.length.exact,
        root=int(kept.root) if request.rooted else None,
        proposal=int(kept.proposal[0]) if drafting and kept.proposal is not None else None,
        proposal_hidden=kept.proposed if drafting else None,
        **{name: _shown(getattr(kept, name)) for name in MEMORY},
    )


def _shown(copies: dict[int, Copied]) -> dict[int, torch.Tensor]:
    return {layer: shown(copied) for layer, copied in copies.items()}
