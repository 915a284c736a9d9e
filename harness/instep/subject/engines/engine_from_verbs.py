"""An engine of the contract made of a few verbs: whatever follows from logits and from the trace is derived here.

Roots, own picks, acceptance, lengths and wishes are the harness's own, so they are compared with nothing. Tensors are
copied as they come in. A request that `preempt` or `save` concerns, where there is no such verb, is dropped, and its
tokens are stepped over again; a request that cannot be served so leaves the run.
Leaves out: what the verbs give, and whether it is of the right kind (`callbacks.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from instep_reference.acceptance import answer, chain, greedy
from instep_reference.contract.adaptive_controller_file import AdaptiveFile
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.controllers import Controlled
from instep_reference.contract.engine import Capacity, Committed, Drafted, Event, Forwarded, Path, Region, Row
from instep_reference.contract.engine import RequestState as State
from instep_reference.contract.errors import Unsupported
from instep_reference.contract.place_names import AFTER_LAYERS, Place, See, unseen
from instep_reference.contract.sampling import Sampling
from instep_reference.controllers import controller as reference_controller
from instep_reference.sampling import Drawing, drawn

from ...watch.visible_places import Shown
from .callbacks import Asked, Said
from .verbs import Tokens

FINAL, LOGITS, PICK = (Place("trunk", AFTER_LAYERS, name) for name in ("final", "logits", "pick"))
UNRECORDED = "not recorded at this event"
AGAIN = "without {} and {}: drop, then a step over the tokens again"


@dataclass(frozen=True)
class Standing:
    """The progress of a request according to the trace.

    tokens   committed tokens
    window   root and drafts, from the draft event to the commit; picks: the target's own picks in it
    there    whether the engine knows the request: some token of it ran
    flying   verified and not committed
    aside    preempted by the engine's own callback
    gone     why the request left the run
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...] = ()
    root: int | None = None
    window: tuple[int, ...] = ()
    picks: tuple[int, ...] = ()
    there: bool = False
    flying: bool = False
    aside: bool = False
    gone: str = ""
    sampling: Sampling | None = None

    def row(self, row: Row) -> Tokens:
        first = len(self.tokens)
        if row.kind == "prefill":
            return Tokens(row.request, "prefill", first, self.prompt[first : first + row.tokens])
        return Tokens(row.request, row.kind, first, self.window if row.kind == "verify" else (_known(self.root),))

    def asks(self, row: Row) -> bool:
        """Whether its logits are requested: for every row except a chunk that is not the last of its prompt."""
        return row.kind != "prefill" or len(self.tokens) + row.tokens == len(self.prompt)

    @property
    def hidden(self) -> str:
        """Why none of its memory is shown at present; empty: it is shown."""
        if self.gone or self.flying or self.aside:
            return self.gone or ("within a round" if self.flying else "preempted")
        return "" if self.there else "not in the engine"


class DerivedEngine:
    """Serves the contract through the callbacks of an external engine; `shown` describes the last event."""

    def __init__(
        self, asked: Asked, checkpoint: Checkpoint, capacity: Capacity, *, num_steps: int,
        adaptive: AdaptiveFile | None, controlled: Controlled | None = None, lag: int = 0,
    ) -> None:
        if capacity.track_interval is not None:
            raise Unsupported("tracked prefixes: an engine that is led by verbs has none for them")
        self.asked, self.config, self.capacity = asked, checkpoint.config, capacity
        self.rounds, self.products, self.once = asked.rounds, asked.products, asked.once
        self.controller, self.num_steps = reference_controller(controlled, num_steps, adaptive, lag), num_steps
        self.requests: dict[str, Standing] = {}
        self.saved: dict[str, Standing] = {}
        self.see: See = unseen
        self.places: set[Place] = set()  # that are packed here, as the trace has them
        self.watched: set[Place] = set()
        self._begin()

    def _begin(self) -> None:
        """The record of one event."""
        self.told: list[str] = []
        self.rebuilt: set[str] = set()
        self.last: set[str] = set()
        self.unrecorded: set[str] = set()
        self.served = self.left = False

    @property
    def shows_layers(self) -> bool:
        """Whether its layers can be computed again from its own bits: it shows its places and what it remembers."""
        return all(map(self.asked.has, ("watch", "state", "kv")))

    def shown(self) -> Shown:
        """Memory of the event that just ran; read once for each."""
        told = Shown(
            whole=False, feeds=self.asked.feeds - self._silent(), exact=self.asked.exact,
            hidden={name: UNRECORDED if name in self.unrecorded else one.hidden
                    for name, one in self.requests.items() if one.hidden or name in self.unrecorded},
            state_layers=None if self.asked.state_layers is None else frozenset(self.asked.state_layers),
            places=frozenset(self.places if self.gone else self.places | self.watched), gone=self.gone,
            rebuilt=frozenset(self.rebuilt), last=frozenset(self.last), unserved=self.left and not self.served,
            said=tuple(self.told),
        )  # fmt: skip
        self._begin()
        return told

    def watch(self, see: See) -> None:
        def seen(place: Place, tensor: torch.Tensor) -> torch.Tensor:
            self.places.add(place)
            return see(place, tensor)

        def watched(place: Place, tensor: torch.Tensor) -> torch.Tensor:
            if self.gone:
                return tensor  # rows are of those that stay: no longer the trace's
            self.watched.add(place)
            return see(place, tensor)

        self.see = seen
        self.asked.watch(watched)

    def _silent(self) -> set[str]:
        """Callbacks that could show places, and have shown none so far."""
        layers = any(place.component == "hidden" for place in self.places)
        return {verb for verb, came in (("watch", self.watched), ("layers", layers)) if not came}

    @property
    def gone(self) -> frozenset[str]:
        return frozenset(name for name, one in self.requests.items() if one.gone)

    # -- a round ---------------------------------------------------------------------------------

    def admit(self, request: str, prompt: tuple[int, ...], sampling: Sampling | None = None) -> None:
        self.requests[request], self.served = Standing(tuple(prompt), sampling=sampling), True

    def draft(
        self, requests: tuple[str, ...], picks: tuple[tuple[int, ...], ...] | None = None,
        parents: tuple[tuple[int, ...], ...] | None = None,
    ) -> Drafted:
        assert picks is not None, "a trace has the drafts of every request"
        for name, tree in zip(requests, parents or (), strict=False):
            if tuple(tree) != tuple(range(len(tree))):
                self._leave(name, "its drafts form a tree, and a window of `step` is a chain")
        staying = [name for name in requests if self._stays(name)]
        for name, drafts in zip(requests, picks, strict=True):
            standing = self.requests[name]
            self.requests[name] = replace(standing, window=(_known(standing.root), *drafts))
        own = {}
        if staying and self.config.mtp_layers and self.asked.has("draft"):
            chosen = tuple(drafts for name, drafts in zip(requests, picks, strict=True) if name in staying)
            own = dict(zip(staying, self.asked.draft(tuple(staying), self.num_steps, chosen), strict=True))
        width = max(map(len, picks))
        return Drafted(_table(picks, width), _table([own.get(name, ()) for name in requests], width))

    def forward(self, rows: tuple[Row, ...]) -> Forwarded:
        staying = [row for row in rows if self._stays(row.request)]
        wanted = {row.request for row in staying if self.requests[row.request].asks(row)}
        said = self._step([self.requests[row.request].row(row) for row in staying], wanted)
        self._draw(staying, said)
        self._show(rows, said)
        own: dict[str, torch.Tensor] = {}
        roots: dict[str, int] = {}
        for row in staying:
            standing, picks = self.requests[row.request], said.picks.get(row.request)
            if picks is not None:
                own[row.request] = picks
            if row.kind == "verify":
                chosen = () if picks is None else tuple(picks.tolist())
                self.requests[row.request] = replace(standing, picks=chosen, there=True, flying=True)
                continue
            if row.root is not None:
                roots[row.request] = row.root
            tokens = (*standing.tokens, *standing.row(row).tokens)
            self.requests[row.request] = replace(standing, tokens=tokens, root=row.root, there=True)
        if rows:
            self.controller.forwarded(sum(row.kind == "decode" for row in rows))
        return Forwarded(roots, own)

    def _draw(self, rows: Sequence[Row], said: Said) -> None:
        """The choices of requests that sample, drawn here from the logits that the engine shows."""
        for row in rows:
            one = self.requests[row.request]
            logits = said.logits.get(row.request)
            if one.sampling is not None and row.uniforms and logits is not None and not logits.isnan().any():
                tokens = one.row(row).tokens if row.kind == "verify" else (0,)
                drawing = Drawing(one.sampling, tokens, chain(len(tokens)), row.uniforms)
                said.picks[row.request] = torch.tensor(drawn(logits.double(), drawing))

    def commit(
        self, requests: tuple[str, ...], accepted: tuple[Path, ...] | None = None, track: tuple[str, ...] = (),
        caps: tuple[int, ...] = (),
    ) -> Committed:
        assert accepted is not None, "a trace has the accepted path of every request"
        most = caps or (None,) * len(requests)
        paths = [Path(path.nodes[:cap], path.bonus) for path, cap in zip(accepted, most, strict=True)]
        own, widths = [], []
        for name, path, cap in zip(requests, paths, most, strict=True):
            one = self.requests[name]
            own.append(greedy(one.window, chain(len(one.window)), one.picks, cap) if one.picks else Path((), -1))
            widths.append(len(one.window))
            tokens = (*one.tokens, *(one.window[node] for node in (0, *path.nodes)))
            if self._stays(name):
                self.asked.verb("keep", name, len(tokens))
            self.requests[name] = replace(one, tokens=tokens, root=path.bonus, window=(), picks=(), flying=False)
        self.controller.committed([len(path.nodes) for path in paths])
        return answer(paths, own, widths, torch.device("cpu"))

    def _step(self, rows: Sequence[Tokens], wanted: set[str]) -> Said:
        return self.asked.step(rows, wanted) if rows else Said()

    def _show(self, rows: tuple[Row, ...], said: Said) -> None:
        """Rows packed as in the trace; rows that are not shown are NaN and never read."""
        before = self.requests
        counts = {row.request: len(before[row.request].row(row).tokens) for row in rows}
        self.last = {name for name, found in said.final.items() if len(found) < counts[name]}
        if said.final:
            self.see(FINAL, _packed(said.final, counts, float("nan")))
        if said.logits:
            scored = {row.request: counts[row.request] if row.kind == "verify" else 1 for row in rows
                      if before[row.request].asks(row)}  # fmt: skip
            self.see(LOGITS, _packed(said.logits, scored, float("nan")))
            self.see(PICK, _packed(said.picks, scored, -1))
        for layer in sorted({layer for layers in said.layers.values() for layer in layers}):
            mine = {name: layers[layer] for name, layers in said.layers.items() if layer in layers}
            self.see(Place("trunk", layer, "hidden"), _packed(mine, counts, float("nan")))

    # -- coming and going ------------------------------------------------------------------------

    def begin_with(self, requests: Mapping[str, Standing], num_steps: int) -> None:
        """Begin with requests that were served elsewhere up to their committed tokens."""
        self.requests, self.num_steps = dict(requests), num_steps

    def set_num_steps(self, num_steps: int) -> None:
        self.num_steps, self.served = num_steps, True
        self.controller.set_num_steps(num_steps)

    def next_num_steps(self, batch: int, scheduled: int) -> int:
        return self.controller.next_num_steps(batch, scheduled)

    def idle(self) -> None:
        self.served = True

    def save(self, request: str, name: str) -> None:
        self.saved[name] = self.requests[request]
        if self._stays(request) and self.asked.has("save"):
            self.asked.verb("save", request, name)

    def load(self, request: str, name: str) -> None:
        kept, live = self.saved[name], self.requests[request]
        self.requests[request] = replace(live, tokens=kept.tokens, root=kept.root, gone=live.gone or kept.gone)
        if not self._stays(request):
            return
        if self.asked.has("load"):
            self.asked.verb("load", request, name)
            self.requests[request] = replace(self.requests[request], there=True)
        else:
            self._again(request, "save", "load")

    def evict(self, name: str) -> None:
        del self.saved[name]
        self.served = True

    def offload(self, name: str) -> None:
        raise Unsupported("what is kept on the host: no verb moves it there")

    fetch = offload

    def preempt(self, request: str) -> None:
        if not self._stays(request) or not self.requests[request].there:
            return
        own = self.asked.has("preempt")
        self.asked.verb("preempt" if own else "drop", request)
        self.requests[request] = replace(self.requests[request], aside=own, there=own)

    def resume(self, request: str) -> None:
        if not self._stays(request):
            return
        if self.requests[request].aside:
            self.asked.verb("resume", request)
            self.requests[request] = replace(self.requests[request], aside=False)
        elif self.requests[request].tokens:
            self._again(request, "preempt", "resume")

    def finish(self, request: str) -> None:
        if self._stays(request) and self.requests[request].there:
            self.asked.verb("drop", request)
        del self.requests[request]

    abort = finish

    def _again(self, request: str, one: str, other: str) -> None:
        """Its tokens once more, from the first on, as a prompt; no more at once than the trace's room has."""
        tokens, most = self.requests[request].tokens, self.capacity.max_tokens
        for first in range(0, len(tokens), most):
            self._step([Tokens(request, "prefill", first, tokens[first : first + most])], set())
        self.requests[request] = replace(self.requests[request], there=True)
        self.rebuilt.add(request)
        self.told.append(AGAIN.format(one, other))

    def _stays(self, request: str) -> bool:
        """Whether it is served; notes what becomes of the event."""
        stays = not self.requests[request].gone
        self.served, self.left = self.served or stays, self.left or not stays
        return stays

    def _leave(self, request: str, why: str) -> None:
        if self._stays(request):
            if self.requests[request].there:
                self.asked.verb("drop", request)
            self.requests[request] = replace(self.requests[request], gone=why, there=False)
            self.told.append(f'request "{request}" leaves the run: {why}')

    # -- what is shown ---------------------------------------------------------------------------

    def state(self, request: str) -> State:
        one = self.requests[request]
        if not one.tokens and self.shows_layers:
            return State(0, None, None, None, *self.asked.nothing())
        if one.hidden or not one.tokens:
            return State(len(one.tokens), one.root, None, None, {}, {}, {}, {})
        states = self.asked.state(request)
        if states is None:
            self.unrecorded.add(request)
        memory = *(states or ({}, {})), *self.asked.kv(request)
        return State(len(one.tokens), one.root, None, None, *memory)

    def regions(self) -> list[Region]:
        return self.asked.shown_or("regions", [])

    def may_change(self, event: Event) -> dict[str, set[int]]:
        return self.asked.shown_or("may_change", {}, event)

    def slots(self) -> dict[str, int]:
        return self.asked.shown_or("slots", {})

    def pages(self) -> dict[str, list[int]]:
        return self.asked.shown_or("pages", {})


def _known(root: int | None) -> int:
    assert root is not None, "a root is known once the prompt is over"
    return root


def _table(rows: Sequence[Sequence[int]], width: int) -> torch.Tensor:
    padded = [[*row, *[-1] * (width - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.int64).reshape(len(rows), width)


def _packed(found: dict[str, torch.Tensor], counts: dict[str, int], nothing: float) -> torch.Tensor:
    """The rows of every request in batch order, `counts` of each; `nothing` where fewer or none are shown."""
    like = next(iter(found.values()))
    parts = []
    for name, count in counts.items():
        mine = found.get(name, like[:0])
        parts += [like.new_full((count - len(mine), *like.shape[1:]), nothing), mine]
    return torch.cat(parts)
