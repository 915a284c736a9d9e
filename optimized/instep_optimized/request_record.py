"""The host's record of a live request. Lengths and windows themselves are on the device (`memory/slot_table.py`).

Leaves out: the place of the request's memory (`memory/`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from instep_reference.contract.engine import MEMORY, RequestState
from instep_reference.contract.sampling import Sampling

from .memory.saved_states import ByLayer, Kept
from .memory.tiled_units import shown
from .transfer.to_host import Length


@dataclass
class Request:
    """One request between its admission and its end.

    tokens  [P] int64, the prompt on the device
    sampling  how its tokens are drawn; its slot's line has the same
    rooted  whether its slot's window begins with a root
    parents of every draft after the root, the node that it continues; None between rounds
    row     its batch row in the verify that is not committed yet
    flight  if batches are cut into micro-batches: the number of the one with its window, and its row there
    said    the tokens after the prompt, root last, in parts that are read on demand. They are recorded only if
            prefixes may be tracked
    """

    name: str
    prompt: tuple[int, ...]
    tokens: torch.Tensor
    sampling: Sampling | None = None
    length: Length = field(default_factory=Length)
    rooted: bool = False
    parents: Sequence[int] | None = None
    row: int | None = None
    flight: tuple[int, int] = (0, 0)
    said: list[Callable[[], Sequence[int]]] = field(default_factory=list)

    @property
    def drafts(self) -> int:
        """Number of drafts after the root."""
        return 0 if self.parents is None else len(self.parents)

    def between_rounds(self) -> Request:
        """A copy without the round in flight, and with its exact length: waits for the accepted counts."""
        return Request(self.name, self.prompt, self.tokens, self.sampling, Length(self.length.exact), self.rooted,
                       said=list(self.said))

    def given_to(self, live: Request) -> Request:
        """Adopt a kept entry as the state of another request, which has its own prompt and sampling."""
        return replace(self, name=live.name, prompt=live.prompt, tokens=live.tokens, sampling=live.sampling)

    def prefix(self, count: int) -> Request:
        """Return its first `count` tokens as the prompt of a request that has run so far. Waits for tokens."""
        text = (*self.prompt, *(token for part in self.said for token in part()))[:count]
        return Request(self.name, text, self.tokens.new_empty(0), length=Length(count))


def logical(request: Request, kept: Kept) -> RequestState:
    """Build the contract's logical state from the host's record and copies of the memory."""
    drafting = request.rooted and kept.proposal is not None
    root = kept.root if request.rooted else None
    proposal = kept.proposal[0] if request.rooted and kept.proposal is not None else None
    asked = [token for token in (root, proposal) if token is not None]
    said = iter(torch.stack(asked).tolist() if asked else ())  # one read, because each one waits for the device
    return RequestState(
        length=request.length.exact,
        root=None if root is None else next(said),
        proposal=None if proposal is None else next(said),
        proposal_hidden=kept.proposed if drafting else None,
        **{name: _shown(kept[name]) for name in MEMORY},
        final=kept.final,
    )


def _shown(copies: ByLayer) -> dict[int, torch.Tensor]:
    return {layer: shown(copied) for layer, copied in copies.items()}
