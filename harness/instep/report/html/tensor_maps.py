"""The tensor of a finding as small maps: as found, as expected, and the difference.

A large tensor is cut into blocks, and the number with the largest difference represents its block.
Leaves out: findings of earlier events, whose tensors are gone, and the drawing.
"""

from __future__ import annotations

from typing import Any

import torch

from ...verdict import Comparison
from ...watch.event_context import EventContext
from ..tensors import tensor_at
from .heat_map import short

MOST_ROWS, MOST_COLUMNS = 48, 96
MEMORY = {"state": ("key row", "value column"), "conv": ("age", "channel"), "keys": ("position", "number"),
          "values": ("position", "number")}  # component of a request's memory -> the meaning of rows and columns


def maps_of(context: EventContext | None, finding: Comparison) -> dict[str, Any] | None:
    """The maps of a finding, or None if the sides have no tensors of one shape.  context: that of the last event"""
    if context is None or context.index != finding.event or finding.request is None or finding.raised is not None:
        return None
    found, right = (tensor_at(context, side, finding) for side in (context.subject, context.truth))
    if found is None or right is None or found.shape != right.shape or not found.numel():
        return None
    found, right = (tensor.detach().to("cpu", torch.float64) for tensor in (found, right))
    head = None
    if finding.place.component == "state" and found.dim() == 3:
        apart = (found - right).abs().nan_to_num(torch.inf).flatten(1).amax(1)
        head = int(apart.argmax()) if finding.head is None else finding.head
        found, right = found[head], right[head]
    elif finding.place.component == "conv":
        found, right = found.T, right.T
    else:
        found, right = (tensor.reshape(len(tensor), -1) for tensor in (found, right))
    shape, found, right = list(found.shape), *pooled(found, right)
    axes = MEMORY.get(finding.place.component, ("row", "number"))
    return {
        "head": head, "shape": shape, "axes": axes, "found": _numbers(found), "expected": _numbers(right),
        "difference": _numbers(found - right),
    }


def pooled(found: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The number with the largest difference of each block, for both tensors."""
    height, width = (-(-size // most) for size, most in zip(found.shape, (MOST_ROWS, MOST_COLUMNS), strict=True))
    pad = (0, -found.shape[1] % width, 0, -found.shape[0] % height)
    down, across = (found.shape[0] + pad[3]) // height, (found.shape[1] + pad[1]) // width

    def blocks(tensor: torch.Tensor, filled: float) -> torch.Tensor:
        whole = torch.nn.functional.pad(tensor, pad, value=filled).view(down, height, across, width)
        return whole.transpose(1, 2).reshape(down, across, -1)

    largest = blocks((found - right).abs().nan_to_num(torch.inf), -1.0).argmax(-1, keepdim=True)
    return blocks(found, 0.0).gather(-1, largest)[..., 0], blocks(right, 0.0).gather(-1, largest)[..., 0]


def _numbers(tensor: torch.Tensor) -> list[list[float | str]]:
    return [[short(number) for number in row] for row in tensor.tolist()]
