"""`LEDGER`: ops that move labels instead of numbers, so that orchestration is checked exactly.

Every row of every place is a label, expanded over int64 elements. `instep_reference.contract.label_algebra` defines the
label that each op makes, and the algebra: mix, expand, read, and the code of a place. Labels are unsigned, and torch
has int64: its sums and products wrap to the same 64 bits, and a mask makes its right shift logical. The ops that only
move bits (select, move, store, pick, accept) are the plain ops themselves. Leaves out: all arithmetic of the model, and
so its weights.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, reduce
from typing import Literal
from zlib import crc32

import torch

from instep_reference.contract.declared_rounding import Storage
from instep_reference.contract.label_algebra import MIX_A, MIX_B, MIX_C, MIX_D, SCORES, SPREAD
from instep_reference.contract.place_names import COMPONENTS, Place

from ..memory_addresses import Inputs, Pages, Part, Updates
from .attention_protocols import LatentInputs
from .family_op_protocols import Hashes, StreamWeights
from .integer_op_protocols import TopkTokens
from .op_protocols import AttentionInputs, ExpertWeights, GdnInputs, Types, ops_of
from .plain import PLAIN
from .plain.attend import entries, extents, nodes_seen
from .plain.causal_conv import pieces_of
from .plain.gdn import Trail
from .plain.requests_of_part import Lanes, after, along, ancestry, before, lanes, scatter
from .plain.rerun_ring import keep, recalled
from .plain.residual_streams import pieces_of_tokens
from .plain.top_k_top_p_sampling import owned

BITS = 64


def signed(number: int) -> int:
    """Return the int64 that has the bits of an unsigned 64-bit number."""
    number %= 1 << BITS
    return number - (1 << BITS) if number >> (BITS - 1) else number


@lru_cache(maxsize=4096)
def _number(number: int) -> torch.Tensor:
    """Return a tensor without axes with the bits of a number: torch takes three times as long for one of Python."""
    return torch.tensor(signed(number), device="cpu")


_SPREAD = signed(SPREAD)
_A, _B, _C, _D = (_number(constant) for constant in (MIX_A, MIX_B, MIX_C, MIX_D))


def mix(a: torch.Tensor, b: torch.Tensor | int) -> torch.Tensor:
    """Mix two labels into one; mix(a, b) is not mix(b, a). Element by element, with broadcasting.

    x = a*MIX_A + b*MIX_B + MIX_C;  x ^= x >> 29;  x *= MIX_D;  x ^= x >> 32
    """
    x = a * _A + (_number(b * MIX_B + MIX_C) if isinstance(b, int) else (b * _B).add_(_C))
    x = shift_right(x, 29).bitwise_xor_(x).mul_(_D)
    return shift_right(x, 32).bitwise_xor_(x)


def shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift logically: zeros come in from the left."""
    by, kept = _shift(bits)
    return (x >> by).bitwise_and_(kept)


@lru_cache
def _shift(bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of bits, and the mask of those that a logical shift fills from x."""
    return _number(bits), _number((1 << (BITS - bits)) - 1)


@lru_cache(maxsize=4096)
def code(place: Place) -> int:
    """Encode a place: crc32 of "family.layer.component", the same for every stage of the draft."""
    family = "trunk" if place.stage == "trunk" else "draft"
    return crc32(f"{family}.{place.layer}.{place.component}".encode("ascii"))


def expand(label: torch.Tensor, *shape: int) -> torch.Tensor:
    """Expand labels [...] -> [..., *shape]: element j of a block is label + j * SPREAD, j over the flattened block.

    The label 0 means empty, and gives zeros.
    """
    head = label[..., None]
    rows = head + _line(math.prod(shape), _SPREAD, 0, label.device)
    return rows.masked_fill_(head.logical_not(), 0).view(*label.shape, *shape)


def read(x: torch.Tensor, keep: int = 1) -> torch.Tensor:
    """Read [*kept, ...] -> labels [*kept]: the label of an intact block; an unexpected number if any element is wrong.

        l = x[0];  l + sum_j (x[j] - expand(l)[j]) * (2j + 1)

    Sums modulo 2^64 can be split: only sum_j x[j] (2j + 1) is taken over the elements. The share of expand(l) is
    l sum_j (2j + 1) + SPREAD sum_j j (2j + 1), and 0 if l is 0.
    """
    flat = x.reshape(*x.shape[:keep], math.prod(x.shape[keep:]))
    count = flat.shape[-1]
    label, found = flat[..., 0], (flat * _line(count, 2, 1, x.device)).sum(dim=-1)
    odd = count * count
    by_place = count * (count - 1) * (2 * count - 1) // 3 + count * (count - 1) // 2
    intact = label * _number(odd) + _number(SPREAD * by_place)
    return label + found - intact.masked_fill_(label.logical_not(), 0)


def _line(count: int, step: int, first: int, device: torch.device) -> torch.Tensor:
    """first + j * step for every j below `count`. Made once on the CPU; memory of a graph is not kept."""
    return (_known if device.type == "cpu" else _made)(count, step, first, device)


def _made(count: int, step: int, first: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, device=device) * step + first


_known = lru_cache(maxsize=1024)(_made)


def types(activation: torch.dtype, state: Storage) -> Types:
    """All memory holds labels: int64."""
    return Types(*[torch.int64] * len(Types._fields))._replace(ring=None)  # a label has one part


def rounds(activation: torch.dtype, state: Storage) -> Mapping[str, torch.dtype]:
    """Labels are never rounded. Only logits are numbers."""
    return dict.fromkeys(COMPONENTS, torch.int64) | {"logits": torch.float32}


# ---- rows -----------------------------------------------------------------------------------------------------


def embed(*, tokens: torch.Tensor, table: torch.Tensor, to: Place) -> torch.Tensor:
    """mix(token, code) per row."""
    return expand(mix(tokens, code(to)), table.shape[1])


def norm(*, x: torch.Tensor, weight: torch.Tensor, eps: float, to: Place) -> torch.Tensor:
    """mix(x, code) per row."""
    return _stamp(x, to, *x.shape[1:])


def linear(*, x: torch.Tensor, weight: torch.Tensor, shape: tuple[int, ...], to: Place) -> torch.Tensor:
    """mix(x, code), in rows of `shape`."""
    return _stamp(x, to, *shape)


def add(*, x: torch.Tensor, y: torch.Tensor, to: Place) -> torch.Tensor:
    """mix(mix(x, y), code)."""
    return _stamp_pair(x, y, to, *x.shape[1:])


def multiply(*, x: torch.Tensor, y: torch.Tensor, to: Place) -> torch.Tensor:
    """mix(mix(x, y), code)."""
    return _stamp_pair(x, y, to, *x.shape[1:])


def scaled_add(*, x: torch.Tensor, y: torch.Tensor, alpha: float, beta: float, to: Place) -> torch.Tensor:
    """mix(mix(x, y), code)."""
    return _stamp_pair(x, y, to, *x.shape[1:])


def concat(*, x: torch.Tensor, y: torch.Tensor, to: Place) -> torch.Tensor:
    """mix(mix(x, y), code), as wide as both."""
    return _stamp_pair(x, y, to, x.shape[1] + y.shape[1])


def gated_norm(
    *, core: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float,
    gate: Literal["silu", "sigmoid"], to: Place,
) -> torch.Tensor:
    """mix(mix(core, z), code)."""
    return _stamp_pair(core, z, to, *core.shape[1:])


def gated_group_norm(
    *, core: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, groups: int, to: Place
) -> torch.Tensor:
    """mix(mix(core, z), code)."""
    return _stamp_pair(core, z, to, *core.shape[1:])


def add_skip(*, core: torch.Tensor, v: torch.Tensor, weight: torch.Tensor, to: Place) -> torch.Tensor:
    """mix(mix(core, v), code)."""
    return _stamp_pair(core, v, to, *core.shape[1:])


def output_gate(*, attended: torch.Tensor, projected: torch.Tensor, to: Place) -> torch.Tensor:
    """mix(mix(attended, projected), code)."""
    return _stamp_pair(attended, projected, to, *attended.shape[1:])


def mlp(*, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, to: Place) -> torch.Tensor:
    """mix(x, code)."""
    return _stamp(x, to, *x.shape[1:])


def squared_mlp(*, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, to: Place) -> torch.Tensor:
    """mix(x, code)."""
    return _stamp(x, to, *x.shape[1:])


def moe(*, x: torch.Tensor, weights: ExpertWeights, top_k: int, norm_topk: bool, to: Place) -> torch.Tensor:
    """mix(x, code)."""
    return _stamp(x, to, *x.shape[1:])


def lm_head(*, x: torch.Tensor, weight: torch.Tensor, to: Place) -> torch.Tensor:
    """Zeros [M, vocab] fp32, and 1.0 at the token that the label names."""
    token = shift_right(mix(read(x), code(to)), 1) % weight.shape[0]
    logits = torch.zeros((x.shape[0], weight.shape[0]), device=x.device)
    return logits.scatter_(1, token[:, None], 1.0)


def topk_tokens(*, logits: torch.Tensor, topk: int) -> TopkTokens:
    """Return integers that follow from the token that the logits name: labels have no probabilities."""
    rank = torch.arange(topk, device=logits.device)
    named = logits.argmax(dim=-1)[:, None]
    falls = shift_right(mix(named.expand(-1, topk), rank.expand(len(named), -1)), 1) % SCORES
    return TopkTokens((named + rank) % logits.shape[1], -falls.cumsum(dim=1).float())


def draw(
    *, logits: torch.Tensor, window: torch.Tensor, parents: torch.Tensor | None, begin: torch.Tensor,
    count: torch.Tensor, sampling: torch.Tensor, uniforms: torch.Tensor, final: torch.Tensor, to: Place,
) -> torch.Tensor:
    """Mix everything that a draw may depend on; with temperature 0 the token that the logits name."""
    rows = owned(window, parents, begin, count, len(logits))
    heat, top_k, top_p = sampling[rows.owner].unbind(1)
    named = logits.argmax(dim=-1)
    label = mix(mix(named, _bits(heat)), _bits(top_p))
    for number in (top_k.long(), uniforms[rows.owner, rows.node], final[rows.owner]):
        label = mix(label, number)
    for place in range(window.shape[1]):
        label = torch.where(rows.child[:, place], mix(label, rows.tokens[:, place]), label)
    drawn = shift_right(label, 1) % logits.shape[1]
    return torch.where(rows.covered, torch.where(heat > 0, drawn, named), 0)


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bits of fp32 numbers."""
    return x.contiguous().view(torch.int32).long()


def _stamp(x: torch.Tensor, to: Place, *shape: int) -> torch.Tensor:
    return expand(mix(read(x), code(to)), *shape)


def _stamp_pair(x: torch.Tensor, y: torch.Tensor, to: Place, *shape: int) -> torch.Tensor:
    return expand(mix(mix(read(x), read(y)), code(to)), *shape)


# ---- gated delta net ------------------------------------------------------------------------------------------


def biased_conv(
    *, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, parts: tuple[Part, ...], to: Place
) -> torch.Tensor:
    """As `conv`."""
    return conv(x=x, weight=weight, parts=parts, to=to)


def conv(*, x: torch.Tensor, weight: torch.Tensor, parts: tuple[Part, ...], to: Place) -> torch.Tensor:
    """acc = code, then acc = mix(acc, tap) over the W taps, oldest first; a tap before the first token is 0."""
    return dilated_conv(x=x, weight=weight, distance=1, parts=parts, to=to)


def dilated_conv(
    *, x: torch.Tensor, weight: torch.Tensor, distance: int, parts: tuple[Part, ...], to: Place
) -> torch.Tensor:
    """As `conv`, over taps that are `distance` rows apart."""
    out, labels = torch.zeros_like(x), read(x)
    for part in parts:
        who = lanes(part)
        if len(who.which):
            _conv_part(labels, (weight.shape[1] - 1) * distance + 1, part, who, out, code(to), distance)
    return out


short_conv = conv


def _conv_part(
    labels: torch.Tensor, width: int, part: Part, who: Lanes, out: torch.Tensor, stamp: int, distance: int
) -> None:
    history, channels = width - 1, out.shape[1]
    window = read(before(part, who, torch.int64).transpose(1, 2), keep=2)  # [n, W-1]
    line = torch.cat([window, labels[who.rows]], dim=1)  # [n, W-1 + most]
    taps = pieces_of(line, part, who, width)  # [n, most, W]
    mixed = torch.full_like(who.rows, stamp)
    for tap in range(0, width, distance):
        mixed = mix(mixed, taps[:, :, tap])
    scatter(out, who, expand(mixed, channels))
    for token, alive in enumerate(who.alive):
        along(part.per_row, who, token, _columns(taps[:alive, token, 1:], channels))
    ends = who.length[:, None] + torch.arange(history, device=out.device)
    after(part.store, who, _columns(line.gather(1, ends), channels))


def _columns(labels: torch.Tensor, channels: int) -> torch.Tensor:
    """[n, W-1] -> windows [n, C, W-1], a label per column."""
    return expand(labels, channels).transpose(1, 2)


def gdn_inputs(
    *, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor,
    key_heads: int, key_dim: int, to: tuple[Place, ...], beta_bound: float = 1.0, decay_bound: float | None = None,
) -> GdnInputs:
    """mix(mix(mixed, a), b), then each result its own code."""
    heads = a.shape[1]
    base = mix(mix(read(mixed), read(a)), read(b))
    value_dim = (mixed.shape[1] - 2 * key_heads * key_dim) // heads
    shapes = ((key_heads, key_dim), (key_heads, key_dim), (heads, value_dim), a.shape[1:], (heads,))
    return GdnInputs(*(expand(mix(base, code(p)), *shape) for p, shape in zip(to, shapes, strict=True)))


def selective_inputs(
    *, mixed: torch.Tensor, a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, key_heads: int, key_dim: int,
    to: tuple[Place, ...],
) -> GdnInputs:
    """mix(mixed, a), then each result its own code."""
    heads, keys = a.shape[1], (key_heads, key_dim)
    base, value_dim = mix(read(mixed), read(a)), (mixed.shape[1] - 2 * key_heads * key_dim) // heads
    shapes = (keys, keys, (heads, value_dim), (heads,), (heads,))
    return GdnInputs(*(expand(mix(base, code(p)), *shape) for p, shape in zip(to, shapes, strict=True)))


def gdn(*, inputs: GdnInputs, parts: tuple[Part, ...], dtype: torch.dtype, to: Place) -> torch.Tensor:
    """Fold every token into its request's chain; core = mix(mix(chain, q), code). `dtype` is always int64 here.

    A token's update is mixed from the chain before it. So an update that was made from a wrong state has a wrong label.
    """
    return _recurred(inputs, parts, to, recalls=True)


kda = gdn


def mamba2(*, inputs: GdnInputs, parts: tuple[Part, ...], dtype: torch.dtype, to: Place) -> torch.Tensor:
    """Do as `gdn`, with updates that are mixed from 0 instead of the chain: they read no state."""
    return _recurred(inputs, parts, to, recalls=False)


lightning = mamba2


def lightning_inputs(
    *, qkv: torch.Tensor, log_decay: torch.Tensor, key_dim: int, to: tuple[Place, ...]
) -> GdnInputs:
    """mix(qkv, code) for each result."""
    (heads, width), base = qkv.shape[1:], read(qkv)
    shapes = ((heads, key_dim), (heads, key_dim), (heads, width - 2 * key_dim), (heads,), (heads,))
    return GdnInputs(*(expand(mix(base, code(p)), *shape) for p, shape in zip(to, shapes, strict=True)))


def _recurred(inputs: GdnInputs, parts: tuple[Part, ...], to: Place, recalls: bool) -> torch.Tensor:
    out = torch.zeros_like(inputs.v)
    for part in parts:
        who = lanes(part)
        if len(who.which):
            _gdn_part(inputs, part, who, out, to, recalls)
    return out


def _gdn_part(inputs: GdnInputs, part: Part, who: Lanes, out: torch.Tensor, to: Place, recalls: bool) -> None:
    own = code(to._replace(component="update"))
    memory = before(part, who, torch.int64)
    chain, block = read(memory), memory.shape[1:]
    for age in range(int(who.again.max()) if part.ring is not None else 0):
        assert part.ring is not None
        owing = torch.nonzero(who.again > age)[:, 0]
        kept = recalled(part.ring, who.which[owing], age)
        if isinstance(kept, Inputs):
            kept = _update(chain[owing] * recalls, kept, own)
        chain[owing] = _absorbed(chain[owing], kept)
    after(part.settled, who, expand(chain, *block))
    chains, trail = torch.zeros_like(who.rows), Trail(chain, ancestry(part, who))
    for row, alive in enumerate(who.alive):
        now = trail.at(row, alive)
        token = Inputs(*(x[who.rows[:alive, row]] for x in inputs[1:]))
        did = _update(now * recalls, token, own)
        now[:] = _absorbed(now, did)
        chains[:alive, row] = now
        keep(part.ring, who.which[:alive], row, token, did)
        along(part.per_row, who, row, expand(now, *block))
    scatter(out, who, expand(mix(mix(chains, read(inputs.q)[who.rows]), code(to)), *out.shape[1:]))
    after(part.store, who, expand(chain, *block))


def _update(chain: torch.Tensor, token: Inputs, own: int) -> Updates:
    """update = mix(mix(mix(mix(mix(chain, k), v), log_decay), beta), code). A decay has the label of its log_decay."""
    label = chain
    for x in token:
        label = mix(label, read(x))
    return Updates(token.k, token.log_decay, expand(mix(label, own), *token.v.shape[1:]))


def _absorbed(chain: torch.Tensor, token: Updates) -> torch.Tensor:
    """mix(chain, mix(mix(k, log_decay), update))."""
    k, decay, update = (read(x) for x in token)
    return mix(chain, mix(mix(k, decay), update))


# ---- residual streams and n-grams ------------------------------------------------------------------------------


def embed_streams(*, tokens: torch.Tensor, table: torch.Tensor, streams: int, to: Place) -> torch.Tensor:
    """mix(token, code) per row."""
    return expand(mix(tokens, code(to)), streams * table.shape[1])


def read_streams(
    *, x: torch.Tensor, weights: StreamWeights, eps: float, to: tuple[Place, ...]
) -> tuple[torch.Tensor, ...]:
    """mix(x, code) for each result."""
    widths = (x.shape[1] // weights.streams, weights.streams)
    return tuple(_stamp(x, p, width) for p, width in zip(to, widths, strict=False))


def add_streams(*, x: torch.Tensor, y: torch.Tensor, strength: torch.Tensor, to: Place) -> torch.Tensor:
    """mix(mix(mix(x, y), strength), code)."""
    return expand(mix(mix(mix(read(x), read(y)), read(strength)), code(to)), x.shape[1])


def norm_streams(*, x: torch.Tensor, weight: torch.Tensor, streams: int, eps: float, to: Place) -> torch.Tensor:
    """mix(x, code)."""
    return _stamp(x, to, *x.shape[1:])


def gate_streams(
    *, x: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_norm: torch.Tensor, query_norm: torch.Tensor,
    eps: float, to: Place,
) -> torch.Tensor:
    """mix(mix(mix(x, key), value), code)."""
    return expand(mix(mix(mix(read(x), read(key)), read(value)), code(to)), x.shape[1])


def ngrams(
    *, tokens: torch.Tensor, tables: torch.Tensor, hashes: Hashes, parts: tuple[Part, ...], to: Place
) -> torch.Tensor:
    """Mix the N last tokens, each plus one, oldest first; a token before the first one is 0. Then mix(.., code)."""
    out = tokens.new_zeros(len(tokens), len(hashes.sizes) * tables.shape[1])
    for who, pieces in pieces_of_tokens(tokens, len(hashes.multipliers), parts):
        label = reduce(mix, pieces.unbind(-1))
        scatter(out, who, expand(mix(label, code(to)), out.shape[1]))
    return out


# ---- attention ------------------------------------------------------------------------------------------------


def attention_inputs(
    *, projected: torch.Tensor, key_raw: torch.Tensor, positions: torch.Tensor, q_norm: torch.Tensor,
    k_norm: torch.Tensor, eps: float, rotary_dim: int, theta: float, to: tuple[Place, Place],
) -> AttentionInputs:
    """mix(mix(row, position), code) for query and key."""
    query, key = (mix(mix(read(x), positions), code(p)) for x, p in zip((projected, key_raw), to, strict=True))
    heads, _, head_dim = projected.shape[1:]  # query, and a gate if there is one
    return AttentionInputs(expand(query, heads, head_dim), expand(key, *key_raw.shape[1:]))


def key_inputs(
    *, key_raw: torch.Tensor, positions: torch.Tensor, k_norm: torch.Tensor, eps: float, rotary_dim: int,
    theta: float, to: Place,
) -> torch.Tensor:
    """mix(mix(row, position), code)."""
    return expand(mix(mix(read(key_raw), positions), code(to)), *key_raw.shape[1:])


def latent_inputs(
    *, projected: torch.Tensor, key_raw: torch.Tensor, positions: torch.Tensor, norm: torch.Tensor, eps: float,
    rotary_dim: int, theta: float, to: tuple[Place, Place, Place],
) -> LatentInputs:
    """mix(mix(row, position), code) for query and key; mix(key_raw, code) for the value."""
    query, key = (mix(mix(read(x), positions), code(p)) for x, p in zip((projected, key_raw), to[:2], strict=True))
    value, heads, head_dim = mix(read(key_raw), code(to[2])), projected.shape[1], projected.shape[2] - 1
    return LatentInputs(expand(query, heads, head_dim), expand(key, 1, rotary_dim), expand(value, 1, len(norm)))


def attend(*, query: torch.Tensor, pages: Pages, to: Place) -> torch.Tensor:
    """total = sum of mix(mix(key_p, value_p), p) over the positions that a row sees; mix(mix(total, query), code).

    For a node of a tree p is the position that the token has if the node's path is accepted.
    """
    return _attend(torch.zeros_like(query), query, pages, to)


def attend_latents(*, query: torch.Tensor, pages: Pages, up: torch.Tensor, to: Place) -> torch.Tensor:
    """As `attend`, from the labels as they are stored."""
    return _attend(query.new_zeros(pages.expanded(query, up)), query, pages, to)


def _attend(out: torch.Tensor, query: torch.Tensor, pages: Pages, to: Place) -> torch.Tensor:
    labels = read(query)
    for request, (begin, count, before_) in enumerate(extents(pages)):
        if not count:
            continue
        nodes = nodes_seen(pages, begin, count)
        reach = before_ + (count if nodes is None else nodes.shape[1])
        keys, values, mapped = entries(pages, request, reach)
        position, both = torch.arange(reach, device=query.device), mix(read(keys), read(values))
        each = mix(both, position) * mapped
        if nodes is None:
            total, sees = each.cumsum(dim=0)[before_:], mapped.cumsum(dim=0)[before_:] > 0
        else:
            depth, sees = nodes.long().cumsum(dim=1) - 1, nodes & mapped[before_:]
            total = each[:before_].sum() + (mix(both[before_:], before_ + depth) * sees).sum(dim=1)
            sees = sees.any(dim=1) | mapped[:before_].any()
        rows = slice(begin, begin + count)
        answer = expand(mix(mix(total, labels[rows]), code(to)), *out.shape[1:])
        out[rows] = answer * sees[:, None, None]
    return out


LEDGER = replace(PLAIN, name="ledger", tiled=False, chances=False, split=False, **ops_of(sys.modules[__name__]))
