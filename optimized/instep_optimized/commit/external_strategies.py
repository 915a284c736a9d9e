"""Strategies from an op set: anything that is no valid strategy is refused in one line, before an allocation.

It checks what is known before an event runs: names, pools, methods, the table. Leaves out: the calls of a strategy; the
harness judges those.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import torch

from instep_reference.contract.errors import BadInput

from ..memory.budget import Component
from ..memory.pool import Demand
from ..ops.op_protocols import Ops
from ..ops.watch_op_calls import OPS
from .base import ACTIONS, CommitStrategy, StrategySpec, Table, Which

METHODS = ("bind", "commit", "peek", "restore", "claim")
OPTION: Mapping[Component, str] = {"state": "--strategy", "conv": "--conv"}  # of components whose strategy is chosen
BATCHED = ("prefill", "verify", "decode", "commit")  # actions in which a request has a row in a batch
COUNTED: Mapping[str, tuple[Which, ...]] = {
    "slot": ("slot",), "row": ("row",), "request": ("request",), "page": ("written", "owned"),
}


def checked(ops: Ops, ours: Sequence[str]) -> Mapping[str, StrategySpec]:
    """Return the keepers of an op set, if each is a strategy with a unique name. ours: names that are taken."""
    forms: dict[str, Any] = {}
    for name, keeper in ops.keepers.items():
        what = f"keepers of the op set {ops.name!r}"
        if not isinstance(name, str) or name in ours or not name or name != name.strip() or name.startswith("-"):
            raise BadInput(what, found=f"the name {name!r}", expected=f"a name other than {', '.join(ours)}")
        if not isinstance(keeper, StrategySpec) or keeper.component not in OPTION:
            raise BadInput(what, found=f"{name!r}: {keeper!r}"[:120], expected="a `StrategySpec` of state or conv")
        for op, form in keeper.ops.items():
            if op in OPS or forms.setdefault(op, form) is not form:
                raise BadInput(f"{what}: {name}", found=f"an op {op!r}, as another one is called",
                               expected="a name that no other op has")  # fmt: skip
    for op, form in ops.own.items():
        if op in OPS or not callable(form):
            raise BadInput(f"own of the op set {ops.name!r}", found=f"{op!r}, {form!r}",
                           expected="an op under a name that no other op has")  # fmt: skip
    return ops.keepers


def demanded(name: str, spec: StrategySpec, demands: Any) -> tuple[Demand, ...]:
    """Return the pools that a strategy demands, if it gave a valid tuple."""
    what = f"{OPTION.get(spec.component, spec.component)} {name}: demands"
    if not isinstance(demands, Sequence) or not all(isinstance(demand, Demand) for demand in demands):
        raise BadInput(what, found=repr(demands)[:80], expected="a tuple of `Demand`")
    for demand in demands:
        whole = (demand.units, *demand.layers, *demand.shape)
        right = demand.by in COUNTED and demand.units > 0 and isinstance(demand.dtype, torch.dtype) and all(
            isinstance(size, int) and size >= 0 for size in whole
        )  # fmt: skip
        if not right:
            expected = "units by slot, row, page or request; sizes that are whole numbers; a dtype"
            raise BadInput(what, found=f"{demand!r}"[:200], expected=expected)
    return tuple(demands)


def distinct(demands: Sequence[Demand]) -> tuple[Demand, ...]:
    """Return all pools of an engine, if their names are unique."""
    names = [demand.name for demand in demands]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise BadInput("pools", found=f"two with the name {twice[0]!r}", expected="a different name for every pool of "
                       "the engine, of the commit strategy and of the conv form")  # fmt: skip
    return tuple(demands)


def made(name: str, spec: StrategySpec, strategy: Any, demands: Sequence[Demand]) -> CommitStrategy:
    """Return a strategy as it was made, if it has the methods, and a table of its own pools."""
    what, kind = f"{OPTION.get(spec.component, spec.component)} {name}", type(strategy).__name__
    missing = [method for method in METHODS if not callable(getattr(strategy, method, None))]
    if missing:
        without = f"a {kind} without {', '.join(missing)}"
        raise BadInput(what, found=without, expected=f"the methods {', '.join(METHODS)}")
    may = getattr(strategy, "may", None)
    if not isinstance(may, Mapping) or not all(isinstance(regions, Mapping) for regions in may.values()):
        raise BadInput(f"{what}: may", found=repr(may)[:80], expected="action -> pool -> which units")
    for said in _wrong(may, {demand.name: demand for demand in demands}):
        raise BadInput(f"{what}: may", found=said[0], expected=said[1])
    found: CommitStrategy = strategy
    return found


def _wrong(may: Table, pools: Mapping[str, Demand]) -> Iterator[tuple[str, str]]:
    """Find impossible entries of a table: (the entry, the allowed ones)."""
    for action, regions in may.items():
        if action not in ACTIONS:
            yield f"the action {action!r}", f"one of {', '.join(ACTIONS)}"
        for region, which in regions.items():
            if region not in pools:
                yield f"{action}: the pool {region!r}", f"a pool that it demands: {', '.join(pools)}"
            elif which not in COUNTED[pools[region].by]:
                either = " or ".join(COUNTED[pools[region].by])
                yield f"{action}: {region} by {which!r}", f"{either}, as its units are counted by {pools[region].by}"
            elif which == "row" and action not in BATCHED:
                yield f"{action}: {region} by row", f"batch rows in {', '.join(BATCHED)} alone"


assert {which for each in COUNTED.values() for which in each} == set(get_args(Which))
