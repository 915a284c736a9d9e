"""Forwards: with prefill chunks and rows of any other kind, or of windows and decodes alone.

Only the target of a forward with chunks may run in a graph, in segments. In a forward without chunks a decode has the
rows of a window. So a proposer that finds nothing for some requests costs neither a second pass over the weights nor a
forward outside of graphs. Leaves out: graphs of prompts (`graphs/prompt_segments.py`), the bodies
(`round_for_step_count.py`), and the bookkeeping of requests (`engine.py`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from instep_reference.contract.engine import Row

from .commit.parts_of_chunks import PartsOfChunks
from .commit.strategy_pair import BoundPair, CommitPair
from .commit.verified_windows import keep_tail, keep_window
from .commit.write_set import width_of
from .draft.drafter_protocol import PickRows
from .memory import Memory
from .memory.saved_states import Kept, Peeked
from .memory.tiled_units import shown
from .model import Model
from .model.trunk import STAGE
from .ops.op_protocols import Ops
from .packed_batch import Batch, Span, TargetRows, begins_of, pack, parents_of
from .request_record import Request
from .round_for_step_count import BESIDE
from .sampling_inputs import Drawing, in_units
from .transfer.to_device import ints, sent

RunTarget = Callable[[Ops, Batch, BoundPair], TargetRows]


@dataclass(frozen=True)
class Planned:
    """A span of a forward and its request.

    begin   of a prefill: how many tokens of the prompt came before it
    """

    row: Row
    span: Span
    request: Request
    begin: int

    @property
    def forced(self) -> int:
        """Root to use after it; -1: the target's own choice."""
        return -1 if self.row.root is None else self.row.root

    @property
    def rooted(self) -> bool:
        """Return whether a root follows: after a decode row and after the last chunk of a prompt."""
        end = self.begin + self.span.count
        return self.span.kind == "decode" or (self.span.kind == "prefill" and end == len(self.request.prompt))

    @property
    def asked(self) -> int:
        """Number of rows, counted from its last one, for which logits are needed."""
        return self.span.count if self.span.kind == "verify" else int(self.rooted)

    def known(self, behind: int) -> int:
        """Return the prompt token `behind` places after the last row; -1: the prompt ends earlier or a root follows."""
        at = self.begin + self.span.count - 1 + behind
        return self.request.prompt[at] if not self.rooted and at < len(self.request.prompt) else -1

    def cuts(self, every: int) -> dict[int, str]:
        """Return the rows of a chunk after which a prefix inside it ends -> the name of the prefix."""
        first = every - self.begin % every
        ends = range(first, self.span.count, every)
        return {end: under for end, under in zip(ends, self.row.inner, strict=False) if under}

    def ran(self) -> None:
        """Record the launch of the forward: a verified window waits for its commit, all other rows are committed."""
        if self.span.kind == "verify":
            self.request.row = self.span.row
        else:
            self.request.length.add(self.span.count)
            self.request.rooted = self.rooted


class Inner(NamedTuple):
    """A prefix that ends inside a chunk.

    tokens  how many it has;  peeked: the blocks after them
    final   [D]: the target's row of the last one;  tail [n, D]: those before it, with several MTP layers; None: none
    """

    under: str
    planned: Planned
    tokens: int
    peeked: Peeked
    final: torch.Tensor
    tail: torch.Tensor | None


def planned(row: Row, number: int, request: Request) -> Planned:
    """Plan one row of a forward, the `number`-th of the batch."""
    prefill = row.kind == "prefill"
    begin = request.length.exact if prefill else 0
    span = Span(row.request, row.kind, width_of(row, request), number, fresh=prefill and not begin)
    return Planned(row, span, request, begin)


def forward(
    ops: Ops, model: Model, commit: CommitPair, plan: Sequence[Planned], num_steps: int, every: int | None,
    replay: RunTarget | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[Inner]]:
    """Run a forward -> own choices, roots, final rows, prefixes inside chunks.

    own choices: the target's, at every row that needs logits, in batch order; roots: those that are now in force; final
    rows: the target's [N, D].
    num_steps: the step count in force. A draft extend may depend on it (`draft/vanilla.py`).
    every: the interval at which prefixes are tracked, None: none is
    replay: runs the target in the segments of a graph; None: it runs eagerly
    """
    memory, target, spans = model.memory, replay or model.trunk, [planned.span for planned in plan]
    batch = pack(ops, memory, spans, torch.cat([_tokens(p, memory) for p in plan]))
    bound, begins = commit.bind(ops, batch), begins_of(spans)
    cuts = {p.row.request: its for p in plan if (its := p.cuts(every or 1))}
    parts = PartsOfChunks(spans, {name: list(its) for name, its in cuts.items()}, memory.device) if cuts else None
    rows = target(ops, batch, bound if parts is None else parts.bind(bound))
    final = rows.final  # [N, D]
    bound.ran(ops)
    inner = [
        Inner(under, p, p.begin + cut, parts.taken(p.row.request, cut), final[begin + cut - 1],
              _tail(memory, p, final[begin:], cut))
        for p, begin in zip(plan, begins, strict=True) if parts is not None
        for cut, under in cuts.get(p.row.request, {}).items()
    ]
    asked = [row for p, begin in zip(plan, begins, strict=True) for row in _last(begin, p.span.count, p.asked)]
    # lm_head is wide: it runs only on the rows whose logits are needed.
    picks = _select(ops, final, asked)  # [M, D]
    own = _own(ops, model, picks, plan) if asked else ints((), final.device)

    # Packed row -> its place among the rows that needed logits.
    said = dict(zip(asked, range(len(asked)), strict=True))
    _keep(ops, memory, plan, begins, said, own, rows)
    committed = [(p, begin) for p, begin in zip(plan, begins, strict=True) if p.span.kind != "verify"]
    rooted = [(p, said[begin + p.span.count - 1]) for p, begin in committed if p.rooted]
    # The roots are written before the extend, which reads them after the last rows.
    roots = _root(ops, memory, [p for p, _ in rooted], _select(ops, own, [place for _, place in rooted]))
    if committed:
        _extend(ops, model, [p for p, _ in committed], _select(
            ops, rows.fed, [row for p, begin in committed for row in range(begin, begin + p.span.count)]
        ), num_steps)
    return own, roots, final, inner


def extend_prefix(ops: Ops, model: Model, request: Request, kept: Kept, num_steps: int) -> None:
    """Run the draft extend over a loaded prefix's last rows, with the tokens that follow in this prompt."""
    assert kept.final is not None, "it is a prefix"
    if model.drafter is not None and not model.drafter.layers:  # no memory of it depends on later tokens
        model = replace(model, drafter=None)
    final = torch.cat((*map(shown, kept["tail"].values()), kept.final[None]))
    row, begin = Row(request.name, "prefill"), request.length.exact - len(final)
    _extend(ops, model, [Planned(row, Span(row.request, "prefill", len(final)), request, begin)], final, num_steps)


def _tail(memory: Memory, planned: Planned, rows: torch.Tensor, cut: int) -> torch.Tensor | None:
    """Return the target's rows before the last one of the prefix that ends after the first `cut` rows of a chunk.

    rows: those of the chunk and what follows. Rows before the chunk are still in the slot table, as no extend has run.
    """
    line, end = memory.slot_table.tail, planned.begin + cut - 1
    first = max(0, end + 1 - len(memory.layers("draft_keys")))
    if line is None or first == end:
        return None
    mine = line[memory.slots.of(planned.span.request)]
    return torch.stack([rows[p - planned.begin] if p >= planned.begin else mine[p % len(mine)]
                        for p in range(first, end)])  # fmt: skip


def _own(ops: Ops, model: Model, final: torch.Tensor, plan: Sequence[Planned]) -> torch.Tensor:
    """Compute the target's own choice after every row that needs logits; single rows are one-node windows."""
    asking, memory = [p for p in plan if p.asked], model.memory
    width = max(p.asked for p in asking)
    units = in_units([p.row for p in asking], width)
    if not units:
        return model.trunk.head.pick(ops, final, STAGE)
    counts = [p.asked for p in asking]
    slots, begin, count, flat = sent([
        [memory.slots.of(p.span.request) for p in asking], [0, *accumulate(counts)][:-1], counts,
        [number for numbers in units for number in numbers],
    ], memory.device)
    uniforms = flat.view(len(asking), width + 1)
    return model.trunk.head.draw(ops, final, Drawing(
        ops.select(x=memory.slot_table.window[:, :width], index=slots), parents_of(ops, memory, slots, width), begin,
        count,
        ops.select(x=memory.slot_table.sampling, index=slots), uniforms[:, :-1], uniforms[:, -1],
    ), STAGE)


def _keep(
    ops: Ops, memory: Memory, plan: Sequence[Planned], begins: Sequence[int], said: dict[int, int], own: torch.Tensor,
    answered: TargetRows,
) -> None:
    """Keep the verified windows in the slot table. Trees are kept to the last column of the table."""
    verified = [(p, begin) for p, begin in zip(plan, begins, strict=True) if p.span.kind == "verify"]
    if not verified:
        return
    table = memory.slot_table
    width = max(p.span.count for p, _ in verified) if table.parents is None else table.parents.shape[1]
    rows = [
        begin + node if node < p.span.count else -1 for p, begin in verified for node in range(width)
    ]
    keep_window(
        ops, table, _slots(memory, (p for p, _ in verified)), _select(ops, own, [said.get(row, -1) for row in rows]),
        TargetRows(*(None if x is None else _select(ops, x, rows) for x in answered)), width,  # type: ignore[arg-type]
    )


def _root(ops: Ops, memory: Memory, rooted: Sequence[Planned], own: torch.Tensor) -> torch.Tensor:
    """Choose the roots, and write them into the requests' windows."""
    if not rooted:
        return own
    roots = ops.choose(own=own, forced=ints([p.forced for p in rooted], own.device))
    ops.store_rows(rows=roots, pool=memory.slot_table.window[:, :1], locations=_slots(memory, rooted))
    return roots


def _extend(ops: Ops, model: Model, committed: Sequence[Planned], hidden: torch.Tensor, num_steps: int) -> None:
    """Run the draft extend over the committed rows, then grow their lengths."""
    memory, drafter, spans = model.memory, model.drafter, [replace(p.span, kind="draft") for p in committed]
    slots = _slots(memory, committed)
    if drafter is not None:
        batch = pack(ops, memory, spans, torch.cat([_following(p, memory) for p in committed]))
        asked = [_pick_rows(memory, committed, layer, drafter.layers) for layer in range(drafter.layers)]
        drafter.extend(ops, memory, batch, hidden, asked, num_steps)
        if memory.slot_table.tail is not None:
            ends = [begin + span.count for begin, span in zip(begins_of(spans), spans, strict=True)]
            # Only the last rows of a long chunk: its line in the slot table is no longer than that.
            newest = [row for end, span in zip(ends, spans, strict=True)
                      for row in range(end - min(span.count, drafter.layers), end)]  # fmt: skip
            keep_tail(ops, memory, batch, hidden, ints(newest, slots.device))
    ops.advance(length=memory.slot_table.length, slots=slots, by=ints([span.count for span in spans], slots.device))


def _pick_rows(memory: Memory, committed: Sequence[Planned], layer: int, layers: int) -> PickRows:
    """Select the requests for which MTP layer `layer` picks a token.

    It picks for every request whose root is known. The next layer reads, for a request's last row, the token that is
    `layer` + 2 places after the row's own. If the prompt is unfinished and has that token, it is known and nothing is
    picked. If the prompt ends before it, the next layer uses this layer's pick.
    """
    spans, further = [p.span for p in committed], layer + 1 < layers
    ends = [begin + span.count - 1 for begin, span in zip(begins_of(spans), spans, strict=True)]
    known = [p.known(layer + 2) if further else -1 for p in committed]
    picks = [number for number, p in enumerate(committed) if p.rooted or (further and known[number] < 0)]
    kept = [memory.slots.of(p.span.request) if p.rooted else -1 for p in committed]
    last, slots, places, behind = sent([
        [ends[number] for number in picks], [kept[number] for number in picks],
        [picks.index(number) if number in picks else -1 for number in range(len(committed))], known,
    ], memory.device)
    return PickRows(last, slots, places, behind) if further else PickRows(last, slots)


def _tokens(planned: Planned, memory: Memory) -> torch.Tensor:
    """Return the tokens that a span runs on: the next ones of the prompt, or those in the slot's window."""
    span, request = planned.span, planned.request
    if span.kind == "prefill":
        return request.tokens[planned.begin : planned.begin + span.count]
    return memory.slot_table.window[memory.slots.of(span.request), : span.count]


def _following(planned: Planned, memory: Memory) -> torch.Tensor:
    """Return for each row the token one place after its own: of the prompt, or the root after the last row."""
    root = memory.slot_table.window[memory.slots.of(planned.span.request), :1]
    if planned.span.kind == "decode":
        return root
    known = planned.request.tokens[planned.begin + 1 : planned.begin + planned.span.count + 1]
    return torch.cat([known, root]) if planned.rooted else known


def _slots(memory: Memory, plan: Iterable[Planned]) -> torch.Tensor:
    return ints([memory.slots.of(planned.span.request) for planned in plan], memory.device)


def _select(ops: Ops, x: torch.Tensor, index: Sequence[int]) -> torch.Tensor:
    return ops.select(x=x, index=ints(index, x.device))


def _last(begin: int, count: int, asked: int) -> range:
    return range(begin + count - asked, begin + count)


WINDOWS, DECODES = frozenset(("verify",)), frozenset(("decode",))
BOTH = WINDOWS | DECODES


@dataclass(frozen=True)
class Forwards:
    """run: runs one body in the engine;  width: packed rows of the widest window"""

    run: Callable[..., Any]
    width: int

    def windows(self, plan: Sequence[Planned]) -> torch.Tensor:
        """Run windows -> the target's own choice at every row, in batch order."""
        own: torch.Tensor = self._run("verify", plan, (), self.width).picks.flatten()
        shorter = any(p.span.count < self.width for p in plan)
        return own[self._spots(plan, own.device)] if shorter else own

    def decodes(self, plan: Sequence[Planned]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run decodes -> the target's own choices, and the roots that are now in force."""
        own, roots = self._run("decode", plan, [[p.forced] for p in plan], 1)
        return own, roots

    def both(self, plan: Sequence[Planned]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run both -> own choices at every row, in batch order, and the roots of the decodes.

        The results are those of `forward`.
        """
        kinds = [p.span.kind for p in plan]
        picks, roots = self._run(BESIDE, plan, [[p.forced] for p in plan], self.width, kinds)
        decoded = [number for number, kind in enumerate(kinds) if kind == "decode"]
        return picks.flatten()[self._spots(plan, picks.device)], roots[ints(decoded, roots.device)]

    def _spots(self, plan: Sequence[Planned], device: torch.device) -> torch.Tensor:
        """Locate the rows that are used among those of windows of full width."""
        return ints([number * self.width + row for number, p in enumerate(plan) for row in range(p.span.count)], device)

    def _run(
        self, kind: str, plan: Sequence[Planned], forced: Sequence[Sequence[int]], width: int,
        kinds: Sequence[str] = (),
    ) -> Any:
        return self.run(kind, [p.request for p in plan], forced, rows=[p.span.row for p in plan],
                        uniforms=in_units([p.row for p in plan], width), kinds=kinds)  # fmt: skip
