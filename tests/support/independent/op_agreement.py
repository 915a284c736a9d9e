"""Whether two op sets agree on a case of one op, within a chosen width: a second net in addition to `instep.kit`.

Leaves out: the cases (`instep.kit.cases`), and the truth (`instep.kit.compare_with_reference`).
"""

import torch

from instep.kit.cases.case import Case, Outcome, strays
from instep.kit.cases.guarded_pools import same_bits


def agree(case: Case, ours: Outcome, theirs: Outcome) -> list[str]:
    """The differences between two op sets on one case; empty if they agree."""
    bad = [f"{case}: {n} stray elements in {name}" for name, n in strays(theirs).items() if n]
    for name, wanted in ours.results.items():
        if not _close(wanted, theirs.results[name], case.exact):
            bad.append(f"{case}: result {name}")
    for name, pool in ours.pools.items():
        at = pool.writable
        if not _close(pool.raw[at], theirs.pools[name].raw[at], case.exact or case.exact_memory, case.narrow):
            bad.append(f"{case}: memory {name}")
    return bad


def _close(x: torch.Tensor, y: torch.Tensor, exact: bool, narrow: bool = False) -> bool:
    """fp32 within 2e-5, and bf16 within 2^-6 of the largest element (an interpreter may truncate).

    narrow: fp32 as bf16.
    """
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    x, y = x.cpu(), y.cpu()
    if exact or not x.dtype.is_floating_point or not x.numel():
        return same_bits(x, y)
    room = {torch.bfloat16: 2.0**-6, torch.float64: 1e-12}.get(x.dtype, 2.0**-6 if narrow else 2e-5)
    worst = (x.double() - y.double()).abs().max()
    return bool(worst <= room * x.double().abs().max().clamp(min=1e-3))
