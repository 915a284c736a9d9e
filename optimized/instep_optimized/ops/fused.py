"""Fusions: ops that an op set may have in addition to those of `op_protocols.py`, each a composition of them.

A fusion is a function here (its composition), a protocol and a field of `Ops` that is None by default, and a line of
`FUSIONS`. The model calls the composition. The composition calls the op if the op set has it, and else the parts. An op
declares the parts that it was made of (`fuses`): a set with a different part does not have the op. Leaves out: kernels.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar

import torch

from instep_reference.contract.place_names import Place
from instep_reference.contract.recurrences import GDN, Recurrence

from ..memory.tiled_units import Units
from ..memory_addresses import Pages, Part
from .integer_op_protocols import Moved
from .op_protocols import AddNorm, GdnInputs, Ops, Shapes

Bounds = Mapping[str, float]  # arguments of `gdn_inputs` that are given if they do not have the value of GDN
NONE: Bounds = MappingProxyType({})


@dataclass(frozen=True)
class Fusion:
    """Properties of a fusion.

    parts   the ops that it is the composition of
    exact   it gives the bits of its parts. So nothing is lost when the parts run instead: in a watched run (a place may
            be inside, or be replaced), and if one of the parts is swapped. False: it gives different bits, so it also
            runs when watched, and its results are judged like those of any op
    hides   components that stay inside: they cannot be shown while it runs
    shares  its results may be views on one tensor
    """

    parts: tuple[str, ...]
    exact: bool = True
    hides: frozenset[str] = frozenset()
    shares: bool = False


FUSIONS: Mapping[str, Fusion] = {
    "add_norm": Fusion(("add", "norm")),
    "conv_inputs": Fusion(("conv", "gdn_inputs"), hides=frozenset({"mixed"})),
    "draft_inputs": Fusion(("embed", "norm", "concat"), hides=frozenset({"embedding", "normed", "post_normed"})),
    "gated_attend": Fusion(("attend", "output_gate"), hides=frozenset({"attended"})),
    "head_pick": Fusion(("lm_head", "pick"), hides=frozenset({"logits"})),
    "kv_inputs": Fusion(("attention_inputs", "store_rows"), hides=frozenset({"key"})),
    "linears": Fusion(("linear",), exact=False, shares=True),
    "moves": Fusion(("move",)),
    "prefill_gdn": Fusion(
        ("conv", "gdn_inputs", GDN.name), hides=frozenset({"mixed", "q", "k", "v", "log_decay", "beta"})),
    "verify_gdn": Fusion(
        ("conv", "gdn_inputs", GDN.name), hides=frozenset({"mixed", "q", "k", "v", "log_decay", "beta"})),
    "window_gdn": Fusion(("gdn_inputs", GDN.name), hides=frozenset({"q", "k", "v", "log_decay", "beta"})),
    "fused_gdn": Fusion(
        ("gdn_inputs", GDN.name), exact=False, hides=frozenset({"q", "k", "v", "log_decay", "beta"})),
}  # fmt: skip


Op = TypeVar("Op", bound=Callable[..., object])


def fuses(**parts: Callable[..., object]) -> Callable[[Op], Op]:
    """Mark an op, as a decorator: it gives what these parts give."""

    def mark(op: Op) -> Op:
        op.fuses = op, parts  # type: ignore[attr-defined]
        return op

    return mark


def wholes(*parts: str) -> list[str]:
    """List the fusions that would still run in place of one of these ops."""
    return [name for name, fusion in FUSIONS.items() if not set(parts).isdisjoint(fusion.parts)]


def exact_of(ops: Ops) -> tuple[str, ...]:
    """Name the fusions of an op set that promise the bits of their parts."""
    return tuple(name for name, fusion in FUSIONS.items() if fusion.exact and getattr(ops, name) is not None)


def in_parts(ops: Ops) -> Ops:
    """Return the op set without its exact fusions: their parts run, with the same bits."""
    return replace(ops, **dict.fromkeys(exact_of(ops)))  # type: ignore[arg-type]


def inside_of(ops: Ops) -> frozenset[str]:
    """Name the components that cannot be shown with this op set, even when it is watched."""
    return frozenset().union(*(
        fusion.hides for name, fusion in FUSIONS.items() if not fusion.exact and getattr(ops, name) is not None
    ))  # fmt: skip


# ---- the compositions

def add_norm(
    ops: Ops, *, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float, to: tuple[Place, Place]
) -> AddNorm:
    """Run `MakeAddNorm`, or its parts."""
    if ops.add_norm is not None:
        return ops.add_norm(x=x, y=y, weight=weight, eps=eps, to=to)
    total = ops.add(x=x, y=y, to=to[0])
    return AddNorm(total, ops.norm(x=total, weight=weight, eps=eps, to=to[1]))


def conv_inputs(
    ops: Ops, *, x: torch.Tensor, weight: torch.Tensor, parts: tuple[Part, ...], a: torch.Tensor, b: torch.Tensor,
    A_log: torch.Tensor, dt_bias: torch.Tensor, key_heads: int, key_dim: int, to: tuple[Place, ...],
    bounds: Bounds = NONE,
) -> GdnInputs:  # fmt: skip
    """Run `ConvInputs`, or its parts."""
    gates = {"a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias}
    heads = {"key_heads": key_heads, "key_dim": key_dim}
    if ops.conv_inputs is not None and not bounds:
        return ops.conv_inputs(x=x, weight=weight, parts=parts, **gates, **heads, to=to)  # type: ignore[arg-type]
    mixed = ops.conv(x=x, weight=weight, parts=parts, to=to[0])
    return ops.gdn_inputs(mixed=mixed, **gates, **heads, to=to[1:], **bounds)  # type: ignore[arg-type]


def draft_inputs(
    ops: Ops, *, tokens: torch.Tensor, table: torch.Tensor, hidden: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor], eps: float, to: tuple[Place, Place, Place, Place],
) -> torch.Tensor:  # fmt: skip
    """Run `DraftInputs`, or its parts."""
    if ops.draft_inputs is not None:
        return ops.draft_inputs(tokens=tokens, table=table, hidden=hidden, weights=weights, eps=eps, to=to)
    embedding = ops.embed(tokens=tokens, table=table, to=to[0])
    left = ops.norm(x=embedding, weight=weights[0], eps=eps, to=to[1])
    right = ops.norm(x=hidden, weight=weights[1], eps=eps, to=to[2])
    return ops.concat(x=left, y=right, to=to[3])


def gated_attend(
    ops: Ops, *, query: torch.Tensor, pages: Pages, projected: torch.Tensor, to: tuple[Place, Place]
) -> torch.Tensor:
    """Run `GatedAttend`, or its parts."""
    if ops.gated_attend is not None:
        return ops.gated_attend(query=query, pages=pages, projected=projected, to=to)
    attended = ops.attend(query=query, pages=pages, to=to[0])
    return ops.output_gate(attended=attended, projected=projected, to=to[1])


def head_pick(ops: Ops, *, x: torch.Tensor, weight: torch.Tensor, to: tuple[Place, Place]) -> torch.Tensor:
    """Run `HeadPick`, or its parts."""
    if ops.head_pick is not None:
        return ops.head_pick(x=x, weight=weight, to=to)
    return ops.pick(logits=ops.lm_head(x=x, weight=weight, to=to[0]), to=to[1])


def kv_inputs(
    ops: Ops, *, projected: torch.Tensor, key_raw: torch.Tensor, positions: torch.Tensor, q_norm: torch.Tensor,
    k_norm: torch.Tensor, eps: float, rotary_dim: int, theta: float, value: torch.Tensor,
    pools: tuple[Units, Units], locations: torch.Tensor, to: tuple[Place, Place],
) -> torch.Tensor:  # fmt: skip
    """Run `KvInputs`, or its parts; pools with scales always use the parts."""
    norms = {"q_norm": q_norm, "k_norm": k_norm, "eps": eps, "rotary_dim": rotary_dim, "theta": theta}
    rows = {"projected": projected, "key_raw": key_raw, "positions": positions}
    if ops.kv_inputs is not None and all(pool.scales is None for pool in pools):
        return ops.kv_inputs(
            **rows, **norms, value=value, pools=(pools[0].pool, pools[1].pool), locations=locations, to=to,  # type: ignore[arg-type]
        )  # fmt: skip
    query, key = ops.attention_inputs(**rows, **norms, to=to)  # type: ignore[arg-type]
    for each, kept in zip((key, value), pools, strict=True):
        store_rows(ops, rows=each, units=kept, locations=locations)
    return query


def store_rows(ops: Ops, *, rows: torch.Tensor, units: Units, locations: torch.Tensor) -> None:
    """Store rows in a pool, with scales if it has them."""
    scaled = {} if units.scales is None else {"scales": units.scales}
    ops.store_rows(rows=rows, pool=units.pool, locations=locations, **scaled)


def linears(
    ops: Ops, *, x: torch.Tensor, weight: torch.Tensor, shapes: Shapes, to: tuple[Place, ...]
) -> tuple[torch.Tensor, ...]:
    """Run `Linears`, or its parts."""
    if ops.linears is not None:
        return ops.linears(x=x, weight=weight, shapes=shapes, to=to)
    weights = torch.split(weight, [math.prod(shape) for shape in shapes])
    return tuple(
        ops.linear(x=x, weight=part, shape=shape, to=place)
        for part, shape, place in zip(weights, shapes, to, strict=True)
    )


def moves(ops: Ops, *, pairs: tuple[Moved, ...]) -> None:
    """Run `Moves`, or its parts."""
    if ops.moves is not None:
        ops.moves(pairs=pairs)
        return
    for pair in pairs:
        ops.move(source=pair.source, target=pair.target)


def window_gdn(
    ops: Ops, *, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor,
    key_heads: int, key_dim: int, parts: tuple[Part, ...], dtype: torch.dtype, to: tuple[Place, ...],
) -> torch.Tensor:  # fmt: skip
    """Run `WindowGdn` if it `serves_windows`, or else its parts."""
    rule = {"a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias, "key_heads": key_heads, "key_dim": key_dim}
    if ops.window_gdn is not None and serves_windows(parts, mixed.dtype):
        return ops.window_gdn(mixed=mixed, **rule, parts=parts, dtype=dtype, to=to)  # type: ignore[arg-type]
    inputs = ops.gdn_inputs(mixed=mixed, **rule, to=to[:-1])  # type: ignore[arg-type]
    return ops.gdn(inputs=inputs, parts=parts, dtype=dtype, to=to[-1])


def serves_windows(parts: tuple[Part, ...], dtype: torch.dtype) -> bool:
    """Whether `WindowGdn` supports rows in this dtype of these parts. 32-bit rows gain nothing from it."""
    chains = len(parts) > 0 and all(part.form == "window" and part.parents is None for part in parts)
    return chains and dtype.itemsize == 2


def verify_gdn(
    ops: Ops, *, x: torch.Tensor, weight: torch.Tensor, windows: tuple[Part, ...], a: torch.Tensor, b: torch.Tensor,
    A_log: torch.Tensor, dt_bias: torch.Tensor, key_heads: int, key_dim: int, parts: tuple[Part, ...],
    dtype: torch.dtype, to: tuple[Place, ...], row: Recurrence = GDN, bounds: Bounds = NONE,
) -> torch.Tensor:  # fmt: skip
    """Run `VerifyGdn` if `serves_verify`; else the conv and `WindowGdn` if `serves_windows`; else the parts.

    bounds: `beta_bound` of `MakeGdnInputs`, if it is not 1; then the parts
    """
    rule = {"a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias, "key_heads": key_heads, "key_dim": key_dim}
    if ops.verify_gdn is not None and row is GDN and not bounds and serves_verify(windows, parts, x.dtype):
        return ops.verify_gdn(x=x, weight=weight, windows=windows, **rule, parts=parts, dtype=dtype, to=to)  # type: ignore[arg-type]
    if ops.window_gdn is not None and row is GDN and not bounds and serves_windows(parts, x.dtype):
        mixed = ops.conv(x=x, weight=weight, parts=windows, to=to[0])
        return ops.window_gdn(mixed=mixed, **rule, parts=parts, dtype=dtype, to=to[1:])  # type: ignore[arg-type]
    inputs = conv_inputs(ops, x=x, weight=weight, parts=windows, **rule, to=to[:-1], bounds=bounds)  # type: ignore[arg-type]
    return ops.recurrence(row)(inputs=inputs, parts=parts, dtype=dtype, to=to[-1])


def serves_verify(windows: tuple[Part, ...], parts: tuple[Part, ...], dtype: torch.dtype) -> bool:
    """Whether `VerifyGdn` supports rows in this dtype of these parts."""
    return serves_windows(windows, dtype) and serves_windows(parts, dtype) and all(map(apart, windows))


def apart(part: Part) -> bool:
    """Return whether windows are kept after every row, outside of the memory that they are read from."""
    if part.store is not None or part.per_row is None:
        return False
    (begin, end), (first, last) = _span(part.per_row.pool), _span(part.read.pool)
    return end <= first or last <= begin


def _span(pool: torch.Tensor) -> tuple[int, int]:
    """Return the first and last address of its memory: tensors may share memory with different beginnings."""
    memory = pool.untyped_storage()
    return memory.data_ptr(), memory.data_ptr() + memory.nbytes()


def prefill_gdn(
    ops: Ops, *, x: torch.Tensor, weight: torch.Tensor, windows: tuple[Part, ...], a: torch.Tensor, b: torch.Tensor,
    A_log: torch.Tensor, dt_bias: torch.Tensor, key_heads: int, key_dim: int, parts: tuple[Part, ...],
    dtype: torch.dtype, to: tuple[Place, ...], row: Recurrence = GDN, bounds: Bounds = NONE,
) -> torch.Tensor:  # fmt: skip
    """Run `FusedGdn` if there is one, `PrefillGdn` if it `serves_prompts`, or else the composition of `verify_gdn`."""
    if ops.fused_gdn is not None and row is GDN and not bounds:
        mixed = ops.conv(x=x, weight=weight, parts=windows, to=to[0])  # [N, C]
        return ops.fused_gdn(mixed=mixed, a=a, b=b, A_log=A_log, dt_bias=dt_bias, key_heads=key_heads,
                             key_dim=key_dim, parts=parts, dtype=dtype, to=to[-1])  # fmt: skip
    given = {"x": x, "weight": weight, "windows": windows, "a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias,
             "key_heads": key_heads, "key_dim": key_dim, "parts": parts, "dtype": dtype, "to": to}  # fmt: skip
    if ops.prefill_gdn is not None and row is GDN and not bounds and serves_prompts(ops, (*windows, *parts), dtype):
        return ops.prefill_gdn(**given)  # type: ignore[arg-type]
    return verify_gdn(ops, **given, row=row, bounds=bounds)  # type: ignore[arg-type]


def serves_prompts(ops: Ops, parts: tuple[Part, ...], dtype: torch.dtype) -> bool:
    """Return whether no dropped bit would be read: the products of every part round q and k to bf16 first."""
    said = ops.products.get("gdn.chunk")
    prompts = {part.form for part in parts} == {"chunk"} and all(part.per_row is None for part in parts)
    return prompts and dtype.itemsize == 2 and said is not None and said.format == "bf16"


def stored(activation: torch.dtype) -> tuple[torch.dtype, ...]:
    """Dtypes of q, k, v, log_decay and beta inside the op: q and k as products read them; v unchanged."""
    return torch.bfloat16, torch.bfloat16, activation, torch.float32, torch.float32
