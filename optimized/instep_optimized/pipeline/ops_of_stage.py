"""The op set of one pipeline stage: hidden rows come from the stage before, and go on to the next one.

    op          on a stage                                                       uses
    embed       of the target, except on the first stage: the rows of the stage before    recv
    norm        the final one of the target, except on the last stage: rows go on         send
    lm_head, pick, draw   except on the last stage: 0, as its choice comes by relay       -

Every other op works on the layers of the stage. So the bodies of a round are the same on every stage. A graph has no
transfer: it reads received rows from memory outside of it, and leaves its rows there (`Passed`). Leaves out: relays,
and the transfers before and after a replay (`stage_engine.py`).
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from instep_reference.contract import shards
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.drafters import BLOCK
from instep_reference.contract.engine import Capacity
from instep_reference.contract.errors import Unsupported
from instep_reference.contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place, See

from ..graphs.capture_and_replay import Rooms
from ..model.trunk import STAGE
from ..ops.op_protocols import Ops
from ..options import Options, types_of
from . import Stage

EMBEDDED, FINAL = Place(STAGE, STAGE_LEVEL, "embedding"), Place(STAGE, AFTER_LAYERS, "final")


@dataclass(frozen=True)
class Passed:
    """Hidden rows between two stages: their width and dtype, and the memory in which the graphs of a stage have them.

    received, left: rows of the stage before, and rows for the next one
    """

    hidden: int
    dtype: torch.dtype
    received: Rooms = field(default_factory=Rooms)
    left: Rooms = field(default_factory=Rooms)

    def rows(self, count: int, device: torch.device) -> torch.Tensor:
        return torch.empty(count, self.hidden, dtype=self.dtype, device=device)


def of_stage(
    checkpoint: Checkpoint, ops: Ops, options: Options, capacity: Capacity, stage: Stage
) -> tuple[Checkpoint, Passed]:
    """Return the checkpoint of one stage and its rows, or refuse settings that have no stages yet."""
    for refused, why in (
        (options.drafter == BLOCK, "a block drafter: it reads layers of all stages"),
        (capacity.topk is not None, "trees that the drafter grows: their shapes are not relayed"),
        (capacity.track_interval is not None, "tracked prefixes: their tokens are not relayed"),
        (options.prompt_graphs is not None, "forwards with prompts in graphs"),
        (checkpoint.config.streams > 1, "residual streams: a stage passes one row per token"),
        (not {options.strategy, options.conv}.isdisjoint(ops.keepers), "a commit strategy that an op set brings"),
    ):
        if refused:
            raise Unsupported(f"pipeline stages with {why} (stages {stage.count})")
    cut = replace(checkpoint, config=shards.config_of_stage(checkpoint.config, stage.number, stage.count))
    return cut, Passed(checkpoint.config.hidden, types_of(options, ops).hidden)


def over_stages(ops: Ops, stage: Stage, passed: Passed, *, in_graphs: bool = False) -> Ops:
    """Return the op set of a stage, or that of its graphs."""
    comm, changed = stage.comm, dict[str, Any]()

    def embed(*, tokens: torch.Tensor, table: torch.Tensor, to: Place) -> torch.Tensor:
        if to != EMBEDDED:
            return ops.embed(tokens=tokens, table=table, to=to)
        rows = passed.rows(len(tokens), tokens.device)
        return rows.copy_(passed.received.of(rows)) if in_graphs else comm.recv(rows, stage.number - 1, FINAL)

    def norm(*, x: torch.Tensor, weight: torch.Tensor, eps: float, to: Place) -> torch.Tensor:
        if to != FINAL:
            return ops.norm(x=x, weight=weight, eps=eps, to=to)
        if in_graphs:
            passed.left.of(x).copy_(x)
        else:
            comm.send(x, stage.number + 1, FINAL)
        return x.clone()

    def lm_head(*, x: torch.Tensor, weight: torch.Tensor, to: Place) -> torch.Tensor:
        return torch.zeros(len(x), 1, dtype=torch.float32, device=x.device)

    def pick(*, logits: torch.Tensor, **given: Any) -> torch.Tensor:
        return torch.zeros(len(logits), dtype=torch.int64, device=logits.device)

    if not stage.first:
        changed |= {"embed": embed}
    if not stage.last:
        changed |= {"norm": norm, "lm_head": lm_head, "pick": pick, "draw": pick}
    return replace(ops, **changed, add_norm=None, head_pick=None)


def own_places(stage: Stage, see: See) -> See:
    """Show the places that this stage computes: another one has the embedding, or everything after the layers."""

    def shown(place: Place, tensor: torch.Tensor) -> torch.Tensor:
        elsewhere = place.stage == STAGE and (
            (place == EMBEDDED and not stage.first) or (place.layer == AFTER_LAYERS and not stage.last))
        return tensor if elsewhere else see(place, tensor)

    return shown
