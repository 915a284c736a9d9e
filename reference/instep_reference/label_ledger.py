"""The ledger engine: the labels that a right engine must hold after every event, in Python integers.

The rounds are those of the reference; only the model differs. A hidden row is one label, and an op mixes labels where
the model computes (`contract/label_algebra.py` has the rules). Leaves out: all arithmetic of the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from math import prod
from struct import pack
from typing import NamedTuple
from zlib import crc32

import torch

from .acceptance import greedy
from .contract.adaptive_controller_file import AdaptiveFile
from .contract.capacity import Capacity
from .contract.config import ModelConfig
from .contract.controllers import Controlled
from .contract.engine import Path, RequestState
from .contract.label_algebra import SPREAD
from .contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place, See, unseen
from .contract.recurrences import PLE, PLE_PLACES, STREAM_PLACES
from .contract.sampling import UNIFORM
from .draft import drafter
from .label_mixing import MASK, mix, most_named
from .sampling import Drawing
from .speculative_rounds import Rounds

SIGN = 1 << 63


def code(place: Place) -> int:
    """Number of a place. The stages extend and chain run the same weights, so their places have the same number."""
    family = "trunk" if place.stage == "trunk" else "draft"
    return crc32(f"{family}.{place.layer}.{place.component}".encode("ascii"))


def expand(labels: Sequence[int], shape: tuple[int, ...]) -> torch.Tensor:
    """Labels as rows of elements: element j is label + j * SPREAD, so a moved element shows. The label 0 gives zeros.

    Shapes:  labels (N,)  ->  (N, *shape) int64, two's complement
    """
    heads = torch.tensor([_signed(label) for label in labels], dtype=torch.int64)[:, None]
    rows = heads + _steps(prod(shape))
    if 0 in labels:
        rows.masked_fill_(heads == 0, 0)
    return rows.reshape(len(labels), *shape)


@lru_cache(maxsize=256)
def _steps(count: int) -> torch.Tensor:
    """j * SPREAD for every j below `count`."""
    return torch.arange(count, dtype=torch.int64) * _signed(SPREAD)


@dataclass(frozen=True)
class GdnLabels:
    """A GDN layer's memory: the labels of the last W - 1 conv inputs, oldest first, and the chain of all tokens.

    A short convolution has no chain. An embedding of n-grams before the mixer keeps tokens, each plus one, and the
    labels of its conv's inputs.
    """

    taps: tuple[int, ...]
    chain: int = 0
    ngram: tuple[int, ...] = ()
    ple_taps: tuple[int, ...] = ()


@dataclass(frozen=True)
class KvLabels:
    """An attention layer's memory: key and value labels per position, and the running total that a query reads."""

    keys: tuple[int, ...] = ()
    values: tuple[int, ...] = ()
    total: int = 0


class Fed(NamedTuple):
    """A row of a target that a block drafter reads: the label of the final row, and that of the features."""

    final: int
    features: int


Labels = list[int]
TargetRows = Sequence[int | Fed]
Memory = tuple[GdnLabels | KvLabels | None, ...]  # None: the layer is an MLP alone


@dataclass(frozen=True)
class LabelModel:
    """A model that moves labels, as `Model` describes it. A row is one label."""

    config: ModelConfig

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def nothing(self) -> Memory:
        fresh = GdnLabels((0,) * (self.config.conv_width - 1))
        fixed, attending = {*self.config.recurrent, *self.config.convolving}, self.config.attending
        preceded = {shape.layer: replace(fresh, ngram=(0,) * (shape.ngram - 1), ple_taps=(0,) * shape.reach)
                    for shape in self.config.ple}  # fmt: skip
        return tuple(preceded.get(layer, fresh) if layer in fixed else KvLabels() if layer in attending else None
                     for layer in range(len(self.config.layers)))  # fmt: skip

    def no_cache(self) -> KvLabels:
        return KvLabels()

    def advance(self, tokens: Sequence[int], memory: Memory, start: int, see: See) -> tuple[TargetRows, Memory]:
        tell = Teller("trunk", self.config, see)
        hidden, answers = tell.embed(tokens), list[Labels]()
        after = []
        for layer, before in enumerate(memory):
            hidden, kept = _layer(tell, layer, hidden, before, start, tokens)
            after.append(kept)
            answers.append(hidden)
        final = tell.of(AFTER_LAYERS, "final", hidden)
        if self.config.block is None:
            return final, tuple(after)
        first, *others = self.config.block.target_layer_ids
        features = answers[first]
        for layer in others:
            features = tell.of(layer, "features", features, answers[layer])
        return [Fed(*row) for row in zip(final, features, strict=True)], tuple(after)

    def head(
        self, layer: int, tokens: Sequence[int], hidden: TargetRows, cache: KvLabels, start: int, stage: str, see: See
    ) -> tuple[Labels, KvLabels]:
        tell = Teller(stage, self.config.drafter(), see)
        embedded = tell.of(STAGE_LEVEL, "normed", tell.embed(tokens))
        joined = tell.of(STAGE_LEVEL, "joined", embedded, tell.of(STAGE_LEVEL, "post_normed", _finals(hidden)))
        x, kept = _layer(tell, layer, tell.of(STAGE_LEVEL, "fused", joined), cache, start)
        assert isinstance(kept, KvLabels), "MTP layers are attention layers"
        return tell.of(AFTER_LAYERS, "final", x), kept

    def block_caches(self) -> tuple[KvLabels, ...]:
        return () if self.config.block is None else (KvLabels(),) * self.config.block.num_hidden_layers

    def context(self, rows: TargetRows, caches: Sequence[KvLabels], start: int, see: See) -> tuple[KvLabels, ...]:
        tell, after = Teller("extend", self.config.block_model(), see), []
        fused = tell.of(STAGE_LEVEL, "fused", [row.features for row in rows if isinstance(row, Fed)])
        context, positions = tell.of(STAGE_LEVEL, "context", fused), list(range(start, start + len(rows)))
        for layer, cache in enumerate(caches):
            key_raw, value = (tell.of(layer, name, context) for name in ("key_raw", "value"))
            key = tell.of(layer, "key", key_raw, positions)
            total = (cache.total + _total(key, value, start)) & MASK
            after.append(KvLabels((*cache.keys, *key), (*cache.values, *value), total))
        return tuple(after)

    def block(self, tokens: Sequence[int], caches: Sequence[KvLabels], start: int, see: See) -> Labels:
        tell = Teller("block", self.config.block_model(), see)
        x = tell.embed(tokens)
        for layer, cache in enumerate(caches):
            x, _ = _layer(tell, layer, x, cache, start, both_ways=True)
        return tell.of(AFTER_LAYERS, "final", x)

    def until(self, cache: KvLabels, count: int) -> KvLabels:
        keys, values = cache.keys[:count], cache.values[:count]
        return KvLabels(keys, values, _total(keys, values))

    def pick(self, rows: TargetRows, stage: str, see: See) -> list[int]:
        picks = self._largest(rows, stage, see)
        see(Place(stage, AFTER_LAYERS, "pick"), torch.tensor(picks, dtype=torch.int64))
        return picks

    def best(self, rows: TargetRows, count: int, stage: str, see: See) -> list[list[tuple[int, float]]]:
        """Derive tokens and integer scores from the named token: labels have no probabilities."""
        return [most_named(token, count, self.config.vocab) for token in self._largest(rows, stage, see)]

    def draw(self, rows: TargetRows, drawing: Drawing, stage: str, see: See) -> list[int]:
        """Mix everything that a draw may depend on: labels have no probabilities."""
        said, sampling = [], drawing.sampling
        known = (_bits(sampling.temperature), _bits(1.0 if sampling.top_p is None else sampling.top_p),
                 sampling.top_k or 0)
        for node, token in enumerate(self._largest(rows, stage, see)):
            uniforms = (round(uniform / UNIFORM) for uniform in (drawing.at_nodes[node], drawing.final))
            children = (drawing.tokens[child] for child, parent in enumerate(drawing.parents) if parent == node)
            said.append((reduce(mix, (*known, *uniforms, *children), token) >> 1) % self.config.vocab)
        see(Place(stage, AFTER_LAYERS, "pick"), torch.tensor(said, dtype=torch.int64))
        return said

    def accept_block(self, rows: TargetRows, drawing: Drawing, cap: int) -> Path:
        return greedy(drawing.tokens, drawing.parents, self.draw(rows, drawing, "trunk", unseen), cap)

    def _largest(self, rows: TargetRows, stage: str, see: See) -> list[int]:
        """Return the token that each row's logits name."""
        own = code(Place(stage, AFTER_LAYERS, "logits"))
        tokens = [(mix(row, own) >> 1) % self.config.vocab for row in _finals(rows)]
        logits = torch.zeros(len(tokens), self.config.vocab)
        at = torch.tensor(tokens, dtype=torch.int64)[:, None]
        see(Place(stage, AFTER_LAYERS, "logits"), logits.scatter(1, at, 1.0))
        return tokens

    def last(self, rows: TargetRows, count: int = 1) -> TargetRows:
        return rows[-count:]

    def join(self, parts: Sequence[TargetRows]) -> TargetRows:
        return [label for part in parts for label in part]

    def logical(
        self, length: int, root: int | None, proposal: int | None, hidden: TargetRows | None,
        memory: Memory, caches: Sequence[KvLabels], tail: TargetRows | None = None,
    ) -> RequestState:
        config = self.config
        (entry, value), drafts, blocks = config.stored_rows, caches, tuple[KvLabels, ...]()
        if config.block is not None:
            drafts, blocks, own = (), tuple(caches), _shape("key", config.block_model())
        block = config.lengths(config.recurrence.state)
        gdn = {layer: kept for layer, kept in enumerate(memory) if isinstance(kept, GdnLabels)}
        kv = {layer: kept for layer, kept in enumerate(memory) if isinstance(kept, KvLabels)}
        return RequestState(
            length=length, root=root, proposal=proposal,
            proposal_hidden=None if hidden is None else expand(_finals(hidden), (config.hidden,))[0],
            conv={layer: expand(kept.taps, _shape("qkv", config)).T.contiguous()
                  for layer, kept in gdn.items() if layer in config.convolving},
            state={layer: expand((kept.chain,), block)[0] for layer, kept in gdn.items() if layer in config.recurrent},
            keys={layer: expand(kept.keys, entry) for layer, kept in kv.items()},
            values={layer: expand(kept.values, value) for layer, kept in kv.items()},
            draft_keys={layer: expand(kept.keys, entry) for layer, kept in enumerate(drafts)},
            draft_values={layer: expand(kept.values, value) for layer, kept in enumerate(drafts)},
            block_keys={layer: expand(kept.keys, own) for layer, kept in enumerate(blocks)},
            block_values={layer: expand(kept.values, own) for layer, kept in enumerate(blocks)},
            ngram={layer: torch.tensor(kept.ngram) for layer, kept in gdn.items() if kept.ngram},
            ple_conv={layer: expand(kept.ple_taps, _shape("ple", config)).T.contiguous()
                      for layer, kept in gdn.items() if kept.ngram},
            tail={} if tail is None else {AFTER_LAYERS: expand(_finals(tail), (config.hidden,))},
        )


class LedgerEngine(Rounds[TargetRows, Memory, KvLabels]):
    """The reference's rounds over labels; needs a configuration and no weights. `mode`: which drafter, by name."""

    def __init__(
        self, config: ModelConfig, *, num_steps: int, adaptive: AdaptiveFile | None = None,
        controlled: Controlled | None = None, lag: int = 0, mode: str = "eagle", see: See = unseen,
        room: Capacity | None = None,
    ) -> None:
        super().__init__(
            LabelModel(config), drafter(config, mode), num_steps=num_steps, adaptive=adaptive, controlled=controlled,
            lag=lag, see=see, room=room)


@dataclass(frozen=True)
class Teller:
    """Makes the labels of an op's result, and shows them to `see`, expanded to the shape of the place."""

    stage: str
    config: ModelConfig
    see: See

    def embed(self, tokens: Sequence[int]) -> Labels:
        own = code(Place(self.stage, STAGE_LEVEL, "embedding"))
        return self.show(STAGE_LEVEL, "embedding", [mix(token, own) for token in tokens])

    def of(self, layer: int, component: str, *inputs: Labels) -> Labels:
        """The result of an op with code c: of one input mix(x, c); of several mix(mix(mix(x, y), z), c)."""
        own = code(Place(self.stage, layer, component))
        labels = []
        for row in zip(*inputs, strict=True):
            label = row[0]
            for other in row[1:]:
                label = mix(label, other)
            labels.append(mix(label, own))
        return self.show(layer, component, labels)

    def show(self, layer: int, component: str, labels: Labels) -> Labels:
        self.see(Place(self.stage, layer, component), expand(labels, _shape(component, self.config, layer)))
        return labels


def _finals(rows: TargetRows) -> Labels:
    return [row.final if isinstance(row, Fed) else row for row in rows]


def _layer(
    tell: Teller, layer: int, hidden: Labels, memory: GdnLabels | KvLabels | None, start: int,
    tokens: Sequence[int] = (), *, both_ways: bool = False,
) -> tuple[Labels, GdnLabels | KvLabels | None]:
    """both_ways: rows of an attention layer also see the rows after them."""
    trunk = tell.stage == "trunk"
    after = trunk and tell.config.mixers[layer] in tell.config.norm_after
    blocks = tell.config.layers[layer] if trunk else ()
    if memory is None:
        return tell.of(layer, "hidden", hidden, tell.of(layer, "mlp", tell.of(layer, "post_normed", hidden))), None
    streams = trunk and tell.config.streams > 1
    if PLE in blocks:
        assert isinstance(memory, GdnLabels), "an embedding of n-grams precedes such a layer alone"
        hidden, memory = _ple(tell, layer, hidden, tokens, memory)
    normed = hidden if after else tell.of(layer, "normed", hidden)
    strength = [tell.of(layer, "strength", hidden)] if streams else []
    kept: GdnLabels | KvLabels
    if isinstance(memory, GdnLabels):
        mixer, kept = (_gdn if layer in tell.config.recurrent else _short_conv)(tell, layer, normed, memory)
    else:
        attends = {"nope": _as_projected, "mla": _latent}.get(tell.config.mixers[layer], _attention)
        mixer, kept = attends(tell, layer, normed, memory, start, both_ways)
    if len(blocks) == 1:
        return tell.of(layer, "hidden", hidden, mixer), kept
    read = normed if tell.config.residual_factors else hidden  # the rows that the residual stream continues from
    residual = tell.of(layer, "residual", read, tell.of(layer, "mixer_normed", mixer) if after else mixer, *strength)
    post_strength = [tell.of(layer, "post_strength", residual)] if streams else []
    post = residual if after else tell.of(layer, "post_normed", residual)
    mlp, read = tell.of(layer, "mlp", post), post if tell.config.residual_factors else residual
    return tell.of(layer, "hidden", read, tell.of(layer, "mlp_normed", mlp) if after else mlp, *post_strength), kept


def _ple(
    tell: Teller, layer: int, hidden: Labels, tokens: Sequence[int], memory: GdnLabels
) -> tuple[Labels, GdnLabels]:
    """Add an embedding of n-grams. Its rows depend on the tokens themselves, each plus one, oldest first."""
    shape, own = tell.config.ple_before(layer), code(Place(tell.stage, layer, "ngrams"))
    line = (*memory.ngram, *(token + 1 for token in tokens))
    rows = tell.show(layer, "ngrams", [mix(reduce(mix, line[t : t + shape.ngram]), own) for t in range(len(tokens))])
    key, value = (tell.of(layer, name, rows) for name in ("ple_key", "ple_value"))
    written = tell.of(layer, "ple_written", hidden, key, value)
    taps, reach = (*memory.ple_taps, *tell.of(layer, "ple_normed", written)), shape.reach
    mixed = tell.show(layer, "ple_mixed", [
        _conv(tell, layer, taps[t : t + reach + 1 : shape.ngram], "ple_mixed") for t in range(len(tokens))])
    answer = tell.of(layer, "ple", hidden, tell.of(layer, "ple_made", written, mixed))
    return answer, replace(memory, ngram=line[len(tokens) :], ple_taps=taps[len(tokens) :])


def _gdn(tell: Teller, layer: int, normed: Labels, memory: GdnLabels) -> tuple[Labels, GdnLabels]:
    low, row = tell.config.low_rank, tell.config.recurrence
    z_in, a_in = (tell.of(layer, name, normed) if low else normed for name in ("z_low", "a_low"))
    qkv, z = tell.of(layer, "qkv", normed), tell.of(layer, "z", z_in)
    gates = [tell.of(layer, name, a_in if name == "a" else normed) for name in row.gates]
    mixed, taps = _mixed(tell, layer, qkv, memory.taps) if row.conv else (qkv, ())
    q, k, v, log_decay, write = (
        tell.of(layer, name, mixed, *reversed(gates)) for name in ("q", "k", "v", "log_decay", row.write))
    chain, own, core, updates = memory.chain, code(Place(tell.stage, layer, "core")), [], []
    for t in range(len(q)):
        read = chain if row.update == "delta" else 0
        updates.append(update_label(tell.stage, layer, read, k[t], v[t], log_decay[t], write[t]))
        chain = absorbed(chain, k[t], log_decay[t], updates[t])
        core.append(mix(mix(chain, q[t]), own))
    tell.show(layer, "core", core)
    tell.show(layer, "update", updates)
    gated = tell.of(layer, "gated", tell.of(layer, "skip", core, v) if row.skip else core, z)
    return tell.of(layer, "mixer", gated), replace(memory, taps=taps, chain=chain)


def _short_conv(tell: Teller, layer: int, normed: Labels, memory: GdnLabels) -> tuple[Labels, GdnLabels]:
    in_gate, out_gate, x = (tell.of(layer, name, normed) for name in ("in_gate", "out_gate", "x"))
    mixed, taps = _mixed(tell, layer, tell.of(layer, "qkv", in_gate, x), memory.taps)
    return tell.of(layer, "mixer", tell.of(layer, "gated", out_gate, mixed)), GdnLabels(taps)


def _mixed(tell: Teller, layer: int, rows: Labels, before: tuple[int, ...]) -> tuple[Labels, tuple[int, ...]]:
    """Convolve the rows -> the labels of its output, and the window after them."""
    taps, width = (*before, *rows), len(before) + 1
    mixed = tell.show(layer, "mixed", [_conv(tell, layer, taps[t : t + width]) for t in range(len(rows))])
    return mixed, taps[len(rows) :]


def update_label(stage: str, layer: int, read: int, k: int, v: int, log_decay: int, write: int) -> int:
    """Label a token's update of a state. read: the chain of all tokens before it; 0 if the update is no delta."""
    label = read
    for part in (k, v, log_decay, write):
        label = mix(label, part)
    return mix(label, code(Place(stage, layer, "update")))


def absorbed(chain: int, k: int, log_decay: int, update: int) -> int:
    """Extend the chain by one token, from what a ring keeps of it."""
    return mix(chain, mix(mix(k, log_decay), update))


def _conv(tell: Teller, layer: int, taps: Sequence[int], place: str = "mixed") -> int:
    label = code(Place(tell.stage, layer, place))
    for tap in taps:
        label = mix(label, tap)
    return label


def _attention(
    tell: Teller, layer: int, normed: Labels, memory: KvLabels, start: int, both_ways: bool
) -> tuple[Labels, KvLabels]:
    projected, key_raw, value = (tell.of(layer, name, normed) for name in ("projected", "key_raw", "value"))
    # Norms over rows are ops of their own, which see no positions.
    positions = [] if tell.config.row_norms else [list(range(start, start + len(normed)))]
    query, key = tell.of(layer, "query", projected, *positions), tell.of(layer, "key", key_raw, *positions)
    attended, after = _attended(tell, layer, query, key, value, memory, start, both_ways)
    opened = tell.of(layer, "opened", attended, projected) if tell.config.attention_gate else attended
    return tell.of(layer, "mixer", opened), after


def _as_projected(
    tell: Teller, layer: int, normed: Labels, memory: KvLabels, start: int, both_ways: bool
) -> tuple[Labels, KvLabels]:
    query, key, value = (tell.of(layer, name, normed) for name in ("query", "key", "value"))
    attended, after = _attended(tell, layer, query, key, value, memory, start, both_ways)
    return tell.of(layer, "mixer", attended), after


def _latent(
    tell: Teller, layer: int, normed: Labels, memory: KvLabels, start: int, both_ways: bool
) -> tuple[Labels, KvLabels]:
    projected = tell.of(layer, "projected", normed) if tell.config.rotary_dim else []
    key_raw = tell.of(layer, "key_raw", normed)
    if projected:
        positions = list(range(start, start + len(normed)))
        query, key = tell.of(layer, "query", projected, positions), tell.of(layer, "key", key_raw, positions)
    else:
        query, key = tell.of(layer, "query", normed), tell.of(layer, "key", normed)
    value = tell.of(layer, "value", key_raw)
    attended, after = _attended(tell, layer, query, key, value, memory, start, both_ways)
    opened = tell.of(layer, "opened", attended, projected) if projected else attended
    return tell.of(layer, "mixer", opened), after


def _attended(
    tell: Teller, layer: int, query: Labels, key: Labels, value: Labels, memory: KvLabels, start: int, both_ways: bool
) -> tuple[Labels, KvLabels]:
    total, own, totals = memory.total, code(Place(tell.stage, layer, "attended")), []
    for t in range(len(query)):
        total = (total + _total(key[t : t + 1], value[t : t + 1], start + t)) & MASK
        totals.append(total)
    if both_ways:
        totals = [total] * len(totals)
    attended = [mix(mix(seen, label), own) for seen, label in zip(totals, query, strict=True)]
    return tell.show(layer, "attended", attended), KvLabels((*memory.keys, *key), (*memory.values, *value), total)


def _total(keys: Sequence[int], values: Sequence[int], start: int = 0) -> int:
    """Total that a query reads from entries at positions start, start + 1, .."""
    return sum(mix(mix(*pair), position) for position, pair in enumerate(zip(keys, values, strict=True), start)) & MASK


def _shape(component: str, config: ModelConfig, layer: int = 0) -> tuple[int, ...]:
    """Return the shape of a row at a place; a place that is not in the table has hidden rows."""
    if component == "features" and config.block is not None:
        return ((1 + config.block.target_layer_ids.index(layer)) * config.hidden,)
    if component in config.recurrence.places:
        return config.lengths(config.recurrence.places[component])
    if component in PLE_PLACES or (config.streams > 1 and component in STREAM_PLACES):
        return config.lengths({**PLE_PLACES, **STREAM_PLACES}[component])
    (_, shared), (groups, width) = config.stored_rows
    heads, turned = config.heads, config.latent and config.rotary_dim
    read = config.value_width if config.latent else config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "joined": (2 * config.hidden,),
        "projected": (heads, config.head_dim + 1) if turned else (heads, 1 + config.attention_gate, config.head_dim),
        "key_raw": (groups, width + shared) if turned else (groups, width),
        "query": (heads, config.head_dim),
        "key": config.stored_rows[0],
        "value": config.stored_rows[1],
        "attended": (heads, read),
        "opened": (heads, read),
    }
    return shapes.get(component, (config.hidden,))


def _bits(number: float) -> int:
    """Return the bits of an fp32 number."""
    return int.from_bytes(pack("<f", number), "little")


def _signed(label: int) -> int:
    """Return the same 64 bits as a two's complement number, as int64 holds them."""
    return label - (1 << 64) if label & SIGN else label
