"""MiniMax: further settings, decays; what is not served is refused by name.

Leaves out: every strategy (`test_families.py`), the layers against `transformers`
(`tests/reference/test_oracle.py`), and planted faults (`minimax` of the catalogue).
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace
from instep_optimized.ops.plain import PLAIN
from instep_optimized.ops.triton import TRITON
from instep_optimized.options import Options, check
from instep_optimized.weights import Stored, lightning
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.errors import BadInput, Unsupported
from instep_reference.contract.shards import config_of as of_rank
from instep_reference.weights import fixed_decay
from support.inputs.checkpoints import write
from support.inputs.traces import committed
from support.running.verdicts import agreed

trace = committed("faults/minimax")


@pytest.mark.whole
@pytest.mark.parametrize("more", [{"dtype": "bfloat16"}, {"graphs": True, "overlap": True}], ids=str)
def test_minimax_agrees_with_narrow_rows_and_in_graphs(trace: Trace, more: dict[str, object]) -> None:
    agreed(Replay(trace, Setting("plain", **more)).run())  # type: ignore[arg-type]


def test_both_sides_make_the_same_fixed_decays(tmp_path: Path) -> None:
    """Two writings of one formula; by hand the last of four heads in the first of four layers keeps e^-2^-8.

    In the last layer two numbers near 1 leave 1.3e-5, so that half a unit of them is 1e-11 of it.
    """
    checkpoint = Checkpoint.open(write(tmp_path / "minimax", "minimax"))
    stored = Stored(checkpoint.tensors, torch.float64, torch.device("cpu"))
    for layer in checkpoint.config.recurrent:
        own = lightning(stored, f"model.layers.{layer}", layer, checkpoint.config).log_decay
        torch.testing.assert_close(own, own.new_tensor(fixed_decay(4, layer, 4)), rtol=1e-10, atol=0)
    assert fixed_decay(4, 0, 4)[-1] == pytest.approx(-(2**-8), rel=2e-5)


def test_op_sets_and_ranks_that_minimax_lacks_are_refused_by_name(tmp_path: Path) -> None:
    config = Checkpoint.open(write(tmp_path / "minimax", "minimax")).config
    for ops, what in (
        (TRITON, "no recurrence lightning"), (replace(PLAIN, scaled_add=None), "`Ops.scaled_add`"),
        (replace(PLAIN, lightning_inputs=None), "`Ops.lightning_inputs`"),
    ):
        with pytest.raises(Unsupported, match=f"the ops of {ops.name} .*{what}.*minimax"):
            check(Options(), config, 1, ops)
    with pytest.raises(BadInput, match="parts of minimax's tensors are not declared"):
        of_rank(config, 2)
