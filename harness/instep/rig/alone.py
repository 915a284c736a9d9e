"""An optimized engine by itself: how it is set up in the words of the command line, and a header for what it runs.

Leaves out: comparing it with anything (`sides.py`; `large.py` where the model is too large for a whole reference).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from instep_optimized import OptimizedEngine, Options
from instep_optimized.layout import StateLayout
from instep_optimized.ops.base import Ops
from instep_reference.contract.adaptive import AdaptiveFile
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Capacity
from instep_reference.contract.errors import BadInput

from ..adapters import find
from ..trace.header import SCHEMA, Header, Model, Part
from ..trace.policy import Policy
from .sides import WIDTHS, candidates, enough_memory, moves_labels, wide
from .strategies import chosen


@dataclass(frozen=True)
class Setup:
    """How an engine is set up, in the words of the command line; None: the engine's own default."""

    ops: str = "plain"
    device: str = "cpu"
    dtype: str = "float32"
    layout: str = "VK"
    strategy: str | None = None
    conv: str | None = None
    graphs: bool | None = None
    drafter: str | None = None

    @property
    def width(self) -> torch.dtype:
        if self.dtype not in WIDTHS:
            raise BadInput("dtype", found=self.dtype, expected=f"one of {', '.join(WIDTHS)}")
        return WIDTHS[self.dtype]

    def options(self) -> Options:
        """Names that are not known are refused here, combinations by the engine's own check."""
        named: dict[str, Any] = chosen(strategy=self.strategy, conv=self.conv)
        if self.graphs is not None:
            named["graphs"] = self.graphs
        if self.drafter is not None:
            named["drafter"] = self.drafter
        device, layout = device_here(self.device), known_layout(self.layout)
        return Options(device=device, activation=self.width, state=wide(self.width), layout=layout, **named)

    def served(self) -> Ops:
        """The op set; somebody else's engine, and one that moves labels, computes no text."""
        found = find(self.ops)
        if not isinstance(found, Ops) or moves_labels(found):
            raise BadInput("ops", found=self.ops, expected="an op set that computes: plain, triton, ...")
        return found


def device_here(name: str) -> str:
    """The same name, if there is such a device on this machine."""
    try:
        kind = torch.device(name).type
    except RuntimeError:  # torch on a name that is none, or with a number that is none
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise BadInput("--device", found=name, expected="cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device", found=name, expected="cpu", hint="no CUDA device is here; see `instep doctor`")
    return name


def known_layout(name: str) -> StateLayout:
    """The same name, if it is a state layout."""
    if name not in ("VK", "KV"):
        raise BadInput("--layout", found=name, expected="VK or KV")
    return "VK" if name == "VK" else "KV"


def engine(
    checkpoint: Checkpoint, setup: Setup, capacity: Capacity, *, num_steps: int, adaptive: AdaptiveFile | None = None,
    ops: Ops | None = None,
) -> OptimizedEngine:
    """The engine, nothing watched; `ops`: those of the setup, wrapped."""
    chosen, options = ops or setup.served(), setup.options()
    with enough_memory(capacity):
        return OptimizedEngine(checkpoint, chosen, options, capacity, num_steps=num_steps, adaptive=adaptive)


def header_of(policy: Policy, checkpoint: Checkpoint, ops: str, model: Model | None = None) -> Header:
    """What stands on the first line of a trace of this policy; `model`: where the checkpoint is, if it is a file."""
    config = checkpoint.config
    header = Header(
        schema=SCHEMA, name=policy.name, claim=policy.claim,
        checkpoint=model or Model("in memory", checkpoint.digest, checkpoint.digest, config.vocab, config.mtp_layers),
        capacity=policy.capacity, num_steps=policy.num_steps, candidates=(policy.num_steps,), adaptive=policy.adaptive,
        lag=policy.lag, seed=policy.seed, stop=policy.stop, replay=(Part(ops),), created={},
    )
    steps, _ = candidates(policy.num_steps, header.adaptive_file(policy.name))
    return msgspec.structs.replace(header, candidates=steps)
