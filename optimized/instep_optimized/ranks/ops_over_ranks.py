"""One rank's op set and checkpoint: ops whose results need the other ranks call a collective, and weights are cut.

    embed       the rows of this rank's tokens, zeros for others        all_reduce
    linear      only the last one of a mixer (`out_proj`, `o_proj`)     all_reduce
    mlp, moe    partial sums over this rank's columns or experts        all_reduce
    lm_head     the logits of this rank's tokens                        all_gather
    pick, draw, topk_tokens   the same on every rank; rank 0's are used: broadcast

Every other op works on this rank's heads alone, or on what every rank has. Labels cannot be added: a rank multiplies
its labels by a factor, and the factors of all ranks add up to 1. So the sum is the label if all ranks have the same.
A fusion of one of these ops would skip its collective, so its parts run instead, in a watched engine, too.
Leaves out: the collectives themselves.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from instep_reference.contract import shards
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.declared_rounding import REDUCED, Product
from instep_reference.contract.errors import Unsupported
from instep_reference.contract.place_names import Place

from ..ops.fused import wholes
from ..ops.integer_op_protocols import TopkTokens
from ..ops.op_protocols import Ops
from ..options import Options, moves_labels
from . import Comm

BY_ROW = "mixer"  # the component that a linear by row makes
HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def of_rank(checkpoint: Checkpoint, ops: Ops, options: Options, comm: Comm) -> tuple[Checkpoint, Ops, Options]:
    """Return the checkpoint, the op set and the options of one rank, or refuse settings that have no ranks yet."""
    if not {options.strategy, options.conv}.isdisjoint(ops.keepers):
        raise Unsupported(f"several ranks with a commit strategy that an op set brings (ranks {comm.size})")
    config = shards.config_of(checkpoint.config, comm.size, options.experts)
    cut = replace(checkpoint, config=config, tensors=_Cut(checkpoint, comm, options.experts == shards.WHOLE))
    own = replace(options, first_head=comm.rank * config.value_heads)
    return cut, over_ranks(ops, comm, checkpoint.config, options), own


class _Cut(Mapping[str, torch.Tensor]):
    """A rank's parts of the stored tensors, by name. whole: it has whole experts, and zeros in place of all others."""

    def __init__(self, checkpoint: Checkpoint, comm: Comm, whole: bool) -> None:
        self._whole, self._config, self._comm = checkpoint.tensors, checkpoint.config, comm
        self._whole_experts = whole

    def __getitem__(self, name: str) -> torch.Tensor:
        mine = shards.expert_of(self._config, name, self._comm.rank, self._comm.size) if self._whole_experts else None
        if mine is not None:
            held, expert = mine
            x = self._whole[name]
            numbers = torch.arange(len(x)) if expert is None else torch.tensor(expert)
            others = (numbers < held.start) | (numbers >= held.stop)
            return x.masked_fill(others.view(-1, *[1] * (x.dim() - 1)), 0)
        return part_of(self._whole[name], shards.weight(self._config, name), self._comm)

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)


def part_of(x: torch.Tensor, shard: shards.Shard | None, comm: Comm) -> torch.Tensor:
    """Cut a whole tensor down to the part of a rank."""
    if shard is None:
        return x
    spans = shard.spans(comm.rank, comm.size)
    return torch.cat([x.narrow(shard.axis, span.start, len(span)) for span in spans], shard.axis)


def products_of(ops: Ops, size: int, activation: torch.dtype, experts: str = shards.COLUMNS) -> dict[str, Product]:
    """Return the declared products of an op set over ranks: each rank stores its partial sums like activations.

    Partial sums in fp32 are one more order of the same sum, which needs no declaration.
    """
    if activation not in HALVES or moves_labels(ops):
        return dict(ops.products)
    return {**ops.products, **{
        form: replace(ops.products.get(form, Product("ieee")), parts=size, stored=HALVES[activation],
                      whole=form == "moe" and experts == shards.WHOLE)
        for form in REDUCED}}  # fmt: skip


def over_ranks(ops: Ops, comm: Comm, config: ModelConfig, options: Options) -> Ops:
    """Return the op set of a rank. config: of the whole model"""
    labels = moves_labels(ops)
    vocab = shards.Segment(config.vocab).held(comm.rank, comm.size)

    def added(part: torch.Tensor, to: Place) -> torch.Tensor:
        return comm.all_reduce(part * factor(comm) if labels else part, to)

    def embed(*, tokens: torch.Tensor, table: torch.Tensor, to: Place) -> torch.Tensor:
        mine = (tokens >= vocab.start) & (tokens < vocab.stop)
        own = {"tokens": tokens, "table": table[:1].expand(config.vocab, -1)} if labels else {
            "tokens": torch.where(mine, tokens - vocab.start, 0), "table": table}
        rows = ops.embed(**own, to=to)
        return comm.all_reduce(rows.masked_fill(~mine[:, None], 0), to)

    def linear(*, x: torch.Tensor, weight: torch.Tensor, shape: tuple[int, ...], to: Place) -> torch.Tensor:
        rows = ops.linear(x=x, weight=weight, shape=shape, to=to)
        return added(rows, to) if to.component == BY_ROW else rows

    def mlp(*, to: Place, **given: Any) -> torch.Tensor:
        return added(ops.mlp(to=to, **given), to)

    def moe(*, to: Place, **given: Any) -> torch.Tensor:
        return added(ops.moe(to=to, **given), to)

    def lm_head(*, x: torch.Tensor, weight: torch.Tensor, to: Place) -> torch.Tensor:
        if labels:  # a label names one token of the whole vocabulary
            whole = ops.lm_head(x=x, weight=weight[:1].expand(config.vocab, -1), to=to)
            return comm.all_gather(whole[:, vocab.start : vocab.stop].contiguous(), 1, to)
        return comm.all_gather(ops.lm_head(x=x, weight=weight, to=to), 1, to)

    def pick(*, logits: torch.Tensor, to: Place) -> torch.Tensor:
        return comm.broadcast(ops.pick(logits=logits, to=to), to)

    def draw(*, to: Place, **given: Any) -> torch.Tensor:
        return comm.broadcast(ops.draw(to=to, **given), to)

    def topk_tokens(*, logits: torch.Tensor, topk: int) -> TopkTokens:
        return TopkTokens(*map(comm.broadcast, ops.topk_tokens(logits=logits, topk=topk)))

    return replace(
        ops, embed=embed, linear=linear, mlp=mlp, moe=moe, lm_head=lm_head, pick=pick, draw=draw,
        topk_tokens=topk_tokens, products=products_of(ops, comm.size, options.activation, options.experts),
        **dict.fromkeys(wholes("embed", "linear", "lm_head", "pick")),  # type: ignore[arg-type]
    )


def factor(comm: Comm) -> int:
    """Return the factor of a rank's labels in a sum. The factors of all ranks add up to 1, and none is 0 or 1."""
    odd = [2 * rank + 3 for rank in range(comm.size - 1)]
    return (*odd, 1 - sum(odd))[comm.rank]
