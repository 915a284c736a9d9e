"""A trace in stamps through an engine: T0, T1 and the check `stream`, without a reference.

The check says which request, up to which position, every state, conv window and value holds. There are two levels.
`model`: the model made by hand; values and states are rounded to the nearest label before they are compared. `op`: the
inputs of the delta rule are rounded to labels first (`exact`), so every state must be right to the bit. Leaves out:
keys, gates and numbers.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
import torch
from torch.nn import functional as F

from instep_optimized.ops.op_protocols import GdnInputs, Ops
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.place_names import memory_place

from ...checks.check_interface import slot_of
from ...checks.trace_bookkeeping import Identity
from ...checks.unchanged_bytes import Bytes
from ...diagnose import explain_outcome
from ...finding_problem import Problem
from ...run.large_model import outcome
from ...run.lockstep import Progress
from ...run.replay import Outcome
from ...setting import Setting
from ...trace.file import Trace
from ...verdict import Comparison, Tier
from ...watch.digests import bits
from ...watch.event_context import EventContext
from .stamped_trace import KEYS, USUAL, WIDTH, Held, Labelled, Stamp, code, decoded, relabelled, stream_checkpoint


class Stream:
    """Checks after every event all requests that are not in flight; of requests in flight only the values."""

    name = "stream"
    tier = Tier.IDENTITY

    def __init__(self, labelled: Labelled, config: ModelConfig, *, exact: bool) -> None:
        self.labelled, self.config, self.exact = labelled, config, exact
        self.longest: dict[str, tuple[int, ...]] = {}  # request -> all tokens that it may have taken in so far

    def __call__(self, context: EventContext) -> Iterator[Comparison]:
        held = self.labelled.held[context.index]
        for name, one in held.items():
            self.longest[name] = max((*one.tokens[: one.length], *one.window), self.longest.get(name, ()), key=len)
        for name, one in held.items():
            state = context.subject.after[name]
            if name not in context.expected.flying:
                for layer, found in state.conv.items():
                    yield self._judged(context, name, one, "conv", layer, self._window(found))
                for layer, found in state.state.items():
                    yield self._judged(context, name, one, "state", layer, found)
            for layer, found in state.values.items():
                if one.length:
                    yield self._judged(context, name, one, "values", layer, found)
            for layer, found in state.draft_values.items():
                if one.length:
                    yield self._judged(context, name, one, "draft_values", layer, found)

    def _window(self, conv: torch.Tensor) -> torch.Tensor:
        """A conv window [C, W-1] -> its rows as values of the delta rule [W-1, HV, V]"""
        values = F.silu(conv[2 * self.config.key_heads * self.config.key_dim :].float())
        return values.T.reshape(-1, self.config.value_heads, self.config.value_dim)

    def _judged(
        self, context: EventContext, name: str, one: Held, component: str, layer: int, found: torch.Tensor
    ) -> Comparison:
        exact = self.exact and component == "state"
        kept = found.float() if exact else found.float().round() + 0.0  # without the sign of a zero
        right = Content(component, layer, found.shape, self.config.conv_width - 1)
        wanted = right.of(one.tokens, one.length)
        alike = kept.shape == wanted.shape
        wrong = (bits(kept) != bits(wanted)).any(-1) if alike else torch.ones(1, dtype=torch.bool)
        slot = slot_of(context, name)
        said = self._sentence(right, kept, wanted, name, one) if wrong.any() else ""
        where = f"slot {slot}" if component in ("conv", "state") else f'the cache of "{name}"'
        return Comparison(
            self.name, self.tier, context.index, context.kind, memory_place(component, layer),
            elements=kept.numel(), worst=float(wrong.sum()), allowed=0.0, request=name, slot=slot,
            problem=Problem("differs", f"{where} {said}") if said else None,
        )  # fmt: skip

    def _sentence(self, right: "Content", found: torch.Tensor, wanted: torch.Tensor, name: str, one: Held) -> str:
        """Name the request whose content the memory holds; without one, the first wrong row."""
        if found.shape != wanted.shape:
            return f"has shape {tuple(found.shape)}; expected {tuple(wanted.shape)}"
        due = f'expected {_upto(one.length)}'
        if found.shape[-1] == found.shape[-2] and torch.equal(found.mT, wanted):
            return "holds a transposed state"
        for other, tokens in sorted(self.longest.items(), key=lambda item: item[0] != name):
            for count in range(len(tokens) + 1) if right.component in ("conv", "state") else ():
                if torch.equal(found, right.of(tokens, count)):
                    more = due if other == name else f'expected request "{name}" {_upto(one.length)}'
                    return f'holds request "{other}" {_upto(count)}; {more}' if count else f"holds nothing; {due}"
        at = tuple(int(n) for n in (bits(found) != bits(wanted)).any(-1).nonzero()[0])
        head = right.head(at)
        held, meant = (self._said(rows[at], head, right.layer) for rows in (found, wanted))
        return f"holds {held} in head {head} where {meant} is due; {due}"

    def _said(self, row: torch.Tensor, head: int, layer: int) -> str:
        if not row.any():
            return "nothing"
        if not row.isfinite().all():
            return "what is not finite"
        stamp = decoded(row, head, layer)
        if stamp is None or stamp.request >= len(self.labelled.names):
            return "nobody's label"
        rejected = ", a rejected draft" if stamp.rejected else ""
        return f'position {stamp.position} of request "{self.labelled.names[stamp.request]}"{rejected}'


@dataclass(frozen=True)
class Content:
    """The correct content of a layer's component after `count` tokens. `shape`: of the memory.

    state [HV, K, V]: row p % 16 of every head is position p; conv [W-1, HV, V]: the last W-1 tokens;
    values [L, heads, 16]: a row per token; draft_values: the same, but head 0 holds the next token.
    """

    component: str
    layer: int
    shape: Sequence[int]
    window: int

    def of(self, tokens: Sequence[int], length: int) -> torch.Tensor:
        if self.component == "state":
            table = torch.zeros(self.shape[0], KEYS, WIDTH)
            for stamp in _stamps(tokens[max(length - KEYS, 0) : length]):
                table[:, stamp.key] = self._row(stamp, table.shape[0])
            return table
        if self.component == "conv":
            table = torch.zeros(self.window, self.shape[1], WIDTH)
            for at, stamp in enumerate(reversed(_stamps(tokens[max(length - self.window, 0) : length]))):
                table[self.window - 1 - at] = self._row(stamp, table.shape[1])
            return table
        table = torch.zeros(length, self.shape[1], WIDTH)
        for at, stamp in enumerate(_stamps(tokens[:length])):
            table[at] = self._row(stamp, table.shape[1])
            if self.component == "draft_values" and at + 1 < len(tokens):
                table[at, 0] = torch.tensor(code(Stamp.of(tokens[at + 1]), 0, self.layer))
        return table

    def head(self, at: tuple[int, ...]) -> int:
        """The head of the row at this index."""
        return at[0] if self.component == "state" else at[1]

    def _row(self, stamp: Stamp, heads: int) -> torch.Tensor:
        return torch.tensor([code(stamp, head, self.layer) for head in range(heads)], dtype=torch.float32)


def _stamps(tokens: Sequence[int]) -> list[Stamp]:
    return [Stamp.of(token) for token in tokens]


def _upto(count: int) -> str:
    return f"up to position {count - 1}" if count else "with no token yet"


Level = Literal["op", "model"]
LEVELS: tuple[Level, ...] = ("op", "model")


def streamed(
    trace: Trace, setting: Setting, level: Level, *, until: int | None = None, layers: Collection[int] | None = None,
    progress: Progress | None = None, recurrence: str = USUAL,
) -> Outcome:
    """Replay the trace in stamps. `setting`: op set, strategy and so on; layers: only these are judged.

    recurrence: that of the model, a row of the contract's table
    """
    named = msgspec.structs.replace(trace.header, name=f"{trace.header.name}, stamps, {level} level")
    labelled = relabelled(replace(trace, header=named), recurrence)
    exact = level == "op"
    served = setting.op_set()
    found = explain_outcome(outcome(
        labelled.trace, stream_checkpoint(labelled.config), setting, until=until, kept=layers, progress=progress,
        ops=labels_consumed(served) if exact else served,
        judged=(Identity(), Stream(labelled, labelled.config, exact=exact), Bytes()),  # the label before the bytes
    ))  # fmt: skip
    other = () if recurrence == USUAL else ("--recurrence", recurrence)
    history = replace(found.history, texts=())  # the text of such a model means nothing
    return replace(found, history=history, again=("instep", "streams", "--level", level, *other))


def labels_consumed(ops: Ops) -> Ops:
    """The op set with the results of `gdn_inputs` rounded: keys one-hot, values labels, beta 1, no decay."""

    def rounded(**given: Any) -> GdnInputs:
        found = ops.gdn_inputs(**given)
        return GdnInputs(*(x.round() + 0.0 for x in found))  # + 0.0 turns -0 into 0, which has other bits

    return replace(ops, name=f"{ops.name}, labels consumed", gdn_inputs=rounded)
