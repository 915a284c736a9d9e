"""Everything that hangs on the step count, in one object: prebuilt per candidate, switched by one assignment.

Leaves out: the choice of a step count (`adaptive.py`) and draft extend, which does not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from instep_reference.contract.engine import Drafted

from .batch import Span, pack
from .commit.base import Commit
from .draft.base import Drafter
from .memory import Memory
from .ops.base import Ops
from .request import Request

NO_OPINION = -1  # `own` of a model that has no draft head


class Round:
    """One candidate: `num_steps`, the window's `width`, the commit strategy for it, and the chain's buffers.

    drafts, own [n, rows] int64: step i of a chain writes line i, and the next step reads it there; forced drafts are
    written into the same places, so that nothing downstream knows the difference.
    """

    def __init__(self, num_steps: int, commit: Commit, rows: int, device: torch.device) -> None:
        self.num_steps, self.width, self.commit = num_steps, num_steps + 1, commit
        self._drafts = torch.zeros(num_steps, rows, dtype=torch.int64, device=device)
        self._own = torch.zeros_like(self._drafts)

    def draft(
        self, ops: Ops, drafter: Drafter | None, memory: Memory, requests: Sequence[Request],
        picks: Sequence[Sequence[int]] | None,
    ) -> Drafted:
        """n drafts per request: draft 1 is extend's proposal, each further one a forward of the chain.

        Without a draft head they are what `picks` gives.
        """
        own, drafts = self._own[:, : len(requests)], self._drafts[:, : len(requests)]
        forced = None if picks is None else torch.tensor(picks, dtype=torch.int64, device=own.device).T
        own.fill_(NO_OPINION)
        if drafter is not None:
            self._chain(ops, drafter, memory, requests, drafts, own, forced)
        else:
            drafts.copy_(_present(forced))
        # Copies: the next draft event writes the same buffers, also while these drafts wait to be verified.
        chains, *answers = (lines.T.clone(memory_format=torch.contiguous_format) for lines in (drafts, drafts, own))
        for request, chain in zip(requests, chains, strict=True):
            request.drafts = chain
        return Drafted(*answers)

    def _chain(
        self, ops: Ops, drafter: Drafter, memory: Memory, requests: Sequence[Request], drafts: torch.Tensor,
        own: torch.Tensor, forced: torch.Tensor | None,
    ) -> None:
        own[0] = torch.cat([_present(request.proposal) for request in requests])
        drafts[0] = own[0] if forced is None else forced[0]
        hidden = torch.cat([_present(request.proposal_hidden) for request in requests])
        for step in range(1, self.num_steps):
            spans = [
                Span(request.name, "draft", drafts[step - 1, number : number + 1], request.length - 1 + step)
                for number, request in enumerate(requests)
            ]
            stage = f"chain.{step}"
            hidden = drafter.rows(ops, hidden, pack(spans, memory), stage)
            own[step] = drafter.pick(ops, hidden, stage)
            drafts[step] = own[step] if forced is None else forced[step]


def _present(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None, "a chain starts from the proposal of draft extend, which needs a root, or from picks"
    return tensor
