"""OLMo-Hybrid: its bound of beta, and a beta that is limited in one half of an update.

Leaves out: settings and refusals (`test_families.py`), the layers against `transformers`
(`tests/reference/test_oracle.py`), and planted faults (`olmo_hybrid` of the catalogue).
"""

from dataclasses import replace

import pytest
import torch

from instep.diagnose.mistakes.delta_rule import candidates, listed
from instep.diagnose.mistakes.delta_rule_with_hooks import Call, spread, walk
from instep_optimized.ops.op_protocols import Ops
from instep_optimized.ops.plain import PLAIN
from instep_optimized.ops.triton import TRITON
from instep_reference.contract.place_names import Place


@pytest.mark.parametrize("ops", [PLAIN, TRITON], ids=lambda ops: ops.name)
def test_a_bound_of_beta_changes_no_bit_but_those_of_beta(ops: Ops) -> None:
    draw = torch.Generator().manual_seed(2)
    heads, width, at = 2, 16, Place("trunk", 0, "beta")
    mixed, a, b = (torch.randn(5, n, generator=draw) for n in (3 * heads * width, heads, heads))
    given = {"mixed": mixed, "a": a, "b": 3 * b, "A_log": a[0], "dt_bias": b[0], "key_heads": heads, "key_dim": width,
             "to": (at,) * 5}  # fmt: skip
    one, two = ops.gdn_inputs(**given), ops.gdn_inputs(**given, beta_bound=2.0)
    assert torch.equal(two.beta, 2 * one.beta) and float(two.beta.max()) > 1
    assert all(torch.equal(left, right) for left, right in zip(one[:-1], two[:-1], strict=True))


def test_a_beta_above_1_may_be_limited_in_one_half_of_an_update() -> None:
    """A beta that is limited in both is not named so, nor is one that nowhere exceeds 1."""
    q, k, v = torch.randn(3, 5, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gate, beta = -v[..., 0].exp(), 2 * q[..., 0].sigmoid()
    call = Call(q, k / k.norm(dim=-1, keepdim=True), v, gate, beta, torch.zeros(2, 4, 4, dtype=torch.float64))
    names = {"erases-at-most-once": (1, 2), "writes-at-most-once": (2, 1)}
    for name, (erased, written) in names.items():
        (one,) = candidates(call, listed(call, [name]))
        state = call.state
        for t, (k, v, gate, beta) in enumerate(zip(spread(call).k, call.v, call.log_decay, call.beta, strict=True)):
            state = gate.exp()[:, None, None] * state
            recall = torch.einsum("hk,hkv->hv", k, state)
            update = beta.clamp(max=written)[:, None] * v - beta.clamp(max=erased)[:, None] * recall
            assert torch.allclose(one.walked.update[t], update)
            state = state + k[..., None] * update[:, None]
        both = walk(replace(call, beta=call.beta.clamp(max=1)))
        assert not torch.allclose(one.walked.core, both.core, rtol=1e-3)
        assert not listed(replace(call, beta=call.beta / 2), [name])
