"""The right answer of a case: rows and memory as the reference computes them, request by request.

The dtype of the inputs decides the role: fp64 gives the truth, a narrower one a sample of the allowed error. Leaves
out: ops that move bits or count; `plain` gives their only right answer (`compare_with_reference.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.nn import functional as F

from instep_optimized.memory_addresses import Address, Pages, Part
from instep_optimized.ops.op_protocols import ExpertWeights, GdnInputs
from instep_reference import attention, gdn, mla, mlp, norms
from instep_reference.chunked_delta_rule import recur_in_chunks
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.recurrences import GDN, RECURRENCES, Recurrence
from instep_reference.weights import MlpWeights, MoeWeights

from .cases.case import Call, Inputs
from .cases.guarded_pools import place, runs

Tensor = torch.Tensor
RULES: Mapping[str, Recurrence] = {**RECURRENCES, "fused_gdn": GDN}  # op -> the recurrence that it computes
ATTENDS = ("attend", "attend_latents")
# Op -> what it makes of the sums of a conv; bias: of the op that has one.
CONVS: Mapping[str, Callable[[Tensor, Any], Tensor]] = {
    "conv": lambda sums, bias: F.silu(sums),
    "biased_conv": lambda sums, bias: F.silu(sums + bias),
    "short_conv": lambda sums, bias: sums,
}
# A recurrence over the rows of one request, (q, k, v, log_decay, beta) and a state -> the read-out, the state after.
Rule = Callable[[Recurrence, Sequence[Tensor], Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Written:
    """A unit of memory after the launch. row: it is stored after this row; before: the memory before the launch."""

    request: int
    row: int
    component: str
    pool: str
    at: tuple[int, ...]
    block: Tensor
    before: Tensor


@dataclass(frozen=True)
class Right:
    """results by name; spans: request -> its rows, all others are zeros. None means that every row is independent."""

    results: Mapping[str, Tensor]
    spans: Mapping[int, range] | None = None
    written: Sequence[Written] = field(default_factory=list)


def widened(inputs: Inputs, width: torch.dtype) -> Inputs:
    """The inputs in this dtype. Memory keeps its dtype, and is converted when it is read."""

    def to(value: Any) -> Any:
        if isinstance(value, GdnInputs):
            return GdnInputs(*map(to, value))
        if isinstance(value, ExpertWeights):
            return replace(value, **{name: to(tensor) for name, tensor in vars(value).items()})
        return value.to(width) if isinstance(value, Tensor) and value.is_floating_point() else value

    return {name: to(value) for name, value in inputs.items()}


def by_token(row: Recurrence, rows: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """The rule token by token."""
    done = gdn.recur(*opened(row, rows), state[None])
    return done.out[0], done.state[0]


def in_chunks_of(size: int, row: Recurrence, rows: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """The rule in chunks of `size` rows."""
    core, after = recur_in_chunks(*opened(row, rows), state[None], size)
    return core[0], after[0]


def opened(row: Recurrence, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows of one request as arguments of `gdn.recur`: q, k, v, log_decay, erase, write."""
    q, k, v, log_decay, beta = rows
    q, k = (x.repeat_interleave(v.shape[1] // k.shape[1], dim=1)[None] for x in (q, k))
    return q, k, v[None], gdn.by_channel(log_decay, v)[None], *gdn.erase_and_write(row, beta[None])


def right(op: str, inputs: Inputs, call: Call, chunk: Rule = by_token) -> Right:
    """The right answer of the op on these inputs. call: the call with its memory; chunk: the form of prefill."""
    if op == "fused_gdn":
        inputs = {**inputs, "inputs": GdnInputs(**gates_of(inputs))}
    if op in RULES:
        return _recurrence(RULES[op], inputs["inputs"], inputs["parts"], call, chunk)
    if op in CONVS:
        return _conv(inputs["x"], inputs["weight"], inputs["parts"], call,
                     lambda sums: CONVS[op](sums, inputs.get("bias")))  # fmt: skip
    if op in ATTENDS:
        return _attend(inputs["query"], inputs["pages"], inputs.get("up"))
    found = ROWS[op](inputs)
    return Right(found if isinstance(found, dict) else {"result": found})


def walk(parts: Sequence[Part], like: Tensor) -> Iterator[tuple[int, Part, int, list[int], Tensor]]:
    """Every request that runs: number in the launch and in its part, the parent of each row, the memory before."""
    first = 0
    for part in parts:
        for request in range(len(part.count)):
            if runs(part, request):
                begin, count = int(part.begin[request]), int(part.count[request])
                chain = list(range(-1, count - 1))
                parents = chain if part.parents is None else part.parents[begin : begin + count].tolist()
                before = part.read.pool[place(part.read, request)].to(like)
                yield (first + request, part, request, parents,
                       torch.zeros_like(before) if part.fresh[request] else before)
        first += len(part.count)


def _written(
    number: int, part: Part, request: int, states: Mapping[int, Tensor], before: Tensor, component: str, call: Call
) -> Iterator[Written]:
    """Yield the units that must hold the memory after rows. The memory of a fresh request is zero before them."""

    def at(address: Address, row: int, spot: tuple[int, ...]) -> Written:
        pool = next(name for name, pool in call.pools.items() if pool.view is address.pool)
        return Written(number, row, component, pool, spot, states[row], before)

    last, store, kept = int(part.count[request]) - 1, part.store, part.per_row
    if store is not None and store.units[request] >= 0:
        yield at(store, last, place(store, request))
    if kept is not None and kept.units[request] >= 0:
        for row in range(last + 1):
            yield at(kept, row, (int(kept.units[request]), row))


def _recurrence(kind: Recurrence, inputs: GdnInputs, parts: Sequence[Part], call: Call, chunk: Rule) -> Right:
    core, spans, written = torch.zeros_like(inputs.v), dict[int, range](), list[Written]()
    for number, part, request, parents, memory in walk(parts, inputs.v):
        begin, states = int(part.begin[request]), {-1: memory}
        spans[number] = range(begin, begin + len(parents))
        if part.form == "chunk":
            rows = [x[begin : begin + len(parents)] for x in inputs]
            core[begin : begin + len(parents)], states[len(parents) - 1] = chunk(kind, rows, memory)
        else:
            for row, parent in enumerate(parents):
                token = [x[begin + row, None] for x in inputs]
                core[begin + row, None], states[row] = by_token(kind, token, states[parent])
        written += _written(number, part, request, states, memory, "state", call)
    return Right({"result": core}, spans, written)


def _conv(
    x: Tensor, weight: Tensor, parts: Sequence[Part], call: Call, then: Callable[[Tensor], Tensor]
) -> Right:
    out, spans, written = torch.zeros_like(x), dict[int, range](), list[Written]()
    for number, part, request, parents, memory in walk(parts, x):
        begin, windows = int(part.begin[request]), {-1: memory}
        spans[number] = range(begin, begin + len(parents))
        for row, parent in enumerate(parents):  # a row continues the window of its parent
            convolved, windows[row] = gdn.causal_conv(x[begin + row, None], weight, windows[parent])
            out[begin + row, None] = then(convolved)
        written += _written(number, part, request, windows, memory, "conv", call)
    return Right({"result": out}, spans, written)


def _attend(query: Tensor, pages: Pages, up: Tensor | None) -> Right:
    """Attention, over latents if `up` is given."""
    shape = query.shape if up is None else pages.expanded(query, up)
    out, spans, size = query.new_zeros(shape), dict[int, range](), pages.keys.shape[1]

    def at(spots: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        keys, values = (torch.stack([pool[spot] for spot in spots]).to(query) for pool in (pages.keys, pages.values))
        if up is None:
            return keys, values
        config = SimpleNamespace(heads=query.shape[1], head_dim=query.shape[2], shared_key=keys.shape[-1],
                                 value_width=shape[2])  # fmt: skip
        return mla.expand(cast(ModelConfig, config), up, attention.AttentionMemory(keys, values))

    for request, (slot, begin, count, before) in enumerate(
        zip(*(x.tolist() for x in (pages.slots, pages.begin, pages.count, pages.before)), strict=True)
    ):
        if slot < 0 or not count:
            continue
        spans[request], line = range(begin, begin + count), pages.table[slot].tolist()
        mapped = len(line) * size >= before + count and min(line[: -(-(before + count) // size)]) >= 0
        if mapped and pages.ancestors is None:
            spots = [(line[p // size], p % size) for p in range(before + count)]
            out[begin : begin + count] = attention.attend(query[begin : begin + count], *at(spots))
            continue
        for row in spans[request]:
            bits = 0 if pages.ancestors is None else int(pages.ancestors[row])
            behind = [n for n in range(63) if bits >> n & 1] if bits else range(row - begin + 1)
            there = [divmod(p, size) for p in (*range(before), *(before + n for n in behind))]
            seen = [(line[n], offset) for n, offset in there if n < len(line) and line[n] >= 0]
            if seen:
                out[row, None] = attention.attend(query[row, None], *at(seen))
    return Right({"result": out}, spans)


def gates_of(given: Inputs) -> dict[str, Tensor]:
    """Inputs of `gdn`, computed from rows after the conv."""
    keys, width, rows = given["key_heads"] * given["key_dim"], given["key_dim"], len(given["mixed"])
    q, k, v = torch.tensor_split(given["mixed"], (keys, 2 * keys), dim=1)
    q, k = (norms.l2_norm(x.reshape(rows, given["key_heads"], width)) for x in (q, k))
    log_decay = gdn.forget(given["a"], given["A_log"], given["dt_bias"], given.get("decay_bound"))
    value = v.reshape(rows, len(given["A_log"]), v.shape[1] // len(given["A_log"]))
    beta = given.get("beta_bound", 1.0) * torch.sigmoid(given["b"])
    return {"q": q * width**-0.5, "k": k, "v": value, "log_decay": log_decay, "beta": beta}


def _selective_inputs(given: Inputs) -> dict[str, Tensor]:
    keys, rows = given["key_heads"] * given["key_dim"], len(given["mixed"])
    v, k, q = torch.tensor_split(given["mixed"], (given["mixed"].shape[1] - 2 * keys, -keys), dim=1)
    dt = F.softplus(given["a"] + given["dt_bias"])
    q, k = (x.reshape(rows, given["key_heads"], given["key_dim"]) for x in (q, k))
    value = v.reshape(rows, len(given["A_log"]), v.shape[1] // len(given["A_log"]))
    return {"q": q, "k": k, "v": value, "log_decay": -given["A_log"].exp() * dt, "beta": dt}


def _lightning_inputs(given: Inputs) -> dict[str, Tensor]:
    q, k, v = torch.tensor_split(F.silu(given["qkv"]), (given["key_dim"], 2 * given["key_dim"]), dim=-1)
    decay = given["log_decay"].expand(len(q), -1)
    return {"q": q, "k": k, "v": v, "log_decay": decay, "beta": torch.ones_like(decay)}


def _latent_inputs(given: Inputs) -> dict[str, Tensor]:
    config = cast(ModelConfig, SimpleNamespace(rotary_dim=given["rotary_dim"], rope_theta=given["theta"]))
    turns, R = given["rotary_dim"], len(given["norm"])
    own, turning = given["projected"][..., : -1 - turns], given["projected"][..., -1 - turns : -1]
    return {
        "query": torch.cat([own, attention.rotate(turning, given["positions"], config)], -1),
        "key": attention.rotate(given["key_raw"][..., R:], given["positions"], config),
        "value": norms.rms_norm(given["key_raw"][..., :R], given["norm"], given["eps"]),
    }


def _attention_inputs(given: Inputs) -> dict[str, Tensor]:
    config = cast(ModelConfig, SimpleNamespace(rotary_dim=given["rotary_dim"], rope_theta=given["theta"]))
    raw = {"query": (given["projected"][:, :, 0], given["q_norm"]), "key": (given["key_raw"], given["k_norm"])}
    return {
        name: attention.rotate(norms.rms_norm(x, weight, given["eps"]), given["positions"], config)
        for name, (x, weight) in raw.items()
    }


def _key_inputs(given: Inputs) -> Tensor:
    config = cast(ModelConfig, SimpleNamespace(rotary_dim=given["rotary_dim"], rope_theta=given["theta"]))
    return attention.rotate(norms.rms_norm(given["key_raw"], given["k_norm"], given["eps"]), given["positions"], config)


def _swiglu(gate_up: Tensor, down: Tensor) -> MlpWeights:
    gate, up = gate_up.chunk(2)
    return MlpWeights(gate, up, down)


def _squared(up: Tensor, down: Tensor) -> MlpWeights:
    return MlpWeights(None, up, down)


def experts(given: ExpertWeights) -> MoeWeights:
    """The weights in the reference's form. A missing shared expert becomes one of zeros."""
    of = _swiglu if given.gated else _squared
    none = torch.zeros_like(given.router[:1])
    shared = (none.new_zeros(2, none.shape[1]), none.new_zeros(none.shape[1], 1))
    if given.shared_gate_up is not None and given.shared_down is not None:
        shared = given.shared_gate_up, given.shared_down
    each = tuple(of(*pair) for pair in zip(given.gate_up, given.down, strict=True))
    each = tuple(replace(one, limit=given.limit) for one in each)
    alone = replace(of(*shared), limit=given.shared_limit)
    return MoeWeights(
        given.router, each, alone, given.shared_gate, given.router_bias, given.to_latent, given.from_latent)


def _moe(given: Inputs) -> Tensor:
    weights = given["weights"]
    config = SimpleNamespace(
        experts_per_token=given["top_k"], norm_topk=given["norm_topk"], experts=len(weights.router),
        expert_groups=weights.groups, groups_per_token=weights.groups_per_token, routed_scale=weights.scale)
    return mlp.mixture(cast(ModelConfig, config), experts(weights), given["x"])


ROWS: Mapping[str, Callable[[Inputs], Tensor | dict[str, Tensor]]] = {
    "norm": lambda given: norms.rms_norm(given["x"], given["weight"], given["eps"]),
    "linear": lambda given: (given["x"].flatten(1) @ given["weight"].T).reshape(-1, *given["shape"]),
    "add": lambda given: given["x"] + given["y"],
    "gdn_inputs": gates_of,
    "gated_norm": lambda given: norms.gated_norm(*(given[name] for name in ("core", "z", "weight", "eps", "gate"))),
    "attention_inputs": _attention_inputs,
    "key_inputs": _key_inputs,
    "latent_inputs": _latent_inputs,
    "output_gate": lambda given: given["attended"] * torch.sigmoid(
        given["projected"][..., -1:] if given["projected"].dim() == 3 else given["projected"][:, :, 1]),
    "mlp": lambda given: mlp.dense(_swiglu(given["gate_up"], given["down"]), given["x"]),
    "squared_mlp": lambda given: mlp.dense(_squared(given["up"], given["down"]), given["x"]),
    "multiply": lambda given: given["x"] * given["y"],
    "scaled_add": lambda given: given["alpha"] * given["x"] + given["beta"] * given["y"],
    "selective_inputs": _selective_inputs,
    "lightning_inputs": _lightning_inputs,
    "add_skip": lambda given: given["core"] + given["weight"][:, None] * given["v"],
    "gated_group_norm": lambda given: norms.gated_group_norm(
        *(given[name] for name in ("core", "z", "weight", "eps", "groups"))),
    "moe": _moe,
    "lm_head": lambda given: given["x"] @ given["weight"].T,
}
COMPUTED = frozenset({*RULES, *ATTENDS, *CONVS, *ROWS})  # ops with a truth other than `plain`
