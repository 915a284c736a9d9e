"""Gated full attention on paged KV: its inputs, the softmax over the positions that a row sees, and the gate.

One request at a time, all its positions at once. Leaves out: writing the pages (`copy_units.py`), and softmax by
blocks.
"""

from collections.abc import Iterator

import torch
from torch.nn.functional import sigmoid

from instep_reference.contract.place_names import Place

from ...memory_addresses import Pages
from ..attention_protocols import LatentInputs
from ..op_protocols import AttentionInputs
from .compute_width import wide, width
from .embed_norm_linear_head import rms_norm
from .scaled_tiles import opened


def attention_inputs(
    *, projected: torch.Tensor, key_raw: torch.Tensor, positions: torch.Tensor, q_norm: torch.Tensor,
    k_norm: torch.Tensor, eps: float, rotary_dim: int, theta: float, to: tuple[Place, Place],
) -> AttentionInputs:
    """Norm per head times (1 + weight), then rotary on the first `rotary_dim` channels, one cast at the end.

    Shapes:  projected (N, heads, 2, head_dim), query half first   key_raw (N, kv_heads, head_dim)   positions (N)
    Mirrors: Qwen3-Next in transformers: channel i turns with channel i + rotary_dim / 2, by
             position * theta ** (-2i / rotary_dim); mRoPE equals this for text.
    """
    work = width(projected.dtype)
    powers = torch.arange(0, rotary_dim, 2, dtype=work, device=positions.device) / rotary_dim
    angle = (positions.to(work)[:, None] * theta**-powers)[:, None, :]  # [N, 1, rotary_dim / 2]
    query, key = projected[:, :, 0].to(work), key_raw.to(work)
    if q_norm.numel():
        query, key = rms_norm(query, q_norm, eps), rms_norm(key, k_norm, eps)
    query, key = _turn(query, angle), _turn(key, angle)
    return AttentionInputs(query.to(projected.dtype), key.to(key_raw.dtype))


def key_inputs(
    *, key_raw: torch.Tensor, positions: torch.Tensor, k_norm: torch.Tensor, eps: float, rotary_dim: int,
    theta: float, to: Place,
) -> torch.Tensor:
    """Do `attention_inputs` for keys alone."""
    rows = wide(key_raw)
    powers = torch.arange(0, rotary_dim, 2, dtype=rows.dtype, device=positions.device) / rotary_dim
    angle = (positions.to(rows.dtype)[:, None] * theta**-powers)[:, None, :]
    return _turn(rms_norm(rows, k_norm, eps), angle).to(key_raw.dtype)


def latent_inputs(
    *, projected: torch.Tensor, key_raw: torch.Tensor, positions: torch.Tensor, norm: torch.Tensor, eps: float,
    rotary_dim: int, theta: float, to: tuple[Place, Place, Place],
) -> LatentInputs:
    """Turn the last `rotary_dim` channels of queries and the shared keys, and norm the latents; one cast at the end.

    Shapes:  projected (N, heads, head_dim + 1), the gate last   key_raw (N, 1, R + S)   positions (N)   norm (R)
    """
    work = width(projected.dtype)
    powers = torch.arange(0, rotary_dim, 2, dtype=work, device=positions.device) / rotary_dim
    angle = (positions.to(work)[:, None] * theta**-powers)[:, None, :]  # [N, 1, rotary_dim / 2]
    own, turning, _ = torch.split(
        projected.to(work), [projected.shape[-1] - 1 - rotary_dim, rotary_dim, 1], dim=-1)
    latent, shared = torch.split(key_raw.to(work), [len(norm), rotary_dim], dim=-1)
    query, key = torch.cat([own, _turn(turning, angle)], dim=-1), _turn(shared, angle)
    return LatentInputs(query.to(projected.dtype), key.to(key_raw.dtype), rms_norm(latent, norm, eps).to(key_raw.dtype))


def attend(*, query: torch.Tensor, pages: Pages, to: Place) -> torch.Tensor:
    """softmax(q K^T / sqrt(head_dim)) V over the positions that a row sees, in at least fp32, one cast.

    Row j of a chain sees positions 0 .. before + j, a node of a tree or of a block those that its bits name.

    Shapes:  query (N, heads, head_dim)   keys, values (pages, page_size, kv_heads, head_dim)  ->  as query
    How we differ: probabilities are not rounded to the value dtype. A row that sees no page gives zeros.
    """
    return _attend(torch.zeros_like(query), query, pages, None)


def attend_latents(*, query: torch.Tensor, pages: Pages, up: torch.Tensor, to: Place) -> torch.Tensor:
    """Do `attend` with keys and values that `up` expands from latents, one request at a time; nothing is rounded.

    Shapes:  keys (.., 1, S)   values (.., 1, R)   up (heads * (head_dim - S + V), R)  ->  (N, heads, V)
    """
    return _attend(query.new_zeros(pages.expanded(query, up)), query, pages, up)


def _attend(out: torch.Tensor, query: torch.Tensor, pages: Pages, up: torch.Tensor | None) -> torch.Tensor:
    for request, (begin, count, before) in enumerate(extents(pages)):
        if count:
            rows = slice(begin, begin + count)
            seen = visible(pages, begin, count, before)
            out[rows] = _softmax_read(query[rows], pages, request, seen, up).to(query.dtype)
    return out


def output_gate(*, attended: torch.Tensor, projected: torch.Tensor, to: Place) -> torch.Tensor:
    """attended * sigmoid(gate), the gate being the second half of `projected`, or the last number of each head."""
    gate = projected[:, :, 1] if projected.dim() > attended.dim() else projected[..., -1:]
    return (wide(attended) * sigmoid(wide(gate))).to(attended.dtype)


def extents(pages: Pages) -> Iterator[tuple[int, int, int]]:
    """(begin, count, before) of every request, on the host. A request without a slot has count 0."""
    lists = (x.tolist() for x in (pages.slots, pages.begin, pages.count, pages.before))
    for slot, begin, count, before in zip(*lists, strict=True):
        yield begin, count if slot >= 0 else 0, before


def entries(pages: Pages, request: int, reach: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, values [reach, kv_heads, head_dim] of a request's first positions, and [reach] whether they have a page."""
    size, width = pages.keys.shape[1], pages.table.shape[1]
    position = torch.arange(reach, device=pages.table.device)
    number = position // size
    page = pages.table[pages.slots[request], number.clamp(max=width - 1)].masked_fill(number >= width, -1)
    spot = (page.clamp(min=0), position % size)
    pools = (pages.keys, pages.key_scales), (pages.values, pages.value_scales)
    keys, values = (pool[spot] if scales is None else opened(pool[spot], scales[spot]) for pool, scales in pools)
    return keys, values, page >= 0


def visible(pages: Pages, begin: int, count: int, before: int) -> torch.Tensor:
    """[count, reach] bool: which of its request's first positions each row sees; some row sees the last of them."""
    nodes = nodes_seen(pages, begin, count)
    if nodes is None:
        row = torch.arange(count, device=pages.table.device)
        return torch.arange(before + count, device=row.device) <= before + row[:, None]
    return torch.cat([nodes.new_ones(count, before), nodes], dim=1)


def nodes_seen(pages: Pages, begin: int, count: int) -> torch.Tensor | None:
    """[count, nodes] bool: which nodes of its tree each row sees; None: the request's rows are a chain."""
    bits = None if pages.ancestors is None else pages.ancestors[begin : begin + count]
    if bits is None or not bool(bits.any()):
        return None
    # Only the nodes that are seen: a tree that is a chain then has the products of a chain, and so its bits.
    node = torch.arange(int(bits.max()).bit_length(), device=bits.device)
    return (bits[:, None] >> node) & 1 > 0


def _softmax_read(
    query: torch.Tensor, pages: Pages, request: int, seen: torch.Tensor, up: torch.Tensor | None
) -> torch.Tensor:
    """[T, heads, head_dim] of one request. seen [T, reach]: the positions that each row sees, if they have a page."""
    _, heads, head_dim = query.shape
    keys, values, mapped = entries(pages, request, seen.shape[1])
    work = width(query.dtype, keys.dtype)
    if up is not None:
        keys, values = _expanded(keys.to(work), values.to(work), up.to(work), heads, head_dim)
    group = heads // keys.shape[1]
    seen = mapped & seen
    keys, values = (x.to(work).repeat_interleave(group, dim=1) for x in (keys, values))
    # A position that no row sees may be NaN; and 0 * NaN is NaN, so a weight of 0 would not hide it.
    values = values.masked_fill(~seen.any(dim=0)[:, None, None], 0)
    scores = torch.einsum("thd,phd->htp", query.to(work), keys) * head_dim**-0.5  # [heads, T, reach]
    # The second mask is for rows that see no position: their softmax is NaN, and they must give zeros.
    chances = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1).masked_fill(~seen, 0)
    if pages.ancestors is None or bool(values.isfinite().all()):
        return torch.einsum("htp,phd->thd", chances, values)
    # A node that only some rows see may be NaN: the other rows must not use it.
    each = [(chances[:, row, None], values.masked_fill(~sees[:, None, None], 0)) for row, sees in enumerate(seen)]
    return torch.cat([torch.einsum("htp,phd->thd", chance, value) for chance, value in each])


def _expanded(
    shared: torch.Tensor, latents: torch.Tensor, up: torch.Tensor, heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expand stored rows [reach, 1, S], [reach, 1, R] to keys [reach, heads, head_dim] and values [reach, heads, V]."""
    own = head_dim - shared.shape[-1]
    each = torch.einsum("pr,hcr->phc", latents[:, 0], up.view(heads, -1, up.shape[1]))
    return torch.cat([each[..., :own], shared.expand(-1, heads, -1)], dim=-1), each[..., own:]


def _turn(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Rotate channel pairs (i, i + half) of the first 2 * half channels by `angle`."""
    half = angle.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]], dim=-1)
