"""MiniMax: its decays.

Leaves out: settings and refusals (`test_families.py`), the layers against `transformers`
(`tests/reference/test_oracle.py`), and planted faults (`minimax` of the catalogue).
"""

from pathlib import Path

import pytest
import torch

from instep_optimized.weights import Stored, lightning
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.weights import fixed_decay
from support.inputs.checkpoints import write


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
