"""OLMo-Hybrid: its bound of beta.

Leaves out: settings and refusals (`test_families.py`), the layers against `transformers`
(`tests/reference/test_oracle.py`), a beta that is limited in one half of an update
(`second_computations/test_delta_rule.py`), and planted faults (`olmo_hybrid` of the catalogue).
"""

import pytest
import torch

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
