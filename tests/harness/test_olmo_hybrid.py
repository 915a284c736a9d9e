"""OLMo-Hybrid: further settings, kernels; what is not served is refused by name.

Leaves out: every strategy (`test_families.py`), the layers against `transformers`
(`tests/reference/test_oracle.py`), and planted faults (`olmo_hybrid` of the catalogue).
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace
from instep_optimized.ops.op_protocols import Ops
from instep_optimized.ops.plain import PLAIN
from instep_optimized.ops.triton import TRITON
from instep_optimized.options import Options, check
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.errors import BadInput, Unsupported
from instep_reference.contract.place_names import Place
from instep_reference.contract.shards import config_of as of_rank
from support.inputs.checkpoints import write
from support.inputs.traces import committed
from support.running.verdicts import agreed

trace = committed("faults/olmo")


@pytest.mark.whole
@pytest.mark.parametrize(("ops", "more"), [
    ("plain", {"dtype": "bfloat16"}), ("triton", {}), ("triton", {"dtype": "bfloat16"}),
    ("plain", {"kv_dtype": "float8_e4m3fn"}),
    ("plain", {"graphs": True}), ("ledger", {"graphs": True, "overlap": True}),
    ("plain", {"strategy": "rerun", "ring_dtype": "bfloat16"}),
], ids=str)  # fmt: skip
def test_olmo_hybrid_agrees_with_narrow_rows_and_in_graphs(trace: Trace, ops: str, more: dict[str, object]) -> None:
    agreed(Replay(trace, Setting(ops, **more)).run())  # type: ignore[arg-type]


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


def test_op_sets_and_ranks_that_olmo_lacks_are_refused_by_name(tmp_path: Path) -> None:
    config, narrow = (Checkpoint.open(write(tmp_path / str(wide), "olmo", linear_allow_neg_eigval=wide)).config
                      for wide in (True, False))  # fmt: skip
    for ops in (replace(PLAIN, name="own", bounds_beta=False), replace(PLAIN, name="own", fused_gdn=lambda **_: None)):
        with pytest.raises(Unsupported, match=r"the ops of own .*`Ops\.bounds_beta`.* olmo_hybrid needs"):
            check(Options(), config, 1, ops)
        check(Options(), narrow, 1, ops)
    with pytest.raises(BadInput, match="parts of olmo_hybrid's tensors are not declared"):
        of_rank(config, 2)
