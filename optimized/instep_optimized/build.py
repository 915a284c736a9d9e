"""Building an engine from a checkpoint: pools, the model over them, and a round per step count.

Leaves out: requests and events (`engine.py`), and graphs (`graphs/capture.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.drafters import in_use
from instep_reference.contract.engine import Capacity

from . import commit as strategies
from .commit.external_strategies import distinct
from .draft import MODES
from .memory import Memory
from .memory.budget import Sizes, check_room, demands, must_fill_pitch
from .model import Model
from .model.trunk import Trunk
from .ops.base import Ops
from .options import Options, types_of
from .round import Round
from .weights import Stored


def built(
    checkpoint: Checkpoint, ops: Ops, options: Options, capacity: Capacity, candidates: Sequence[int]
) -> tuple[Model, dict[int, Round]]:
    """Build the model on its pools, and one round per candidate. Pools have room for the largest candidate's window."""
    config, device = in_use(checkpoint.config, options.drafter), torch.device(options.device)
    widest = capacity.widest(max(candidates))
    check_room(capacity, widest)
    sizes = Sizes(types_of(options, ops), options.layout, capacity, widest, ops.keeps,
                  options.snapshot_layout)  # fmt: skip
    chosen = options.strategy, options.conv, ops
    kept = strategies.demands(config, sizes, *chosen)
    if ops.packed:
        must_fill_pitch(kept)
    wanted, guarded = distinct(demands(config, sizes) + kept), options.guarded and not ops.packed
    try:
        memory = Memory(wanted, capacity, guarded=guarded, poison=options.poison, device=device)
    except (MemoryError, RuntimeError, TypeError) as error:  # the pools do not fit
        if {options.strategy, options.conv} & ops.keepers.keys():  # their demands may be the cause
            largest = max(wanted, key=lambda demand: demand.bytes(guarded))
            error.add_note(f"the largest pool is {largest.name}, of {largest.bytes(guarded)} bytes")
        raise
    stored = Stored(checkpoint.tensors, options.activation, device)
    trunk = Trunk.of(stored, config, memory)
    drafter = MODES[options.drafter](stored, config, trunk.head, memory) if config.mtp_layers else None
    model = Model(trunk, drafter, memory)
    nodes = capacity.num_draft_tokens
    return model, {
        steps: Round(
            steps, strategies.make(config, sizes, memory, nodes or steps + 1, *chosen), model, nodes, capacity.topk)
        for steps in candidates
    }
