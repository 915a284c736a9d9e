"""Everything that depends on the step count, in one object. One is built per candidate; one assignment switches.

Each event here is a *body*: it consists of ops and views only, on tensors of the device. So the same body runs eagerly
or in a graph. Leaves out: the choice of a step count (`controllers/`), and the body that a forward runs
(`forwards.py`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from .commit.base import AcceptedWindows
from .commit.strategy_pair import CommitPair
from .commit.verified_windows import gather_path, keep_tail, keep_window
from .draft.drafter_protocol import GrowsTrees, PickRows, Use, column
from .memory.component_cells import cells
from .model import Model
from .model.trunk import STAGE
from .ops.op_protocols import Ops
from .packed_batch import Batch, TargetRows, Who, nodes_of, parents_of, plan_of, windows, windows_beside_decodes
from .request_record import Request
from .sampling_inputs import Drawing
from .transfer.to_device import sent

KINDS = ("verify", "decode")  # kinds of rows that share one body
BESIDE = " and ".join(KINDS)
CAPPED = "capped commit"


class Inputs(NamedTuple):
    """The host's inputs for the B requests of an event, int64. The slot table has the rest.

    slots, rows, begin [B]  as in `Who`;  width [B]: packed rows of each request; -1: the slot table has the number
    forced [B, k]           choices that the caller makes for the engine; -1: the engine chooses. For a draft: every
                            draft token; decode: the root; commit: last accepted node, bonus, and the cap, if there
                            are caps; verify: none
    uniforms [B, k]         in units of UNIFORM: one per node, then the final one; k = 0 if no request samples
    tree [B, k]             for a draft of chains of own widths: 1 if the head runs in a step, else 0.
                            For a draft if windows may be trees: the parent of each of T nodes; -1: of the root,
                            after a window's end, or as the drafter grows it. For given trees also the index of each
                            parent among T nodes of each request, counted through all requests; the number of nodes
    kinds [B, k]            for windows mixed with decodes: the slot of a request with a window, then of one that
                            decodes; -1: it is of the other kind
    used [B, k]             for windows mixed with decodes: the packed rows of each request; -1: it does not use the row
    """

    slots: torch.Tensor
    rows: torch.Tensor
    begin: torch.Tensor
    width: torch.Tensor
    forced: torch.Tensor
    uniforms: torch.Tensor
    tree: torch.Tensor
    kinds: torch.Tensor
    used: torch.Tensor

    def who(self) -> Who:
        return Who(self.slots, self.rows, self.begin, self.width)


class Asked(NamedTuple):
    """A body that the host asks for, with the requests of the batch; what is empty has none.

    rows                            of scratch memory; None: the numbers in the batch
    forced, uniforms, tree, kinds   of each request, as in `Inputs`; kinds by their names
    join, most                      as in `Runner.run`
    """

    kind: str
    requests: Sequence[Request]
    forced: Sequence[Sequence[int]] = ()
    rows: Sequence[int | None] | None = None
    uniforms: Sequence[Sequence[int]] = ()
    tree: Sequence[Sequence[int]] = ()
    join: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None = None
    kinds: Sequence[str] = ()
    most: int = 0

    def part(self, numbers: Sequence[int], width: int) -> "Asked":
        """Pick requests by their numbers in the batch. width: T of a given tree, whose nodes are counted again"""

        def of(each: Sequence[Any]) -> Sequence[Any]:
            return [each[number] for number in numbers] if each else each

        lines = [renumbered(self.tree[n], n - at, width) for at, n in enumerate(numbers)] if self.tree else ()
        return self._replace(requests=of(self.requests), forced=of(self.forced), uniforms=of(self.uniforms), tree=lines,
                             kinds=of(self.kinds), rows=None if self.rows is None else of(self.rows))  # fmt: skip


def renumbered(line: Sequence[int], before: int, width: int) -> Sequence[int]:
    """Count the nodes of a given tree (`Inputs.tree`) without those of `before` requests that are left out."""
    if len(line) != 1 + 2 * width:
        return line
    nodes = (node - before * width if node >= 0 else node for node in line[width : 2 * width])
    return [*line[:width], *nodes, line[-1]]


def inputs_of(
    slots: Sequence[int], rows: Iterable[int | None], width: int, forced: Sequence[Sequence[int]], device: torch.device,
    counts: Sequence[int] | None = None, uniforms: Sequence[Sequence[int]] = (), tree: Sequence[Sequence[int]] = (),
    kinds: Sequence[str] = (),
) -> Inputs:
    """Send the inputs to the device in one transfer; for a graph they stay on the host, and the runner sends them.

    The packed rows of request n begin at n * width.

    counts: how many of them each request uses; -1: only the device knows; None: all
    kinds: of each request, if windows and decodes are mixed
    """
    number = range(len(slots))
    widths = [width] * len(slots) if counts is None else counts
    by_kind = [[slots[n] if kind == own else -1 for own in KINDS] for n, kind in enumerate(kinds)]
    most = [width if count < 0 else count for count in widths]
    used = [[n * width + row if row < most[n] else -1 for row in range(width)] for n in range(len(kinds))]
    flat = [[number for numbers in each for number in numbers] for each in (forced, uniforms, tree, by_kind, used)]
    at, row, begin, count, *tables = sent([
        list(slots), [-1 if row is None else row for row in rows], [n * width for n in number], widths, *flat,
    ], device)
    return Inputs(at, row, begin, count, *(
        table.view(len(slots), len(table) // max(1, len(slots))) for table in tables
    ))


def tree_inputs(trees: Sequence[Sequence[int]], width: int, *, behind: int = -1) -> list[list[int]]:
    """Build `Inputs.tree` from the parents of every request's drafts, in windows of at most `width` nodes.

    behind: the value after a window's end
    """
    lines = []
    for number, parents in enumerate(trees):
        rest = [behind] * (width - 1 - len(parents))
        places = [number * width + parent for parent in parents]
        lines.append([-1, *parents, *rest, -1, *places, *rest, 1 + len(parents)])
    return lines


# Component -> the inputs that address it: its slot, and of blocks the row of a snapshot. At -1 an op skips the request.
IDLES = cells(block=("slots", "rows"), rows=("slots",), last=("slots",))
_ADDRESSES: dict[str, Any] = dict.fromkeys((name for names in IDLES.values() for name in names), -1)
# The value of each input in rows that pad a bucket.
IDLE = Inputs(0, 0, 0, 0, -1, 0, 0, -1, -1)._replace(**_ADDRESSES)  # type: ignore[arg-type]


class Verified(NamedTuple):
    """picks [B, T]: the target's own choice at every node."""

    picks: torch.Tensor


class Decoded(NamedTuple):
    """own, root [B]: the target's own choice, and the root in force."""

    own: torch.Tensor
    root: torch.Tensor


class Beside(NamedTuple):
    """picks [B, T]: as in `Verified`, for a decode in column 0;  root [B]: for a decode the root in force."""

    picks: torch.Tensor
    root: torch.Tensor


class Body(NamedTuple):
    """One kind of event, made of ops and views only.

    width: packed rows per request;  choices: how many may be forced;  tree: how many numbers describe a tree's shape
    ragged: whether requests may have fewer rows
    later: its graphs are captured at their first use instead of at the start
    """

    run: Callable[[Ops, Inputs], tuple[torch.Tensor, ...]]
    width: int
    choices: int
    tree: int = 0
    later: bool = False
    ragged: bool = False


def kind_of(kind: str, sampled: bool) -> str:
    """Name the kind of body. With sampling it is a different body, so that other batches run no further op."""
    return f"sampled {kind}" if sampled else kind


@dataclass(frozen=True)
class Round:
    """One candidate: `num_steps` drafts a round, and the commit strategy for its window.

    nodes: if windows may be trees, the maximum number of nodes. Then every window has this many packed rows, also a
    chain
    topk: if the drafter grows trees, the children of a node
    """

    num_steps: int
    strategy: CommitPair
    model: Model
    nodes: int | None = None
    topk: int | None = None

    @property
    def width(self) -> int:
        return self.nodes or self.num_steps + 1

    @property
    def bodies(self) -> dict[str, Body]:
        """Return the bodies of this step count, by kind. At 0 steps there are no drafts, so only `decode` is left."""
        forwards = {"decode": Body(self.decode, width=1, choices=1)}
        if self.num_steps:
            forwards["verify"] = Body(self.verify, width=self.width, choices=0, ragged=True)
            forwards[BESIDE] = Body(self.beside, width=self.width, choices=1, later=True, ragged=True)
        sampled = {kind_of(kind, True): body._replace(later=True) for kind, body in forwards.items()}
        if not self.num_steps:
            return forwards | sampled
        drafts = {"draft": Body(self.draft, 1, self.width - 1, self.nodes or 0)}
        if self.model.drafter is not None and self.model.drafter.at_once:
            drafts = {"draft": Body(self.draft, self.width, self.num_steps, ragged=True)}
        elif self.topk is not None:
            drafts = {"draft": Body(self.grow, self.topk, self.width - 1, self.width)}
        elif self.nodes:
            drafts["shaped draft"] = Body(self.draft_trees, 1, self.width - 1, 1 + 2 * self.width)
        else:
            drafts["shaped draft"] = Body(self.draft_chains, 1, self.num_steps, self.num_steps, later=True)
        commit = Body(self.commit, width=self.width, choices=2, ragged=True)
        return forwards | sampled | drafts | {"commit": commit, CAPPED: commit._replace(choices=3, later=True)}

    # Bodies

    def draft(self, ops: Ops, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        """Draft chains -> the drafts in use, then the head's own if there is a head; one [B] per step."""
        inputs = self._counted(ops, inputs)
        self._shape(ops, inputs)
        drafter, window = self.model.drafter, self.model.memory.slot_table.window
        if drafter is None:
            return self._given(ops, inputs)
        if self.width > self.num_steps + 1:  # a verify runs all columns of a window, also those after its end
            rest = slice(self.num_steps, self.width - 1), slice(self.num_steps + 1, self.width)
            ops.store_rows(rows=inputs.forced[:, rest[0]], pool=window[:, None, rest[1]], locations=inputs.slots)
        return drafter.draft(ops, self.model.memory, inputs.who(), self._use(ops, inputs), self.num_steps)

    def draft_chains(self, ops: Ops, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        """Draft chains of own widths -> as `draft`; after the end of a chain the values mean nothing."""
        drafter = self.model.drafter
        if drafter is None:
            return self._given(ops, inputs)
        runs = [column(ops, inputs.tree, step) for step in range(self.num_steps)]
        return drafter.draft(ops, self.model.memory, inputs.who(), self._use(ops, inputs), self.num_steps, runs)

    def draft_trees(self, ops: Ops, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        """Draft trees of given shapes, and chains among them -> as `draft`, one [B] per node."""
        self._shape(ops, inputs)
        memory, drafter = self.model.memory, self.model.drafter
        if drafter is None:
            return self._given(ops, inputs)
        plan = plan_of(ops, memory, inputs.slots, column(ops, inputs.tree, 2 * self.width))
        behind = inputs.tree[:, self.width : 2 * self.width]
        return drafter.draft_tree(ops, memory, inputs.who(), self._use(ops, inputs), plan, behind)

    def grow(self, ops: Ops, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        """Grow trees -> the drafts in use, the drafter's own [B, T-1], and the parents of its own [B, T]."""
        drafter, table = self.model.drafter, self.model.memory.slot_table
        assert isinstance(drafter, GrowsTrees) and self.topk is not None and table.parents is not None
        own = drafter.grow(ops, self.model.memory, inputs.who(), self.num_steps, self.topk, self.width)
        drafts = ops.choose(own=own.tokens, forced=inputs.forced)
        parents = ops.choose(own=own.parents, forced=inputs.tree)
        ops.store_rows(rows=drafts, pool=table.window[:, None, 1 : self.width], locations=inputs.slots)
        ops.store_rows(rows=parents, pool=table.parents[:, None], locations=inputs.slots)
        return drafts, own.tokens, own.parents

    def verify(self, ops: Ops, inputs: Inputs) -> Verified:
        """Run the window of every request. Its picks and final rows wait in the slot table for the commit."""
        inputs = self._counted(ops, inputs)
        slot_table, (count, width) = self.model.memory.slot_table, (len(inputs.slots), self.width)
        tokens = ops.select(x=slot_table.window[:, :width], index=inputs.slots).view(count * width)
        nodes = nodes_of(ops, self.model.memory, inputs.slots, inputs.width)
        batch = windows(ops, self.model.memory, inputs.who(), tokens, "verify", width, nodes=nodes)
        rows = self._forward(ops, batch)
        picks = self._own(ops, inputs, rows.final, tokens)
        keep_window(ops, slot_table, inputs.slots, picks, rows, width)
        return Verified(picks.view(count, width))

    def decode(self, ops: Ops, inputs: Inputs) -> Decoded:
        """Run the root alone. It is committed at once, and the draft head is extended by it."""
        memory = self.model.memory
        root = ops.select(x=memory.slot_table.window[:, 0], index=inputs.slots)
        batch = windows(ops, memory, inputs.who(), root, "decode", 1)
        rows = self._forward(ops, batch)
        own = self._own(ops, inputs, rows.final, root)
        chosen = ops.choose(own=own, forced=inputs.forced[:, 0])
        self._note(ops, chosen, inputs.slots, 0)
        # The length grows last: until then every op finds the row at position `length`.
        self._extend(ops, inputs.who(), chosen, rows.fed, 1)
        ops.advance(length=memory.slot_table.length, slots=inputs.slots, by=batch.count)
        return Decoded(own, chosen)

    def beside(self, ops: Ops, inputs: Inputs) -> Beside:
        """Run windows and decodes, each in the rows of a window, of which a decode uses the first.

        So the weights are read once. A request has the addresses of its kind, and stores the same memory as in its own
        body.
        """
        inputs = self._counted(ops, inputs)
        memory, (count, width) = self.model.memory, (len(inputs.slots), self.width)
        verified, decoded = (column(ops, inputs.kinds, kind) for kind in range(len(KINDS)))
        tokens = self._used(ops, inputs)
        nodes = nodes_of(ops, memory, verified, inputs.width)
        batch = windows_beside_decodes(ops, memory, inputs.who(), (verified, decoded), tokens, width, nodes)
        rows = self._forward(ops, batch)
        picks = self._own(ops, inputs, rows.final, tokens)
        keep_window(ops, memory.slot_table, verified, picks, rows, width)
        chosen = ops.choose(own=ops.select(x=picks, index=inputs.begin), forced=inputs.forced[:, 0])
        self._note(ops, chosen, decoded, 0)
        self._extend(ops, replace(inputs.who(), slots=decoded), self._used(ops, inputs), rows.fed, width)
        ops.advance(length=memory.slot_table.length, slots=decoded, by=inputs.width)
        return Beside(picks.view(count, width), chosen)

    def commit(self, ops: Ops, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        """Accept drafts, make the accepted node's memory the request's own, extend the draft head, grow the length.

        -> the fields of `Acceptance`, and a second copy of accept_lens. A graph returns a copy of each. The caller owns
        the first accept_lens, and may write into it; the second one goes to the host.
        """
        inputs = self._counted(ops, inputs)
        slot_table, (count, width) = self.model.memory.slot_table, (len(inputs.slots), self.width)
        parents, given = slot_table.parents, dict[str, torch.Tensor]()
        if parents is not None:
            given["parents"] = ops.select(x=parents, index=inputs.slots)
        if inputs.forced.shape[1] > 2:
            given["caps"] = inputs.forced[:, 2]
        acceptance = ops.accept(
            window=ops.select(x=slot_table.window[:, :width], index=inputs.slots),
            picks=ops.select(x=slot_table.picks[:, :width], index=inputs.slots),
            count=inputs.width, forced_last=inputs.forced[:, 0], forced_bonus=inputs.forced[:, 1],
            **given,
        )
        before, path = ops.select(x=slot_table.length, index=inputs.slots), acceptance.accept_index
        self.strategy.commit(ops, AcceptedWindows(
            inputs.rows, inputs.slots, acceptance.last_correct_step_indices, acceptance.accept_lens, before,
            None if parents is None else path,
        ))
        if parents is not None:
            gather_path(ops, self.model.memory, inputs.slots, path, before, inputs.begin)
        self._note(ops, acceptance.bonus, inputs.slots, 0)
        if self.model.drafter is not None:
            kept = slot_table.final if slot_table.features is None else slot_table.features
            fed = ops.select(x=kept[:, :width], index=inputs.slots).flatten(0, 1)
            # Every request has `width` packed rows; the extend uses as many of them as were accepted.
            who = replace(inputs.who(), count=acceptance.accept_lens)
            self._extend(ops, who, acceptance.tokens.view(count * width), fed, width)
        # The length grows last: the strategy and the extend need the length before the window.
        ops.advance(length=slot_table.length, slots=inputs.slots, by=acceptance.accept_lens)
        return *acceptance, acceptance.accept_lens

    # Parts of the bodies

    def _counted(self, ops: Ops, inputs: Inputs) -> Inputs:
        """Fill in the widths of windows that only the device knows. A draft has written them into the slot table."""
        nodes = self.model.memory.slot_table.nodes
        if nodes is None:
            return inputs
        own = ops.select(x=nodes[:, 0], index=inputs.slots)
        return inputs._replace(width=ops.choose(own=own, forced=inputs.width))

    def _used(self, ops: Ops, inputs: Inputs) -> torch.Tensor:
        """Tokens [B * T] of windows mixed with decodes, 0 in unused rows: the table may hold anything after a root."""
        window = ops.select(x=self.model.memory.slot_table.window[:, : self.width], index=inputs.slots)
        return ops.select(x=window.flatten(), index=inputs.used.flatten())

    def _shape(self, ops: Ops, inputs: Inputs) -> None:
        """Write the shapes of windows into the slot table, if windows may be trees."""
        parents = self.model.memory.slot_table.parents
        if parents is not None:
            ops.store_rows(rows=inputs.tree[:, : self.width], pool=parents[:, None], locations=inputs.slots)

    def _given(self, ops: Ops, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        """Return the given drafts of a model without a head."""
        drafts = tuple(inputs.forced[:, step] for step in range(inputs.forced.shape[1]))
        for step, draft in enumerate(drafts):
            self._note(ops, draft, inputs.slots, step + 1)
        return drafts

    def _use(self, ops: Ops, inputs: Inputs) -> Use:
        """Return the draft in use at a step: the forced one if there is one. It enters the window."""

        def use(own: torch.Tensor, step: int) -> torch.Tensor:
            draft = ops.choose(own=own, forced=inputs.forced[:, step])
            self._note(ops, draft, inputs.slots, step + 1)
            return draft

        return use

    def _forward(self, ops: Ops, batch: Batch) -> TargetRows:
        bound = self.strategy.bind(ops, batch)
        rows = self.model.trunk(ops, batch, bound)
        bound.ran(ops)
        return rows

    def _own(self, ops: Ops, inputs: Inputs, final: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Compute the target's own choice after every row of windows with these tokens."""
        head, (count, drawn) = self.model.trunk.head, inputs.uniforms.shape
        if not drawn:
            return head.pick(ops, final, STAGE)
        memory, slots = self.model.memory, inputs.slots
        return head.draw(ops, final, Drawing(
            tokens.view(count, drawn - 1), parents_of(ops, memory, slots, drawn - 1), inputs.begin, inputs.width,
            ops.select(x=memory.slot_table.sampling, index=slots), inputs.uniforms[:, :-1], inputs.uniforms[:, -1],
        ), STAGE)

    def _extend(self, ops: Ops, who: Who, tokens: torch.Tensor, fed: torch.Tensor, width: int) -> None:
        """Extend the draft side, if there is one, over committed rows of requests whose root is known."""
        memory, drafter = self.model.memory, self.model.drafter
        if drafter is not None:
            batch = windows(ops, memory, who, tokens, "draft", width)
            asked = (PickRows(batch.last, who.slots),) * drafter.layers
            drafter.extend(ops, memory, batch, fed, asked, self.num_steps)
            keep_tail(ops, memory, batch, fed)

    def _note(self, ops: Ops, tokens: torch.Tensor, slots: torch.Tensor, column: int) -> None:
        """Write tokens [B] into one column of the windows in the slot table: the root into column 0, draft j into j."""
        ops.store_rows(rows=tokens, pool=self.model.memory.slot_table.window[:, column : column + 1], locations=slots)
