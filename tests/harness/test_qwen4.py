"""Qwen4-Exp: its hash of n-grams; stages, positions and drafters that are refused.

Leaves out: settings and op sets (`test_families.py`), the layers against `transformers`
(`tests/reference/test_oracle.py`), and planted faults (`qwen4` of the catalogue).
"""

from pathlib import Path

import pytest
import torch

from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace
from instep_optimized.ops.plain import PLAIN
from instep_optimized.ops.plain.residual_streams import rows_of
from instep_optimized.options import Options, check
from instep_optimized.weights import Stored, per_layer_embedding
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.errors import Unsupported
from instep_reference.per_layer_embedding import entries
from support.inputs.checkpoints import write
from support.inputs.traces import committed

trace = committed("faults/qwen4")


def test_both_sides_hash_the_same_n_grams(tmp_path: Path) -> None:
    """Two writings of one hash, over texts that end, and after tokens that a chunk before left."""
    checkpoint = Checkpoint.open(write(tmp_path / "qwen4", "qwen4", ngram_size=4, ple_embed_dim=12))
    stored = Stored(checkpoint.tensors, torch.float32, torch.device("cpu"))
    draw = torch.Generator().manual_seed(1)
    for shape in checkpoint.config.ple:
        hashes = per_layer_embedding(stored, f"model.layers.{shape.layer}", shape.layer, checkpoint.config).hashes
        line = torch.randint(4, 12, (200,), generator=draw)  # the end of a text is token 7
        pieces = (line + 1).unfold(0, shape.ngram, 1)
        right = entries(shape, tuple(line[shape.ngram - 1 :].tolist()), tuple(line[: shape.ngram - 1].tolist()))
        assert torch.equal(rows_of(pieces, hashes), right)
        first = rows_of(torch.tensor([[0] * (shape.ngram - 1) + [6]]), hashes)
        assert torch.equal(first, entries(shape, (5,), (shape.eos,) * (shape.ngram - 1)))


def test_stages_of_residual_streams_are_refused_by_name(trace: Trace) -> None:
    with pytest.raises(Unsupported, match="pipeline stages with residual streams"):
        Replay(trace, Setting("plain", stages=2)).run()


def test_positions_and_drafters_that_qwen4_lacks_are_refused_by_name(tmp_path: Path) -> None:
    config = Checkpoint.open(write(tmp_path / "qwen4", "qwen4")).config
    check(Options(drafter="external"), config, 1, PLAIN, positions=4096)
    with pytest.raises(Unsupported, match=r"up to 4097 positions .* of qwen4_exp may read chosen tokens alone"):
        check(Options(drafter="external"), config, 1, PLAIN, positions=4097)
    with pytest.raises(Unsupported, match="not several streams"):
        check(Options(drafter="block"), config, 1, PLAIN)
