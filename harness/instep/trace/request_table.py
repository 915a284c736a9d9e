"""The state of every request, predicted from the trace alone: phase, length, root, window, slot and pages.

Leaves out: which event may follow (`event_rules.py`). The order of slots and pages comes from the header: the first
free one in that order is taken, so instep need not ask the engine.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from instep_reference.contract.engine import Capacity
from instep_reference.contract.event_facts import Phase
from instep_reference.contract.kept_copies import Copy
from instep_reference.contract.sampling import Sampling


@dataclass(frozen=True)
class Standing:
    """One live request.

    length   committed tokens; root: chosen but not committed; said: everything chosen after the prompt
    window   root and drafts of this round, while drafted or verified; parents: one per node, -1 for the root
    slot     None while preempted; pages in order of position; request_row: the row that goes with the slot
    before   the phase that a preempted request returns to
    prefix   whether it is a tracked prefix and no request: `prompt` are its tokens
    aside    for a copy under a name: whether it is on the host
    track_slot  of a prefix on the device, if the room limits them
    ahead    how many tokens more than `length` an engine with overlapping rounds must assume, as it does not know yet
             how many drafts of the last commit were accepted; 0 without overlap
    """

    request: str
    prompt: tuple[int, ...]
    slot: int | None
    phase: Phase = Phase.WAITING
    length: int = 0
    root: int | None = None
    said: tuple[int, ...] = ()
    window: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    pages: tuple[int, ...] = ()
    before: Phase | None = None
    ahead: int = 0
    sampling: Sampling | None = None
    prefix: bool = False
    aside: bool = False
    track_slot: int | None = None
    request_row: int | None = None

    @property
    def draws(self) -> bool:
        """Whether its tokens are drawn."""
        return self.sampling is not None and self.sampling.draws

    def fits(self, prompt: tuple[int, ...]) -> bool:
        """Whether what was kept of it belongs to a request with this prompt."""
        return prompt[: len(self.prompt)] == self.prompt and (len(prompt) > len(self.prompt)) == self.prefix

    def children(self, node: int) -> list[int]:
        """The drafts of the window that continue a node."""
        return [child for child, parent in enumerate(self.parents) if parent == node]

    @property
    def unread(self) -> int:
        """Tokens of the prompt that no forward has taken yet."""
        return max(len(self.prompt) - self.length, 0)


@dataclass
class RequestTable:
    """All requests. `ended` has those that are over, in order; `saved` maps the name of a copy to its content.

    steps: for the last commit, request -> the node of its window whose memory a tracked prefix has
    """

    capacity: Capacity
    num_steps: int
    live: dict[str, Standing] = field(default_factory=dict)
    ended: list[Standing] = field(default_factory=list)
    saved: dict[str, Standing] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)

    def width(self, name: str) -> int:
        """The tokens that count for a request's window: for pages, for tokens of a forward, before its commit."""
        return self.capacity.width(self.num_steps, len(self.live[name].window))

    def as_it_stands(self) -> "RequestTable":
        """A table that later events do not change."""
        return replace(self, live=dict(self.live), saved=dict(self.saved))

    def in_phase(self, *phases: Phase) -> tuple[str, ...]:
        """Requests in one of the phases, in order of admission."""
        return tuple(name for name, standing in self.live.items() if standing.phase in phases)

    def coming(self) -> tuple[int, int]:
        """Count the requests with a slot: those whose root is known, and all. With them a wish is requested."""
        slotted = [standing for standing in self.live.values() if standing.slot is not None]
        return sum(standing.root is not None for standing in slotted), len(slotted)

    def copies(self) -> frozenset[Copy]:
        """The copies of requests: of saves until they are evicted, of preempts until they resume or are over."""
        preempted = self.in_phase(Phase.PREEMPTED)
        return frozenset([*(("offload" if kept.aside else "save", name) for name, kept in self.saved.items()),
                          *(("preempt", name) for name in preempted)])  # fmt: skip

    def room_for(self, prefixes: int) -> bool:
        """Whether the device has room for this many further prefixes."""
        there, most = len(self.on_device()), self.capacity.tracked
        return most is None or not prefixes or there + prefixes <= most

    def on_device(self) -> list[str]:
        """The names of the tracked prefixes on the device."""
        return [name for name, kept in self.saved.items() if kept.prefix and not kept.aside]

    def loadable(self, prompt: tuple[int, ...]) -> list[str]:
        """The names of the copies that a request with this prompt may load."""
        return [name for name, kept in self.saved.items() if not kept.aside and kept.fits(prompt)]

    def boundary(self, name: str, tokens: int) -> int | None:
        """The last multiple of the interval that a request reaches with `tokens` more tokens."""
        before, every = self.live[name].length, self.capacity.track_interval
        if not every:
            return None
        last = (before + tokens) // every * every
        return last if last > before else None

    def track(self, name: str, under: str, tokens: int, slot: int | None = None) -> None:
        """Keep the first tokens of a request as a prefix. slot: its track slot; None: its name's, or a free one."""
        standing = self.live[name]
        text = (*standing.prompt, *standing.said)[:tokens]
        if slot is None:
            slot = self.saved[under].track_slot if under in self.saved else self.free_track_slot()
        self.saved[under] = Standing(name, text, None, Phase.PREFILLING, tokens, prefix=True, track_slot=slot)

    def own_prefix(self, name: str, under: str) -> bool:
        """Whether a name is that of a prefix of a request of this name on the device, which a commit may replace."""
        kept = self.saved.get(under)
        return kept is not None and kept.prefix and not kept.aside and kept.request == name

    def free_track_slot(self, but: Iterable[int | None] = ()) -> int | None:
        """The lowest free track slot, `but` those; None: the room does not limit the prefixes on the device."""
        taken = {*(self.saved[name].track_slot for name in self.on_device()), *but}
        return None if self.capacity.tracked is None else next(
            slot for slot in range(1, len(taken) + 2) if slot not in taken)

    def free_slot(self) -> int | None:
        """The slot that the next admitted or resumed request takes."""
        taken = {standing.slot for standing in self.live.values()}
        return next((slot for slot in self.capacity.slots if slot not in taken), None)

    def free_request_row(self) -> int | None:
        """The request row that it takes: the lowest free even number, or else the lowest free odd one."""
        taken = {standing.request_row for standing in self.live.values()}
        free = [row for row in range(1, 1 + len(self.capacity.slots)) if row not in taken]
        return min(free, key=lambda row: (row % 2, row), default=None)

    def pages_missing(self, positions: Mapping[str, int]) -> int:
        """How many pages are missing for these requests to reach these positions."""
        used = sum(len(standing.pages) for standing in self.live.values())
        grown = sum(max(self._pages_for(count) - len(self.live[name].pages), 0) for name, count in positions.items())
        return max(used + grown - len(self.capacity.pages), 0)

    def room_of(self, positions: int) -> bool:
        """Whether there are pages for a further request with that many positions."""
        used = sum(len(standing.pages) for standing in self.live.values())
        return used + self._pages_for(positions) <= len(self.capacity.pages)

    def positions(self, tokens: Mapping[str, int]) -> dict[str, int]:
        """The positions up to which an event writes that gives these requests these numbers of tokens.

        With overlapping rounds the worst case counts. If there is no room for it, the engine waits for the exact
        lengths, and they count.
        """
        worst = {name: self.live[name].length + self.live[name].ahead + count for name, count in tokens.items()}
        most = self.capacity.request_positions
        if not self.pages_missing(worst) and all(positions <= most for positions in worst.values()):
            return worst
        return {name: self.live[name].length + count for name, count in tokens.items()}

    def reach(self, tokens: Mapping[str, int]) -> None:
        """Give out the pages for it. If the engine waited for a length, that length is exact from now on."""
        positions = self.positions(tokens)
        for name, count in tokens.items():
            if positions[name] == self.live[name].length + count:
                self.change(name, ahead=0)
        self.grow(positions.items())

    def grow(self, positions: Iterable[tuple[str, int]]) -> None:
        """Give out pages, request by request in the given order."""
        for name, count in positions:
            standing = self.live[name]
            more = self._pages_for(count) - len(standing.pages)
            if more <= 0:  # the most frequent case: a round stays on its page
                continue
            taken = {page for other in self.live.values() for page in other.pages}
            free = [page for page in self.capacity.pages if page not in taken]
            self.change(name, pages=(*standing.pages, *free[:more]))

    def trim(self, name: str, positions: int) -> None:
        """Give back the pages after these positions."""
        self.change(name, pages=self.live[name].pages[: self._pages_for(positions)])

    def change(self, name: str, **fields: object) -> None:
        self.live[name] = replace(self.live[name], **fields)  # type: ignore[arg-type]

    def end(self, name: str) -> None:
        self.ended.append(self.live.pop(name))

    def _pages_for(self, positions: int) -> int:
        return -(-positions // self.capacity.page_size)
