"""The parts that every layer has: its number, weights, config and second half, and how they are read from a checkpoint.

Leaves out: running it, which each kind of layer does in its own way.
"""

from dataclasses import dataclass
from typing import Generic, Self, TypeVar

import torch

from instep_reference.contract.checkpoint_tensor_shapes import layer_norms
from instep_reference.contract.config import ModelConfig

from .. import weights as w
from ..memory.tiled_units import Units
from ..ops.family_op_protocols import StreamWeights
from .mlp import Half

W = TypeVar("W")


@dataclass(frozen=True)
class Layer(Generic[W]):
    """One layer, frozen. norm: of its input; weights: of its mixer"""

    layer: int
    norm: torch.Tensor | StreamWeights
    weights: W
    half: Half
    config: ModelConfig

    @classmethod
    def read(cls, stored: w.Stored, prefix: str, layer: int, config: ModelConfig) -> W:
        """Load the weights of the mixer."""
        raise NotImplementedError

    @classmethod
    def of(cls, stored: w.Stored, prefix: str, layer: int, config: ModelConfig, *pools: Units) -> Self:
        """Load a layer. pools: its own memory, if the layer addresses it itself"""
        norm = stored.read(f"{prefix}.{layer_norms(config, layer)[0]}", config)
        half = Half.of(stored, prefix, layer, config)
        return cls(layer, norm, cls.read(stored, prefix, layer, config), half, config, *pools)


@dataclass(frozen=True)
class StoringLayer(Layer[W]):
    """A layer that stores rows: keys and values are its own pools [pages, page_size, heads, channels]."""

    keys: Units
    values: Units
