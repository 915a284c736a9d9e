"""Landing verified windows: greedy acceptance, or forced paths in its place, and the commit of state memory.

Leaves out: draft extend and the requests' lengths (`engine.py`), and which units move (`commit/`). Chains only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from instep_reference.contract.engine import Committed, Path
from instep_reference.contract.errors import Unsupported

from .batch import ints, sent
from .commit.base import Commit, Landing
from .memory import Memory
from .ops.base import Acceptance, Ops
from .request import Flight, Request


def land(
    ops: Ops, commit: Commit, memory: Memory, requests: Sequence[Request], accepted: Sequence[Path] | None,
    device: torch.device,
) -> Committed:
    """Accept, write forced paths into what the accept op gave, and commit conv windows and states."""
    flights = [_flight(request) for request in requests]
    if not flights:
        none = ints((), device)
        return Committed(none, none, none.view(0, 0), none, none, none, none)
    result = ops.accept(
        window=pad_sequence([flight.tokens for flight in flights], batch_first=True),
        picks=pad_sequence([flight.picks for flight in flights], batch_first=True),
        count=ints([flight.width for flight in flights], device),
    )
    own_count, own_bonus = result.num_correct_drafts.clone(), result.bonus.clone()
    if accepted is not None:
        _force(result, accepted)
    rows, slots = sent(
        [[flight.row for flight in flights], [memory.slots.of(request.name) for request in requests]], device
    )
    commit.commit(ops, Landing(rows, slots, result.last_correct_step_indices))
    return Committed(**result._asdict(), own_num_correct_drafts=own_count, own_bonus=own_bonus)


def _flight(request: Request) -> Flight:
    assert request.flight is not None, f"request {request.name!r} was not verified"
    return request.flight


def _force(result: Acceptance, accepted: Sequence[Path]) -> None:
    """Overwrite the engine's own answer in its own buffers: nothing downstream knows the difference."""
    for path in accepted:
        if path.nodes != tuple(range(1, len(path.nodes) + 1)):
            raise Unsupported(f"accepted nodes {path.nodes}: this engine verifies chains, whose paths are 1, 2, ...")
    width, counts = result.accept_index.shape[1], [len(path.nodes) for path in accepted]
    index = [node for path in accepted for node in (0, *path.nodes, *[-1] * (width - len(path.nodes) - 1))]
    correct, lens, bonus, nodes = sent(
        [counts, [count + 1 for count in counts], [path.bonus for path in accepted], index], result.bonus.device
    )
    result.num_correct_drafts.copy_(correct)
    result.accept_lens.copy_(lens)
    result.last_correct_step_indices.copy_(correct)
    result.bonus.copy_(bonus)
    result.accept_index.copy_(nodes.view(-1, width))
