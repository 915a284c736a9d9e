"""Shapes of real models add up to the real models, and what is drawn for them behaves like trained weights.

Leaves out: running them at full size (`tests/on_gpu.sh`).
"""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from instep.campaign.shapes import NAMES, cut, shape, sized_like
from instep.campaign.shapes.random_weights import random_checkpoint
from instep_reference import trunk
from instep_reference.contract.checkpoint_tensor_shapes import expected_shapes
from instep_reference.contract.errors import BadInput
from instep_reference.contract.place_names import Place
from instep_reference.weights import Weights
from support.inputs.narrow_models import narrow

# Billions of parameters of the text models according to their converted files, without the draft head.
PUBLISHED = {"qwen3.5-0.8b": 0.75, "qwen3.5-4b": 4.2, "qwen3.5-9b": 8.95, "qwen3.5-27b": 26.9}


@pytest.mark.parametrize("name", NAMES)
def test_a_shape_adds_up_to_the_published_model(name: str) -> None:
    config = replace(shape(name), mtp_layers=0)
    total = sum(math.prod(size) for size in expected_shapes(config).values()) / 1e9
    assert total == pytest.approx(PUBLISHED[name], rel=0.005)
    assert config.mixers[:4] == ("gdn", "gdn", "gdn", "attention") and config.rotary_dim == 64
    assert shape(name).mtp_layers == 1


def test_a_cut_keeps_the_first_layers_and_their_weights() -> None:
    whole = narrow("qwen3.5-9b", layers=8)
    few = cut(whole, layers=3, vocab=16)
    assert few.mixers == ("gdn", "gdn", "gdn") and few.vocab == 16
    parts = {parts: random_checkpoint(config, seed=3).tensors for parts, config in (("few", few), ("whole", whole))}
    name = "model.layers.2.linear_attn.in_proj_qkv.weight"
    assert torch.equal(parts["few"][name], parts["whole"][name])
    for wrong in ({"layers": 0}, {"layers": 9}, {"vocab": 0}):
        with pytest.raises(BadInput):
            cut(whole, **wrong)


def test_a_place_is_a_shape_a_directory_or_a_file(tmp_path: Path) -> None:
    assert sized_like("qwen3.5-4b") == shape("qwen3.5-4b")
    with pytest.raises(BadInput, match="no such file or shape"):
        sized_like(str(tmp_path / "nothing"))


def test_drawn_rows_keep_size_one_and_heads_remember_for_long() -> None:
    config = narrow("qwen3.5-27b", layers=4, vocab=64, hidden=256, value_heads=48, key_heads=16)
    weights, seen = Weights.of(random_checkpoint(config), torch.float32), {}

    def see(place: Place, tensor: torch.Tensor) -> torch.Tensor:
        seen[place] = tensor
        return tensor

    final, _ = trunk.advance(weights, list(range(32)), trunk.empty_memories(weights), 0, see)
    sizes = [float(tensor.std()) for place, tensor in seen.items() if place.component == "hidden"]
    assert len(sizes) == 4 and all(0.7 < size < 1.5 for size in sizes)
    assert 0.3 < float(trunk.logits(weights, final).std()) < 3
    remembered = -1 / seen[Place("trunk", 0, "log_decay")].median(0).values
    assert remembered.min() < 5 and remembered.max() > 1000
