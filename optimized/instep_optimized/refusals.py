"""Refusals before anything has changed: events that are illegal at this point. `BadInput` carries the reason.

All of it is known on the host, so nothing waits for the device. Leaves out: room (`memory/`, `OutOfCapacity`) and
unsupported requests (`Unsupported`).
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from instep_reference.contract.engine import Path, Row
from instep_reference.contract.errors import BadInput
from instep_reference.contract.sampling import UNIFORM, Sampling

from .kept_entries_on_device_or_host import Tiers
from .request_record import Request

WAITING, PREFILLING, READY, DRAFTED, VERIFIED = "waiting", "prefilling", "ready", "drafted", "verified"
MAY_RUN = {"prefill": (WAITING, PREFILLING), "verify": (DRAFTED,), "decode": (READY,)}


def phase(request: Request) -> str:
    """Return the phase of a request within its round."""
    if request.row is not None:
        return VERIFIED
    if request.parents is not None:
        return DRAFTED
    return READY if request.rooted else PREFILLING if request.length.most else WAITING


class Refusals:
    """One method per kind of event that may be illegal. It reads the engine's own books and never writes them."""

    def __init__(
        self, live: Mapping[str, Request], preempted: Mapping[str, Any], saved: Mapping[str, tuple[Request, Any]],
        tiers: Tiers, vocab: int, interval: int | None = None, *, device_widths: bool = False,
    ) -> None:  # fmt: skip
        """saved: states kept on the device, by name; tiers: has those on the host."""
        self._live, self._preempted, self._saved, self._vocab = live, preempted, saved, vocab
        self._aside, self._fetchable = tiers.aside, tiers.fetchable
        self._interval, self._device_widths = interval, device_widths

    def admit(self, name: str, prompt: Sequence[int], sampling: Sampling | None = None) -> None:
        if not name or name in self._live or name in self._preempted:
            _no(f"admit of {name!r}", "a name that is in use" if name else "no name", "a name that no request has")
        if not prompt:
            _no(f"prompt of {name!r}", "no token", f"tokens from 0 to {self._vocab - 1}")
        self._tokens(f"prompt of {name!r}", prompt)
        for field, found, expected in () if sampling is None else sampling.wrong():
            _no(f"sampling.{field} of {name!r}", found, expected)

    def draft(
        self, names: Sequence[str], picks: Sequence[Sequence[int]] | None, trees: Sequence[Sequence[int]],
        num_steps: int,
    ) -> None:
        self._none_within("draft", VERIFIED)
        self._must_be("draft", names, READY, *() if picks is None else (DRAFTED,))
        if names and not num_steps:
            _no("draft", "num_steps 0", "a step count above 0")
        if len(trees) != len(names):
            _no("parents", f"{len(trees)} trees", f"{len(names)}")
        for tree in trees:
            wrong = [node for node, parent in enumerate(tree, start=1) if not 0 <= parent < node]
            if wrong:
                _no("parents", list(tree), "for each draft an earlier node")
            depths = [0]
            for parent in tree:
                depths.append(depths[parent] + 1)
            if picks is not None and max(depths) > num_steps:  # a grown tree's shape is not yet known
                _no("parents", f"a path of {max(depths)} drafts", f"at most num_steps = {num_steps}")
        if picks is not None:
            sizes, due = [len(one) for one in picks], [len(tree) for tree in trees]
            if sizes != due:
                _no("picks", f"{sizes} drafts", f"{due}, one list per request")
            for one in picks:
                self._tokens("picks", one)

    def forward(self, rows: Sequence[Row]) -> None:
        self._none_within("forward", VERIFIED)
        _distinct("forward", [row.request for row in rows])
        if self._device_widths and {row.kind for row in rows} >= {"prefill", "verify"}:
            _no("forward", "a prompt next to windows", "one of them: only the device knows the widths of the windows")
        for row in rows:
            if row.kind not in MAY_RUN:
                _no(f"forward of {row.request!r}", f"a row of kind {row.kind!r}", f"one of {', '.join(MAY_RUN)}")
            self._must_be("forward", [row.request], *MAY_RUN[row.kind])
            request, prefill = self._live[row.request], row.kind == "prefill"
            unread = len(request.prompt) - request.length.exact if prefill else 1  # a prompt has no pending counts
            if not 1 <= row.tokens <= unread:
                _no(f"forward of {row.request!r}", f"{row.tokens} tokens", f"1 to {unread}")
            if row.root is not None:
                if row.kind == "verify" or (prefill and row.tokens < unread):
                    _no(f"forward of {row.request!r}", "a root", "none: no token is chosen there")
                self._tokens(f"root of {row.request!r}", [row.root])
            _drawn(row, request, chooses=not prefill or row.tokens == unread, device_widths=self._device_widths)
            reached = request.length.exact + row.tokens if prefill and row.track else 1
            if row.track and (not prefill or self._interval is None or reached % self._interval):
                _no(f"track of {row.request!r}", f"a {row.kind} row up to token {reached}", f"a prefill row up to a "
                    f"multiple of track_interval = {self._interval}")  # fmt: skip
            start, every = request.length.exact if prefill else 0, self._interval or 1
            inside = (start + row.tokens - 1) // every - start // every if prefill and self._interval else 0
            if row.inner and len(row.inner) != inside:
                _no(f"inner of {row.request!r}", f"{len(row.inner)} names", f"{inside}, one for each multiple of "
                    f"track_interval = {self._interval} inside the row")  # fmt: skip
        self._free([under for row in rows for under in (*row.inner, row.track) if under])

    def commit(
        self, names: Sequence[str], accepted: Sequence[Path] | None, track: Sequence[str] = (),
        caps: Sequence[int] = (),
    ) -> None:
        self._must_be("commit", names, VERIFIED)
        for name, under in zip(names, track, strict=False):  # a request's own prefix is replaced in place
            kept, memory = self._saved.get(under, (None, None))
            if kept is None or kept.name != name or getattr(memory, "final", None) is None or track.count(under) > 1:
                self._free([under] * track.count(under) if under else [])
        if track and (len(track) != len(names) or self._interval is None):
            _no("track", f"{len(track)} names", f"{len(names)}, and an interval at which prefixes are tracked")
        flying = [name for name, request in self._live.items() if request.row is not None]
        if names and len(names) != len(flying):
            _no("commit", f"{len(names)} requests", f"all that were verified: {', '.join(flying)}")
        if caps and len(caps) != len(names):
            _no("caps", f"{len(caps)} numbers", f"{len(names)}, one per request")
        for name, cap in zip(names, caps, strict=bool(caps)):
            if not 0 <= cap <= self._live[name].drafts:
                _no(f"cap of {name!r}", cap, f"0 to {self._live[name].drafts}, the number of its drafts")
        if accepted is None:
            return
        if len(accepted) != len(names):
            _no("accepted", f"{len(accepted)} paths", f"{len(names)}")
        for name, path in zip(names, accepted, strict=True):
            parents = self._live[name].parents or ()
            for at, node in zip((0, *path.nodes), path.nodes, strict=False):
                if not 0 < node <= len(parents) or parents[node - 1] != at:
                    _no(f"accepted of {name!r}", f"nodes {list(path.nodes)}", f"a path through the window: {node} is "
                        f"no child of node {at}")  # fmt: skip
            self._tokens(f"bonus of {name!r}", [path.bonus])

    def set_num_steps(self, num_steps: int, candidates: Collection[int]) -> None:
        self._none_within("set_num_steps", DRAFTED, VERIFIED)
        if num_steps not in candidates:
            _no("set_num_steps", num_steps, f"one of {tuple(candidates)}")

    def save(self, name: str, under: str) -> None:
        self._must_be("save", [name], PREFILLING, READY)
        self._free([under])

    def load(self, name: str, under: str) -> None:
        self._must_be("load", [name], WAITING)
        self._on_device("load", under)
        (kept, memory), prompt = self._saved[under], self._live[name].prompt
        prefix = getattr(memory, "final", None) is not None
        if prompt[: len(kept.prompt)] != kept.prompt or (len(prompt) > len(kept.prompt)) != prefix:
            _no(f"load of {under!r}", f"another prompt in {name!r}",
                "a longer prompt that begins with this prefix" if prefix else "the prompt it has")

    def offload(self, name: str) -> None:
        self._on_device("offload", name)

    def _on_device(self, what: str, name: str) -> None:
        """Refuse a name whose entry is not on the device."""
        if name not in self._saved:
            found = "what is on the host" if name in self._aside else "nothing of that name"
            _no(f"{what} of {name!r}", found, f"one of {', '.join(self._saved) or 'none'}")

    def fetch(self, name: str) -> None:
        if name not in self._fetchable or name in self._saved:
            there = ", ".join(self._fetchable) or "none"
            _no(f"fetch of {name!r}", "nothing of that name on the host", f"one of {there}")

    def evict(self, name: str) -> None:
        if name not in self._aside:
            self._on_device("evict", name)

    def preempt(self, name: str) -> None:
        self._must_be("preempt", [name], WAITING, PREFILLING, READY)

    def resume(self, name: str) -> None:
        if name not in self._preempted:
            _no(f"resume of {name!r}", "a request that is not preempted", f"one of {', '.join(self._preempted) or '-'}")

    def finish(self, name: str) -> None:
        self._must_be("finish", [name], READY)

    def abort(self, name: str) -> None:
        if name not in self._preempted:
            self._must_be("abort", [name])

    def idle(self) -> None:
        self._none_within("idle", VERIFIED)

    def _must_be(self, what: str, names: Sequence[str], *phases: str) -> None:
        _distinct(what, names)
        for name in names:
            found = phase(self._live[name]) if name in self._live else "not there"
            if found not in phases and (phases or name not in self._live):
                _no(f"{what} of {name!r}", found, " or ".join(phases) or "a request that is there")

    def _free(self, names: Sequence[str]) -> None:
        """Refuse names that are not free for a new entry."""
        for name in names:
            if not name or name in self._saved or name in self._aside or names.count(name) > 1:
                _no("what is kept", f"the name {name!r}", "a name under which nothing is kept")

    def _none_within(self, what: str, *phases: str) -> None:
        busy = [name for name, request in self._live.items() if phase(request) in phases]
        if busy:
            _no(what, f"{', '.join(busy)} within a round", "the end of the round")

    def _tokens(self, what: str, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not 0 <= token < self._vocab:
                _no(what, f"token {token}", f"tokens from 0 to {self._vocab - 1}")


def _drawn(row: Row, request: Request, *, chooses: bool, device_widths: bool) -> None:
    """Check that a row which chooses a token of a sampling request has uniforms, and no other row has any."""
    samples = request.sampling is not None and request.sampling.draws
    due = 0 if not (samples and chooses) else request.drafts + 2 if row.kind == "verify" else 1
    fewer = device_widths and due > 1 and 2 <= len(row.uniforms) < due  # as many as the window has nodes, and one
    if (len(row.uniforms) != due and not fewer) or any(not 0 <= u < 1 or u % UNIFORM for u in row.uniforms):
        _no(f"uniforms of {row.request!r}", list(row.uniforms), f"{due}, multiples of 2**-24 below 1")


def _distinct(what: str, names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        _no(what, f"{list(names)}", "no request twice")


def _no(field: str, found: object, expected: str) -> NoReturn:
    raise BadInput(field, found=found, expected=expected)
