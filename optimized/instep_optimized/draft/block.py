"""The block drafter: a separate model over rows of several layers of the target, which drafts a block in one launch.

Leaves out: which rows were committed (`round_for_step_count.py`, `forwards.py`). Ops only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from instep_reference.contract.block_drafter import PREFIX
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.errors import Unsupported
from instep_reference.contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place

from .. import weights as w
from ..memory import Memory
from ..model.attention import AttentionLayer
from ..model.residual import Residual
from ..model.trunk import Head
from ..ops.fused import linears, store_rows
from ..ops.integer_op_protocols import TreePlan
from ..ops.op_protocols import Ops
from ..packed_batch import Batch, Nodes, Who, windows
from ..transfer.to_device import sent
from .drafter_protocol import PickRows, Use, column

CONTEXT, BLOCK = "extend", "block"  # stages


@dataclass(frozen=True)
class Block:
    """Keys and values of committed tokens come from the target's rows, those of a block from its own tokens.

    The block's tokens are the root, at the request's length, and a mask token for each draft. Every row of a block sees
    the other rows of its block: each has the bits of all of them, as a node of a tree has those of its path. Their keys
    and values come after the request's length, where the next extend or the next draft writes again.

    blank   per width T of a block: [requests, T], -1 for the root and the mask token for the others
    owner   per width T: [requests * T], the number of the request that a packed row belongs to
    bits    [T + 1] for the widest T: the bits of n rows
    """

    weights: w.BlockWeights
    layers_of_block: tuple[AttentionLayer, ...]
    head: Head
    config: ModelConfig
    blank: tuple[torch.Tensor, ...]
    owner: tuple[torch.Tensor, ...]
    bits: torch.Tensor
    at_once: ClassVar[bool] = True
    layers: ClassVar[int] = 0

    @classmethod
    def of(cls, stored: w.Stored, config: ModelConfig, head: Head, memory: Memory) -> "Block":
        assert config.block is not None, "there is a block drafter"
        own, device = config.block_model(), memory.device
        layers = tuple(
            AttentionLayer.of(stored, f"{PREFIX}layers.{number}", number, own,
                              *(memory.units(name, number) for name in ("block_keys", "block_values")))
            for number in range(config.block.num_hidden_layers)
        )
        requests, widest = len(memory.none_fresh), memory.slot_table.window.shape[1]
        widths = range(widest + 1)
        tokens, numbers, rows = sent([
            [-1, *[config.block.mask_token_id] * (widest - 1)], range(requests), [(1 << width) - 1 for width in widths],
        ], device)  # fmt: skip
        return cls(
            w.block(stored), layers, head, own, tuple(tokens[:T].repeat(requests, 1) for T in widths),
            tuple(numbers.repeat_interleave(T) for T in widths), rows,
        )

    def extend(
        self, ops: Ops, memory: Memory, batch: Batch, hidden: torch.Tensor, asked: Sequence[PickRows], num_steps: int
    ) -> None:
        """Compute keys and values of committed rows from the features [N, nD]; no query, and no attention."""
        weights, config = self.weights, self.config
        fused = ops.linear(
            x=hidden, weight=weights.fc, shape=(config.hidden,), to=Place(CONTEXT, STAGE_LEVEL, "fused"))
        rows = ops.norm(x=fused, weight=weights.hidden_norm, eps=config.eps, to=Place(CONTEXT, STAGE_LEVEL, "context"))
        shape, queries = (config.kv_heads, config.head_dim), 2 * config.heads * config.head_dim
        for number, layer in enumerate(self.layers_of_block):
            key_raw, value = linears(
                ops, x=rows, weight=layer.weights.inputs[queries:], shapes=(shape, shape),
                to=(Place(CONTEXT, number, "key_raw"), Place(CONTEXT, number, "value")),
            )
            key = ops.key_inputs(
                key_raw=key_raw, positions=batch.positions, k_norm=layer.weights.k_norm, eps=config.eps,
                rotary_dim=config.rotary_dim, theta=config.rope_theta, to=Place(CONTEXT, number, "key"),
            )
            for kept, units in ((key, layer.keys), (value, layer.values)):
                store_rows(ops, rows=kept, units=units, locations=batch.locations)

    def draft(
        self, ops: Ops, memory: Memory, who: Who, use: Use, num_steps: int, runs: Sequence[torch.Tensor] = ()
    ) -> tuple[torch.Tensor, ...]:
        """Run blocks of num_steps + 1 packed rows, of which a request has `who.count`. Row j picks draft j."""
        count, width = len(who.slots), num_steps + 1
        root = ops.select(x=memory.slot_table.window[:, :width], index=who.slots)
        tokens = ops.choose(own=root, forced=self.blank[width][:count]).flatten()
        rows = ops.select(x=who.count, index=self.owner[width][: count * width])
        batch = windows(ops, memory, who, tokens, "draft", width)
        batch = replace(batch, nodes=Nodes(None, batch.positions, ops.select(x=self.bits, index=rows), width))
        hidden = Residual(self.head.embed(ops, tokens, BLOCK))
        for layer in self.layers_of_block:
            hidden = layer(ops, hidden, batch, BLOCK)
        y = hidden.normed(ops, self.weights.norm, self.config.eps, Place(BLOCK, AFTER_LAYERS, "final")).normed
        picks = self.head.pick(ops, y, BLOCK).view(count, width)
        own = [column(ops, picks, draft) for draft in range(1, width)]
        return (*(use(draft, step) for step, draft in enumerate(own)), *own)

    def draft_tree(
        self, ops: Ops, memory: Memory, who: Who, use: Use, plan: TreePlan, behind: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        raise Unsupported("a block drafter proposes chains only: its rows have no branches")
