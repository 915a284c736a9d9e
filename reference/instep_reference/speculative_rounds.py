"""The engine as a paper states it: a dictionary of requests, a loop over rows, a round in four steps.

The caller must not send illegal events. Leaves out: the model (`Model`: tensors in `engine.py`, labels in
`label_ledger.py`), and slots, pages and batches, which a definition does not need.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic

import torch

from .acceptance import answer, block_greedy, chain, greedy
from .contract.adaptive_controller_file import AdaptiveFile
from .contract.capacity import Capacity
from .contract.controllers import Controlled
from .contract.engine import Committed, Drafted, Forwarded, Path, RequestState, Row
from .contract.errors import Unsupported
from .contract.event_facts import inner_multiples
from .contract.place_names import See, unseen
from .contract.sampling import Sampling
from .controllers import controller
from .draft.block import BlockHead
from .draft.drafter_protocol import Asked, Drafter, GrowsTrees, Proposed
from .model_interface import Cache, Memory, Model, Rows
from .sampling import Drawing
from .verify_by_decoding import Node, verify


@dataclass(frozen=True)
class Standing(Generic[Rows, Memory, Cache]):
    """Everything a request has between rounds. It is a value, so a save only has to keep a reference to it.

    final  only in a tracked prefix: the target's rows of its last tokens, one for each MTP layer
    tail   if prefixes are tracked: the earlier rows that the final rows of the next prefix need
    """

    tokens: tuple[int, ...]  # committed: in KV and state
    root: int | None
    memory: Memory
    proposed: Proposed[Rows, Cache]
    final: Rows | None = None
    tail: Rows | None = None


@dataclass(frozen=True)
class Request(Generic[Rows, Memory, Cache]):
    """A live request: its prompt, its standing, and its round. Between rounds it has no drafts and no nodes."""

    prompt: tuple[int, ...]
    standing: Standing[Rows, Memory, Cache]
    sampling: Sampling | None = None
    drafts: tuple[int, ...] = ()
    parents: tuple[int, ...] = (-1,)
    nodes: tuple[Node[Rows, Memory], ...] = ()
    picks: tuple[int, ...] = ()  # the target's own choice at each node
    drawing: Drawing | None = None  # of the verify, if the request samples

    def then(self, standing: Standing[Rows, Memory, Cache]) -> "Request[Rows, Memory, Cache]":
        """Return the request between rounds, with this standing."""
        return Request(self.prompt, standing, self.sampling)



class Rounds(Generic[Rows, Memory, Cache]):
    """Serves the `Engine` protocol over any model, one request at a time."""

    def __init__(
        self, model: Model[Rows, Memory, Cache], drafter: Drafter, *, num_steps: int,
        adaptive: AdaptiveFile | None = None, controlled: Controlled | None = None, lag: int = 0, see: See = unseen,
        room: Capacity | None = None,
    ) -> None:
        self.room = room
        if room is not None and room.topk is not None and not isinstance(drafter, GrowsTrees):
            raise Unsupported("trees that the drafter grows (capacity.topk): this drafter proposes no trees")
        self.track_interval = None if room is None else room.track_interval
        # Number of final rows of a prefix: MTP layer i has read i tokens after its row, so its last i + 1 rows are new.
        # `ahead`: how many layers read tokens after their rows. Those of a block drafter read none.
        self.ahead = 0 if isinstance(drafter, BlockHead) else len(drafter.begin(model).caches)
        self.layers = max(1, self.ahead) if self.track_interval is not None else 1
        self.model, self.drafter, self.see = model, drafter, see
        self.adaptive = adaptive is not None if controlled is None else controlled.varies
        self.controller = controller(controlled, num_steps, adaptive, lag)
        self.messages = tuple(self.controller.messages)
        self.num_steps = num_steps
        self.requests: dict[str, Request[Rows, Memory, Cache]] = {}
        self.preempted: dict[str, Request[Rows, Memory, Cache]] = {}
        self.saved: dict[str, Standing[Rows, Memory, Cache]] = {}

    def watch(self, see: See) -> None:
        self.see = see

    # -- a round ---------------------------------------------------------------------------------

    def admit(self, request: str, prompt: tuple[int, ...], sampling: Sampling | None = None) -> None:
        standing = Standing((), None, self.model.nothing(), self.drafter.begin(self.model))
        self.requests[request] = Request(tuple(prompt), standing, sampling)

    def draft(
        self, requests: tuple[str, ...], picks: tuple[tuple[int, ...], ...] | None = None,
        parents: tuple[tuple[int, ...], ...] | None = None,
    ) -> Drafted:
        if self.adaptive and any(tuple(tree) != tuple(range(len(tree))) for tree in parents or ()):
            raise Unsupported("a tree with adaptive step counts: chains only")
        if self.room is not None and self.room.topk is not None:
            return self._grown(requests, picks, parents, self.room)
        drafts, own = [], []
        for i, name in enumerate(requests):
            live = self.requests[name]
            asked = Asked(self.num_steps, None if picks is None else picks[i], None if parents is None else parents[i])
            tokens = (*live.standing.tokens, _known(live.standing.root))
            ours, theirs = self.drafter.draft(self.model, live.standing.proposed, tokens, asked, self.see)
            tree = chain(len(ours) + 1) if asked.parents is None else (-1, *asked.parents)
            self.requests[name] = replace(live, drafts=tuple(ours), parents=tree)
            drafts.append(ours)
            own.append(theirs)
        return Drafted(self._table(drafts), self._table(own))

    def _grown(
        self, requests: Sequence[str], picks: Sequence[Sequence[int]] | None, parents: Sequence[Sequence[int]] | None,
        room: Capacity,
    ) -> Drafted:
        """Grow the drafter's own trees; a given window replaces the grown one."""
        assert isinstance(self.drafter, GrowsTrees) and room.topk is not None, "asked at the start"
        drafts, own, shapes = [], [], []
        for i, name in enumerate(requests):
            live = self.requests[name]
            tokens = (*live.standing.tokens, _known(live.standing.root))
            ours, tree = self.drafter.grow(
                self.model, live.standing.proposed, tokens, self.num_steps, room.topk, room.grown(self.num_steps),
                self.see)
            used = ours if picks is None else list(picks[i])
            shape = tree if picks is None else range(len(used)) if parents is None else parents[i]
            self.requests[name] = replace(live, drafts=tuple(used), parents=(-1, *shape))
            drafts.append(used)
            own.append(ours)
            shapes.append(tree)
        return Drafted(self._table(drafts), self._table(own), self._table(shapes))

    def forward(self, rows: tuple[Row, ...]) -> Forwarded:
        roots: dict[str, int] = {}
        own: dict[str, torch.Tensor] = {}
        tracked: dict[str, int] = {}
        inner: dict[str, int] = {}
        for row in rows:
            if row.kind == "prefill":
                picks = self._prefill(row)
                inner |= {under: len(self.saved[under].tokens) for under in row.inner if under}
                if row.track:
                    tracked[row.request] = len(self.saved[row.track].tokens)
            elif row.kind == "decode":
                picks = self._decode(row)
            else:
                picks = self._verify(row)
            if picks:
                own[row.request] = torch.tensor(picks, dtype=torch.int64, device=self.model.device)
            if picks and row.kind != "verify":
                roots[row.request] = _known(self.requests[row.request].standing.root)
        if rows:
            self.controller.forwarded(sum(row.kind == "decode" for row in rows))
        return Forwarded(roots, own, tracked, inner)

    def commit(
        self, requests: tuple[str, ...], accepted: tuple[Path, ...] | None = None, track: tuple[str, ...] = (),
        caps: tuple[int, ...] = (),
    ) -> Committed:
        live = [self.requests[name] for name in requests]
        most = caps or (None,) * len(live)
        own = self._accepted(live, most)
        paths = own
        if accepted is not None:
            paths = [Path(path.nodes[:cap], path.bonus) for path, cap in zip(accepted, most, strict=True)]
        for name, one, path in zip(requests, live, paths, strict=True):
            self.requests[name] = one.then(self._taken(one, path))
        under = track or ("",) * len(requests)
        found = {
            name: kept for name, one, path, kept_as in zip(requests, live, paths, under, strict=True)
            if kept_as and (kept := self._track_path(one, path, self.requests[name].standing, kept_as)) is not None
        }
        self.controller.committed([len(path.nodes) for path in paths])
        said = answer(paths, own, [len(one.nodes) for one in live], self.model.device)
        if self.track_interval is None:
            return said
        steps = said.bonus.new_tensor([found[name][1] if name in found else -1 for name in requests])
        return replace(said, tracked={name: count for name, (count, _) in found.items()}, steps_to_track=steps)

    def _accepted(self, live: Sequence[Request[Rows, Memory, Cache]], caps: Sequence[int | None]) -> list[Path]:
        """Return the engine's own acceptance of verified windows; those of a block drafter in block form.

        Greedy blocks are one table. A window that is narrower than the widest one ends in tokens that no pick equals. A
        block of a request that samples is accepted by its probabilities, not by the choice that was drawn at each node.
        """
        windows = [[node.token for node in one.nodes] for one in live]
        if not isinstance(self.drafter, BlockHead) or not live:
            return [greedy(window, one.parents, one.picks, cap)
                    for window, one, cap in zip(windows, live, caps, strict=True)]  # fmt: skip
        widest = max(map(len, windows))
        block, picks = (torch.tensor([[*line, *[filler] * (widest - len(line))] for line in lines])
                        for lines, filler in ((windows, -1), ([one.picks for one in live], -2)))  # fmt: skip
        most = [len(window) - 1 if cap is None else cap for window, cap in zip(windows, caps, strict=True)]
        correct_len, bonus = block_greedy(block, picks, torch.tensor(most))
        paths = [Path(tuple(range(1, 1 + count)), token)
                 for count, token in zip(correct_len.tolist(), bonus.tolist(), strict=True)]  # fmt: skip
        return [path if one.drawing is None else self.model.accept_block(
                    self.model.join([node.final for node in one.nodes]), one.drawing, cap)
                for one, path, cap in zip(live, paths, most, strict=True)]  # fmt: skip

    def _prefill(self, row: Row) -> list[int]:
        """Run and commit the next tokens of the prompt. The last chunk also chooses the root -> [that choice]."""
        live = self.requests[row.request]
        standing, start = live.standing, len(live.standing.tokens)
        tokens, rest = live.prompt[start : start + row.tokens], live.prompt[start + row.tokens :]
        memory, parts, passed = standing.memory, list[Rows](), list[tuple[str, int, Memory]]()
        multiples = inner_multiples(start, start + row.tokens, self.track_interval or 1)
        cuts = [(under, end) for under, end in zip(row.inner, multiples, strict=False) if under]
        for under, end in (*cuts, ("", start + row.tokens)):
            begin = passed[-1][1] if passed else start
            part, memory = self._chunk(live.prompt[begin:end], memory, begin, inner=bool(under))
            parts.append(part)
            passed.append((under, end, memory))
        final = self.model.join(parts)
        picks = [] if rest else self._chosen(live, row, self.model.last(final), tokens[-1:])
        root = None if rest else picks[0] if row.root is None else row.root
        following = live.prompt[start + 1 :]
        after = self._extended(standing, tokens, final, memory, following, root)
        self.requests[row.request] = replace(live, standing=after)
        for number, (under, end, there) in enumerate(passed[:-1], start=1):
            self._track(after, end, there, self._newest(standing, self.model.join(parts[:number])), under)
        if row.track:
            self._track(after, len(after.tokens), memory, self._newest(standing, final), row.track)
        return picks

    def _chunk(self, tokens: tuple[int, ...], memory: Memory, start: int, *, inner: bool) -> tuple[Rows, Memory]:
        """Run the tokens of a chunk, or of its part up to a prefix inside it -> their final rows, the memory after."""
        return self.model.advance(tokens, memory, start, self.see)

    def _decode(self, row: Row) -> list[int]:
        """Run the root and commit it at once -> [the target's choice]."""
        live = self.requests[row.request]
        standing = live.standing
        tokens = (_known(standing.root),)
        final, memory = self.model.advance(tokens, standing.memory, len(standing.tokens), self.see)
        picks = self._chosen(live, row, final, tokens)
        root = picks[0] if row.root is None else row.root
        self.requests[row.request] = live.then(self._extended(standing, tokens, final, memory, (), root))
        return picks

    def _verify(self, row: Row) -> list[int]:
        """Run the window -> the target's choice at every node. Nothing is committed: the standing does not change."""
        live = self.requests[row.request]
        standing = live.standing
        window = (_known(standing.root), *live.drafts)
        nodes = verify(self.model, window, live.parents, standing.memory, len(standing.tokens), self.see)
        picks = self._chosen(live, row, self.model.join([node.final for node in nodes]), window, live.parents)
        drawing = _drawing(live, row, window, live.parents)
        self.requests[row.request] = replace(live, nodes=nodes, picks=tuple(picks), drawing=drawing)
        return picks

    def _chosen(
        self, live: Request[Rows, Memory, Cache], row: Row, final: Rows, tokens: Sequence[int],
        parents: Sequence[int] = (-1,),
    ) -> list[int]:
        """Compute the target's own choice after each row of a window, or after the row of a one-node window."""
        drawing = _drawing(live, row, tokens, parents)
        if drawing is None:
            return self.model.pick(final, "trunk", self.see)
        return self.model.draw(final, drawing, "trunk", self.see)

    def _taken(self, live: Request[Rows, Memory, Cache], path: Path) -> Standing[Rows, Memory, Cache]:
        """Return the standing after a commit: its memory is the memory after the last accepted node."""
        taken = [live.nodes[node] for node in (0, *path.nodes)]
        tokens = tuple(node.token for node in taken)
        final = self.model.join([node.final for node in taken])
        return self._extended(live.standing, tokens, final, taken[-1].memory, tokens[1:], path.bonus)

    def _track_path(
        self, before: Request[Rows, Memory, Cache], path: Path, after: Standing[Rows, Memory, Cache], name: str
    ) -> tuple[int, int] | None:
        """Track up to the last multiple of the interval that an accepted path reaches.

        -> its number of tokens, and the node after which that is; None: the path reaches no multiple
        """
        assert self.track_interval is not None, "nothing is tracked without an interval"
        count = len(after.tokens) // self.track_interval * self.track_interval
        reached = count - len(before.standing.tokens)
        if reached <= 0:
            return None
        taken = (0, *path.nodes)[:reached]
        nodes = [before.nodes[node] for node in taken]
        final = self._newest(before.standing, self.model.join([node.final for node in nodes]))
        self._track(after, count, nodes[-1].memory, final, name)
        return count, taken[-1]

    def _newest(self, before: Standing[Rows, Memory, Cache], final: Rows) -> Rows:
        """Return the target's rows of the last tokens after the rows `final` are committed to this standing."""
        return self.model.last(final if before.tail is None else self.model.join((before.tail, final)), self.layers)

    def _track(
        self, standing: Standing[Rows, Memory, Cache], count: int, memory: Memory, final: Rows, name: str
    ) -> None:
        """Keep the first `count` tokens of a request. memory, final: the target's memory after them, and its last rows.

        The last i + 1 rows of MTP layer i depend on tokens after the prefix, which belong to this request.
        """
        caches = tuple(self.model.until(cache, max(0, count - 1 - layer) if self.ahead else count)
                       for layer, cache in enumerate(standing.proposed.caches))  # fmt: skip
        self.saved[name] = Standing(standing.tokens[:count], None, memory, Proposed(caches), final)

    def _extended(
        self, before: Standing[Rows, Memory, Cache], tokens: tuple[int, ...], final: Rows, memory: Memory,
        following: tuple[int, ...], root: int | None,
    ) -> Standing[Rows, Memory, Cache]:
        """Return the standing with `tokens` committed. The draft side takes in their rows too.

        following: the known tokens after the first of them, without the root; root: None while it is unknown
        """
        known = following if root is None else (*following, root)
        proposed = self.drafter.extend(
            self.model, before.proposed, final, len(tokens), known, root is not None, len(before.tokens),
            self.num_steps, self.see)
        tail = self.model.last(self._newest(before, final), self.layers - 1) if self.layers > 1 else None
        return Standing(before.tokens + tokens, root, memory, proposed, tail=tail)

    # -- step counts -----------------------------------------------------------------------------

    def set_num_steps(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.controller.set_num_steps(num_steps)

    def next_num_steps(self, batch: int, scheduled: int) -> int:
        return self.controller.next_num_steps(batch, scheduled)

    # -- coming and going ------------------------------------------------------------------------

    def save(self, request: str, name: str) -> None:
        self.saved[name] = self.requests[request].standing

    def load(self, request: str, name: str) -> None:
        live, kept = self.requests[request], self.saved[name]
        if kept.final is not None and not self.ahead:  # a prefix whose memory depends on no later token
            kept = Standing(kept.tokens, None, kept.memory, kept.proposed)
        elif kept.final is not None:  # a prefix: the rows of its last tokens are paired with this request's next ones
            count = min(self.layers, len(kept.tokens))
            start = len(kept.tokens) - count
            before: Standing[Rows, Memory, Cache] = Standing(kept.tokens[:start], None, kept.memory, Proposed(tuple(
                self.model.until(cache, start) for cache in kept.proposed.caches)))
            kept = self._extended(before, kept.tokens[start:], kept.final, kept.memory, live.prompt[start + 1 :], None)
        self.requests[request] = live.then(kept)

    def offload(self, name: str) -> None:
        """Do nothing: the place of a copy is not part of the definition."""

    def fetch(self, name: str) -> None:
        """Do nothing, as in `offload`."""

    def evict(self, name: str) -> None:
        del self.saved[name]

    def preempt(self, request: str) -> None:
        self.preempted[request] = self.requests.pop(request)

    def resume(self, request: str) -> None:
        self.requests[request] = self.preempted.pop(request)

    def finish(self, request: str) -> None:
        del self.requests[request]

    def abort(self, request: str) -> None:
        (self.preempted if request in self.preempted else self.requests).pop(request)

    def idle(self) -> None:
        """Do nothing: an empty step has no effect."""

    def state(self, request: str) -> RequestState:
        """Return the logical state. A round in flight is not part of it before its commit."""
        standing = (self.requests.get(request) or self.preempted[request]).standing
        proposed = standing.proposed
        return self.model.logical(
            len(standing.tokens), standing.root, next(iter(proposed.proposals), None), proposed.hidden,
            standing.memory, proposed.caches, standing.tail)

    def prefix(self, name: str) -> RequestState:
        """Return the prefix that is tracked under a name."""
        kept = self.saved[name]
        state = self.model.logical(
            len(kept.tokens), None, None, None, kept.memory, kept.proposed.caches, tail=kept.final)
        ((level, final),) = state.tail.items()
        return replace(state, tail={level: final[:-1]} if len(final) > 1 else {}, final=final[-1])

    def _table(self, rows: list[list[int]]) -> torch.Tensor:
        """Build a table [B, n] int64 from rows. Trees of a batch may differ in size: shorter rows end in -1."""
        width = max(map(len, rows), default=self.num_steps)
        padded = [row + [-1] * (width - len(row)) for row in rows]
        return torch.tensor(padded, dtype=torch.int64, device=self.model.device).reshape(len(rows), width)


def _drawing(
    live: Request[Rows, Memory, Cache], row: Row, tokens: Sequence[int], parents: Sequence[int]
) -> Drawing | None:
    """Return the inputs of the row's draw; None: the request takes the argmax."""
    sampling = live.sampling
    return None if sampling is None or not sampling.draws else Drawing(sampling, tokens, parents, row.uniforms)


def _known(root: int | None) -> int:
    assert root is not None, "the prompt is unfinished: there is no root yet"
    return root
