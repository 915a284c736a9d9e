"""One layer of the reference over the rows of one request, as a piece whose inputs can be replaced one by one.

Leaves out: the source of the rows and the memory (`recomputation_plan.py`), and running a piece (`recomputation.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch

from instep_reference import per_layer_embedding, trunk
from instep_reference.attention import attend_both_ways, rotate
from instep_reference.contract.engine import RequestState
from instep_reference.contract.place_names import STAGE_LEVEL, Place, See
from instep_reference.contract.qwen4_config import PleShape
from instep_reference.contract.recurrences import PLE, WITH_FIXED_MEMORY
from instep_reference.gdn import Recurred, recur
from instep_reference.norms import rms_norm
from instep_reference.per_layer_embedding import PleMemory
from instep_reference.trunk import Forms, WithState
from instep_reference.weights import AttentionWeights, BlockWeights, DraftWeights, Weights

from ..trace.tree_shape import depths, lines

# A piece of the reference: from weights in some width it computes its places, and returns its final state, if any.
Work = Callable[[Weights, See], torch.Tensor | None]


@dataclass(frozen=True)
class LayerWork:
    """hidden: its rows, the first of them at position `start`; memory: the memory before, None if there is none. An MTP
    stage has the layers of the draft head, the stage "block" those of the block drafter, whose rows see each other.
    parents: of each row, if the rows are nodes of a tree; None: a chain.  tokens: of the rows
    """

    stage: str
    layer: int
    hidden: torch.Tensor
    start: int
    memory: trunk.LayerMemory | None = None
    parents: tuple[int, ...] | None = None
    tokens: tuple[int, ...] = ()

    def __call__(self, weights: Weights, see: See) -> torch.Tensor | None:
        config, layers, like = weights.config, weights.layers, weights.embedding
        if self.stage == "block":
            config, layers = config.block_model(), block_of(weights).layers
        elif self.stage != "trunk":
            config, layers = config.drafter(), draft_of(weights).layers
        if self.memory is None:
            memory = trunk.layer_memory(config, self.layer, like.dtype, like.device)
        else:
            own: Any = self.memory
            memory = replace(own, **{name: trunk.as_like(x, like) for name, x in vars(own).items()})
        positions, forms = positions_of(self.start, self.hidden.shape[0], self.parents, like.device)
        if self.stage == "block":
            forms = {"attention": {"read": attend_both_ways}}
        hidden = self.hidden.to(like)
        _, after = trunk.layer(
            config, layers[self.layer], self.layer, self.stage, hidden, memory, positions, see, forms,
            torch.tensor(self.tokens, device=like.device))
        return after.state if isinstance(after, WithState) else None


def context_of(fed: torch.Tensor) -> Work:
    """The ops before the layers of a block drafter's context: norm(fc(features))."""

    def work(weights: Weights, see: See) -> None:
        block, eps = block_of(weights), weights.config.block_model().eps
        fused = see(Place("extend", STAGE_LEVEL, "fused"), fed.to(weights.embedding) @ block.fc.T)
        see(Place("extend", STAGE_LEVEL, "context"), rms_norm(fused, block.hidden_norm, eps))

    return work


def keys_and_values(layer: int, context: torch.Tensor, start: int, *, normed: bool = False) -> Work:
    """A layer's keys and values of the context, from its rows. normed: the rows pass the layer's input norm first."""

    def work(weights: Weights, see: See) -> None:
        config, mixer = weights.config.block_model(), cast(AttentionWeights, block_of(weights).layers[layer].mixer)
        rows, shape = context.to(weights.embedding), (len(context), config.kv_heads, config.head_dim)
        if normed:
            rows, _ = trunk.read(config, block_of(weights).layers[layer].input_norm, rows)
        raw = see(Place("extend", layer, "key_raw"), (rows @ mixer.key.T).reshape(shape))
        positions = start + torch.arange(len(rows), device=rows.device)
        see(Place("extend", layer, "key"), rotate(rms_norm(raw, mixer.key_norm, config.eps), positions, config))
        see(Place("extend", layer, "value"), (rows @ mixer.value.T).reshape(shape))

    return work


def to_state(
    hidden: torch.Tensor, before: RequestState, layer: int, number: int, start: int,
    tree: tuple[int, ...] | None = None, *, read: bool = True, tokens: Sequence[int] = (),
) -> Work:
    """Run a layer with a recurrence from its rows to the state, and nothing after it.

    number: the layer's index in the weights
    read: whether the read-outs are computed as well; for a tree's nodes they always are
    tokens: of the rows. The weights may lack an embedding of n-grams: then the rows have it already
    """

    def work(weights: Weights, see: See) -> torch.Tensor:
        like, mine = weights.embedding, weights.layers[number]
        kind = weights.config.mixers[number]
        mixer = trunk.MIXERS[kind]
        memory = mixer.empty(weights.config, like.dtype, like.device)
        if start:
            memory = trunk.memory_of(weights.config, kind, before, layer, like)

        def at(component: str, tensor: torch.Tensor) -> torch.Tensor:
            return see(Place("trunk", layer, component), tensor)

        positions, forms = positions_of(start, hidden.shape[0], tree, like.device)
        rows = hidden.to(like)
        if mine.ple is not None:
            ids = torch.tensor(tokens, device=like.device)
            if not isinstance(memory, PleMemory):
                memory = trunk.layer_memory(weights.config, layer, like.dtype, like.device)
            rows, memory = per_layer_embedding.embed(
                weights.config.ple_before(layer), mine.ple, rows, ids, memory, weights.config.eps, at,
                **forms.get(PLE, {}))
        normed = at("normed", trunk.read(weights.config, mine.input_norm, rows)[0])
        if not read and tree is None:
            state: torch.Tensor = mixer.state_after(weights.config, mine.mixer, normed, memory, at)
            return state
        after: WithState = mixer.mix(
            weights.config, mine.mixer, normed, memory, positions, at, **forms.get(kind, {}))[1]
        return after.state

    return work


def positions_of(
    start: int, count: int, parents: tuple[int, ...] | None, device: torch.device
) -> tuple[torch.Tensor, trunk.Forms]:
    """The positions of a window's rows, and the forms of the ops that look backwards in it."""
    if parents is None:
        return start + torch.arange(count, device=device), {}
    return start + torch.tensor(depths(parents), device=device), forms(parents)


def draft_of(weights: Weights) -> DraftWeights:
    return cast(DraftWeights, weights.draft)


def block_of(weights: Weights) -> BlockWeights:
    return cast(BlockWeights, weights.block)


# The parts of a layer that look backwards, over a window that is a tree: conv, delta rule, attention. The reference
# decodes a tree node by node, each from its parent's memory. Here all nodes of a layer are rows of one run, as in an
# engine, so that every place shows the whole window; a test compares the two.


def forms(parents: Sequence[int]) -> Forms:
    """For `trunk.layer`. parents: of each node, -1 for the root; the memory before the window is the layer's."""
    tree = tuple(parents)
    recurrent = {"rule": partial(recur_tree, tree), "conv": partial(conv_tree, tree)}
    attending = {"read": partial(read_tree, tree)}
    part = {"rule": "state", "conv": "conv"}  # the memory that each form runs over
    fixed = {mixer: {name: form for name, form in recurrent.items() if part[name] in row.memory}
             for mixer, row in WITH_FIXED_MEMORY.items()}  # fmt: skip
    ple = {PLE: {"grams": partial(grams_tree, tree), "conv": partial(dilated_tree, tree)}}
    return {**dict.fromkeys(("attention", "mla", "nope"), attending), **fixed, **ple}


def grams_tree(
    parents: tuple[int, ...], shape: PleShape, tokens: tuple[int, ...], before: tuple[int, ...]
) -> torch.Tensor:
    """`per_layer_embedding.entries`, with the tokens of each node's own path before it."""
    found = []
    for line in lines(parents):
        path = (*before, *(tokens[node] for node in line))
        found.append(per_layer_embedding.entries(shape, path[-1:], path[:-1]))
    return torch.cat(found)


def dilated_tree(
    parents: tuple[int, ...], x: torch.Tensor, weight: torch.Tensor, window: torch.Tensor, distance: int
) -> torch.Tensor:
    """`per_layer_embedding.dilated_conv` along each node's own path."""
    rows = []
    for line in lines(parents):
        rows.append(per_layer_embedding.dilated_conv(x[list(line)], weight, window, distance)[-1:])
    return torch.cat(rows)


def recur_tree(
    parents: tuple[int, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor,
    erase: torch.Tensor, write: torch.Tensor, state: torch.Tensor,
) -> Recurred:
    """`recur`, with every node from its parent's state. The state that it returns is the last node's.

    Shapes:  as `recur`
    """
    nodes: list[Recurred] = []
    for node, parent in enumerate(parents):
        at = slice(node, node + 1)
        before = nodes[parent].state if parent >= 0 else state
        nodes.append(recur(q[:, at], k[:, at], v[:, at], log_decay=log_decay[:, at], erase=erase[:, at],
                           write=write[:, at], state=before))  # fmt: skip
    out, update = (torch.cat([getattr(one, name) for one in nodes], 1) for name in ("out", "update"))
    return Recurred(out, update, nodes[-1].state)


def conv_tree(
    parents: tuple[int, ...], x: torch.Tensor, weight: torch.Tensor, window: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`causal_conv` along each node's own path. The window that it returns is the last node's.

    Shapes:  x (T, C)   weight (C, W)   window (C, W-1)  ->  (T, C), (C, W-1)
    """
    width, history = weight.shape[1], window.T
    inputs = torch.cat([history, x])  # (W-1 + T, C)
    reads = [[*range(width - 1), *(width - 1 + node for node in line)][-width:] for line in lines(parents)]
    rows = inputs[torch.tensor(reads, device=x.device)]  # (T, W, C)
    taps = [weight[:, j] * rows[:, j] for j in range(width)]  # W of (T, C)
    return torch.stack(taps).sum(0), rows[-1, 1:].T


def read_tree(
    parents: tuple[int, ...], query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """`attend`, if the T queries belong to the last T rows of memory: each sees its path, and everything before the
    tree.

    Shapes:  as `attend`
    """
    (tokens, heads, width), (length, kv_heads, _) = query.shape, keys.shape
    keys, values = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (keys, values))
    scores = torch.einsum("thd,lhd->htl", query, keys) * width**-0.5  # (heads, T, L)
    hidden = torch.zeros(tokens, length, dtype=torch.bool)
    hidden[:, length - tokens :] = True
    for node, line in enumerate(lines(parents)):
        hidden[node, [length - tokens + other for other in line]] = False
    shares = scores.masked_fill(hidden.to(query.device), float("-inf")).softmax(-1)
    return torch.einsum("htl,lhd->thd", shares, values)
