"""The gated delta rule, one token at a time, as the papers state it, and the layers around it: GDN, KDA and Mamba2.

Leaves out: chunking (`chunked_delta_rule.py`), fusing, caches. For those see `instep_optimized`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional as F

from .contract.config import ModelConfig
from .contract.place_names import At
from .contract.recurrences import Recurrence
from .norms import gated_group_norm, gated_norm, l2_norm
from .weights import GdnWeights


@dataclass(frozen=True)
class GdnMemory:
    """A GDN layer's memory of a request: window [C, W-1], oldest first, and state [HV, K, V]."""

    window: torch.Tensor
    state: torch.Tensor


def empty(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> GdnMemory:
    """Return the memory before the first token: zeros."""
    return GdnMemory(
        window=torch.zeros(*config.lengths(("C",)), config.conv_width - 1, dtype=dtype, device=device),
        state=torch.zeros(config.lengths(config.recurrence.state), dtype=dtype, device=device),
    )


def mix(
    config: ModelConfig, weights: GdnWeights, normed: torch.Tensor, memory: GdnMemory, positions: torch.Tensor, at: At,
    rule: Rule | None = None, conv: Conv | None = None,
) -> tuple[torch.Tensor, GdnMemory]:
    """Run the GDN layer between its input norm and its residual: T consecutive tokens of one request.

    rule, conv: the delta rule and the conv in another form than `recur` and `causal_conv`
    Shapes:  normed (T, D)  ->  (T, D), and the memory after the last of them. Positions play no part.
    Mirrors: transformers `Qwen3_5GatedDeltaNet`, and with a beta of up to 2 `OlmoHybridGatedDeltaNet`.
             Differs: the dtype (HF: fp32 inside); W-1 conv inputs are kept (HF: W); every token is decoded by the
             recurrence (HF: chunks, when there is more than one token). Softplus is torch's, as in transformers. Above
             20 torch returns the argument itself. The error is at most 2e-9, less than the last bit of fp32.
    """
    rows, z, window = _rows(config, weights, normed, memory.window, at, conv or causal_conv)
    done = (rule or recur)(**rows, state=memory.state[None])
    core = at("core", done.out[0])  # (T, HV, V)
    state = by_shown_updates(rows, done.update[0], done.state, memory.state[None], at)  # (1, HV, K, V)
    if weights.skip is not None:
        core = at("skip", core + weights.skip[:, None] * rows["v"][0])  # (T, HV, V)
    if config.recurrence.norm == "group":
        gated = gated_group_norm(core, z, weights.norm, config.core_eps, config.key_heads)
    else:
        gated = gated_norm(core, z, weights.norm, config.core_eps, config.output_gate)
    gated = at("gated", gated)  # (T, HV, V)
    return at("mixer", gated.flatten(1) @ weights.out.T), GdnMemory(window, state[0])


def state_after(
    config: ModelConfig, weights: GdnWeights, normed: torch.Tensor, memory: GdnMemory, at: At, conv: Conv | None = None
) -> torch.Tensor:
    """Return the state [HV, K, V] that `mix` leaves, bit for bit, without reading from it."""
    rows, _, _ = _rows(config, weights, normed, memory.window, at, conv or causal_conv)
    return unread(rows, memory.state, at)


def unread(rows: dict[str, torch.Tensor], before: torch.Tensor, at: At) -> torch.Tensor:
    """Return the state [HV, K, V] that `recur` leaves of these rows, bit for bit, without reading from it."""
    written = [*_written(state=before[None], **{name: x for name, x in rows.items() if name != "q"})]
    updates, (_, state) = torch.cat([update for update, _ in written]), written[-1]  # (T, HV, V), (1, HV, K, V)
    return by_shown_updates(rows, updates, state, before[None], at)[0]


def _rows(
    config: ModelConfig, weights: GdnWeights, normed: torch.Tensor, window: torch.Tensor, at: At, conv: Conv
) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Inputs of the rule for T tokens, by the names of `recur`; their gate z (T, HV, V); the window after them."""
    T, H, HV, row = normed.shape[0], config.key_heads, config.value_heads, config.recurrence
    K, V, gate = config.key_dim, config.value_dim, config.lengths(row.gate)
    qkv = at("qkv", normed @ weights.qkv.T)  # (T, C), C = 2HK + HV*V
    z_in = normed if weights.z_low is None else at("z_low", normed @ weights.z_low.T)  # (T, D), or KDA: (T, V)
    z = at("z", (z_in @ weights.z.T).reshape(T, HV, V))  # (T, HV, V)
    b = None if weights.b is None else at("b", normed @ weights.b.T)  # (T, HV)
    a_in = normed if weights.a_low is None else at("a_low", normed @ weights.a_low.T)  # (T, D), or KDA: (T, K)
    a = at("a", (a_in @ weights.a.T).reshape(T, *gate))  # (T, HV), or (T, HV, K) with a decay per channel
    convolved, window = conv(qkv, weights.conv, window)  # (T, C), (C, W-1)
    mixed = at("mixed", F.silu(convolved if weights.conv_bias is None else convolved + weights.conv_bias))  # (T, C)
    segments = torch.split(mixed, [heads * width for heads, width in config.segments], dim=-1)
    q, k, v = (dict(zip(row.conv, segments, strict=True))[name] for name in ("q", "k", "v"))  # (T, HK) twice, (T, HV*V)
    make = _selective if row.inputs == "selective" else _normed
    q, k, v, log_decay, gates = make(
        config, weights, q.reshape(T, H, K), k.reshape(T, H, K), v.reshape(T, HV, V), a, b, at)
    # value head h reads key head h // r
    q, k = (x.repeat_interleave(HV // H, dim=1) for x in (q, k))  # (T, HV, K)
    decay = log_decay.reshape(1, T, HV, *(gate[1:] or (1,)))  # (1, T, HV, 1 or K)
    erase, write = erase_and_write(row, gates[None])  # (1, T, HV, 1)
    return {"q": q[None], "k": k[None], "v": v[None], "log_decay": decay, "erase": erase, "write": write}, z, window


def _normed(
    config: ModelConfig, weights: GdnWeights, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor,
    b: torch.Tensor | None, at: At,
) -> tuple[torch.Tensor, ...]:
    """q, k (T, H, K), v (T, HV, V) after the conv, a and b -> q, k, v, log_decay, and beta (T, HV)."""
    assert b is not None, "a row of such a kind has it"
    gate = config.lengths(config.recurrence.gate)
    q = at("q", l2_norm(q) * config.key_dim**-0.5)  # (T, H, K)
    k = at("k", l2_norm(k))  # (T, H, K)
    v = at("v", v)  # (T, HV, V)
    log_decay = at("log_decay", forget(a, weights.A_log, weights.dt_bias.reshape(gate), config.decay_bound))  # as a
    beta = at("beta", config.beta_bound * torch.sigmoid(b))  # (T, HV)
    return q, k, v, log_decay, beta


def _selective(
    config: ModelConfig, weights: GdnWeights, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor,
    b: torch.Tensor | None, at: At,
) -> tuple[torch.Tensor, ...]:
    """The same for Mamba2, where q, k and v are named C, B and x, and the step is dt = softplus(a + dt_bias).

        log_decay = -exp(A_log) dt        write = dt

    Mirrors: Mamba2 (arXiv:2405.21060); transformers 5.24 `NemotronHMamba2Mixer`. HF clamps the dt of a prompt at
             `time_step_min`, and that of a decode not at all; here, as by `mamba_ssm`'s default, none is clamped.
    """
    q, k, v = at("q", q), at("k", k), at("v", v)
    dt = F.softplus(a + weights.dt_bias)  # (T, HV)
    log_decay = at("log_decay", -weights.A_log.exp() * dt)  # (T, HV)
    return q, k, v, log_decay, at("write", dt)


def forget(
    a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, bound: float | None = None
) -> torch.Tensor:
    """Compute the logarithm of the decay, of each head (GDN) or of each key channel (KDA).

        -exp(A_log) softplus(a + dt_bias)              without a bound
        bound sigmoid(exp(A_log) (a + dt_bias))        with one: the safe gate, which never falls below it

    Shapes:  a (T, HV) or (T, HV, K)   A_log (HV,)   dt_bias (HV,) or (HV, K)  ->  as a
    Units:   nats, at most 0; a bound is negative.
    Mirrors: transformers 5.24 `KimiLinearForgetGate`, and with a bound `BailingHybridForgetGate`; HF computes in fp32.
    """
    rate = A_log.exp().reshape(-1, *(1,) * (dt_bias.ndim - 1))  # (HV,) or (HV, 1)
    return -rate * F.softplus(a + dt_bias) if bound is None else bound * torch.sigmoid(rate * (a + dt_bias))


def erase_and_write(row: Recurrence, gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both gates of `recur` from the write gate (.., HV): (.., HV, 1) each. Only the delta rule erases."""
    write = gate[..., None]
    return write if row.update == "delta" else torch.zeros_like(write), write


def by_channel(gate: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A gate of each head (.., HV) or of each channel (.., HV, K), in the form of `recur`. v (.., HV, V): its rows."""
    return gate if gate.ndim == v.ndim else gate[..., None]


def by_shown_updates(
    rows: dict[str, torch.Tensor], own: torch.Tensor, state: torch.Tensor, before: torch.Tensor, at: At
) -> torch.Tensor:
    """Show the updates. If `at` returns others, the state is made from these; the read-out stays as it was."""
    update = at("update", own)  # (T, HV, V)
    return state if update is own else absorb(rows["k"], rows["log_decay"], update[None], before)


Conv = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def causal_conv(x: torch.Tensor, weight: torch.Tensor, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve depthwise: out[t] = sum_j weight[:, j] * input[t - (W-1) + j]; the window has the inputs before row 0.

    Shapes:  x (T, C)   weight (C, W)   window (C, W-1), oldest first  ->  (T, C), the window after the last row
    """
    tokens, width = x.shape[0], weight.shape[1]
    history = torch.cat([window.T, x])  # (W-1 + T, C)
    taps = [weight[:, j] * history[j : j + tokens] for j in range(width)]  # W of (T, C)
    return torch.stack(taps).sum(0), history[tokens:].T


class Recurred(NamedTuple):
    """The result of `recur`.

    out     (B, T, HV, V), what each token reads from the state
    update  (B, T, HV, V), what each token adds to the state along its key
    state   (B, HV, K, V), after the last token
    """

    out: torch.Tensor
    update: torch.Tensor
    state: torch.Tensor


Rule = Callable[..., Recurred]  # with the arguments of `recur`, by the names that it gives them


def recur(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, erase: torch.Tensor,
    write: torch.Tensor, state: torch.Tensor,
) -> Recurred:
    """Carry one K x V memory per head through the tokens, left to right.

        S <- exp(log_decay) S                          forget
        u <- write v - S^T (erase k)                   write only what k does not already recall
        S <- S + k u^T
        o <- S^T q                                     read

    Gates are scalars (last axis 1) or one per channel. Gated DeltaNet: log_decay scalar, erase = write = beta.
    KDA: log_decay per key channel. Gated DeltaNet-2: erase per key channel, write per value channel. Mamba2: erase = 0.

    Shapes:  q, k (B, T, HV, K)   v (B, T, HV, V)   log_decay, erase (B, T, HV, 1 or K)   write (B, T, HV, 1 or V)
             state (B, HV, K, V)  ->  o, u (B, T, HV, V), state (B, HV, K, V)
    Units:   log_decay in nats, at most 0; erase and write within (0, 1) or (0, 2), or Mamba2's write above 0; q already
             scaled.
    Mirrors: Gated DeltaNet (arXiv:2412.06464), the recurrent form. Returns a new state.
    """
    out, updates, after = [], [], state
    for read, (update, after) in zip(q.unbind(1), _written(k, v, log_decay, erase, write, state), strict=True):
        updates.append(update)  # (B, HV, V)
        out.append(torch.einsum("bhk,bhkv->bhv", read, after))  # (B, HV, V)
    return Recurred(torch.stack(out, dim=1), torch.stack(updates, dim=1), after) if out else Recurred(v, v, state)


def left_by(
    k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, erase: torch.Tensor, write: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Return the state that `recur` leaves, bit for bit; nothing is read from it."""
    return [state, *(after for _, after in _written(k, v, log_decay, erase, write, state))][-1]


def _written(
    k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, erase: torch.Tensor, write: torch.Tensor,
    state: torch.Tensor,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return each token's update along its key, (B, HV, V), and the state after it: `recur` without its last line."""
    for key, value, decay, erasing, writing in _tokens(k, v, log_decay.exp(), erase, write):  # (B, HV, ..) each
        state = decay[..., None] * state  # (B, HV, K, V)
        recalled = torch.einsum("bhk,bhkv->bhv", erasing * key, state)  # (B, HV, V)
        update = writing * value - recalled  # (B, HV, V)
        state = _add(state, key, update)  # (B, HV, K, V)
        yield update, state


def absorb(k: torch.Tensor, log_decay: torch.Tensor, update: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """The state after tokens whose updates u are known: `recur` without reading what the state recalls.

        S <- exp(log_decay) S + k u^T

    Shapes:  as `recur`; update (B, T, HV, V)  ->  state (B, HV, K, V)
    """
    for key, decay, written in _tokens(k, log_decay.exp(), update):  # (B, HV, ..) each
        state = _add(decay[..., None] * state, key, written)  # (B, HV, K, V)
    return state


def _tokens(*rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Iterate over tokens: (B, T, ..) each -> each token's part of each."""
    return zip(*(x.unbind(1) for x in rows), strict=True)


def _add(state: torch.Tensor, k: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    return state + torch.einsum("bhk,bhv->bhkv", k, update)
