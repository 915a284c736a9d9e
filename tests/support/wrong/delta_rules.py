"""Kernels for the delta rule as a user writes them, and edits that make each of them wrong in one way.

Independent of the catalogue (`instep.diagnose.mistakes.delta_rule`): a mistake is a change in the text of a kernel.
Leaves out: the checks (`tests/harness/test_mistakes.py`).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from instep import kit
from instep.adapters.dense import dense
from instep.adapters.pooled import pooled
from instep_optimized.ops.op_protocols import Ops

Edits = Sequence[tuple[str, str]]

DENSE = '''
def kernel(*, q, k, v, log_decay, beta, lengths, state):
    H, HV, scale = q.shape[1], v.shape[1], q.shape[2] ** -0.5
    r, heads = HV // H, torch.arange(HV)
    q, k = q[:, heads // r], k[:, heads // r]
    core, state, begin = torch.zeros_like(v), state.clone(), 0
    for S, length in zip(state, lengths.tolist()):
        end = begin + length
        for row in range(begin, end):
            g, b = log_decay[row], beta[row]
            S *= g.exp()[:, None, None]
            recalled = torch.einsum("hk,hkv->hv", k[row], S)
            update = b[:, None] * (v[row] - recalled)
            S += torch.einsum("hk,hv->hkv", k[row], update)
            core[row] = torch.einsum("hk,hkv->hv", q[row], S)
        begin = end
    return core, state
'''
DECAY = "            S *= g.exp()[:, None, None]\n"
GATE, BETA, READ = "log_decay[row]", "beta[row]", 'torch.einsum("hk,hkv->hv", q[row], S)'
RECALL = 'torch.einsum("hk,hkv->hv", k[row], S)'

# Edits of DENSE -> the sentence.
MISTAKES: dict[str, tuple[Edits, str]] = {
    "gate before, from the end": ([(GATE, "log_decay[row - 1]")], "the gate of row t - 1 is used for row t"),
    "gate before, or its own": (
        [(GATE, "log_decay[max(row - 1, begin)]")], "the gate of row t - 1 is used for row t"),
    "gate before, or none": (
        [(GATE, "log_decay[row - 1] * (row > begin)")], "the gate of row t - 1 is used for row t"),
    "gate after": ([(GATE, "log_decay[min(row + 1, len(v) - 1)]")], "the gate of row t + 1 is used for row t"),
    "beta before": ([(BETA, "beta[row - 1]")], "beta of row t - 1 is used for row t"),
    "beta after": ([(BETA, "beta[min(row + 1, len(v) - 1)]")], "beta of row t + 1 is used for row t"),
    "both before": (
        [(GATE, "log_decay[row - 1]"), (BETA, "beta[row - 1]")], "the gate and beta of row t - 1 are used for row t"),
    "gate h // r": ([(GATE, "log_decay[row, heads // r]")], "uses the gate of head h // r, r value heads per key head"),
    "gate h % H": ([(GATE, "log_decay[row, heads % H]")], "uses the gate of head h % H, H key heads"),
    "beta h // r": ([(BETA, "beta[row, heads // r]")], "uses beta of head h // r, r value heads per key head"),
    "beta h % H": ([(BETA, "beta[row, heads % H]")], "uses beta of head h % H, H key heads"),
    "keys h % H": ([("q[:, heads // r], k[:, heads // r]", "q[:, heads % H], k[:, heads % H]")],
                   "value head h reads key head h % 2, not h // 2"),
    "decay last": ([(DECAY, ""), (READ, READ + "\n" + DECAY.rstrip())],
                   "the state decays after the update, not before it"),
    "decay, then read": ([(DECAY, ""), ("            core[row]", DECAY + "            core[row]")],
                         "the state decays after the update, not before it"),
    "recall undecayed": ([(RECALL, RECALL.replace("S)", "S / g.exp()[:, None, None])"))],
                         "the recall S^T k is read from the state before its decay"),
    "exp2": ([("g.exp()", "g.exp2()")], "the decay is 2 ** gate, not exp(gate)"),
    "exp of log2": ([("g.exp()", "(g * 1.4426950408889634).exp()")], "the decay is exp(gate * log2(e))"),
    "last row": ([("range(begin, end)", "range(begin, end - 1)")], "the last row of a sequence is skipped"),
    "state in bf16": ([(READ, READ + "\n            S.copy_(S.bfloat16())")],
                      "the state is rounded to bfloat16 after every token"),
    "state in fp16": ([("            core[row]", "            S.copy_(S.half())\n            core[row]")],
                      "the state is rounded to float16 after every token"),
    "update in bf16": ([("k[row], update)", "k[row], update.bfloat16().float())")],
                       "the update of every token is rounded to bfloat16"),
    "update in fp16": ([("k[row], update)", "k[row], update.half().float())")],
                       "the update of every token is rounded to float16"),
    "scale twice": ([(READ, f"scale * {READ}")], "the scale K ** -0.5 is applied twice"),
    "scale missing": ([(READ, f"{READ} / scale")], "the scale K ** -0.5 is missing"),
}

# No entry of the catalogue is one of these.
UNKNOWN: dict[str, Edits] = {
    "two at once": [(GATE, "log_decay[row - 1]"), (BETA, "beta[row, heads % H]")],
    "root of beta": [("b[:, None] *", "b.sqrt()[:, None] *")],
    "recall added": [("v[row] - recalled", "v[row] + recalled")],
    "some decays twice": [("g.exp()", "(g * (1 + (row % 3 == 1))).exp()")],
    "recall of the key before": [(RECALL, RECALL.replace("k[row]", "k[max(row - 1, begin)]")), (READ, f"0.9 * {READ}")],
    "recall in bf16": [(RECALL, RECALL.replace("k[row], S", "k[row].bfloat16().float(), S.bfloat16().float()"))],
}

RAW = '''
def kernel(call):
    H, HV = call.q.shape[1], call.v.shape[1]
    unit = lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    q, k = unit(call.q) * call.q.shape[2] ** -0.5, unit(call.k)
    q, k = (x.repeat_interleave(HV // H, dim=1) for x in (q, k))
    decay = -call.A_log.exp() * torch.nn.functional.softplus(call.a + call.dt_bias)
    beta, core, bounds = call.b.sigmoid(), torch.zeros_like(call.v), call.cu_seqlens.tolist()
    for i, unit_of in enumerate(call.index.tolist()):
        S = call.pool[unit_of].clone()
        for t, row in enumerate(range(bounds[i], bounds[i + 1])):
            S *= decay[row].exp()[:, None, None]
            update = beta[row][:, None] * (call.v[row] - torch.einsum("hk,hkv->hv", k[row], S))
            S += torch.einsum("hk,hv->hkv", k[row], update)
            core[row] = torch.einsum("hk,hkv->hv", q[row], S)
            if call.snapshots is not None:
                call.snapshots[call.rows[i], t] = S
            if call.blocks is not None:
                call.pool[call.blocks[i, t]] = S
        if call.stores:
            call.pool[unit_of] = S
    return core
'''
RAW_MISTAKES: dict[str, tuple[Edits, str]] = {
    "q not normalised": ([("unit(call.q) *", "call.q *")], "q is not normalised"),
    "k not normalised": ([("unit(call.k)", "call.k")], "k is not normalised"),
    "neither normalised": ([("unit(call.q) *", "call.q *"), ("unit(call.k)", "call.k")], "q and k are not normalised"),
    "scale missing": ([(" * call.q.shape[2] ** -0.5", "")], "the scale K ** -0.5 is missing"),
}


def kernel_of(text: str, edits: Edits) -> Any:
    """The kernel with these edits of its text."""
    for old, new in edits:
        assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
        text = text.replace(old, new)
    scope: dict[str, Any] = {"torch": torch}
    exec(text, scope)
    return scope["kernel"]


def dense_ops(edits: Edits = (), *, chunk: Edits | None = None) -> Ops:
    """An op set with the kernel over dense states; chunk: other edits for prefill."""
    kernels = {"window": kernel_of(DENSE, edits), "chunk": kernel_of(DENSE, edits if chunk is None else chunk)}
    return replace(kit.load("plain"), name="mine", gdn=dense(**kernels), keeps="inputs", trees=False)


def raw_ops(edits: Edits = ()) -> Ops:
    """An op set with a kernel that norms q and k and computes the gates itself."""
    kernel = kernel_of(RAW, edits)
    return pooled(kit.load("plain"), name="mine", window=kernel, chunk=kernel, raw=True, order="KV")


RIGHT = dense_ops()
STALE_GATE = dense_ops(MISTAKES["gate before, or its own"][0])
