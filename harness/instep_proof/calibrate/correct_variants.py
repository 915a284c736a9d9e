"""Op sets that are right but sum in another order: `plain` with every reduction changed, by name as `NAME_SEED`.

    permuted   the terms shuffled            blocked   sums of 8, 16 or 32 terms, then their sum
    running    one term after another        pairwise  halves, halves of halves, ...
    split      products row by row, outputs in three parts
    exact      in fp64, rounded once         chunked   the delta rule of a prompt in chunks of 2, 4 or 16 tokens

Leaves out: other functions and other rounding points.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import sigmoid, silu, softplus

from instep_optimized import load
from instep_optimized.memory_addresses import Inputs, Pages, Part, Updates
from instep_optimized.ops.op_protocols import ExpertWeights, GdnInputs, Ops
from instep_optimized.ops.plain.attend import entries, extents, visible
from instep_optimized.ops.plain.compute_width import wide, width
from instep_optimized.ops.plain.embed_norm_linear_head import rms_norm
from instep_optimized.ops.plain.gdn import Trail
from instep_optimized.ops.plain.gdn import gdn as plain_gdn
from instep_optimized.ops.plain.requests_of_part import Lanes, after, along, ancestry, before, lanes, scatter
from instep_optimized.ops.plain.rerun_ring import keep, recalled
from instep_optimized.ops.plain.scaled_tiles import as_stored
from instep_reference.chunked_delta_rule import recur_in_chunks

PLAIN = load("plain")
SIZES = (8, 16, 32)  # terms to a block
CHUNKS = (2, 4, 16)  # tokens to a chunk


def __getattr__(name: str) -> Ops:
    """Op sets by name, such as permuted_3 for `--ops instep_proof.calibrate.correct_variants:permuted_3`."""
    form, _, seed = name.partition("_")
    if form not in FORMS or not seed.isdigit():
        raise AttributeError(name)
    return correct(form, int(seed))


@dataclass(frozen=True)
class Order:
    """The order in which sums are formed."""

    form: str
    seed: int

    @property
    def size(self) -> int:
        return SIZES[self.seed % len(SIZES)]

    def total(self, terms: torch.Tensor) -> torch.Tensor:
        """The sum over the last axis."""
        if self.form == "exact":
            return terms.double().sum(-1).to(terms.dtype)
        if self.form == "blocked":
            return _added([part.sum(-1) for part in torch.split(terms, self.size, -1)])
        if self.form == "split":
            return _added([part.sum(-1) for part in terms.chunk(2, -1)])
        shuffled = terms[..., self._shuffle(terms)]
        if self.form == "permuted":
            return shuffled.sum(-1)
        return _added(list(shuffled.unbind(-1))) if self.form == "running" else _pairwise(list(shuffled.unbind(-1)))

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [..., n] and weight [m, n] -> [..., m]. Both have the dtype of the sum."""
        if self.form == "exact":
            return (x.double() @ weight.double().T).to(x.dtype)
        if self.form == "split":
            rows = [torch.cat([row @ part.T for part in weight.chunk(3)], -1) for row in x.unbind(0)]
            return torch.stack(rows) if rows else x.new_zeros(0, *x.shape[1:-1], len(weight))
        order = self._shuffle(x)
        x, weight = x[..., order], weight[..., order]
        if self.form == "permuted":
            return x @ weight.T
        size = 1 if self.form == "running" else self.size
        pieces = zip(torch.split(x, size, -1), torch.split(weight, size, -1), strict=True)
        parts = [left @ right.T for left, right in pieces]
        return _pairwise(parts) if self.form == "pairwise" else _added(parts)

    def _shuffle(self, terms: torch.Tensor) -> torch.Tensor:
        return torch.randperm(terms.shape[-1], generator=torch.Generator().manual_seed(self.seed)).to(terms.device)


def _added(parts: list[torch.Tensor]) -> torch.Tensor:
    out = parts[0]
    for part in parts[1:]:
        out = out + part
    return out


def _pairwise(parts: list[torch.Tensor]) -> torch.Tensor:
    while len(parts) > 1:
        parts = [_added(parts[at : at + 2]) for at in range(0, len(parts), 2)]
    return parts[0]


def correct(form: str, seed: int) -> Ops:
    """`plain` with the sums in that order."""
    return replace(PLAIN, name=f"{form}_{seed}", **FORMS[form](Order(form, seed)))


def _linear(order: Order, *, x: torch.Tensor, weight: torch.Tensor, shape: tuple[int, ...], to: Any) -> torch.Tensor:
    return order.product(wide(x).reshape(len(x), -1), wide(weight)).to(x.dtype).view(len(x), *shape)


def _lm_head(order: Order, *, x: torch.Tensor, weight: torch.Tensor, to: Any) -> torch.Tensor:
    return order.product(wide(x), wide(weight))


def _mlp(order: Order, *, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, to: Any) -> torch.Tensor:
    gate, up = order.product(wide(x), wide(gate_up)).chunk(2, dim=-1)
    return order.product(silu(gate) * up, wide(down)).to(x.dtype)


def _moe(
    order: Order, *, x: torch.Tensor, weights: ExpertWeights, top_k: int, norm_topk: bool, to: Any
) -> torch.Tensor:
    """Compute every expert on all rows; a share of 0 excludes it. The lower number wins a tie of experts."""
    rows = wide(x)
    scores = order.product(rows, wide(weights.router))
    chances = (scores - scores.amax(-1, True)).exp()
    chances = chances / order.total(chances)[:, None]
    ranked = chances.sort(dim=-1, descending=True, stable=True)
    share = torch.zeros_like(chances).scatter(1, ranked.indices[:, :top_k], ranked.values[:, :top_k])
    if norm_topk:
        share = share / order.total(ranked.values[:, :top_k])[:, None]
    experts = zip(weights.gate_up, weights.down, strict=True)
    answers = torch.stack([_mlp(order, x=rows, gate_up=up, down=down, to=to) for up, down in experts], -1)
    out = order.total(answers * share[:, None])
    up, down, gate = weights.shared_gate_up, weights.shared_down, weights.shared_gate
    if up is not None and down is not None and gate is not None:
        out = out + sigmoid(order.product(rows, wide(gate))) * _mlp(order, x=rows, gate_up=up, down=down, to=to)
    return out.to(x.dtype)


def _mean_square(order: Order, x: torch.Tensor) -> torch.Tensor:
    return order.total(x * x)[..., None] / x.shape[-1]


def _norm(order: Order, *, x: torch.Tensor, weight: torch.Tensor, eps: float, to: Any) -> torch.Tensor:
    if order.form == "exact":
        return rms_norm(x.double(), weight, eps).to(x.dtype)
    return (wide(x) / (_mean_square(order, wide(x)) + eps).sqrt() * (1 + wide(weight))).to(x.dtype)


def _gated_norm(
    order: Order, *, core: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, gate: str, to: Any
) -> torch.Tensor:
    opened, x = silu(wide(z)) if gate == "silu" else sigmoid(wide(z)), wide(core)
    return (x / (_mean_square(order, x) + eps).sqrt() * (wide(weight) * opened)).to(core.dtype)


def _gdn_inputs(
    order: Order, *, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor,
    key_heads: int, key_dim: int, to: Any,
) -> GdnInputs:
    keys, rows, heads, x = key_heads * key_dim, len(mixed), a.shape[1], wide(mixed)
    q, k = (part.reshape(rows, key_heads, key_dim) for part in (x[:, :keys], x[:, keys : 2 * keys]))
    q, k = (part / (order.total(part * part)[..., None] + 1e-6).sqrt() for part in (q, k))
    gate = softplus(a.to(x.dtype) + dt_bias.to(x.dtype))
    return GdnInputs(
        q / key_dim**0.5, k, x[:, 2 * keys :].clone().view(rows, heads, -1), -wide(A_log).to(x.dtype).exp() * gate,
        1 / (1 + (-b.to(x.dtype)).exp()),
    )  # fmt: skip


def _gdn(
    order: Order, *, inputs: GdnInputs, parts: tuple[Part, ...], dtype: torch.dtype, to: Any
) -> torch.Tensor:
    out = torch.zeros(inputs.v.shape, dtype=dtype, device=inputs.v.device)
    for part in parts:
        who = lanes(part)
        if len(who.which):
            _one_part(order, inputs, part, who, out)
    return out


def _one_part(order: Order, inputs: GdnInputs, part: Part, who: Lanes, out: torch.Tensor) -> None:
    """Run one part: first its kept tokens, if any, then its rows."""
    state = before(part, who, width(inputs.q.dtype, part.read.pool.dtype))
    if part.ring is not None:
        for age in range(int(who.again.max())):
            owing = torch.nonzero(who.again > age)[:, 0]
            kept = recalled(part.ring, who.which[owing], age)
            if isinstance(kept, Inputs):
                kept = _did(order, state[owing], kept)
            state[owing] = _after(state[owing], kept)
        state = as_stored(part.read, state, who.tokens)
    after(part.settled, who, state, 0)
    core, rows = torch.zeros_like(inputs.v[who.rows], dtype=state.dtype), Inputs(*(x[who.rows] for x in inputs[1:]))
    q = _per_value_head(inputs.q[who.rows], inputs.v.shape[1]).to(state.dtype)
    trail = Trail(state, ancestry(part, who))
    for row, alive in enumerate(who.alive):
        now, token = trail.at(row, alive), Inputs(*(x[:alive, row] for x in rows))
        did = _did(order, now, token)
        now.copy_(_after(now, did))  # where the trail keeps it
        core[:alive, row] = order.total(now.mT * q[:alive, row, :, None])
        keep(part.ring, who.which[:alive], row, token, did)
        along(part.per_row, who, row, now, trail.depth(row, alive))
    scatter(out, who, core)
    after(part.store, who, state)


def _did(order: Order, state: torch.Tensor, token: Inputs) -> Updates:
    """The update of one token for the states [n, HV, K, V]; its sums run over K."""
    k, v, log_decay, beta = (x.to(state.dtype) for x in token)
    decay = log_decay.exp()
    recalled = order.total(state.mT * decay[..., None, None] * _per_value_head(k, state.shape[1])[:, :, None])
    return Updates(token.k, decay, beta[..., None] * (v - recalled))


def _after(state: torch.Tensor, did: Updates) -> torch.Tensor:
    k, decay, update = (x.to(state.dtype) for x in did)
    k = _per_value_head(k, state.shape[1])[:, :, None]
    return (state.mT * decay[..., None, None] + update[..., None] * k).mT


def _per_value_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.repeat_interleave(heads // x.shape[-2], dim=-2)


def _gdn_in_chunks(
    order: Order, *, inputs: GdnInputs, parts: tuple[Part, ...], dtype: torch.dtype, to: Any
) -> torch.Tensor:
    """Prefill parts by the reference's chunked form, request by request; windows as in `plain`."""
    windows = tuple(part for part in parts if part.form == "window")
    out = plain_gdn(inputs=inputs, parts=windows, dtype=dtype, to=to)
    for part in (part for part in parts if part.form == "chunk"):
        who = lanes(part)
        if not len(who.which):
            continue
        state = before(part, who, width(inputs.q.dtype, part.read.pool.dtype))
        core = torch.zeros_like(inputs.v[who.rows], dtype=state.dtype)
        for number, length in enumerate(who.length.tolist()):
            rows = who.rows[number, :length]
            q, k = (_per_value_head(x[rows], inputs.v.shape[1]).to(state.dtype)[None] for x in inputs[:2])
            v, decay, beta = inputs.v[rows], inputs.log_decay[rows], inputs.beta[rows]
            v, decay, beta = (x.to(state.dtype)[None] for x in (v, decay[..., None], beta[..., None]))
            size = CHUNKS[order.seed % len(CHUNKS)]
            read, left = recur_in_chunks(q, k, v, decay, beta, beta, state[number, None], size)
            core[number, :length], state[number] = read[0], left[0]
        scatter(out, who, core)
        after(part.store, who, state)
    return out


def _attend(order: Order, *, query: torch.Tensor, pages: Pages, to: Any) -> torch.Tensor:
    out, wanted = torch.zeros_like(query), wide(query)
    for request, (begin, count, known) in enumerate(extents(pages)):
        if not count:
            continue
        seen = visible(pages, begin, count, known)
        keys, values, mapped = entries(pages, request, seen.shape[1])
        seen = mapped & seen
        keys, values = wide(keys), wide(values.masked_fill(~seen.any(0)[:, None, None], 0))
        for head in range(query.shape[1]):
            other = head // (query.shape[1] // keys.shape[1])
            scores = order.product(wanted[begin : begin + count, head], keys[:, other]) * query.shape[2] ** -0.5
            scores = scores.masked_fill(~seen, -torch.inf)
            weights = (scores - scores.amax(1, True)).exp()
            read = order.product(weights, values[:, other].T) / order.total(weights)[:, None]
            out[begin : begin + count, head] = read.to(query.dtype)
    return out


def _every_sum(order: Order) -> dict[str, Any]:
    own: dict[str, Callable[..., Any]] = {
        "linear": _linear, "lm_head": _lm_head, "mlp": _mlp, "moe": _moe, "norm": _norm, "gated_norm": _gated_norm,
        "gdn_inputs": _gdn_inputs, "gdn": _gdn, "attend": _attend,
    }  # fmt: skip
    return {name: partial(op, order) for name, op in own.items()}


# One form per line: the ops in which it differs from `plain`.
FORMS: dict[str, Callable[[Order], dict[str, Any]]] = {
    "permuted": _every_sum,
    "blocked": _every_sum,
    "running": _every_sum,
    "pairwise": _every_sum,
    "split": _every_sum,
    "exact": _every_sum,
    "chunked": lambda order: {"gdn": partial(_gdn_in_chunks, order)},
}
