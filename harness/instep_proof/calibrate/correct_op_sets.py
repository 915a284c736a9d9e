"""Correct op sets: `plain` with every reduction changed, by name as `NAME_SEED`.

    permuted   the terms shuffled            blocked   sums of 8, 16 or 32 terms, then their sum
    running    one term after another        pairwise  halves, halves of halves, ...
    split      products row by row, outputs in three parts
    exact      in fp64, rounded once         chunked   the delta rule of a prompt in chunks of 2, 4 or 16 tokens

Leaves out: other functions and other rounding points, and running the sets (`allowance_use.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from instep_optimized import load
from instep_optimized.memory_addresses import Part
from instep_optimized.ops.op_protocols import GdnInputs, Ops
from instep_optimized.ops.plain.compute_width import width
from instep_optimized.ops.plain.requests_of_part import after, before, lanes, scatter
from instep_reference.chunked_delta_rule import recur_in_chunks
from instep_reference.contract.recurrences import RECURRENCES, Recurrence
from instep_reference.gdn import erase_and_write

PLAIN, GDN = load("plain"), import_module("instep_optimized.ops.plain.gdn")
SIZES = (8, 16, 32)  # terms to a block
CHUNKS = (2, 4, 16)  # tokens to a chunk


def __getattr__(name: str) -> Ops:
    """Op sets by name, such as permuted_3 for `--ops instep_proof.calibrate.correct_op_sets:permuted_3`."""
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


class Ordered(TorchFunctionMode):
    """While it is entered, torch's products and sums over the last axis have this order."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self.order = order

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        order, given = self.order, kwargs or {}
        match func.__name__, args:
            case "linear", (x, weight):
                return order.product(x, weight)
            case "matmul", (x, row):
                return order.product(x, row[None])[..., 0]
            case "einsum", ("thd,phd->htp", query, keys):
                return torch.stack([order.product(*pair) for pair in zip(query.unbind(1), keys.unbind(1), strict=True)])
            case "einsum", ("htp,phd->thd", chances, values):
                pairs = zip(chances, values.unbind(1), strict=True)
                return torch.stack([order.product(chance, value.T) for chance, value in pairs], 1)
            case "softmax", (x,):
                weights = (x - x.amax(-1, True)).exp()
                return weights / order.total(weights)[..., None]
            case "sum" | "mean" as name, (x,) if given == {"dim": -1, "keepdim": True}:
                return order.total(x)[..., None] / (x.shape[-1] if name == "mean" else 1)
        return func(*args, **given)


def _ordered(order: Order, op: Callable[..., Any]) -> Callable[..., Any]:
    """An op of `plain` with its sums in that order. Those of the delta rule are no call of torch."""

    def call(**given: Any) -> Any:
        with Ordered(order), patch.object(GDN, "_sum_by_halves", lambda terms: order.total(terms.mT)):
            return op(**given)

    return call


def _in_chunks(
    row: Recurrence, order: Order, *, inputs: GdnInputs, parts: tuple[Part, ...], dtype: torch.dtype, to: Any
) -> torch.Tensor:
    """Prefill parts by the reference's chunked form, request by request; windows as in `plain`."""
    windows = tuple(part for part in parts if part.form == "window")
    out = PLAIN.recurrence(row)(inputs=inputs, parts=windows, dtype=dtype, to=to)
    for part in (part for part in parts if part.form == "chunk"):
        who = lanes(part)
        if not len(who.which):
            continue
        state = before(part, who, width(inputs.q.dtype, part.read.pool.dtype))
        core = torch.zeros_like(inputs.v[who.rows], dtype=state.dtype)
        for number, length in enumerate(who.length.tolist()):
            q, k, v, decay, beta = (x[None, who.rows[number, :length]].to(state.dtype) for x in inputs)
            q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
            decay = decay if decay.dim() > beta.dim() else decay[..., None]
            gates, size = erase_and_write(row, beta), CHUNKS[order.seed % len(CHUNKS)]
            read, left = recur_in_chunks(q, k, v, decay, *gates, state[number, None], size)
            core[number, :length], state[number] = read[0], left[0]
        scatter(out, who, core)
        after(part.store, who, state)
    return out


SUMS = ("linear", "lm_head", "mlp", "moe", "norm", "gated_norm", "gdn_inputs", *RECURRENCES, "attend")


def _every_sum(order: Order) -> dict[str, Any]:
    return {name: _ordered(order, getattr(PLAIN, name)) for name in SUMS}


# One form per line: the ops in which it differs from `plain`.
FORMS: dict[str, Callable[[Order], dict[str, Any]]] = {
    "permuted": _every_sum,
    "blocked": _every_sum,
    "running": _every_sum,
    "pairwise": _every_sum,
    "split": _every_sum,
    "exact": _every_sum,
    "chunked": lambda order: {name: partial(_in_chunks, row, order) for name, row in RECURRENCES.items()},
}
