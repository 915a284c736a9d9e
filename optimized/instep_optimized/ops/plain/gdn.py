"""The gated delta rule over packed rows, token by token, and the inputs of the rule.

Both forms of a part (chunk, window) are the same loop here, over all requests and heads at once. Leaves out: chunked
products.
"""

from typing import Literal, NamedTuple

import torch
from torch.nn.functional import sigmoid, silu, softplus

from instep_reference.contract.place_names import Place

from ...memory_addresses import Inputs, Part, Updates
from ..op_protocols import GdnInputs
from .compute_width import wide, width
from .requests_of_part import Lanes, after, along, ancestry, before, lanes, scatter
from .rerun_ring import keep, recalled
from .scaled_tiles import as_stored

L2_EPS = 1e-6  # added to the sum of squares, inside the root


def gdn(*, inputs: GdnInputs, parts: tuple[Part, ...], dtype: torch.dtype, to: Place) -> torch.Tensor:
    """Carry one K x V memory per value head through every request's kept tokens, then through its rows.

        S <- exp(log_decay) S;   S <- S + k (beta (v - S^T k))^T;   o <- S^T q

    Shapes:  q, k (N, H, K)   v (N, HV, V)   log_decay (N, HV), or (N, HV, K) per channel   beta (N, HV)
             states in memory (HV, K, V)  ->  (N, HV, V)
    Units:   log_decay in nats; q already scaled by K ** -0.5.
    Mirrors: Gated DeltaNet (arXiv:2412.06464) and KDA (arXiv:2510.26692), the recurrent form. Within the rows of a
             call the running state is never rounded; `per_row` and `store` round a copy to the pool's dtype. The state
             that the kept tokens make is rounded to it once, before the rows, as a store and a load between two calls
             would do.
    """
    out = torch.zeros(inputs.v.shape, dtype=dtype, device=inputs.v.device)
    for part in parts:
        who = lanes(part)
        if len(who.which):
            _run(inputs, part, who, out, recalls=True)
    return out


kda = gdn  # the decay's axes tell the kinds apart


def mamba2(*, inputs: GdnInputs, parts: tuple[Part, ...], dtype: torch.dtype, to: Place) -> torch.Tensor:
    """Do as `gdn` without the delta rule: a token writes all of its value, times the write gate `inputs.beta`.

        S <- exp(log_decay) S;   S <- S + k (write v)^T;   o <- S^T q

    Mirrors: Mamba2 (arXiv:2405.21060), the recurrent form: k is B, q is C, v is x, write is dt.
    """
    out = torch.zeros(inputs.v.shape, dtype=dtype, device=inputs.v.device)
    for part in parts:
        who = lanes(part)
        if len(who.which):
            _run(inputs, part, who, out, recalls=False)
    return out


lightning = mamba2  # its decays are the same for every token


def lightning_inputs(
    *, qkv: torch.Tensor, log_decay: torch.Tensor, key_dim: int, to: tuple[Place, ...]
) -> GdnInputs:
    """Pass each head's q, k and v through a silu; all in at least fp32, no cast back.

    Shapes:  qkv (N, HV, 2K + V)   log_decay (HV)  ->  q, k (N, HV, K)  v (N, HV, V)  gates (N, HV)
    Mirrors: the linear attention of MiniMax-01 (arXiv:2501.08313), whose queries have no scale.
    """
    x = silu(wide(qkv))
    q, k, v = (part.contiguous() for part in torch.split(x, [key_dim, key_dim, x.shape[2] - 2 * key_dim], dim=2))
    decays = log_decay.to(x.dtype).repeat(len(x), 1)
    return GdnInputs(q, k, v, decays, torch.ones_like(decays))


def _run(inputs: GdnInputs, part: Part, who: Lanes, out: torch.Tensor, recalls: bool) -> None:
    work = width(inputs.q.dtype, part.read.pool.dtype)
    heads = inputs.v.shape[1]
    state = _settle(before(part, who, work), part, who, recalls)  # [n, HV, K, V]
    q = _per_value_head(inputs.q.to(work)[who.rows], heads)  # [n, most, HV, K, 1]
    rows = Inputs(*(x[who.rows] for x in inputs[1:]))
    writes = _writes(rows, work, heads)
    core = torch.zeros_like(rows.v, dtype=work)
    trail = Trail(state, ancestry(part, who))
    for row, alive in enumerate(who.alive):  # requests are sorted by length: the first `alive` have this row
        S = trail.at(row, alive)  # `_absorb` works in place
        token, write = Inputs(*(x[:alive, row] for x in rows)), Write(*(x[:alive, row] for x in writes))
        update = _absorb(S, write, recalls)
        core[:alive, row] = _sum_by_halves(S * q[:alive, row])  # [alive, HV, V]
        keep(part.ring, who.which[:alive], row, token, Updates(token.k, write.decay, update))
        along(part.per_row, who, row, S, trail.depth(row, alive))
    scatter(out, who, core)
    after(part.store, who, state)


class Trail:
    """The running memories [n, ...] of a launch: in a chain one, in place; in a tree a copy for every row.

    parents  [n, most]; -1: the memory before the window. None: chains
    """

    def __init__(self, memory: torch.Tensor, parents: torch.Tensor | None) -> None:
        self._memory, self._parents = memory, parents
        self._after = [memory]  # in a tree: the memory before the window, then the one after every row
        self._depths: list[torch.Tensor] = []  # in a tree: 0, then that of every row so far

    def at(self, row: int, alive: int) -> torch.Tensor:
        """Return the memory that row `row` of the first `alive` requests continues. The caller updates it in place."""
        if self._parents is None:
            return self._memory[:alive]
        parents = self._parents[:alive, row].tolist()
        memories = [self._after[parent + 1][request] for request, parent in enumerate(parents)]
        self._after.append(torch.stack(memories) if memories else self._memory[:0])
        return self._after[-1]

    def depth(self, row: int, alive: int) -> torch.Tensor | int:
        """Count the rows from the memory before the window to row `row`, that one included: [alive], or one number.

        Call it for the rows in order.
        """
        if self._parents is None:
            return row + 1
        parents = self._parents[:alive, row]
        if not row:
            self._depths = [torch.zeros_like(self._parents[:, 0])]
        above = torch.stack([depths[:alive] for depths in self._depths], 1)  # [alive, 1 + row]
        found = above.gather(1, parents[:, None] + 1)[:, 0] + 1
        self._depths.append(found)
        return found


def _settle(state: torch.Tensor, part: Part, who: Lanes, recalls: bool) -> torch.Tensor:
    """Run the kept tokens again, oldest first; store the result. -> the state before row 0, in its own width."""
    if part.ring is not None:
        for age in range(int(who.again.max())):
            owing = torch.nonzero(who.again > age)[:, 0]
            S = state[owing]  # a copy, because `owing` is an index: it is written back below
            _again(S, recalled(part.ring, who.which[owing], age), recalls)
            state[owing] = S
        state = as_stored(part.read, state, who.tokens)
    after(part.settled, who, state, 0)
    return state


class Write(NamedTuple):
    """A token of n requests in the form that the rule uses, in the width of the states [n, HV, K, V].

    key [n, HV, K, 1];  v [n, HV, V];  decay = exp(log_decay) [n, HV] or [n, HV, K];  beta [n, HV];  for several tokens
    [n, most, ...]
    """

    key: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor


def _writes(token: Inputs, work: torch.dtype, heads: int) -> Write:
    k, v, log_decay, beta = (x.to(work) for x in token)
    return Write(_per_value_head(k, heads), v, log_decay.exp(), beta)


def _per_value_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[..., H, K] -> [..., HV, K, 1]."""
    return x.repeat_interleave(heads // x.shape[-2], dim=-2)[..., None]


def _absorb(S: torch.Tensor, write: Write, recalls: bool) -> torch.Tensor:
    """Put one token into the states, in place -> its update [n, HV, V], which was added along its key.

    recalls: whether it obeys the delta rule: the decayed state already recalls a part of the value for this key, and
    only the rest is written
    """
    _forget(S, write.decay)
    update = write.beta[..., None] * (write.v - _sum_by_halves(S * write.key) if recalls else write.v)
    S += write.key * update[..., None, :]
    return update


def _forget(S: torch.Tensor, decay: torch.Tensor) -> None:
    """Multiply states [n, HV, K, V] by decays [n, HV] or [n, HV, K], in place."""
    S *= decay[(..., *[None] * (S.dim() - decay.dim()))]


def _again(S: torch.Tensor, kept: Updates | Inputs, recalls: bool) -> None:
    """Put a kept token into the states again, in place, by the products and sums of `_absorb` on the same bits."""
    if isinstance(kept, Inputs):
        _absorb(S, _writes(kept, S.dtype, S.shape[1]), recalls)
        return
    k, decay, update = (x.to(S.dtype) for x in kept)
    _forget(S, decay)
    S += _per_value_head(k, S.shape[1]) * update[..., None, :]


def _sum_by_halves(x: torch.Tensor) -> torch.Tensor:
    """Sum over axis -2, in an order that depends only on the length of this axis.

    torch chooses the order of a sum by the shape of the whole tensor. Then a request's bits would depend on the number
    of requests in the batch.
    """
    while x.shape[-2] > 1:
        half, odd = divmod(x.shape[-2], 2)
        total = x[..., :half, :] + x[..., half : 2 * half, :]
        if odd:
            total[..., :1, :] += x[..., 2 * half :, :]
        x = total
    return x[..., 0, :]


def gdn_inputs(
    *, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor,
    key_heads: int, key_dim: int, to: tuple[Place, ...], beta_bound: float = 1.0, decay_bound: float | None = None,
) -> GdnInputs:
    """Split the conv's output, normalise q and k, and turn a, b into gates; all in at least fp32, no cast back.

        q, k: x / sqrt(sum x^2 + 1e-6), q times K ** -0.5;  log_decay = -exp(A_log) softplus(a + dt_bias)
        beta = beta_bound sigmoid(b);  a safe gate: log_decay = decay_bound sigmoid(exp(A_log) (a + dt_bias)), in nats

    Shapes:  mixed (N, 2HK + HV*V)   a, b (N, HV)   A_log, dt_bias (HV)  ->  q, k (N, H, K)  v (N, HV, V)  gates (N, HV)
             with a decay per channel a, log_decay (N, HV, K)   dt_bias (HV, K)
    Mirrors: Qwen3-Next in transformers, which keeps beta in the activation dtype; here it stays fp32 on every path.
    """
    keys, heads = key_heads * key_dim, a.shape[1]
    rows, x = mixed.shape[0], wide(mixed)
    q, k = (part.reshape(rows, key_heads, key_dim) for part in (x[:, :keys], x[:, keys : 2 * keys]))
    v = x[:, 2 * keys :].clone(memory_format=torch.contiguous_format)
    rate = wide(A_log).to(q.dtype).exp()
    log_decay = -rate[(..., *[None] * (a.dim() - 2))] * softplus(a.to(q.dtype) + dt_bias.to(q.dtype))
    if decay_bound is not None:
        log_decay = decay_bound * sigmoid(rate[:, None] * (a.to(q.dtype) + dt_bias.to(q.dtype)))
    found = GdnInputs(
        q=_unit(q) * key_dim**-0.5,
        k=_unit(k),
        v=v.view(rows, heads, v.shape[1] // heads),
        log_decay=log_decay,
        beta=sigmoid(b.to(q.dtype)),
    )
    return found if beta_bound == 1.0 else found._replace(beta=beta_bound * found.beta)


def selective_inputs(
    *, mixed: torch.Tensor, a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, key_heads: int, key_dim: int,
    to: tuple[Place, ...],
) -> GdnInputs:
    """Split the conv's output into x, B and C, and turn a into a step; all in at least fp32, no cast back.

        dt = softplus(a + dt_bias);  log_decay = -exp(A_log) dt;  the write gate is dt

    Shapes:  mixed (N, HV*V + 2HK)   a (N, HV)   A_log, dt_bias (HV)  ->  q, k (N, H, K)  v (N, HV, V)  gates (N, HV)
    Mirrors: Mamba2 (arXiv:2405.21060): v is x, k is B, q is C.
    """
    keys, heads, x = key_heads * key_dim, a.shape[1], wide(mixed)
    v, k, q = torch.split(x, [x.shape[1] - 2 * keys, keys, keys], dim=1)
    dt = softplus(a.to(x.dtype) + dt_bias.to(x.dtype))
    return GdnInputs(
        q=q.reshape(len(x), key_heads, key_dim).clone(), k=k.reshape(len(x), key_heads, key_dim).clone(),
        v=v.reshape(len(x), heads, v.shape[1] // heads).clone(), log_decay=-wide(A_log).to(x.dtype).exp() * dt, beta=dt,
    )


def add_skip(*, core: torch.Tensor, v: torch.Tensor, weight: torch.Tensor, to: Place) -> torch.Tensor:
    """Compute core + weight v in at least fp32, one cast at the end. Shapes: core, v (N, HV, V), weight (HV)."""
    x = wide(core)
    return (x + weight.to(x.dtype)[:, None] * v.to(x.dtype)).to(core.dtype)


def gated_group_norm(
    *, core: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, groups: int, to: Place
) -> torch.Tensor:
    """y / rms(y) * weight with y = core silu(z), over the heads of each group, in at least fp32, one cast at the end.

    Shapes:  core, z (N, HV, V)   weight (HV*V)  ->  (N, HV, V)
    """
    opened = wide(core) * silu(wide(z))
    y = opened.reshape(len(core), groups, len(weight) // groups)
    normed = (y * torch.rsqrt(y.square().mean(dim=-1, keepdim=True) + eps)).flatten(1) * wide(weight)
    return normed.reshape(core.shape).to(core.dtype)


def gated_norm(
    *, core: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float,
    gate: Literal["silu", "sigmoid"], to: Place,
) -> torch.Tensor:
    """core / rms(core) * weight * gate(z) over V, in at least fp32, one cast at the end.

    Shapes:  core, z (N, HV, V)   weight (V)  ->  (N, HV, V)
    """
    x, opened = wide(core), silu(wide(z)) if gate == "silu" else sigmoid(wide(z))
    normed = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return (normed * wide(weight) * opened).to(core.dtype)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + L2_EPS)
