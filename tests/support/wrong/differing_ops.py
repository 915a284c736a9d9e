"""Op sets and engines whose two runs differ where they must not.

Found by the harness as `support.wrong.differing_ops:NAME`. Leaves out: faults that every run shows (`ops.py`), which a
replay finds without a relation.
"""

from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch

from instep_optimized import OptimizedEngine, load
from instep_optimized.memory_addresses import Address, Part
from instep_optimized.ops.integer_op_protocols import Acceptance, RingPlan, RowPlacement
from instep_optimized.ops.op_protocols import AddNorm, GdnInputs
from instep_reference.contract.engine import Forwarded, Row
from instep_reference.contract.place_names import See
from support.wrong.subjects import maker

PLAIN, LEDGER = load("plain"), load("ledger")
SCALES = 1 << 10  # steps of a number format with one scale for a whole tensor


def _one_scale(**given: Any) -> torch.Tensor:
    """A product whose input shares one scale, as in dynamic quantisation per tensor: every row depends on all rows."""
    x = given["x"]
    scale = x.abs().amax() / SCALES if x.numel() else 1.0
    return PLAIN.linear(**{**given, "x": (x / scale).round() * scale})


def _with(part: Part, **changes: Any) -> Part:
    return replace(part, **changes)


def _never_fresh(**given: Any) -> torch.Tensor:
    """The conv reads a window even where nothing came before."""
    parts = tuple(_with(part, fresh=torch.zeros_like(part.fresh)) for part in given["parts"])
    return PLAIN.conv(**{**given, "parts": parts})


def _always_fresh(**given: Any) -> torch.Tensor:
    """Every chunk of a prompt begins with an empty window."""
    parts = tuple(
        _with(part, fresh=torch.ones_like(part.fresh)) if part.form == "chunk" else part for part in given["parts"]
    )
    return PLAIN.conv(**{**given, "parts": parts})


def _packed(at: Address | None) -> Address | None:
    """The same units by a stride that was computed, not read."""
    if at is None or at.pool.dim() > 4:
        return at
    tight = at.pool[0].numel()
    return replace(at, pool=at.pool.as_strided(at.pool.shape, (tight, *at.pool.stride()[1:])))


def _own_stride(**given: Any) -> torch.Tensor:
    parts = tuple(_with(part, read=_packed(part.read), store=_packed(part.store)) for part in given["parts"])
    return PLAIN.gdn(**{**given, "parts": parts})


def _few_slots(**given: Any) -> torch.Tensor:
    """Slots above 3 are served by slot 3."""
    parts = tuple(_with(part, read=replace(part.read, units=part.read.units.clamp_max(3))) for part in given["parts"])
    return PLAIN.conv(**{**given, "parts": parts})


def _forgetful(**given: Any) -> RingPlan:
    """At most two kept tokens are run again."""
    planned = PLAIN.plan_ring(**given)
    return planned._replace(pending=planned.pending.clamp_max(2))


def _never_the_root(**given: Any) -> Acceptance:
    """Commit the first draft's state if everything is rejected."""
    landed = PLAIN.accept(**given)
    width = given["window"].shape[1]
    return landed._replace(last_correct_step_indices=landed.last_correct_step_indices.clamp_min(min(1, width - 1)))


def _capless(**given: Any) -> Acceptance:
    return PLAIN.accept(**{**given, "caps": None})


def _cap_with_bonus(**given: Any) -> Acceptance:
    """A cap counts the bonus, too."""
    caps = given.get("caps")
    return PLAIN.accept(**{**given, "caps": None if caps is None else (caps - 1).clamp_min(0)})


def _coarse_decode(**given: Any) -> torch.Tensor:
    """A step that stores its state takes beta in bf16, a window that keeps its tokens does not."""
    inputs: GdnInputs = given["inputs"]
    decoding = any(part.form == "window" and part.store is not None for part in given["parts"])
    if decoding:
        inputs = inputs._replace(beta=inputs.beta.bfloat16().to(inputs.beta))
    return PLAIN.gdn(**{**given, "inputs": inputs})


def _backwards(**given: Any) -> torch.Tensor:
    """Sums over the keys in another order."""
    written = import_module(PLAIN.gdn.__module__)
    with patch.object(written, "_sum_by_halves", lambda x: x.flip(-2).cumsum(-2)[..., -1, :]):
        return PLAIN.gdn(**given)


def _other_order_of_many(**given: Any) -> torch.Tensor:
    """The same where several requests are served by one launch."""
    return _backwards(**given) if any(len(part.count) > 1 for part in given["parts"]) else PLAIN.gdn(**given)


def _other_order(**given: Any) -> torch.Tensor:
    """Launches of one token sum over the keys in another order."""
    (part,) = given["parts"] if len(given["parts"]) == 1 else (None,)
    if part is None or part.form != "window" or part.most != 1:
        return PLAIN.gdn(**given)
    return _backwards(**given)


def _other_order_in_decode(**given: Any) -> torch.Tensor:
    """The same, of steps alone: a window of one token keeps its token, and stores nothing."""
    stores = any(part.store is not None for part in given["parts"])
    return _other_order(**given) if stores else PLAIN.gdn(**given)


def _narrow_move(*, source: Address, target: Address) -> None:
    """States are copied by way of bf16."""
    PLAIN.move(source=source, target=target)
    if target.pool.dtype is torch.float32 and target.pool.dim() > 3:
        target.pool[target.units] = target.pool[target.units].bfloat16().float()


def _last_of_the_layout(**given: Any) -> RowPlacement:
    """The last row of a request is the last that its window has room for."""
    placed = LEDGER.place_rows(**given)
    each = given["rows"] // max(len(given["slots"]), 1)
    return placed._replace(last=torch.where(placed.last >= 0, given["begin"] + each - 1, placed.last))


def _stuck(**given: Any) -> torch.Tensor:
    raise RuntimeError("too far")


def _never_rounded(*, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float, to: Any) -> AddNorm:
    """The sum is rounded where it is stored, but not where it is normed."""
    wide = PLAIN.norm(x=x.double() + y.double(), weight=weight, eps=eps, to=to[1])
    return AddNorm(PLAIN.add(x=x, y=y, to=to[0]), wide.to(x.dtype))


class _SinceTheBeginning:
    """Decay between two tokens as the difference of two sums since the first token: less and less of it is left."""

    def __init__(self) -> None:
        self.total = torch.zeros(0)

    def __call__(self, **given: Any) -> torch.Tensor:
        inputs: GdnInputs = given["inputs"]
        if not len(inputs.log_decay):
            return PLAIN.gdn(**given)  # a fold of what was kept
        if self.total.shape != inputs.log_decay.shape[1:] or bool(given["parts"][0].fresh.any()):
            self.total = torch.zeros_like(inputs.log_decay[0])
        sums = self.total + inputs.log_decay.cumsum(0)
        before = torch.cat([self.total[None], sums[:-1]])
        self.total = sums[-1]
        return PLAIN.gdn(**{**given, "inputs": inputs._replace(log_decay=sums - before)})


ONE_SCALE = replace(PLAIN, name="one scale", linear=_one_scale)
NEVER_ROUNDED = replace(PLAIN, name="never rounded", add_norm=_never_rounded)
NEVER_FRESH = replace(PLAIN, name="never fresh", conv=_never_fresh)
ALWAYS_FRESH = replace(PLAIN, name="always fresh", conv=_always_fresh)
OWN_STRIDE = replace(PLAIN, name="own stride", gdn=_own_stride)
FEW_SLOTS = replace(PLAIN, name="few slots", conv=_few_slots)
FORGETFUL = replace(PLAIN, name="forgetful", plan_ring=_forgetful)
CAPLESS = replace(PLAIN, name="capless", accept=_capless)
CAP_WITH_BONUS = replace(PLAIN, name="cap with bonus", accept=_cap_with_bonus)
NEVER_THE_ROOT = replace(PLAIN, name="never the root", accept=_never_the_root)
COARSE_DECODE = replace(PLAIN, name="coarse decode", gdn=_coarse_decode)
OTHER_ORDER = replace(PLAIN, name="other order", gdn=_other_order)
OTHER_ORDER_IN_DECODE = replace(PLAIN, name="other order in decode", gdn=_other_order_in_decode)
OTHER_ORDER_OF_MANY = replace(PLAIN, name="other order of many", gdn=_other_order_of_many)
NARROW_MOVE = replace(PLAIN, name="narrow move", move=_narrow_move)
LAST_OF_THE_LAYOUT = replace(LEDGER, name="last of the layout", place_rows=_last_of_the_layout)
STUCK = replace(PLAIN, name="stuck", gdn=_stuck)
SINCE_THE_BEGINNING = replace(PLAIN, name="since the beginning", gdn=_SinceTheBeginning())


class _Shy(OptimizedEngine):
    """Its probes write into what they are shown."""

    def watch(self, see: See) -> None:
        super().watch(lambda place, tensor: see(place, tensor.mul_(2) if tensor.is_floating_point() else tensor))


class _OtherLayout(OptimizedEngine):
    """With speculation a prefill leaves the channels of a state in another order."""

    def forward(self, rows: tuple[Row, ...]) -> Forwarded:
        answer = super().forward(rows)
        for row in rows if self._round.num_steps else ():
            if row.kind == "prefill":
                for layer in self._memory.layers("state"):
                    unit = self._memory["state"].units(layer)[self._memory.slots.of(row.request)]
                    unit.copy_(unit.flip(-2))
        return answer


shy, other_layout = maker(_Shy), maker(_OtherLayout)
