"""`around(ops, see)`: the one place where calls of an op set are watched.

Leaves out: the use of the results that are seen (recording, grafting and rounding are the caller's `see`).

Wrappers are applied from the inside out, in a fixed order:
  1. the op itself;
  2. the wrappers that the caller gives, in their order, each `(name, op) -> op`: contracts first, so that they judge
     the op's own arguments and results; then launch counts; then the recorder of a graph, which must hold exactly
     what is replayed;
  3. `see`, outermost. The next op receives a tensor that `see` returns, and no wrapper takes it for the op's result.
     With a `see`, the parts of exact fusions run instead of the fusions, so that every place is shown, and can be
     replaced, separately.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

import torch

from instep_reference.contract.place_names import Place, See, unseen
from instep_reference.contract.recurrences import RECURRENCES

from .fused import in_parts
from .op_protocols import Ops
from .plain.rerun_ring import keeps_updates, put_updates

Op = Callable[..., Any]
Wrapper = Callable[[str, Op], Op]

# Fields of an op set that describe it. They are not ops, so they are not wrapped.
DESCRIPTIONS = {
    "name", "types", "rounds", "keeps", "captures", "products", "once", "row_invariant", "tiled", "chances", "split",
    "packed", "trees", "bounds_beta", "bounds_decay", "sigmoid", "clamps", "keepers", "own", "scratch",
}
OPS = tuple(field.name for field in fields(Ops) if field.name not in DESCRIPTIONS)


def around(ops: Ops, see: See, *wrappers: Wrapper) -> Ops:
    """A copy of `ops` in which every call is wrapped and every named result goes through `see`."""
    if see is unseen and not wrappers:
        return ops
    ops = ops if see is unseen else in_parts(ops)
    wrapped: dict[str, Any] = {}
    for name, op in all_ops(ops).items():
        for wrapper in wrappers:
            op = wrapper(name, op)
        wrapped[name] = op
    if see is not unseen:
        look = wrapped["kept_updates"]
        wrapped = {name: _seen(op, see) for name, op in wrapped.items()}
        wrapped |= {name: _with_updates(wrapped[name], look, see) for name in wrapped.keys() & RECURRENCES.keys()}
    return with_ops(ops, wrapped)


def all_ops(ops: Ops) -> dict[str, Op]:
    """Every op that a set has, by name; then the ops that only its keepers call (`Ops.own`)."""
    return {name: op for name in OPS if (op := getattr(ops, name)) is not None} | dict(ops.own)


def with_ops(ops: Ops, others: Mapping[str, Op]) -> Ops:
    """Return the set with other ops under these names."""
    named: dict[str, Any] = {name: op for name, op in others.items() if name in OPS}
    return replace(ops, **named, own={name: others.get(name, op) for name, op in ops.own.items()})


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Find the tensors of a value: itself, or all inside a tuple, a list, a dict, or a dataclass."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from tensors_of(inner)
    elif names := _fields(value.__class__):
        for name in names:
            yield from tensors_of(getattr(value, name))
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors_of(inner)


@cache
def _fields(kind: type) -> tuple[str, ...]:
    """Field names of a dataclass; none for another type."""
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()


def memory_of(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's storage. Views of one tensor share it."""
    return tensor.untyped_storage().data_ptr()


def _with_updates(rule: Op, look: Op, see: See) -> Op:
    """Wrap the op of a recurrence, so that it also shows `see` the updates that its rings have kept.

    Updates are memory, not a result: the next step reads them there. If `see` returns other updates, they are written
    into the rings.
    """

    def call(**given: Any) -> Any:
        core, parts, rows = rule(**given), given["parts"], len(given["inputs"].q)
        if rows and keeps_updates(parts):
            place = given["to"]._replace(component="update")
            kept = look(parts=parts, rows=rows, to=place)
            shown = see(place, kept)
            if shown is not kept:
                put_updates(parts, shown)
        return core

    return call


def _seen(op: Op, see: See) -> Op:
    """Pass each result through `see` under its place in `to`. A call without `to` has no named result."""

    def call(**given: Any) -> Any:
        result = op(**given)
        to = given.get("to")
        if to is None:
            return result
        if isinstance(result, torch.Tensor):
            assert isinstance(to, Place)
            return see(to, result)
        shown = [see(place, tensor) for place, tensor in zip(to, result, strict=True)]
        return type(result)(*shown) if hasattr(result, "_fields") else tuple(shown)

    return call
