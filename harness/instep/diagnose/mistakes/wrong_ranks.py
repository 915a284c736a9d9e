"""Mistakes of ranks: a partial sum that is missing or added twice, and weights that are cut for another rank.

All follow from the subject's own merged rows, and from the part of a weight that a rank has (`contract/shards.py`).
Leaves out: ranks that hold different results (`checks/ranks.py`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import combinations, permutations

import torch

from instep_reference.contract import shards
from instep_reference.contract.shards import Segment, Shard
from instep_reference.mlp import dense
from instep_reference.weights import LatentWeights, MlpWeights, MoeWeights, given

from ...watch.rank_facts import RankFacts
from .experts import mixture
from .finding_case import NARROW, Case, Explanation, rounded
from .wrong_inputs import nearest
from .wrong_weights import layer_of, mixer_of, with_mixer

# Component -> fields of a mixer's weights that make it, with the ends of their names in a checkpoint.
MADE_OF: dict[str, dict[str, str]] = {
    "qkv": {"qkv": "linear_attn.in_proj_qkv.weight"}, "mixed": {"conv": "linear_attn.conv1d.weight"},
    "z": {"z": "linear_attn.in_proj_z.weight"}, "a": {"a": "linear_attn.in_proj_a.weight"},
    "b": {"b": "linear_attn.in_proj_b.weight"},
    "log_decay": {"A_log": "linear_attn.A_log", "dt_bias": "linear_attn.dt_bias"},
    "projected": {"query_gate": "self_attn.q_proj.weight"}, "key_raw": {"key": "self_attn.k_proj.weight"},
    "value": {"value": "self_attn.v_proj.weight"},
}  # fmt: skip
# The same of a layer whose gates have two matrices, and of one that stores latents.
OF_LOW_RANK = {
    "z": {"z": "self_attn.g_b_proj.weight"}, "a": {"a": "self_attn.f_b_proj.weight"},
    "b": {"b": "self_attn.b_proj.weight"},
    "log_decay": {"A_log": "self_attn.A_log", "dt_bias": "self_attn.dt_bias"},
}  # fmt: skip
OF_LATENTS = {"query": {"query": "self_attn.q_proj.weight"}, "attended": {"up": "self_attn.kv_b_proj.weight"}}
CHANNELS = ("qkv", "mixed")  # components whose columns are the rows of the weight, which may be declared differently
MOST = 4  # ranks up to which every order is tried


def ranks(case: Case) -> Iterator[Explanation]:
    if case.piece is None:
        return
    if case.context.group is not None:
        yield from _tokens(case, case.context.group.size)
    if (facts := case.context.ranks) is not None:
        yield from _sums(case, facts)
        yield from _experts(case, facts.size)
        yield from _weights(case, facts)
        yield from _tokens(case, facts.size)


def _sums(case: Case, facts: RankFacts) -> Iterator[Explanation]:
    size = facts.size
    made = _parts(case, size)
    if made is None:
        return
    parts, by_others = made
    unlike = {one.rank for one in facts.replicas if one.place == case.finding.place and one.differing}
    unsummed = len(unlike) == size - 1
    if unsummed:
        yield Explanation("lacks the sum over the ranks: it is the partial sum of rank 0", parts[0])
    for rank, part in enumerate(parts):
        yield Explanation(f"has the partial sum of rank {rank} twice", case.right + part)
        if size > 2 or not unsummed:  # of two ranks that differ, the same as without the sum
            yield Explanation(f"lacks the partial sum of rank {rank}", case.right - part)
        if size > 2 and (rank or not unsummed):  # of two ranks, the same as without the other one
            yield Explanation(f"is the partial sum of rank {rank} alone", part)
    for rank, other in permutations(range(size), 2):
        yield Explanation(f"has the partial sum of rank {rank} in place of that of rank {other}",
                          case.right - parts[other] + parts[rank])  # fmt: skip
        if by_others is not None:
            yield Explanation(f"the rows of rank {rank} meet the columns of rank {other}",
                              case.right - parts[rank] + by_others(rank, other))  # fmt: skip
    if by_others is not None:
        for rank, other in combinations(range(size), 2):
            both = by_others(rank, other) + by_others(other, rank)
            yield Explanation(f"ranks {rank} and {other} have the columns of each other",
                              case.right - parts[rank] - parts[other] + both)  # fmt: skip
    yield Explanation("has every partial sum twice", 2 * case.right)
    yield Explanation("is the mean over the ranks, not the sum", case.right / size)
    for name, dtype in NARROW.items():
        narrow = torch.stack([rounded(part, dtype) for part in parts]).sum(0)
        yield Explanation(f"its partial sums are rounded to {name} before they are added", narrow)


Parts = tuple[list[torch.Tensor], Callable[[int, int], torch.Tensor] | None]


def _parts(case: Case, size: int) -> Parts | None:
    """The partial sum of every rank, and what makes that of the rows of one rank and the columns of another one."""
    layer, component = layer_of(case), case.component
    if layer is None or component not in ("mixer", "mlp"):
        return None
    if component == "mixer":
        assert layer.mixer is not None, "the finding is about a mixer"
        out = layer.mixer.out
        rows = next((own for name in ("gated", "opened", "attended") if (own := case.own(name)) is not None), None)
        if rows is None:
            return None
        each, columns = torch.tensor_split(rows.flatten(1), size, 1), torch.tensor_split(out, size, 1)
        return [x @ w.T for x, w in zip(each, columns, strict=True)], lambda rank, other: each[rank] @ columns[other].T
    x = case.own("post_normed")
    if x is None:
        return None
    if isinstance(layer.mlp, MlpWeights):
        return [dense(part, x) for part in _cut(layer.mlp, size)], partial(_of_two_ranks, layer.mlp, x, size)
    mix = mixture(case)
    if mix is None:
        return None
    weighed = mix.weighed(mix.shares(mix.top, mix.config.norm_topk))

    def mixed(rank: int, other: int) -> torch.Tensor:
        own: MoeWeights = replace(mix.mlp, shared=_of_two(mix.mlp.shared, size, rank, other))
        made = torch.stack([dense(_of_two(expert, size, rank, other), x) for expert in mix.mlp.experts])
        return torch.einsum("te,etd->td", weighed, made) + replace(mix, mlp=own).shared()

    return [mixed(rank, rank) for rank in range(size)], mixed


def _experts(case: Case, size: int) -> Iterator[Explanation]:
    """Routed experts that several ranks have as a whole, or none, and experts that are cut as one block."""
    mix = mixture(case)
    if mix is None:
        return
    x = mix.x
    weighed, held = mix.weighed(mix.shares(mix.top, mix.config.norm_topk)), Segment(len(mix.mlp.experts))
    made = torch.stack([dense(expert, x) for expert in mix.mlp.experts])
    for rank in range(size) if held.fits(size) else ():
        mine = held.held(rank, size)
        part = torch.einsum("te,etd->td", weighed[:, mine.start : mine.stop], made[mine.start : mine.stop])
        yield Explanation(f"has the experts of rank {rank} twice", case.right + part)
        yield Explanation(f"lacks the experts of rank {rank}", case.right - part)
    blocks = torch.stack([sum((dense(part, x) for part in _as_one_block(expert, size)), torch.zeros_like(x))
                          for expert in mix.mlp.experts])  # fmt: skip
    yield Explanation("the ranks have gate and up of the experts as one block, not of each half",
                      case.right + torch.einsum("te,etd->td", weighed, blocks - made))  # fmt: skip


def _as_one_block(mlp: MlpWeights, size: int) -> Iterator[MlpWeights]:
    """The parts of an expert whose gate and up are cut as one matrix."""
    rows = torch.tensor_split(torch.cat([given(mlp.gate), mlp.up]), size)
    for both, down in zip(rows, torch.tensor_split(mlp.down, size, 1), strict=True):
        gate, up = torch.tensor_split(both, 2)
        yield MlpWeights(gate, up, down, mlp.limit)


def _cut(mlp: MlpWeights, size: int) -> list[MlpWeights]:
    held = (Segment(len(mlp.up)).held(rank, size) for rank in range(size))
    return [
        MlpWeights(given(mlp.gate)[mine.start : mine.stop], mlp.up[mine.start : mine.stop],
                   mlp.down[:, mine.start : mine.stop], mlp.limit) for mine in held]  # fmt: skip


def _of_two_ranks(mlp: MlpWeights, x: torch.Tensor, size: int, rank: int, other: int) -> torch.Tensor:
    return dense(_of_two(mlp, size, rank, other), x)


def _of_two(mlp: MlpWeights, size: int, rank: int, other: int) -> MlpWeights:
    """The part of a rank, with the columns of the last product that another rank has."""
    parts = _cut(mlp, size)
    return replace(parts[rank], down=parts[other].down)


def every_shared_expert(case: Case) -> Iterator[Explanation]:
    """The shared expert as a whole on every rank, so that the sum has it several times."""
    facts, mix = case.context.ranks, mixture(case)
    if facts is not None and mix is not None:
        yield Explanation(f"has the shared expert {facts.size} times: it is whole on every rank",
                          case.right + (facts.size - 1) * mix.shared())  # fmt: skip


def _tokens(case: Case, size: int) -> Iterator[Explanation]:
    """Embeddings and logits, which are split over the vocabulary."""
    vocab = Segment(case.weights.config.vocab)
    if case.component == "embedding":
        table = case.weights.embedding
        tokens = torch.tensor(nearest(case.right.to("cpu", torch.float64), table.to("cpu", torch.float64)))
        for rank in range(size):
            held = vocab.held(rank, size)
            own = ((tokens >= held.start) & (tokens < held.stop))[:, None].to(case.right.device)
            if not own.all():
                yield Explanation(f"has the embedding of token {held.start}, rank {rank}'s first one, added",
                                  case.right + table[held.start].masked_fill(own, 0))  # fmt: skip
            if own.any():
                yield Explanation(f"lacks the embedding of rank {rank}'s tokens", case.right.masked_fill(own, 0))
    if case.component == "logits" and size <= MOST:
        parts = torch.tensor_split(case.right, size, -1)
        for rank, part in enumerate(parts):
            if all(part.shape == other.shape for other in parts):
                yield Explanation(f"has the logits of rank {rank} in the place of those of every rank",
                                  torch.cat([part] * size, -1))  # fmt: skip
        for order in permutations(range(size)):
            if order != tuple(range(size)):
                told = ", ".join(map(str, order))
                yield Explanation(f"has the logits of the ranks in the order {told}",
                                  torch.cat([parts[rank] for rank in order], -1))  # fmt: skip


def _weights(case: Case, facts: RankFacts) -> Iterator[Explanation]:
    """Results of weights that a rank has of another one, or that are cut as one block instead of per segment."""
    mixer, config, size = mixer_of(case), case.weights.config, facts.size
    if mixer is None:
        return
    latents = isinstance(mixer, LatentWeights)
    made = OF_LATENTS if latents else MADE_OF | OF_LOW_RANK if config.low_rank else MADE_OF
    for field, name in made.get(case.component, {}).items():
        stored = f"model.layers.{case.finding.place.layer}.{name}"
        weight, shard = getattr(mixer, field), shards.weight(config, stored)
        assert shard is not None, "every weight of the table is split"
        if case.component in CHANNELS and (rows := facts.row(case.finding.place)) is not None:
            shard = rows
        short = name.split(".")[1]
        for rank, other in permutations(range(size), 2):
            wrong = _moved(weight, shard, size, {rank: shard.spans(other, size)})
            yield from with_mixer(case, f"rank {rank} has {short} of rank {other}", **{field: wrong})
        for rank, other in combinations(range(size), 2):
            wrong = _moved(weight, shard, size, {rank: shard.spans(other, size), other: shard.spans(rank, size)})
            yield from with_mixer(case, f"ranks {rank} and {other} have {short} of each other", **{field: wrong})
        if len(shard.segments) > 1:
            spans = {rank: (Segment(len(weight)).held(rank, size),) for rank in range(size)}
            wrong = _moved(weight, shard, size, spans)
            yield from with_mixer(case, f"the ranks have parts of {short} as one block, not of each segment",
                                  **{field: wrong})  # fmt: skip


def _moved(weight: torch.Tensor, shard: Shard, size: int, spans: Mapping[int, tuple[range, ...]]) -> torch.Tensor:
    """The whole weight with other rows in the places of some ranks. spans: the rows that each of them has."""
    whole = weight.clone()
    for rank, taken in spans.items():
        into, rows = ([at for span in both for at in span] for both in (shard.spans(rank, size), taken))
        whole[into] = weight[rows]
    return whole
