"""The gated short convolution of LFM2: a layer whose conv window is its only memory.

Leaves out: fusing, caches, and a state, which such a layer does not have.
"""

from dataclasses import dataclass

import torch

from .contract.config import ModelConfig
from .contract.place_names import At
from .gdn import Conv, causal_conv
from .weights import ShortConvWeights


@dataclass(frozen=True)
class ConvMemory:
    """The layer's memory of a request: window [D, W-1], the last gated inputs, oldest first."""

    window: torch.Tensor


def empty(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> ConvMemory:
    """Return the memory before the first token: zeros."""
    return ConvMemory(torch.zeros(*config.lengths(("C",)), config.conv_width - 1, dtype=dtype, device=device))


def mix(
    config: ModelConfig, weights: ShortConvWeights, normed: torch.Tensor, memory: ConvMemory, positions: torch.Tensor,
    at: At, conv: Conv | None = None,
) -> tuple[torch.Tensor, ConvMemory]:
    """Run the layer between its input norm and its residual: T consecutive tokens of one request.

        B, C, x <- inputs row;   out <- out_proj (C * conv(B * x))

    conv: in another form than `causal_conv`
    Shapes:  normed (T, D)  ->  (T, D), and the memory after the last of them. Positions play no part.
    Mirrors: transformers 5.24 `Lfm2ShortConv`. No nonlinearity follows the conv. Differs: W-1 inputs are kept (HF: W).
    """
    projected = (normed @ weights.inputs.T).chunk(3, dim=-1)  # (T, D) each
    in_gate, out_gate, x = (at(name, part) for name, part in zip(("in_gate", "out_gate", "x"), projected, strict=True))
    convolved, window = (conv or causal_conv)(at("qkv", in_gate * x), weights.conv, memory.window)  # (T, D), (D, W-1)
    gated = at("gated", out_gate * at("mixed", convolved))  # (T, D)
    return at("mixer", gated @ weights.out.T), ConvMemory(window)
