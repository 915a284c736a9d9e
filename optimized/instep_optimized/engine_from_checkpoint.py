"""Building an engine from a checkpoint: pools, the model over them, and a round per step count.

Leaves out: requests and events (`engine.py`), and graphs (`graphs/capture_all_at_start.py`).
"""

from collections.abc import Sequence

import torch

from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.drafters import in_use
from instep_reference.contract.engine import Capacity

from . import commit as strategies
from .commit.external_strategies import distinct
from .draft import MODES
from .memory import Memory
from .memory.budget import BUDGETS, Sizes, check_room, contents, demands, must_fill_pitch
from .memory.pool import Demand
from .model import Model
from .model.trunk import Trunk
from .ops.op_protocols import Ops
from .options import Options, types_of
from .round_for_step_count import Round
from .weights import Stored

Demanded = tuple[Sizes, tuple[Demand, ...], tuple[Demand, ...]]


def all_demands(
    config: ModelConfig, ops: Ops, options: Options, capacity: Capacity, candidates: Sequence[int]
) -> Demanded:
    """Return the sizes, the pools of every engine, and the pools of the commit strategy.

    candidates: all step counts that may ever be in force. Every pool has room for the window of the largest one.
    """
    types = types_of(options, ops)
    sizes = Sizes(types, options.layout, capacity, capacity.widest(max(candidates)),
                  ops.keeps if types.ring is None else "split", options.snapshot_layout, options.scratch)  # fmt: skip
    return sizes, demands(config, sizes), strategies.demands(config, sizes, options.strategy, options.conv, ops)


def budget(
    config: ModelConfig, ops: Ops, options: Options, capacity: Capacity, candidates: Sequence[int]
) -> dict[str, int]:
    """Count the bytes of the units of each pool, without allocating anything (`ShowsBudget` of the contract)."""
    _, always, kept = all_demands(in_use(config, options.drafter), ops, options, capacity, candidates)
    return {demand.name: contents(demand) for demand in distinct(always + kept)
            if not demand.component or demand.component in BUDGETS}  # fmt: skip


def built(
    checkpoint: Checkpoint, ops: Ops, options: Options, capacity: Capacity, candidates: Sequence[int],
    kind: type[Round] = Round,
) -> tuple[Model, dict[int, Round]]:
    """Build the model on its pools, and one round per candidate."""
    config, device = in_use(checkpoint.config, options.drafter), torch.device(options.device)
    check_room(capacity, capacity.widest(max(candidates)))
    sizes, always, kept = all_demands(config, ops, options, capacity, candidates)
    if ops.packed:
        must_fill_pitch(kept)
    wanted, guarded = distinct(always + kept), options.guarded and not ops.packed
    try:
        memory = Memory(wanted, capacity, guarded=guarded, poison=options.poison, device=device,
                        first=options.first_head * config.key_dim * config.value_dim)  # fmt: skip
    except (MemoryError, RuntimeError, TypeError) as error:  # the pools do not fit
        if {options.strategy, options.conv} & ops.keepers.keys():  # their demands may be the cause
            largest = max(wanted, key=lambda demand: demand.bytes(guarded))
            error.add_note(f"the largest pool is {largest.name}, of {largest.bytes(guarded)} bytes")
        raise
    stored = Stored(checkpoint.tensors, options.activation, device)
    trunk = Trunk.of(stored, config, memory)
    drafts = bool(config.mtp_layers) or config.block is not None
    drafter = MODES[options.drafter](stored, config, trunk.head, memory) if drafts else None
    model = Model(trunk, drafter, memory)
    nodes = capacity.num_draft_tokens
    return model, {
        steps: kind(
            steps, strategies.make(config, sizes, memory, nodes or steps + 1, options.strategy, options.conv, ops),
            model, nodes, capacity.topk)
        for steps in candidates
    }
