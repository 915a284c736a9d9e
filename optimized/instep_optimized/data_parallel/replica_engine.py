"""The engine of one replica of a data-parallel group: it serves its own requests, and joins the launches of all others.

Every replica keeps the books of all requests: slots, pages and lengths, from the results that the replicas exchange.
The memory of a request is in the pools of its replica alone. A replica without rows in an event serves an idle forward
in the same collectives, which changes nothing. All replicas replay the same graph, in the bucket of the one with the
most requests. Leaves out: the choice of a replica for a request.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Capacity, Commit, Draft, Event, Forward
from instep_reference.contract.event_facts import named

from ..draft.drafter_protocol import PickRows
from ..engine import OptimizedEngine
from ..forwards import Inner, Planned, RunTarget
from ..graphs.capture_all_at_start import recorder_for
from ..kept_entries_on_device_or_host import Entry
from ..memory.saved_states import Kept
from ..model.trunk import STAGE
from ..ops.op_protocols import Ops
from ..ops.unpadded_view import noting
from ..options import Options
from ..packed_batch import Who, windows
from ..request_record import Request
from ..round_for_step_count import IDLE, Asked, inputs_of, kind_of
from ..transfer.to_device import HOST, ints
from . import Launch, Replica
from .ops_of_group import of_group

EXTEND, PAGES = "extend", "table"  # the stage of the draft head's extend; the pages in the slot table
NOTHING = Kept()  # of a request that another replica serves


class ReplicaEngine(OptimizedEngine):
    """One replica. checkpoint, ops: of the whole model."""

    def __init__(
        self, checkpoint: Checkpoint, ops: Ops, options: Options, capacity: Capacity, *, replica: Replica, **steps: Any
    ) -> None:
        checkpoint, ops = of_group(checkpoint, ops, options, capacity, replica)
        self.replica = replica
        self.recorder = recorder_for(ops, torch.device(options.device), replica.comm) if options.graphs else None
        super().__init__(checkpoint, ops, replace(options, scratch="request"), capacity, **steps)

    def may_change(self, event: Event) -> dict[str, set[int]]:
        writes = self._writes(event)
        if not isinstance(event, Draft | Forward | Commit):  # these are served on every replica
            return self._table(writes)
        others = {self._memory.slots.of(name) for name in named(event)
                  if not self._mine(name)}  # fmt: skip
        mine = self._table([one for one in writes if one.slot not in others])
        return mine | {PAGES: self._table(writes).get(PAGES, set())}

    def _mine(self, request: str) -> bool:
        return self.replica.owners[request] == self.replica.comm.rank

    def _kept(self, name: str) -> Entry:
        """Copy a request's state. A replica that does not serve the request has its record alone."""
        return super()._kept(name) if self._mine(name) else (self._requests[name].between_rounds(), NOTHING)

    def _restore(self, kept: Request, memory: Kept) -> None:
        if self._mine(kept.name):
            super()._restore(kept, memory)
            return
        self._memory.grow([(kept.name, kept.length.exact)])
        self._requests[kept.name] = kept.between_rounds()

    def _serve(self, asked: Asked) -> Any:
        """Run a body on the requests of this replica, or idle, and exchange the results."""
        owners = [self.replica.owners[one.name] for one in asked.requests]
        mine = [number for number, owner in enumerate(owners) if owner == self.replica.comm.rank]
        most = max(Counter(owners).values())
        asked = asked._replace(most=most)
        # A graph pads the rows of every replica to its bucket, so its collectives need no other padding.
        self.replica.launch = Launch(max(1, len(mine)), most) if self._graphs is None else Launch(1, 1)
        found = super()._serve(asked.part(mine, self._round.width)) if mine else self._idle(asked)
        return self._exchanged(found, owners, most)

    def _idle(self, asked: Asked) -> Any:
        """Run a body on one idle row: the same ops and collectives, and no byte of any pool changes."""
        uniforms, join, kind = asked.uniforms, asked.join, kind_of(asked.kind, bool(asked.uniforms))
        body = self._round.bodies[kind]
        inputs = inputs_of(
            [-1], [-1], body.width, [[-1] * body.choices], self._device if self._graphs is None else HOST, [0],
            [[0] * len(one) for one in uniforms[:1]], [[-1] * body.tree], asked.kinds[:1],
        )
        if self._graphs is not None:  # a watched graph, if the other replicas replay one
            return self._graphs.run((kind, self._round.num_steps), self._base, body.run, inputs, IDLE,
                                    noting(self._see, []), join, asked.most)  # fmt: skip
        found = body.run(self._ops, inputs)
        return found if join is None else join(found)

    def _exchanged(self, found: Any, owners: Sequence[int], most: int) -> Any:
        """Give every replica the results of all requests, in the order of the batch."""
        seen, places = Counter[int](), list[int]()
        for owner in owners:
            places.append(owner * most + seen[owner])
            seen[owner] += 1
        index = ints(places, self._memory.device)

        def each(x: torch.Tensor) -> torch.Tensor:
            padded = torch.cat([x, x.new_zeros(most, *x.shape[1:])])[:most]
            return self.replica.comm.all_gather(padded, 0)[index]

        if isinstance(found, torch.Tensor):
            return each(found)
        parts = [each(x) for x in found]
        return type(found)(*parts) if hasattr(found, "_fields") else tuple(parts)

    # Forwards with prefill chunks: one replica after the other, the others are idle

    def _run_chunks(
        self, plan: Sequence[Planned], replay: RunTarget | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[Inner]]:
        own, roots = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        final = torch.empty(0, device=self._memory.device)
        for owner in sorted({self.replica.owners[p.request.name] for p in plan}):
            part = [p for p in plan if self.replica.owners[p.request.name] == owner]
            asked, rooted = sum(p.asked for p in part), [p for p in part if p.rooted]
            committed = [p for p in part if p.span.kind != "verify"]
            self.replica.launch = Launch(1, 1, {
                (STAGE, "embedding"): sum(p.span.count for p in part), (STAGE, "logits"): asked,
                (EXTEND, "embedding"): sum(p.span.count for p in committed), (EXTEND, "logits"): len(rooted),
            })
            if owner == self.replica.comm.rank:
                said, chosen, final, _ = super()._run_chunks(part, replay)
            else:
                said, chosen = (torch.zeros(n, dtype=torch.int64, device=final.device) for n in (asked, len(rooted)))
                self._idle_forward(bool(asked), bool(committed), bool(rooted))
            own |= dict(zip((p.request.name for p in part), torch.split(
                self._from(owner, said), [p.asked for p in part]), strict=True))
            roots |= dict(zip((p.request.name for p in rooted), self._from(owner, chosen), strict=True))
        every = [roots[p.request.name] for p in plan if p.rooted]
        return (torch.cat([own[p.request.name] for p in plan]),
                torch.stack(every) if every else ints((), self._memory.device), final, [])  # fmt: skip

    def _from(self, owner: int, x: torch.Tensor) -> torch.Tensor:
        """Return what one replica has; x: as long on every replica."""
        return self.replica.comm.all_gather(x[None], 0)[owner] if len(x) else x

    def _idle_forward(self, asked: bool, committed: bool, rooted: bool) -> None:
        """Run the target, and the extend if there is one, on an idle row.

        asked: whether rows need logits;  committed, rooted: whether the draft head is extended, and picks
        """
        ops, model, memory = self._ops, self._model, self._memory
        none, zero = ints([-1], memory.device), ints([0], memory.device)
        who, tokens = Who(none, none, zero, zero), zero
        batch = windows(ops, memory, who, tokens, "decode", 1)
        rows = model.trunk(ops, batch, self._round.strategy.bind(ops, batch))
        if asked:
            model.trunk.head.pick(ops, rows.final, STAGE)
        if committed and model.drafter is not None:
            batch = windows(ops, memory, who, tokens, "draft", 1)
            picks = PickRows(zero, none) if rooted else PickRows(zero[:0], none[:0])
            model.drafter.extend(ops, memory, batch, rows.fed, (picks,) * model.drafter.layers, self._round.num_steps)
