"""LFM2: a model without states, and names of tensors.

Leaves out: settings and refusals (`test_families.py`), the layers against `transformers`
(`tests/reference/test_oracle.py`), and planted faults (`lfm2` of the catalogue).
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace as with_fields

from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace
from instep.verdict import Exit
from instep_reference import short_conv
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Forward, Row
from instep_reference.contract.errors import BadInput
from support.inputs.checkpoints import write
from support.inputs.traces import committed
from support.running.verdicts import agreed, related

trace = committed("faults/lfm2")


def test_a_model_without_states_leaves_step_changes_inconclusive(trace: Trace) -> None:
    held = related("step-changes", Replay(trace, Setting("plain")))
    assert held.verdict.exit is Exit.INCONCLUSIVE and "no recurrent states" in held.verdict.skipped[0].reason


def test_prefixes_of_lfm2_hold_windows_alone(trace: Trace) -> None:
    """A tracked prefix ends inside a chunk of 7 tokens. A narrow storage of states rounds nothing of it."""
    header = with_fields(trace.header, capacity=with_fields(trace.header.capacity, track_interval=4, tracked=1))
    events = (trace.events[0], Forward((Row("a", "prefill", 7, inner=("x",)),)))
    for setting in (Setting("ledger"), Setting("plain", kept_dtype="int8", chunk_dtype="bfloat16")):
        agreed(Replay(replace(trace, header=header, events=events), setting).run())


def test_the_conv_of_a_short_convolution_has_no_silu() -> None:
    """One row by hand: taps 1, 2 and a window of one input."""
    x, weight, window = (torch.tensor([[number]]).double() for number in (3.0, 1.0, 5.0))
    mixed, after = short_conv.causal_conv(x, torch.cat([weight, 2 * weight], 1), window)
    assert (float(mixed), float(after)) == (1 * 5 + 2 * 3, 3)


def test_a_tensor_that_lfm2_lacks_is_named_as_in_its_files(tmp_path: Path) -> None:
    directory = write(tmp_path / "lfm2", "lfm2")
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.0.feed_forward.w3.weight"]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(BadInput, match=r"tensor model.layers.0.feed_forward.w3.weight: found nothing"):
        Checkpoint.open(directory)
