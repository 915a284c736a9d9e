"""How an engine is set up, frozen; and the combinations that are refused.

Leaves out: the op set and the room, which are given to the engine beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from instep_reference.contract.config import ModelConfig
from instep_reference.contract.errors import Unsupported

from .commit import STRATEGIES
from .draft import DRAFTERS
from .layout import StateLayout

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Options:
    """device      where weights, pools and rows stand
    activation  dtype of hidden rows, KV and conv windows, as far as the op set follows it
    state       dtype in which the recurrent state is stored
    layout      physical order of a state block: VK (K contiguous) or KV (V contiguous)
    strategy    how rejected drafts are undone; a name of `commit.STRATEGIES`
    drafter     how drafts are made; with the model type a key of `draft.DRAFTERS`
    guarded     red zones between units, so that a pitch is never the packed size
    poison      what fresh and freed units are filled with; None: fresh units are zeros, freed ones are left as they are
    """

    device: str = "cpu"
    activation: torch.dtype = torch.float32
    state: torch.dtype = torch.float32
    layout: StateLayout = "VK"
    strategy: str = "snapshot"
    drafter: str = "eagle"
    guarded: bool = True
    poison: float | None = math.nan


Rule = Callable[[Options, ModelConfig], bool]

# (is it refused, why), one line each.
REFUSED: tuple[tuple[Rule, str], ...] = (
    (lambda o, c: o.strategy not in STRATEGIES, f"this commit strategy is not here; known: {', '.join(STRATEGIES)}"),
    (lambda o, c: o.layout not in ("VK", "KV"), "a state layout is VK or KV"),
    (lambda o, c: o.activation not in FLOATS, "activations are float64, float32, bfloat16 or float16"),
    (lambda o, c: o.state not in FLOATS, "a state is stored in float64, float32, bfloat16 or float16"),
    (
        lambda o, c: torch.device(o.device).type == "cuda" and not torch.cuda.is_available(),
        "there is no CUDA device here",
    ),
    (
        lambda o, c: o.activation is torch.float64 and o.state is not torch.float64,
        "float64 activations with a narrower state: nothing would be left of the width",
    ),
    (
        lambda o, c: bool(c.mtp_layers) and (c.model_type, o.drafter) not in DRAFTERS,
        "this drafter is not here for this model type",
    ),
    (
        lambda o, c: o.drafter == "eagle" and c.mtp_layers > 1,
        "the eagle drafter runs one MTP layer again and again; this model has several",
    ),
)


def check(options: Options, config: ModelConfig) -> None:
    """Refuse what this side does not serve, before anything is allocated."""
    for refused, why in REFUSED:
        if refused(options, config):
            raise Unsupported(f"{why} ({options}, model type {config.model_type!r}, {config.mtp_layers} MTP layers)")
