"""A Triton kernel of the gated delta rule as a user writes it, for tests: `mine.py` of the example, in Triton.

Leaves out: speed. One program carries one value head of one sequence through its rows.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from instep.adapters.dense import dense
from instep_optimized import load


@triton.jit
def _recur(
    q, k, v, log_decay, beta, begins, state, core, after, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    rows, columns = tl.arange(0, K), tl.arange(0, V)
    block = (sequence * HV + head) * K * V + rows[:, None] * V + columns[None, :]
    S = tl.zeros([K, V], tl.float32) + tl.load(state + block)
    for row in range(tl.load(begins + sequence), tl.load(begins + sequence + 1)):
        key_at = (row * H + head // (HV // H)) * K + rows
        query, key = tl.load(q + key_at), tl.load(k + key_at)
        value_at = (row * HV + head) * V + columns
        S *= tl.exp(tl.load(log_decay + row * HV + head))
        delta = tl.load(beta + row * HV + head) * (tl.load(v + value_at) - tl.sum(key[:, None] * S, axis=0))
        S += key[:, None] * delta[None, :]
        tl.store(core + value_at, tl.sum(query[:, None] * S, axis=0))
    tl.store(after + block, S)


def kernel(*, q, k, v, log_decay, beta, lengths, state):
    begins = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    core, after = torch.zeros_like(v), torch.empty_like(state)
    given = [x.contiguous() for x in (q, k, v, log_decay, beta, begins, state)]
    sizes = {"H": k.shape[1], "HV": v.shape[1], "K": k.shape[2], "V": v.shape[2]}
    _recur[(len(lengths), v.shape[1])](*given, core, after, **sizes)
    return core, after


OPS = replace(load("plain"), name="mine", gdn=dense(window=kernel, chunk=kernel), keeps="inputs")
