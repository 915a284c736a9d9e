"""The optimized engine: one method per event. The engine only routes; the ops compute.

Leaves out: arithmetic (`ops/`), addresses (`commit/`, `packed_batch.py`), the model (`model/`, `draft/`), and the
bodies of the events: `round_for_step_count.py` for what depends on the step count, `forwards.py` for rows of several
kinds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from instep_reference.contract import engine as e
from instep_reference.contract.adaptive_controller_file import AdaptiveFile
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.controllers import Controlled
from instep_reference.contract.drafters import BLOCK
from instep_reference.contract.errors import OutOfCapacity, Unsupported
from instep_reference.contract.kept_copies import Copy
from instep_reference.contract.place_names import Place, See, unseen
from instep_reference.contract.sampling import Sampling

from . import forwards
from .commit import write_set
from .commit.base import RequestWrites, changes
from .commit.verified_windows import answered, forced_paths
from .controllers import Controller, controller
from .draft_answers import cut_to_trees, split_tables
from .engine_from_checkpoint import budget, built
from .forwards import BOTH, DECODES, WINDOWS, Forwards, Inner, Planned, RunTarget, planned
from .graphs import Recorder, Runner
from .graphs.capture_all_at_start import prepared
from .graphs.prompt_segments import PromptGraphs
from .kept_entries_on_device_or_host import Entry, Tiers
from .memory.saved_states import Kept, NarrowStates, copied, read, write
from .memory.tiled_units import SCALES
from .ops.integer_op_protocols import Acceptance
from .ops.op_protocols import Ops
from .ops.unpadded_view import covers, noting, show, watched
from .options import Options, check, moves_labels, types_of
from .packed_batch import empty_commit
from .ranks import Comm
from .ranks.ops_over_ranks import of_rank
from .refusals import Refusals
from .request_record import Request, logical
from .round_for_step_count import CAPPED, IDLE, Asked, Round, inputs_of, kind_of, tree_inputs
from .tracked_prefixes import Prefixes
from .transfer.to_device import HOST, ints, sent
from .transfer.to_host import CutPicks, Drafts, HostCopy, Parents, Roots
from .transfer_between_engines import Courier, Wire


class Settled(NamedTuple):
    """The parts of an engine, after every check that they are supported."""

    checkpoint: Checkpoint
    ops: Ops
    options: Options
    capacity: e.Capacity
    controller: Controller


class OptimizedEngine:
    """Implements `Engine`, `Inspectable` and `Watched` of the contract. `messages`: changes to the adaptive candidates.

    Between a draft and its commit nothing waits for the device: lengths, windows, roots and counts are in the slot
    table. The host gets copies of the numbers that it needs, and waits for a copy only when it reads it. A draft
    reserves pages, so it reads the lengths of its requests first. When rounds overlap, it does not wait: it reserves
    pages for the longest possible lengths.
    """

    refuses = True  # an illegal event raises `BadInput`, and nothing has changed (`refusals.py`)
    drafts_elsewhere = False  # another engine chooses the drafts (`pipeline/stage_engine.py`)
    of_round: type[Round] = Round
    recorder: Recorder | None = None  # of its graphs; None: by the device

    def __init__(
        self, checkpoint: Checkpoint, ops: Ops, options: Options, capacity: e.Capacity, *, num_steps: int,
        adaptive: AdaptiveFile | None = None, controlled: Controlled | None = None, lag: int = 0,
        comm: Comm | None = None, wire: Wire | None = None,
    ) -> None:
        """Build the engine; with `comm`, one rank of it. checkpoint, ops: of the whole model in any case.

        lag: rounds by which accepted counts reach the controller late (a rule of its dialect)
        wire: to another engine of the same model, which fetches what this one offloads, and the other way round
        """
        whole = checkpoint.config
        checkpoint, ops, options, capacity, self._controller = OptimizedEngine.settled(
            checkpoint, ops, options, capacity, num_steps=num_steps, adaptive=adaptive, controlled=controlled, lag=lag,
            comm=comm)  # fmt: skip
        config = checkpoint.config
        self._device, self._options = torch.device(options.device), options
        self._base = self._ops = ops
        self._see: See = unseen
        self._capacity, self._vocab = capacity, config.vocab
        self.messages = tuple(self._controller.messages)
        self._model, self._rounds = built(checkpoint, ops, options, capacity, self._controller.candidates,
                                          self.of_round)
        self._budget = partial(budget, config, ops, options, capacity, self._controller.candidates)
        self._memory = self._model.memory
        self._round = self._rounds[num_steps]
        self._requests: dict[str, Request] = {}
        # Requests without a slot, and saved states and prefixes by name: the host's records, and copies of memory.
        self._preempted: dict[str, Entry] = {}
        self._saved: dict[str, Entry] = {}
        courier = None if wire is None else Courier.of(
            wire, comm, whole, self._memory, types_of(options, ops), moves_labels(ops))
        self._tiers = Tiers(self._saved, self._device, capacity.tracked, courier)
        self._prefixes = Prefixes(self._memory, capacity, self._saved, NarrowStates.of(types_of(options, ops)))
        self._refusals = Refusals(self._requests, self._preempted, self._saved, self._tiers, self._vocab,
                                  capacity.track_interval, device_widths=capacity.device_widths)
        self._graphs = prepared(
            ops, self._rounds.values(), self._device, self.recorder, options.batches, comm) if options.graphs else None
        self._prompt_graphs = None if self._graphs is None or options.prompt_graphs is None else PromptGraphs(
            self._graphs.record, options.prompt_graphs, ops, self._model, self._device)
        # Not reported to the controller yet: counts of commits, and the decode rows of forwards after them.
        self._unreported: list[HostCopy | int] = []

    @classmethod
    def settled(
        cls, checkpoint: Checkpoint, ops: Ops, options: Options, capacity: e.Capacity, *, num_steps: int,
        adaptive: AdaptiveFile | None = None, controlled: Controlled | None = None, lag: int = 0,
        comm: Comm | None = None,
    ) -> Settled:
        """Return what an engine is built from, or refuse what it does not support, before anything is allocated."""
        if comm is not None:
            checkpoint, ops, options = of_rank(checkpoint, ops, options, comm)
        capacity = replace(capacity, block=options.drafter == BLOCK)
        made = controller(controlled, num_steps, adaptive, lag)
        check(options, checkpoint.config, made.candidates[-1], ops, capacity.num_draft_tokens, topk=capacity.topk,
              interval=capacity.track_interval, device_widths=capacity.device_widths,
              positions=capacity.request_positions)
        if capacity.trees and (adaptive is not None if controlled is None else controlled.varies):
            raise Unsupported("windows that are trees with adaptive step counts: the controller counts chains")
        return Settled(checkpoint, ops, options, capacity, made)

    # Events

    def admit(self, request: str, prompt: tuple[int, ...], sampling: Sampling | None = None) -> None:
        self._refusals.admit(request, prompt, sampling)
        self._claim(request, 0, sampling)
        self._requests[request] = Request(request, prompt, ints(prompt, self._device), sampling)

    def draft(
        self, requests: tuple[str, ...], picks: tuple[tuple[int, ...], ...] | None = None,
        parents: tuple[tuple[int, ...], ...] | None = None,
    ) -> e.Drafted:
        steps, nodes = self._round.num_steps, self._capacity.num_draft_tokens
        grown = self._capacity.grown(steps)
        alike = tuple(range(steps if picks is not None or not grown else grown))  # for a grown tree: as many drafts
        trees = parents if parents is not None else (alike,) * len(requests)
        chains = all(tuple(tree) == tuple(range(len(tree))) for tree in trees)
        if nodes is None and not chains:
            raise Unsupported("drafts that form a tree: without num_draft_tokens windows are chains")
        if nodes is not None and any(len(tree) >= nodes for tree in trees):
            raise OutOfCapacity(f"a window of {1 + max(map(len, trees))} nodes; there is room for {nodes}")
        if parents is not None and picks is None and (grown or not chains):
            raise Unsupported("a tree without its drafts: the drafter chooses the shapes of the trees that it grows")
        if self._model.drafter is None and picks is None and not self.drafts_elsewhere:
            raise Unsupported("no draft head is in use: a draft event must bring its picks")
        self._refusals.draft(requests, picks, trees, steps)
        drafted = self._named(requests)
        if drafted and nodes is None and self._capacity.device_widths:
            return self._draft_widths(drafted, picks, [len(tree) for tree in trees])
        if not drafted:
            empty = torch.zeros(len(drafted), len(alike), dtype=torch.int64, device=self._device)
            return e.Drafted(empty, empty.clone(), empty.clone() if grown else None)
        room = self._capacity
        wanted = {name: room.drafted(steps, len(tree)) for name, tree in zip(requests, trees, strict=True)}
        self._grow(drafted, lambda exact: write_set.draft_wants(wanted, self._requests, exact=exact))
        for request, tree in zip(drafted, trees, strict=True):
            request.parents = tuple(tree)
        if grown:
            return self._grown(drafted, picks, trees, grown)
        kind, width = "draft", self._round.width
        shapes = [] if nodes is None else tree_inputs(trees, nodes)
        forced = [[*given, *[0] * (width - 1 - len(given))]
                  for given in ([[-1] * len(tree) for tree in trees] if picks is None else picks)]  # fmt: skip
        shaped = any(tuple(tree) != alike for tree in trees)
        if shaped and (self._model.drafter is None or not self._model.drafter.at_once):
            kind = "shaped draft"
        if kind == "draft":
            shapes = [line[:nodes] for line in shapes]
        elif nodes is None:  # whether the head runs in a step
            shapes = [[int(step < len(tree)) for step in range(steps)] for tree in trees]
        said = self._run(kind, drafted, forced, tree=shapes, join=partial(torch.stack, dim=1))
        if shaped:
            said, steps = cut_to_trees(said, trees, width), max(map(len, trees))
        return split_tables(said, steps, headed=self._model.drafter is not None)

    def _draft_widths(
        self, drafted: Sequence[Request], picks: Sequence[Sequence[int]] | None, widths: Sequence[int]
    ) -> e.Drafted:
        """Draft chains whose widths go to the device. From here on the host counts all drafts of the step count."""
        steps, table = self._round.num_steps, self._memory.slot_table
        assert table.nodes is not None, "the device knows the widths"
        slots, nodes = sent([[self._memory.slots.of(one.name) for one in drafted], [1 + width for width in widths]],
                            self._device)
        wanted = {one.name: self._capacity.drafted(steps, steps) for one in drafted}
        self._grow(drafted, lambda exact: write_set.draft_wants(wanted, self._requests, exact=exact))
        for request in drafted:
            request.parents = tuple(range(steps))
        self._ops.store_rows(rows=nodes, pool=table.nodes, locations=slots)
        given = [()] * len(drafted) if picks is None else picks
        forced = [[*one, *[-1 if picks is None else 0] * (steps - len(one))] for one in given]
        said = self._run("draft", drafted, forced, join=partial(torch.stack, dim=1))
        behind = torch.arange(steps, device=self._device) >= nodes[:, None] - 1
        said = said.view(len(drafted), -1, steps).masked_fill(behind[:, None], -1).flatten(1)
        return split_tables(said, steps, headed=self._model.drafter is not None)

    def _grown(
        self, drafted: Sequence[Request], picks: Sequence[Sequence[int]] | None, trees: Sequence[Sequence[int]],
        grown: int,
    ) -> e.Drafted:
        """Let the drafter grow its trees; a given window replaces the grown one."""
        width, count = self._round.width, len(drafted)
        if picks is None:
            forced, tree, most = [[-1] * (width - 1)] * count, [[-1] * width] * count, grown
        else:  # after the end of a given window nothing of the grown one remains
            forced, most = [[*one, *[0] * (width - 1 - len(one))] for one in picks], max(map(len, picks))
            tree = [line[:width] for line in tree_inputs(trees, width, behind=0)]
        drafts, own, parents = self._run("draft", drafted, forced, tree=tree)
        shapes = parents[:, 1 : 1 + grown].contiguous()
        if picks is None:
            copy = HostCopy(shapes.flatten())
            for number, request in enumerate(drafted):
                request.parents = Parents(copy, number * grown, grown)
        behind = torch.arange(most, device=self._device) >= ints([len(tree) for tree in trees], self._device)[:, None]
        return e.Drafted(drafts[:, :most].masked_fill(behind, -1), own[:, :grown].contiguous(), shapes)

    def forward(self, rows: tuple[e.Row, ...]) -> e.Forwarded:
        if not rows:
            return e.Forwarded({}, {})
        self._refusals.forward(rows)
        requests = self._named([row.request for row in rows])
        write_set.check_tokens(rows, self._requests, self._capacity)
        tracked_names = [under for row in rows for under in (*row.inner, row.track) if under]
        self._tiers.must_have_room(len(tracked_names))
        self._grow(requests, lambda exact: write_set.forward_wants(rows, self._requests, exact=exact))
        plan = [planned(row, self._scratch_row(number, request), request)
                for number, (row, request) in enumerate(zip(rows, requests, strict=True))]  # fmt: skip
        self._tiers.claim(tracked_names)
        kinds, at, roots, final, inner = {row.kind for row in rows}, self._round, None, None, list[Inner]()
        alike = Forwards(self._run, at.width)
        if kinds == WINDOWS:
            own = alike.windows(plan)
        elif kinds == DECODES:
            own, roots = alike.decodes(plan)
        elif kinds == BOTH:
            own, roots = alike.both(plan)
        else:  # prefill chunks: in no graph, or their target in segments
            replay = None if self._prompt_graphs is None else self._prompt_graphs.target(plan, self._see)
            own, roots, final, inner = self._run_chunks(plan, replay)
        said = zip(plan, torch.split(own, [p.asked for p in plan]), strict=True)
        nodes = self._nodes(requests) if "verify" in kinds else None
        for p in plan:
            p.ran()
        self._forwarded(sum(row.kind == "decode" for row in rows))
        chosen = Roots([p.request.name for p in plan if p.rooted], roots)
        self._prefixes.chosen(self._requests, chosen)
        within = self._prefixes.inside_chunks(inner)
        tracked = {} if final is None else self._prefixes.of_chunks(self._base, at.strategy, plan, final)
        answers = {p.request.name: picks for p, picks in said if p.asked}
        return e.Forwarded(chosen, answers if nodes is None else CutPicks(answers, HostCopy(nodes, immutable=True)),
                         tracked, within)

    def commit(
        self, requests: tuple[str, ...], accepted: tuple[e.Path, ...] | None = None, track: tuple[str, ...] = (),
        caps: tuple[int, ...] = (),
    ) -> e.Committed:
        self._refusals.commit(requests, accepted, track, caps)
        second = self._prefixes.reachable([self._requests[name] for name in requests], track)
        self._tiers.must_have_room(len(second))
        forced, kind = forced_paths(accepted, len(requests), caps), CAPPED if caps else "commit"
        verified = self._named(requests)
        if not verified:
            return empty_commit(self._device)
        self._tiers.claim(second)
        self._catch_up()
        *fields, lens = self._run(kind, verified, forced, [request.row for request in verified])
        acceptance = Acceptance(*fields)
        steps = self._prefixes.steps(acceptance, lens, verified, track)
        counts = self._prefixes.counts(acceptance, lens, steps)
        for number, request in enumerate(verified):
            request.length.settle()  # counts of the rounds before: _catch_up has read them, so nothing waits here
            request.length.owe(counts, number, 1 + request.drafts)
        self._prefixes.accepted(verified, counts)
        tracked = self._prefixes.of_paths(self._base, self._round.strategy, verified, track, counts)
        self._tiers.release(second)
        if self._capacity.trim:
            self._trim(verified)
        widest = 1 + max(request.drafts for request in verified)
        for request in verified:
            request.parents, request.row = None, None
        self._unreported.append(counts)
        return replace(answered(acceptance, widest), tracked=tracked, steps_to_track=steps)

    def set_num_steps(self, num_steps: int) -> None:
        self._refusals.set_num_steps(num_steps, self._controller.candidates)
        self._catch_up()  # commits before the switch count under the old step count
        self._controller.set_num_steps(num_steps)
        self._round = self._rounds[num_steps]

    def next_num_steps(self, batch: int, scheduled: int) -> int:
        self._catch_up()
        return self._controller.next_num_steps(batch, scheduled)

    def save(self, request: str, name: str) -> None:
        self._refusals.save(request, name)
        self._requests[request].length.settle()
        self._saved[name] = self._kept(request)

    def load(self, request: str, name: str) -> None:
        self._refusals.load(request, name)
        self._give(request, name)

    def _give(self, request: str, name: str) -> None:
        """Give the request a copy of the entry under this name."""
        (kept, memory), live = self._saved[name], self._requests[request]
        self._restore(kept.given_to(live), self._prefixes.narrow.give(memory))
        if memory.final is not None:  # a prefix
            steps = self._round.num_steps
            forwards.extend_prefix(self._ops, self._model, self._requests[request], memory, steps)

    def offload(self, name: str) -> None:
        self._refusals.offload(name)
        self._tiers.offload(name)

    def fetch(self, name: str) -> None:
        self._refusals.fetch(name)
        self._tiers.fetch(name)

    def evict(self, name: str) -> None:
        self._refusals.evict(name)
        self._tiers.evict(name)

    def preempt(self, request: str) -> None:
        self._refusals.preempt(request)
        self._preempted[request] = self._kept(request)  # first the copies: `_end` poisons what it frees
        self._end(request)

    def resume(self, request: str) -> None:
        self._refusals.resume(request)
        kept, memory = self._preempted[request]
        self._claim(request, kept.length.exact, kept.sampling)  # raises without room; then the request stays preempted
        self._restore(kept, memory)
        del self._preempted[request]

    def finish(self, request: str) -> None:
        self._refusals.finish(request)
        self._end(request)

    def abort(self, request: str) -> None:
        self._refusals.abort(request)
        if self._preempted.pop(request, None) is None:
            self._end(request)

    def idle(self) -> None:
        self._refusals.idle()

    # Inspection: these methods change nothing

    def state(self, request: str) -> e.RequestState:
        if request in self._preempted:
            kept, memory = self._preempted[request]
            return logical(kept, copied(memory))
        return logical(*self._kept(request))

    def prefix(self, name: str) -> e.RequestState:
        kept, memory = self._tiers.shown(name)
        return logical(kept, copied(memory))

    def track_slots(self) -> Mapping[str, int]:
        return dict(self._tiers.slots)

    def regions(self) -> list[e.Region]:
        return self._memory.regions()

    def budget(self) -> Mapping[str, int]:
        return self._budget()

    def copies(self) -> dict[Copy, dict[str, torch.Tensor]]:
        preempted: dict[Copy, Kept] = {("preempt", name): kept for name, (_, kept) in self._preempted.items()}
        return {copy: dict(kept.parts()) for copy, kept in (self._tiers.copies() | preempted).items()}

    def may_change(self, event: e.Event) -> dict[str, set[int]]:
        return self._table(self._writes(event))

    def _writes(self, event: e.Event) -> list[RequestWrites]:
        saved, preempted = (
            {name: kept.length.exact for name, (kept, _) in aside.items()} for aside in (self._saved, self._preempted)
        )
        return write_set.writes_of(
            event, self._requests, saved, preempted, self._round.num_steps, self._memory, self._capacity,
            overlap=self._options.overlap,
        )

    def _table(self, writes: Sequence[RequestWrites]) -> dict[str, set[int]]:
        """Look up the units of each pool that these actions may write."""
        found = changes(self._round.strategy.may, writes) | changes(write_set.slot_table(self._capacity), writes)
        found |= {name + SCALES: units for name, units in found.items()}
        return {name: units for name, units in found.items() if self._memory.layers(name)}

    def slots(self) -> dict[str, int]:
        return self._memory.slots.owned()

    def pages(self) -> dict[str, list[int]]:
        return self._memory.pages.owned()

    @property
    def graphs(self) -> Runner | None:
        """Return the runner of the captured graphs; None if the rounds run eagerly."""
        return self._graphs

    @property
    def prompt_graphs(self) -> Runner | None:
        """Return the runner of the graphs for forwards with prompts; None if these run eagerly."""
        return None if self._prompt_graphs is None else self._prompt_graphs.runner

    def watch(self, see: See) -> None:
        self._see, self._ops = see, watched(self._base, see)

    # Between the events

    def _run(
        self, kind: str, requests: Sequence[Request], forced: Sequence[Sequence[int]] = (),
        rows: Sequence[int | None] | None = None, **more: Any,
    ) -> Any:
        """Run the body of one event; the arguments are those of `Asked`."""
        return self._serve(Asked(kind, requests, forced, rows, **more))

    def _serve(self, asked: Asked) -> Any:
        """Run a body on the inputs that come from the host: eagerly, or as a captured graph."""
        _, requests, forced, rows, uniforms, tree, join, kinds, most = asked
        kind = kind_of(asked.kind, bool(uniforms))
        body, slots = self._round.bodies[kind], [self._memory.slots.of(request.name) for request in requests]
        counts = [1 + request.drafts for request in requests] if body.ragged else None
        if counts is not None and self._capacity.device_widths:
            counts = [count if request.parents is None else -1 for count, request in zip(counts, requests, strict=True)]
        inputs = inputs_of(
            slots, range(len(slots)) if rows is None else rows, body.width, forced,
            self._device if self._graphs is None else HOST, counts, uniforms, tree, kinds,
        )
        if self._graphs is None:
            results = body.run(self._ops, inputs)
            return results if join is None else join(results)
        # Inside a graph no row can be cut. The results of a replay are kept, and cut when the answer is known, because
        # it has the rows that count.
        key, seen = (kind, self._round.num_steps), list[tuple[Place, torch.Tensor]]()
        answer: Any = self._graphs.run(key, self._base, body.run, inputs, IDLE, noting(self._see, seen), join, most)
        if seen:
            lens = answer[-1] if kind in ("commit", CAPPED) else counts
            if counts is not None and self._capacity.device_widths and lens is counts:
                lens = self._nodes(requests)
            show(self._see, seen, covers(kind, lens, body.width, [one.parents or () for one in requests], kinds))
        return answer

    def _run_chunks(
        self, plan: Sequence[Planned], replay: RunTarget | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[Inner]]:
        """Run a forward with prefill chunks. replay: runs its target in segments of graphs"""
        at = self._round
        return forwards.forward(
            self._ops, self._model, at.strategy, plan, at.num_steps, self._capacity.track_interval, replay
        )

    def _scratch_row(self, number: int, request: Request) -> int:
        """Return the row of the scratch memory of a window: the `number`-th of a batch."""
        return number if self._options.scratch == "row" else self._memory.request_rows.of(request.name)

    def _nodes(self, requests: Sequence[Request]) -> torch.Tensor | None:
        """[B]: the nodes of windows, which only the device knows, and 1 for a decode; None: the host knows them."""
        table = self._memory.slot_table
        if table.nodes is None:
            return None
        slots = [self._memory.slots.of(one.name) if one.parents is not None else -1 for one in requests]
        index, ones = sent([slots, [1 if slot < 0 else -1 for slot in slots]], self._device)
        return self._base.choose(own=self._base.select(x=table.nodes[:, 0], index=index), forced=ones)

    def _named(self, names: Sequence[str]) -> list[Request]:
        """Look up the requests in batch order. Unless rounds overlap, their lengths are made exact first."""
        requests = [self._requests[name] for name in names]
        for request in requests if not self._options.overlap else ():
            request.length.settle()
        return requests

    def _grow(self, requests: Sequence[Request], wants: Callable[[bool], write_set.Wants]) -> None:
        """Reserve pages for the longest possible lengths. If they do not fit, wait for the exact lengths."""
        try:
            self._memory.grow(wants(False))
        except OutOfCapacity:
            self._memory.grow(wants(True))  # if it raises, the event is refused, and nothing has changed
            for request in requests:
                request.length.settle()

    def _trim(self, requests: Sequence[Request]) -> None:
        """Give back the pages after the lengths. Unless rounds overlap, this waits for the accepted counts."""
        for request in requests if not self._options.overlap else ():
            request.length.settle()
        self._memory.trim([(request.name, request.length.most) for request in requests])

    def _forwarded(self, decode_rows: int) -> None:
        """Report a forward to the controller, in order: after the commits before it, which may not have arrived."""
        if self._unreported:
            self._unreported.append(decode_rows)
        else:
            self._controller.forwarded(decode_rows)

    def _catch_up(self) -> None:
        """Report earlier forwards and accepted counts to the controller. It reads counts when it processes them."""
        for served in self._unreported:
            if isinstance(served, HostCopy):
                self._controller.committed(Drafts(served))
            else:
                self._controller.forwarded(served)
        self._unreported.clear()

    def _claim(self, name: str, positions: int, sampling: Sampling | None) -> None:
        self._memory.claim(name, positions, sampling)
        self._round.strategy.claim(self._memory.slots.of(name))

    def _kept(self, name: str) -> Entry:
        """Copy a request's logical state. A round in flight is not part of it."""
        request = self._requests[name].between_rounds()
        length = request.length.exact
        peeked = self._round.strategy.peek(self._base, self._memory.slots.of(name), length)
        return request, read(self._memory, name, length, peeked)

    def _restore(self, kept: Request, memory: Kept) -> None:
        name, length = kept.name, kept.length.exact
        self._memory.grow([(name, length)])
        write(self._memory, name, length, memory)
        self._round.strategy.restore(self._memory.slots.of(name), length, memory)
        self._requests[name] = kept.between_rounds()

    def _end(self, name: str) -> None:
        self._memory.release(name)
        del self._requests[name]
