"""Random weights for a configuration, of the scale of trained ones, made in memory on the device where they are used.

A tensor depends only on its name and the seed. So the first layers stay the same if the model is cut to fewer layers.
Leaves out: files.
"""

import hashlib
import math
from types import MappingProxyType
from zlib import crc32

import torch

from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.checkpoint_tensor_shapes import FUSED, block_shapes, expected_shapes
from instep_reference.contract.config import ModelConfig

# The part of its memory that a head loses in one token, spread geometrically over the heads: from a few tokens of
# memory to thousands. Drawn as at initialisation (A_log = log U(0, 16), dt_bias 1), every head would forget within one
# token.
SHORTEST, LONGEST = 0.3, 2e-4
NORM_SPREAD = 0.2  # of norm weights around their value at initialisation
CONV_SCALE = 0.6  # with 4 such taps a channel keeps about its size
FP32 = ("A_log", "linear_attn.norm.weight")  # kept in fp32 in a bf16 file, as released files may have it


def random_checkpoint(
    config: ModelConfig, *, seed: int = 0, device: str | torch.device = "cpu", dtype: torch.dtype = torch.bfloat16
) -> Checkpoint:
    """A model that engine and reference accept as if it had been read from a directory.

    Linear maps keep the size of a row. A layer's contribution to the hidden row is divided by the square root of the
    number of contributions. So hidden rows keep size 1 at any depth.
    """
    tensors = {
        name: drawn(config, name, size, seed, torch.device(device), dtype)
        for name, size in (expected_shapes(config, stored=FUSED) | block_shapes(config)).items()
    }
    digest = hashlib.sha256(f"drawn {config} {seed} {dtype}".encode()).hexdigest()
    return Checkpoint(config, MappingProxyType(tensors), digest, digest if config.block is not None else "")


def drawn(
    config: ModelConfig, name: str, size: tuple[int, ...], seed: int, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """One tensor, as it is stored."""
    parts = 2 * len(config.layers)
    return _draw(name, size, parts, seed, device).to(torch.float32 if name.endswith(FP32) else dtype)


def _draw(name: str, size: tuple[int, ...], parts: int, seed: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device=device).manual_seed((seed << 32) + crc32(name.encode()))
    noise = torch.randn(size, generator=generator, device=device, dtype=torch.float32)
    if name.endswith("A_log"):
        return noise.mul_(0.5)
    if name.endswith("dt_bias"):
        return _dt_bias(size[0]).to(device) + noise.mul_(NORM_SPREAD)
    if "norm" in name.split(".")[-2]:
        centre = 1.0 if name.endswith("linear_attn.norm.weight") else 0.0  # the others are stored as w of (1 + w)
        return noise.mul_(NORM_SPREAD).add_(centre)
    if name.endswith("conv1d.weight"):
        return noise.mul_(CONV_SCALE)
    if "embed_tokens" in name:
        return noise
    adds = name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight", "experts.down_proj"))
    return noise.mul_(1 / math.sqrt(size[-1] * (parts if adds else 1)))


def _dt_bias(heads: int) -> torch.Tensor:
    """softplus(dt_bias) = -log(1 - lost), so that a head loses the part `lost` where A_log and a are 0."""
    lost = torch.logspace(math.log10(SHORTEST), math.log10(LONGEST), heads)
    return torch.log(torch.expm1(-torch.log1p(-lost)))
