"""The op set of one replica of a data-parallel group: embedding and head are split over the vocabulary.

    op          the result                                             collectives
    embed       of the tokens of all replicas, 0 for tokens of others  all_gather, all_reduce
    lm_head     of the rows of all replicas, for this one's tokens     all_gather, all_gather

Every replica has the layers as a whole. Its rows are padded with zeros to those of the replica with the most. So a
replica without rows joins each collective, with one idle row. A graph has the rows of its bucket on every replica.
Leaves out: the idle forward (`replica_engine.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from instep_reference.contract import shards
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.drafters import BLOCK
from instep_reference.contract.engine import Capacity
from instep_reference.contract.errors import BadInput, Unsupported
from instep_reference.contract.place_names import Place

from ..ops.op_protocols import Ops
from ..options import Options, moves_labels
from ..ranks.ops_over_ranks import part_of
from . import Replica

SHARED = ("embed_tokens.weight", "lm_head.weight")


def of_group(
    checkpoint: Checkpoint, ops: Ops, options: Options, capacity: Capacity, replica: Replica
) -> tuple[Checkpoint, Ops]:
    """Return the checkpoint and the op set of one replica, or refuse settings that have no groups yet."""
    config, size = checkpoint.config, replica.comm.size
    for refused, why in (
        (options.drafter == BLOCK or config.mtp_layers > 1, "a drafter other than eagle"),
        (bool(config.experts), "experts: their rows are not exchanged"),
        (capacity.track_interval is not None, "tracked prefixes"),
        (capacity.topk is not None, "trees that the drafter grows"),
        (options.prompt_graphs is not None, "forwards with prompts in graphs"),
        (not {options.strategy, options.conv}.isdisjoint(ops.keepers), "a commit strategy that an op set brings"),
    ):
        if refused:
            raise Unsupported(f"a data-parallel group with {why} (dp {size})")
    if config.vocab % size:
        raise BadInput("--dp", found=size, expected=f"a divisor of the model's {config.vocab} tokens (vocab_size)")
    return replace(checkpoint, tensors=_Shared(checkpoint, replica)), over_group(ops, replica, config.vocab)


class _Shared(Mapping[str, torch.Tensor]):
    """The stored tensors; of embedding and head the tokens of this replica."""

    def __init__(self, checkpoint: Checkpoint, replica: Replica) -> None:
        self._whole, self._config, self._comm = checkpoint.tensors, checkpoint.config, replica.comm

    def __getitem__(self, name: str) -> torch.Tensor:
        shard = shards.weight(self._config, name) if name.endswith(SHARED) else None
        return part_of(self._whole[name], shard, self._comm)

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)


def over_group(ops: Ops, replica: Replica, vocab: int) -> Ops:
    """Return the op set of a replica. vocab: of the whole model"""
    comm, labels = replica.comm, moves_labels(ops)
    held = shards.Segment(vocab).held(comm.rank, comm.size)

    def gathered(x: torch.Tensor, to: Place) -> tuple[torch.Tensor, slice]:
        """The padded rows of all replicas, and where those of this one are."""
        width = replica.launch.width(to, len(x))
        padding = x.new_zeros(width - len(x), *x.shape[1:])
        begin = comm.rank * width
        replica.padded(to, padding)
        return comm.all_gather(torch.cat([x, padding]), 0, to), slice(begin, begin + len(x))

    def embed(*, tokens: torch.Tensor, table: torch.Tensor, to: Place) -> torch.Tensor:
        every, own = gathered(tokens, to)
        mine = (every >= held.start) & (every < held.stop)
        given = {"tokens": every, "table": table[:1].expand(vocab, -1)} if labels else {
            "tokens": torch.where(mine, every - held.start, 0), "table": table}
        rows = ops.embed(**given, to=to).masked_fill(~mine[:, None], 0)
        return comm.all_reduce(rows, to)[own]

    def lm_head(*, x: torch.Tensor, weight: torch.Tensor, to: Place) -> torch.Tensor:
        every, own = gathered(x, to)
        if labels:  # a label names one token of the whole vocabulary
            part = ops.lm_head(x=every, weight=weight[:1].expand(vocab, -1), to=to)[:, held.start : held.stop]
        else:
            part = ops.lm_head(x=every, weight=weight, to=to)
        return comm.all_gather(part.contiguous(), 1, to)[own].contiguous()

    return replace(ops, embed=embed, lm_head=lm_head, head_pick=None, draft_inputs=None)
