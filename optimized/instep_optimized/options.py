"""How an engine is set up (frozen), and the combinations that are refused.

Leaves out: the op set and the capacity, which are separate arguments of the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from instep_reference.contract.config import ModelConfig
from instep_reference.contract.errors import BadInput, Unsupported

from .commit import known
from .draft import DRAFTERS
from .layout import StateLayout
from .memory.budget import Component
from .ops.base import Ops
from .ops.placing import MOST_NODES

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Options:
    """device      where weights, pools and rows stand
    activation  dtype of hidden rows, KV and conv windows, as far as the op set follows it
    state       dtype in which the recurrent state is stored
    layout      physical order of a state block: VK (K contiguous) or KV (V contiguous)
    strategy    how rejected drafts are undone in the states; a name of `commit.STRATEGIES` or of `Ops.keepers`
    conv        the same in the conv windows; a name of `commit.CONV_FORMS` or of `Ops.keepers`
    drafter     how drafts are made; with the model type a key of `draft.DRAFTERS`
    guarded     red zones between units, so that a pitch is never the packed size
    graphs      draft, verify, decode and commit run as graphs, captured at the start for every step count
    overlap     a round may be launched before the accepted counts of the round before are known. Pages are then
                reserved for the worst case
    poison      the value that fills fresh and freed units; None: fresh units are zeros, freed units stay as they are
    """

    device: str = "cpu"
    activation: torch.dtype = torch.float32
    state: torch.dtype = torch.float32
    layout: StateLayout = "VK"
    strategy: str = "rerun"
    conv: str = "windows"
    drafter: str = "eagle"
    guarded: bool = True
    poison: float | None = math.nan
    overlap: bool = False
    graphs: bool = False


Rule = Callable[[Options, ModelConfig, int], bool]

# (whether it is refused, why, which options say so), one line each. o: options, c: configuration, n: the most drafts
# that a round may have.
REFUSED: tuple[tuple[Rule, str, tuple[str, ...]], ...] = (
    (lambda o, c, n: o.layout not in ("VK", "KV"), "a state layout is VK or KV", ("layout",)),
    (lambda o, c, n: o.activation not in FLOATS,
     "activations are float64, float32, bfloat16 or float16", ("activation",)),
    (lambda o, c, n: o.state not in FLOATS,
     "a state is stored in float64, float32, bfloat16 or float16", ("state",)),
    (lambda o, c, n: torch.device(o.device).type == "cuda" and not torch.cuda.is_available(),
     "there is no CUDA device here", ("device",)),
    (lambda o, c, n: o.activation is torch.float64 and o.state is not torch.float64,
     "float64 activations with a narrower state: nothing would be left of the width", ("activation", "state")),
    (lambda o, c, n: o.strategy == "lazy_rerun" and o.state in (torch.bfloat16, torch.float16),
     "lazy_rerun with a state narrower than float32: where it is rounded would depend on the schedule",
     ("strategy", "state")),
    (lambda o, c, n: bool(c.mtp_layers) and (c.model_type, o.drafter) not in DRAFTERS,
     "this drafter is not here for this model type", ("drafter",)),
    (lambda o, c, n: o.drafter == "eagle" and c.mtp_layers > 1,
     "the eagle drafter runs one MTP layer again and again; this model has several", ("drafter",)),
    (lambda o, c, n: o.drafter == "vanilla" and 0 < c.mtp_layers < n,
     "the vanilla drafter has one MTP layer per draft, so no more drafts than layers", ("drafter",)),
)  # fmt: skip


TreeRule = Callable[[Options, ModelConfig, Ops], bool]

# The same where windows may be trees. s: the op set.
NO_TREES: tuple[tuple[TreeRule, str, tuple[str, ...]], ...] = (
    (lambda o, c, s: not s.trees,
     "windows that are trees: this op set serves chains alone, or does not say that it serves trees (`Ops.trees`)", ()),
    (lambda o, c, s: o.conv == "widened",
     "windows that are trees: in a widened line of inputs the conv windows of siblings would overlap", ("conv",)),
    (lambda o, c, s: not {o.strategy, o.conv}.isdisjoint(s.keepers),
     "windows that are trees: a strategy that comes with an op set is told of chains alone", ("strategy", "conv")),
    (lambda o, c, s: o.drafter == "vanilla" and c.mtp_layers > 0,
     "windows that are trees: vanilla drafting has no layer of its own per branch", ("drafter",)),
)  # fmt: skip


NAMED: tuple[tuple[str, Component, str], ...] = (
    ("strategy", "state", "commit strategy"), ("conv", "conv", "form of conv window"),
)


def check(options: Options, config: ModelConfig, steps: int, ops: Ops, nodes: int | None = None) -> None:
    """Refuse what this side does not serve, before anything is allocated.

    steps: the most drafts of a round;  nodes: `Capacity.num_draft_tokens`
    """
    for field, component, what in NAMED:
        names = known(component, ops)
        if getattr(options, field) not in names:
            raise Unsupported(f"this {what} is not here; known: {', '.join(names)} ({field} {getattr(options, field)})")
    for refused, why, fields in REFUSED:
        if refused(options, config, steps):
            said = [f"{name} {str(getattr(options, name)).removeprefix('torch.')}" for name in fields]
            if fields == ("drafter",):
                layers = f"{config.mtp_layers} MTP layer{'s' * (config.mtp_layers != 1)}"
                said += [f"model type {config.model_type}", layers, f"up to {steps} drafts"]
            raise Unsupported(f"{why} ({', '.join(said)})")
    if nodes is None:
        return
    if not steps < nodes <= MOST_NODES:
        expected = f"from {steps + 1}, the root and {steps} drafts, to {MOST_NODES}: ancestors are bits of an int64"
        raise BadInput("capacity.num_draft_tokens", found=nodes, expected=expected)
    for serves_none, why, fields in NO_TREES:
        if serves_none(options, config, ops):
            said = [f"op set {ops.name}", *(f"{name} {getattr(options, name)}" for name in fields)]
            raise Unsupported(f"{why} ({', '.join(said)})")
