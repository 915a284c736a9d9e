"""The gated delta rule over the rows of one sequence, in any width, with a hook for each row.

The catalogue (`delta_rule.py`) changes its inputs or its hook. Leaves out: the mistakes, and the steps of one token
(`checks/wrong_state_inputs.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from instep_reference.contract.declared_rounding import Storage

from ...checks.wrong_state_inputs import fade, read, update_of, write

Tensor = torch.Tensor
Rows = Mapping[str, Tensor]  # name of an input -> its rows
ROWS = ("q", "k", "v", "log_decay", "beta")


@dataclass(frozen=True)
class Call:
    """The inputs of one sequence in a call of the delta rule, all of one dtype.

    q, k [n, H, K], v [n, HV, V], log_decay [n, HV] or [n, HV, K], beta [n, HV]: its rows; q and k are normalised,
    q times K ** -0.5
    state [HV, K, V]: before row 0
    parents: the parent of each row, -1 is the state before row 0; empty: each row follows the row before it
    raw: q and k before their norm and scale, where the op norms them itself
    before, after: rows of other sequences that may be in memory before row 0, and after the last row
    launched_before, launched_after: the same for every row, where each row is launched by itself
    others: whose rows they are ('of request "b"'), and the rows of another sequence of the same batch
    recalls: whether tokens obey the delta rule. If not, beta is the write gate alone
    skip [HV]: the weight with which values are added to read-outs after the call
    stored: how the state is stored, if that is in tiles
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor
    state: Tensor
    parents: Sequence[int] = ()
    raw: Rows = field(default_factory=dict)
    before: Sequence[Rows] = ()
    after: Sequence[Rows] = ()
    launched_before: Sequence[Rows] = ()
    launched_after: Sequence[Rows] = ()
    others: Sequence[tuple[str, Rows]] = ()
    recalls: bool = True
    skip: Tensor | None = None
    stored: Storage | None = None


class Walked(NamedTuple):
    """The result of a recurrence.

    core [n, HV, V]: the read-outs; update [n, HV, V]: what each row adds along its key; states [n + 1, HV, K, V]: the
    state before row 0, and after each row. With an axis in front where several calls are carried through at once.
    """

    core: Tensor
    update: Tensor
    states: Tensor


class Row(NamedTuple):
    """q, k [HV, K], v [HV, V], log_decay, beta [HV] of one row; recalls: of its call."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor
    recalls: bool = True

    def update(self, faded: Tensor) -> Tensor:
        """Return what the row adds along its key to a state that has decayed."""
        return update_of(faded, self.k, self.v, self.beta, self.recalls)


Token = Callable[[Tensor, Row], tuple[Tensor, Tensor, Tensor]]  # state, row -> read-out, update, state after it
Walk = Callable[[Call], Walked]


# -- the recurrence ------------------------------------------------------------------------------------


def right(state: Tensor, row: Row) -> tuple[Tensor, Tensor, Tensor]:
    """S <- exp(log_decay) S;  u = beta (v - S^T k);  S <- S + k u^T;  o = S^T q."""
    faded = fade(state, row.log_decay)
    update = row.update(faded)
    after = write(faded, row.k, update)
    return read(after, row.q), update, after


def walk(call: Call, token: Token = right, count: int | None = None) -> Walked:
    """Carry the state through the rows, or the first `count` of them; `token`: another recurrence of one row."""
    call = spread(call)
    axis = call.v.ndim - 3  # of the rows; the axis in front of it is that of several calls
    rows = list(zip(*(getattr(call, name).movedim(axis, 0) for name in ROWS), strict=True))[:count]
    states, core, updates = [call.state], list[Tensor](), list[Tensor]()
    for row, parent in zip(rows, call.parents or range(-1, len(rows)), strict=False):
        read, update, after = token(states[parent + 1], Row(*row)._replace(recalls=call.recalls))
        core.append(read)
        updates.append(update)
        states.append(after)
    none = call.v[..., :0, :, :]
    return Walked(*(torch.stack(each, axis) if each else none for each in (core, updates, states)))


def spread(call: Call) -> Call:
    """q and k for every value head: value head h reads key head h // (HV / H)."""
    heads = call.v.shape[-2]
    q, k = (x.repeat_interleave(heads // x.shape[-2], dim=-2) for x in (call.q, call.k))
    return replace(call, q=q, k=k)
