"""The reference with states that are stored narrower than they are computed, as a subject's may be.

Leaves out: every other place, which `see` rounds. Between events a state is what the store kept of it; within one it
runs in full width, as an engine's does in its registers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from instep_reference.contract.engine import Committed, Forwarded, Path, Row
from instep_reference.engine import ReferenceEngine
from instep_reference.gdn import GdnMemory


class StoringEngine(ReferenceEngine):
    """`stored`: the dtype of its states between events."""

    stored: torch.dtype

    def forward(self, rows: tuple[Row, ...]) -> Forwarded:
        answer = super().forward(rows)
        self._store(row.request for row in rows)
        return answer

    def commit(self, requests: tuple[str, ...], accepted: tuple[Path, ...] | None = None) -> Committed:
        answer = super().commit(requests, accepted)
        self._store(requests)
        return answer

    def _store(self, requests: Iterable[str]) -> None:
        for name in requests:
            live = self.requests[name]
            kept = tuple(
                replace(memory, state=memory.state.to(self.stored).to(memory.state.dtype))
                if isinstance(memory, GdnMemory) else memory
                for memory in live.standing.memory
            )
            self.requests[name] = replace(live, standing=replace(live.standing, memory=kept))
