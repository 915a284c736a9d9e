"""A data-parallel group as one engine of the contract: every request is served by one replica, with its own pools.

Requests go to the replicas in turn as they are admitted; one that loads a state goes to the replica that saved it. The
state of a request is that of its replica. Leaves out: building the replicas (`run/build_parallel_engines.py`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from instep_optimized.ranks.lockstep import Lockstep
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.engine import RequestState
from instep_reference.contract.place_names import Place

from ...watch.pool_addresses import NO_LAYER
from ...watch.rank_facts import GroupFacts
from .ranked import PICKS, by_name, parts_of
from .staged import PartedEngine

Padded = tuple[Place, int, int]


class GroupEngine(PartedEngine):
    """Implements the contract over the engines of all replicas.

    owners: request -> its replica; the replicas read it. padded: of each replica what it showed about padded rows
    """

    def __init__(
        self, group: Lockstep, engines: Sequence[Any], config: ModelConfig, owners: dict[str, int],
        padded: Sequence[list[Padded]],
    ) -> None:
        super().__init__(group, engines, config)
        self.owners, self._padded = owners, padded
        self._saved: dict[str, int] = {}  # name of a state -> the replica that saved it
        self._admitted = 0

    def __getattr__(self, name: str) -> Any:
        serve = super().__getattr__(name)
        return self._routed(name, serve) if name in ("admit", "save", "load") else serve

    def _routed(self, name: str, serve: Callable[..., Any]) -> Callable[..., Any]:
        """Serve an event that decides about replicas: they keep the decision if the event is served."""

        def call(request: str, *given: Any) -> Any:
            was = dict(self.owners)
            if name == "admit":
                self.owners[request] = self._admitted % self.group.size
            elif name == "load":
                self.owners[request] = self._saved.get(given[0], self.owners.get(request, 0))
            try:
                answer = serve(request, *given)
            except BaseException:
                self.owners.clear()
                self.owners.update(was)
                raise
            self._admitted += name == "admit"
            if name == "save":
                self._saved[given[0]] = self.owners[request]
            return answer

        return call

    def state(self, request: str) -> RequestState:
        states: list[RequestState] = [engine.state(request) for engine in self.engines]
        self._decide("the length", [one.length for one in states], request, NO_LAYER)
        return states[self.owners[request]]

    def patch(self, request: str, places: Sequence[Place], right: RequestState) -> None:
        self.engines[self.owners[request]].patch(request, places, right)

    def take_group_facts(self) -> GroupFacts:
        """Return the facts of the event that was served."""
        for field, values in by_name([parts_of(one) for one in self._answers]).items():
            self._decide(field, values, place=PICKS[type(self._answers[0])])
        calls, padded = tuple(map(tuple, self.group.take_calls())), tuple(map(tuple, self._padded))
        for one in self._padded:
            one.clear()
        facts = GroupFacts(self.group.size, dict(self.owners), tuple(self._decisions), calls, padded)
        self._decisions, self._answers = [], ()
        return facts


def noted_padding(into: list[Padded]) -> Callable[[Place, torch.Tensor], None]:
    """A hook that notes how many numbers of padded rows are not 0."""

    def note(place: Place, rows: torch.Tensor) -> None:
        if rows.numel():
            into.append((place, len(rows), int((rows != 0).sum())))

    return note
