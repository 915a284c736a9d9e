"""Op sets that are right and sum otherwise: `plain` with every reduction in another order, found as `NAME_SEED`.

    permuted   the terms shuffled          blocked   sums of 8, 16 or 32 terms, then their sum
    running    one term after another      exact     in fp64, rounded once at the end

Leaves out: other functions and other rounding points, and rings: their delta rule serves the strategy `snapshot`.
`python -m support.honest [SEEDS]` replays the recorded trace with each and prints the worst headroom of every tier of
numbers: the evidence for the allowances.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import sigmoid, silu, softplus

from instep_optimized import load
from instep_optimized.layout import Pages, Part
from instep_optimized.ops.base import GdnInputs, Ops
from instep_optimized.ops.plain.attend import entries
from instep_optimized.ops.plain.lanes import after, along, before, lanes, scatter
from instep_optimized.ops.plain.rows import rms_norm

PLAIN = load("plain")
FORMS = ("permuted", "blocked", "running", "exact")
TRACE = Path(__file__).resolve().parents[2] / "fixtures" / "traces" / "adaptive.jsonl"
NUMBERS = ("T2", "T2d", "T3", "T4")


def __getattr__(name: str) -> Ops:
    """permuted_3 and the like, for `--ops support.honest:permuted_3`."""
    form, _, seed = name.rpartition("_")
    if form not in FORMS or not seed.isdigit():
        raise AttributeError(name)
    return honest(form, int(seed))


@dataclass(frozen=True)
class Order:
    """How sums are formed."""

    form: str
    seed: int

    def total(self, terms: torch.Tensor) -> torch.Tensor:
        """The sum over the last axis."""
        if self.form == "exact":
            return terms.double().sum(-1).to(terms.dtype)
        if self.form == "blocked":
            size = (8, 16, 32)[self.seed % 3]
            return sum((part.sum(-1) for part in terms.split(size, -1)), torch.zeros(terms.shape[:-1]))
        shuffled = terms[..., self._shuffle(terms.shape[-1])]
        return shuffled.sum(-1) if self.form == "permuted" else _running(shuffled)

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [..., n] and weight [m, n] -> [..., m]."""
        if self.form == "exact":
            return (x.double() @ weight.double().T).to(x.dtype)
        order = self._shuffle(x.shape[-1])
        x, weight = x[..., order], weight[..., order]
        if self.form == "permuted":
            return x @ weight.T
        size = 1 if self.form == "running" else (8, 16, 32)[self.seed % 3]
        out = torch.zeros(*x.shape[:-1], weight.shape[0])
        for begin in range(0, x.shape[-1], size):
            out += x[..., begin : begin + size] @ weight[:, begin : begin + size].T
        return out

    def _shuffle(self, terms: int) -> torch.Tensor:
        return torch.randperm(terms, generator=torch.Generator().manual_seed(self.seed))


def honest(form: str, seed: int) -> Ops:
    """`plain` in that order of summation."""
    order = Order(form, seed)
    own: dict[str, Callable[..., Any]] = {
        "linear": _linear, "lm_head": _lm_head, "mlp": _mlp, "norm": _norm, "gated_norm": _gated_norm,
        "gdn_inputs": _gdn_inputs, "gdn": _gdn, "attend": _attend,
    }  # fmt: skip
    return replace(PLAIN, name=f"{form}_{seed}", **{name: partial(op, order) for name, op in own.items()})


def _running(terms: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(terms.shape[:-1])
    for term in terms.unbind(-1):
        out = out + term
    return out


def _linear(order: Order, *, x: torch.Tensor, weight: torch.Tensor, shape: tuple[int, ...], to: Any) -> torch.Tensor:
    return order.product(x.reshape(len(x), -1), weight).view(len(x), *shape)


def _lm_head(order: Order, *, x: torch.Tensor, weight: torch.Tensor, to: Any) -> torch.Tensor:
    return order.product(x, weight)


def _mlp(order: Order, *, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, to: Any) -> torch.Tensor:
    gate, up = order.product(x, gate_up).chunk(2, dim=-1)
    return order.product(silu(gate) * up, down)


def _mean_square(order: Order, x: torch.Tensor) -> torch.Tensor:
    return order.total(x * x)[..., None] / x.shape[-1]


def _norm(order: Order, *, x: torch.Tensor, weight: torch.Tensor, eps: float, to: Any) -> torch.Tensor:
    if order.form == "exact":
        return rms_norm(x.double(), weight, eps).to(x.dtype)
    return x / (_mean_square(order, x) + eps).sqrt() * (1 + weight)


def _gated_norm(
    order: Order, *, core: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, gate: str, to: Any
) -> torch.Tensor:
    opened = silu(z) if gate == "silu" else sigmoid(z)
    return core / (_mean_square(order, core) + eps).sqrt() * (weight * opened)


def _gdn_inputs(
    order: Order, *, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor,
    key_heads: int, key_dim: int, to: Any,
) -> GdnInputs:
    keys, rows, heads = key_heads * key_dim, len(mixed), a.shape[1]
    q, k = (part.reshape(rows, key_heads, key_dim) for part in (mixed[:, :keys], mixed[:, keys : 2 * keys]))
    q, k = (x / (order.total(x * x)[..., None] + 1e-6).sqrt() for x in (q, k))
    return GdnInputs(
        q / key_dim**0.5, k, mixed[:, 2 * keys :].clone().view(rows, heads, -1),
        -A_log.exp() * softplus(a + dt_bias), 1 / (1 + (-b).exp()),
    )  # fmt: skip


def _gdn(
    order: Order, *, inputs: GdnInputs, parts: tuple[Part, ...], dtype: torch.dtype, to: Any
) -> torch.Tensor:
    out = torch.zeros(inputs.v.shape, dtype=dtype)
    group = inputs.v.shape[1] // inputs.q.shape[1]
    q, k = (x.repeat_interleave(group, dim=1) for x in (inputs.q, inputs.k))
    for part in parts:
        who = lanes(part)
        if not len(who.which):
            continue
        state, core = before(part, who, torch.float32), torch.zeros_like(inputs.v[who.rows])
        for token, alive in enumerate(who.alive):
            row = who.rows[:alive, token]
            decayed = state[:alive].mT * inputs.log_decay[row].exp()[..., None, None]  # [n, HV, V, K]
            update = inputs.beta[row][..., None] * (inputs.v[row] - order.total(decayed * k[row][:, :, None]))
            decayed = decayed + update[..., None] * k[row][:, :, None]
            core[:alive, token] = order.total(decayed * q[row][:, :, None])
            state[:alive] = decayed.mT
            along(part.each, who, token, state[:alive])
        scatter(out, who, core)
        after(part.store, who, state)
    return out


def _attend(order: Order, *, query: torch.Tensor, pages: Pages, to: Any) -> torch.Tensor:
    out = torch.zeros_like(query)
    for request, (begin, count, known) in enumerate(
        zip(pages.begin.tolist(), pages.count.tolist(), pages.before.tolist(), strict=True)
    ):
        if not count:
            continue
        keys, values, mapped = entries(pages, request, known + count)
        last = known + torch.arange(count)
        seen = mapped & (torch.arange(len(keys)) <= last[:, None])
        for head in range(query.shape[1]):
            other = head // (query.shape[1] // keys.shape[1])
            scores = order.product(query[begin : begin + count, head], keys[:, other]) * query.shape[2] ** -0.5
            scores = scores.masked_fill(~seen, -torch.inf)
            weights = (scores - scores.amax(1, True)).exp()
            read = order.product(weights, values[:, other].masked_fill(~mapped[:, None], 0).T)
            out[begin : begin + count, head] = read / order.total(weights)[:, None]
    return out


def headrooms(ops: str, until: int | None = None, trace: Path = TRACE) -> tuple[int, dict[str, float]]:
    """The exit code of a replay, and the worst headroom per tier of numbers."""
    from instep.report.terminal import tiers
    from instep.rig.rig import Rig
    from instep.trace.file import read

    outcome = Rig(read(trace), ops=ops, strategy="snapshot").run(until=until)
    found = {total.tier.value: total.headroom or 0.0 for total in tiers(outcome)}
    return int(outcome.verdict.exit), {tier: found[tier] for tier in NUMBERS}


def main(seeds: int = 2) -> None:
    print("| order | exit | " + " | ".join(NUMBERS) + " |")
    print("|---|---|" + "---|" * len(NUMBERS))
    for form in FORMS:
        for seed in range(seeds if form != "exact" else 1):
            code, worst = headrooms(f"support.honest:{form}_{seed}")
            cells = " | ".join(f"{worst[tier]:.3g}" for tier in NUMBERS)
            print(f"| {form} {seed} | {code} | {cells} |", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
