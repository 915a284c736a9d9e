"""Adapt a kernel with dense states and packed sequences to the contract of a recurrence.

The author of such a kernel need not know slots, pools or rings: this file gathers the states of a launch, passes them
to the kernel, and stores the states that it returns. A kernel that reads pools itself implements `Recur`.
Leaves out: the kernel.
"""

from collections.abc import Iterator
from typing import Protocol

import torch

from instep_optimized.memory_addresses import Inputs, Part, Ring
from instep_optimized.ops.op_protocols import GdnInputs, Recur
from instep_optimized.ops.plain.compute_width import width
from instep_optimized.ops.plain.requests_of_part import Lanes, after, along, before, lanes
from instep_optimized.ops.plain.rerun_ring import NO_UPDATES, keep, recalled
from instep_optimized.ops.plain.scaled_tiles import as_stored
from instep_reference.contract.errors import Unsupported
from instep_reference.contract.place_names import Place
from instep_reference.contract.recurrences import GDN, RECURRENCES

from ..watch.kernel_calls import adapts, called
from .read_only_arguments import only_read
from .returned_tensors import pair_of


class Kernel(Protocol):
    """Run n sequences, packed in M rows, each through its own state. A kernel must not change its arguments.

    q, k [M, H, K] (l2-normalised, q times K ** -0.5); v [M, HV, V]; log_decay, beta [M, HV]; lengths [n] int64, their
    sum is M, some may be 0; state [n, HV, K, V] -> core [M, HV, V], states after the last row of each sequence.
    With a decay per channel (`kda`) log_decay is [M, HV, K].
    """

    def __call__(
        self, *, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor,
        lengths: torch.Tensor, state: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


def dense(*, window: Kernel, chunk: Kernel, op: str = GDN.name) -> Recur:
    """The op of a recurrence, made of two kernels: `window` for decode, verify and rerun tokens, `chunk` for prefill.

    op: the recurrence, and the field of the op set that gets the result: `gdn` or `kda`
    Such a kernel returns no updates, so its op set must declare keeps="inputs". Its rings then keep the inputs.
    """

    kernels = {"window": window, "chunk": chunk}

    def recur(*, inputs: GdnInputs, parts: tuple[Part, ...], dtype: torch.dtype, to: Place) -> torch.Tensor:
        core = torch.zeros_like(inputs.v, dtype=dtype)
        adapts(op, kernels)
        for part in parts:
            if part.parents is not None:
                raise Unsupported("a kernel over dense states runs rows one after another: no windows that are trees")
            who = lanes(part)
            if len(who.which):
                _run(op, kernels[part.form], inputs, part, who, core)
        return core

    return recur


def _run(op: str, kernel: Kernel, inputs: GdnInputs, part: Part, who: Lanes, core: torch.Tensor) -> None:
    state = before(part, who, width(inputs.q.dtype, part.read.pool.dtype))
    if part.ring is not None:
        state = as_stored(part.read, _again(op, kernel, part.ring, who, state), who.tokens)
        for row, alive in enumerate(who.alive):
            keep(part.ring, who.which[:alive], row, Inputs(*(x[who.rows[:alive, row]] for x in inputs[1:])))
    after(part.settled, who, state, 0)
    for row, taken in launches(part, who):
        rows, lengths = who.rows[taken], taken.sum(dim=1)
        called(f"{op}.{part.form}", [length for length in lengths.tolist() if length])
        given = {**GdnInputs(*(x[rows] for x in inputs))._asdict(), "lengths": lengths}
        with only_read(given):
            found = kernel(**given, state=state)
        out, state = pair_of(kernel, found, core=given["v"].shape, state=state.shape)
        core[rows] = out.to(core.dtype)
        along(part.per_row, who, row, state[: who.alive[row]])
    after(part.store, who, state)


def launches(part: Part, who: Lanes) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the rows of each launch, as [n, most] bool: all rows in one launch. If the state after every row is needed,
    each launch has one row of every request. Without rows there is no launch."""
    rows = sum(alive > 0 for alive in who.alive)
    if part.per_row is None and rows:
        yield 0, who.inside
    elif part.per_row is not None:
        for row in range(rows):
            yield row, who.inside & (torch.arange(part.most, device=who.inside.device) == row)


def _again(op: str, kernel: Kernel, ring: Ring, who: Lanes, state: torch.Tensor) -> torch.Tensor:
    """The states after the kept tokens were run again. No query is kept, so k is passed: the read-out is not used."""
    ages = torch.arange(int(who.again.max()), device=state.device)
    lane, age = torch.nonzero(ages < who.again[:, None], as_tuple=True)
    if not len(lane):
        return state
    kept = recalled(ring, who.which[lane], age)
    if not isinstance(kept, Inputs):
        raise Unsupported(NO_UPDATES)
    k, v, log_decay, beta = (x.to(state.dtype) for x in kept)
    called(RECURRENCES[op].forms[0], [length for length in who.again.tolist() if length])
    given = {"q": k, "k": k, "v": v, "log_decay": log_decay, "beta": beta, "lengths": who.again}
    with only_read(given):
        found = kernel(**given, state=state)
    return pair_of(kernel, found, core=v.shape, state=state.shape)[1]
