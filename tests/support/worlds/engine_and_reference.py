"""An optimized engine and a reference side, driven by the same events and compared after each of them.

Leaves out: diagnosis, which the harness does. Plain assertions are used here, so that the engine's tests do not
depend on the harness.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import Any, Protocol, Self

import torch

from instep_optimized import OptimizedEngine, Options, load
from instep_optimized.ops.op_protocols import Ops
from instep_reference.contract import engine as e
from instep_reference.contract.answers import MEMORY
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.event_facts import tracked
from instep_reference.contract.place_names import Place, See
from instep_reference.engine import ReferenceEngine
from instep_reference.label_ledger import LedgerEngine
from instep_reference.weights import Weights

# Three slots, sparse and out of order; pages from the top down.
CAPACITY = e.Capacity(slots=(4, 1, 6), pages=tuple(range(45, 0, -1)), page_size=4, max_tokens=64)
FP64_NOISE = 1e-9  # absolute; values are of order 1, and fp64 sums of this size err by 1e-14


FP64 = torch.float64
WIDE = {"activation": FP64, "state": FP64}  # options of an engine whose numbers the reference has, up to noise


class Reference(e.Engine, Protocol):
    def watch(self, see: See) -> None: ...


class TwoSides:
    """Calling it with an event serves it on both sides and compares answers, places, states and untouched bytes.

    watched: False where the subject is held in graphs, which a watched engine is not; places are not compared then.
    """

    def __init__(self, subject: OptimizedEngine, truth: Reference, *, watched: bool = True) -> None:
        self.subject, self.truth = subject, truth
        self.live: set[str] = set()
        self.verified: set[str] = set()  # not committed yet: conv windows and states have no owner
        self.compared = 0
        self.tracked: list[tuple[object, int]] = []  # prefixes: by which kind of event, and how many tokens
        self.widths: dict[str, int] = {}  # of the windows that are drafted
        self._tapes: tuple[dict[Place, list[torch.Tensor]], ...] = ({}, {})
        for side, one in enumerate((subject, truth) if watched else ()):
            one.watch(self._recorder(side))

    def __call__(self, event: e.Event) -> e.Answer | None:
        may, before = self.subject.may_change(event), snapshot(self.subject)
        for tape in self._tapes:
            tape.clear()
        ours, theirs = event.on(self.subject), event.on(self.truth)
        self._answers(ours, theirs)
        if isinstance(event, e.Draft) and isinstance(ours, e.Drafted):
            self.widths.update(zip(event.requests, (1 + (ours.drafts >= 0).sum(dim=1)).tolist(), strict=True))
        self._places(self._kept(event))
        self.compared += untouched(self.subject, before, may)
        if isinstance(event, e.Admit):
            self.live.add(event.request)
        elif isinstance(event, e.Finish | e.Abort):
            self.live.discard(event.request)
        if isinstance(event, e.Forward):
            self.verified |= {row.request for row in event.rows if row.kind == "verify"}
        elif isinstance(event, e.Commit):
            self.verified -= set(event.requests)
        elif isinstance(event, e.Abort):
            self.verified.discard(event.request)
        for name in self.live:
            self._states(name, self.subject.state(name), self.truth.state(name))
        for under, count in tracked(event, ours).items():
            assert self._prefix(under) == count, under
            self.tracked.append((event.__struct_config__.tag, count))
        if isinstance(event, e.Offload | e.Fetch):
            self._prefix(event.name)
        assert self.subject.next_num_steps(1, 1) == self.truth.next_num_steps(1, 1)
        return ours

    def serve(self, events: Iterable[e.Event]) -> Self:
        """Serve and compare events in turn."""
        for event in events:
            self(event)
        return self

    def _prefix(self, under: str) -> int:
        mine, right = self.subject.prefix(under), self.truth.prefix(under)  # type: ignore[attr-defined]
        self._states(under, mine, right)
        self._same(mine.final, right.final, under)
        return mine.length

    def _recorder(self, side: int) -> See:
        def see(place: Place, tensor: torch.Tensor) -> torch.Tensor:
            self._tapes[side].setdefault(place, []).append(tensor.clone())
            return tensor

        return see

    def _answers(self, ours: e.Answer | None, theirs: e.Answer | None) -> None:
        assert type(ours) is type(theirs)
        if isinstance(ours, e.Drafted | e.Committed):
            for field in fields(ours):
                if field.name == "tracked":
                    continue
                mine, right = getattr(ours, field.name), getattr(theirs, field.name)
                assert (mine is right is None) or torch.equal(mine.cpu(), right), field.name
        if isinstance(ours, e.Forwarded | e.Committed):
            assert ours.tracked == getattr(theirs, "tracked", None)
        if isinstance(ours, e.Forwarded):
            assert isinstance(theirs, e.Forwarded)
            assert ours.roots == theirs.roots and ours.inner == theirs.inner
            assert {name: own.tolist() for name, own in ours.own.items()} == {
                name: own.tolist() for name, own in theirs.own.items()
            }

    def _kept(self, event: e.Event) -> torch.Tensor | None:
        """[N] bool: the rows whose updates the subject keeps, those of windows; None: it keeps none here."""
        if not isinstance(event, e.Forward) or all(region.name != "ring_update" for region in self.subject.regions()):
            return None
        kinds = [(row.kind, self.widths[row.request] if row.kind == "verify" else row.tokens if row.kind == "prefill"
                  else 1) for row in event.rows]  # fmt: skip
        kept = torch.tensor([kind == "verify" for kind, count in kinds for _ in range(count)])
        return kept if bool(kept.any()) else None

    def _places(self, kept: torch.Tensor | None) -> None:
        ours, theirs = ({place: torch.cat(seen) for place, seen in tape.items()} for tape in self._tapes)
        for side in (ours, theirs):
            for place in [place for place in side if place.component == "update"]:
                rows = side.pop(place)
                if kept is not None:
                    side[place] = rows.cpu()[kept]
        assert ours.keys() == theirs.keys()
        for place, rows in ours.items():
            self._same(rows, theirs[place], str(place))

    def _states(self, name: str, ours: e.RequestState, theirs: e.RequestState) -> None:
        assert (ours.length, ours.root, ours.proposal) == (theirs.length, theirs.root, theirs.proposal), name
        assert (ours.proposal_hidden is None) == (theirs.proposal_hidden is None)
        if ours.proposal_hidden is not None and theirs.proposal_hidden is not None:
            self._same(ours.proposal_hidden, theirs.proposal_hidden, name)
        for field in MEMORY:
            mine, right = getattr(ours, field), getattr(theirs, field)
            assert mine.keys() == right.keys(), field
            if name in self.verified and field in ("conv", "state"):
                continue
            for layer, tensor in mine.items():
                self._same(tensor, right[layer], f"{name} {field} of layer {layer}")

    def _same(self, ours: torch.Tensor, theirs: torch.Tensor, where: str) -> None:
        ours = ours.cpu()  # the reference runs there, whatever the subject runs on
        assert ours.shape == theirs.shape, where
        self.compared += ours.numel()
        if not ours.numel():
            return
        if not ours.is_floating_point():
            assert torch.equal(ours, theirs), where
            return
        worst = float((ours - theirs).abs().max())
        assert worst <= FP64_NOISE, f"{where}: {worst}"


def snapshot(subject: OptimizedEngine) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Every byte of every pool, units and gaps."""
    return [(_bits(r.units).clone(), None if r.gaps is None else _bits(r.gaps).clone()) for r in subject.regions()]


def untouched(
    subject: OptimizedEngine, before: list[tuple[torch.Tensor, torch.Tensor | None]], may: dict[str, set[int]]
) -> int:
    """Assert that only units that may change did; how many elements were compared."""
    compared = 0
    for region, (units, gaps) in zip(subject.regions(), before, strict=True):
        assert gaps is None or (region.gaps is not None and torch.equal(_bits(region.gaps), gaps)), region.name
        now, allowed = _bits(region.units), may.get(region.name, set())
        changed = [] if torch.equal(now, units) else (now != units).flatten(1).any(dim=1).nonzero()[:, 0].tolist()
        strays = set(changed) - allowed
        assert not strays, f"{region.name} layer {region.layer} {region.by} {sorted(strays)}"
        compared += (len(now) - len(allowed)) * now[0].nbytes
    return compared


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as whole numbers."""
    return tensor.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[tensor.element_size()])


def scenario(vocab: int, num_steps: tuple[int, ...], *, forced: bool) -> Iterator[e.Event]:
    """A scenario for a small engine: every event, mixed batches, ragged acceptance, slots given back and reused.

    forced: drafts, paths and bonuses are given; otherwise they are the engine's own.
    """
    generator = torch.Generator().manual_seed(7)

    def token() -> int:
        return int(torch.randint(vocab, (), generator=generator))

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(token() for _ in range(count))

    def round_of(names: tuple[str, ...], n: int, *also: e.Row) -> Iterator[e.Event]:
        for some in (names[:1], names[1:]) if n < 3 else (names,):  # at small counts in two events
            yield e.Draft(some, tuple(tokens(n) for _ in some) if forced else None)
        yield e.Forward((*also[:1], *(e.Row(name, "verify") for name in names), *also[1:]))
        order = names[::-1]
        correct = [(n + 2 * i) % (n + 1) for i in range(len(order))]
        paths = tuple(e.Path(tuple(range(1, count + 1)), token()) for count in correct)
        yield e.Commit(order, paths if forced else None)

    prompt = tokens(9)
    yield e.Idle()
    yield e.Admit("a", tokens(11))
    yield e.Admit("b", tokens(1))
    yield e.Forward((e.Row("a", "prefill", 3), e.Row("b", "prefill", 1)))
    yield e.Admit("c", prompt)
    yield e.Forward((e.Row("c", "prefill", 2), e.Row("b", "decode"), e.Row("a", "prefill", 8)))
    for number, n in enumerate(num_steps):
        yield e.SetNumSteps(n)
        if n:
            also = (e.Row("c", "prefill", 1),) if number < 3 else ()
            yield from round_of(("b", "a"), n, *also)
        else:
            yield e.Forward((e.Row("a", "decode"), e.Row("b", "decode", root=token() if forced else None)))
    yield e.SetNumSteps(num_steps[0])
    yield e.Save("c", "kept")
    yield e.Preempt("a")
    yield e.Finish("b")
    yield e.Admit("d", prompt)
    yield e.Load("d", "kept")
    yield e.Resume("a")
    yield e.Preempt("d")
    yield e.Resume("d")
    state = sum(n > 0 for n in num_steps[:3])
    left = len(prompt) - 2 - state
    yield e.Forward((e.Row("d", "prefill", left), e.Row("a", "decode"), e.Row("c", "prefill", left - 1)))
    yield from round_of(("d", "a"), num_steps[0], e.Row("c", "prefill", 1))
    yield e.Draft(("c",), (tokens(num_steps[0]),) if forced else None)
    yield e.Abort("c")
    yield e.Draft(("a", "d"), (tokens(num_steps[0]), tokens(num_steps[0])) if forced else None)
    yield e.Forward((e.Row("a", "verify"), e.Row("d", "verify")))
    yield e.Abort("d")
    yield e.Commit(("a",), (e.Path((), token()),) if forced else None)
    yield e.Preempt("a")
    yield e.Abort("a")
    yield from _comings_and_goings(tokens(6), num_steps, round_of)


def _comings_and_goings(
    prompt: tuple[int, ...], num_steps: tuple[int, ...], round_of: Callable[[tuple[str, ...], int], Iterator[e.Event]]
) -> Iterator[e.Event]:
    """Requests that leave before anything ran or in their prompt; states kept at one step count and used at another."""
    widest, narrowest = max(num_steps), min(n for n in num_steps if n)
    yield e.Admit("e", prompt)
    yield e.Preempt("e")  # nothing ran yet: there is no state to keep
    yield e.Resume("e")
    yield e.Forward((e.Row("e", "prefill", 2),))
    yield e.Preempt("e")  # in its prompt
    yield e.Resume("e")
    yield e.Admit("f", prompt)
    yield e.Abort("f")  # nothing ran
    yield e.Admit("f", prompt)
    yield e.Forward((e.Row("f", "prefill", 3), e.Row("e", "prefill", 4)))
    yield e.Abort("f")  # in its prompt
    yield e.SetNumSteps(widest)
    yield from round_of(("e",), widest)
    yield e.Save("e", "after a wide round")
    yield e.Preempt("e")
    yield e.SetNumSteps(narrowest)
    yield e.Resume("e")
    yield e.Admit("g", prompt)
    yield e.Load("g", "after a wide round")
    yield from round_of(("g", "e"), narrowest)
    yield e.Finish("e")
    yield e.SetNumSteps(0)
    yield e.Forward((e.Row("g", "decode"),))
    yield e.Preempt("g")
    yield e.SetNumSteps(widest)
    yield e.Resume("g")
    yield from round_of(("g",), widest)
    yield e.Finish("g")


def engine(
    checkpoint: Checkpoint, ops: str | Ops = "plain", room: e.Capacity = CAPACITY, *, num_steps: int = 3,
    adaptive: Any = None, controlled: Any = None, lag: int = 0, **options: Any,
) -> OptimizedEngine:
    """Our engine with an op set or its name, in this room, with these of its `Options`."""
    counts: dict[str, Any] = {"num_steps": num_steps, "adaptive": adaptive, "controlled": controlled, "lag": lag}
    return OptimizedEngine(checkpoint, load(ops) if isinstance(ops, str) else ops, Options(**options), room, **counts)


def truth(checkpoint: Checkpoint, ops: str | Ops = "plain", *, num_steps: int = 3, **how: Any) -> Any:
    """The reference for these ops: its ledger for labels, else its numbers in fp64."""
    if (ops if isinstance(ops, str) else ops.name) == "ledger":
        return LedgerEngine(checkpoint.config, num_steps=num_steps, **how)
    return ReferenceEngine(Weights.of(checkpoint, FP64), num_steps=num_steps, **how)


def both_sides(
    checkpoint: Checkpoint, ops: str | Ops = "plain", room: e.Capacity = CAPACITY, *, num_steps: int = 3,
    adaptive: Any = None, watched: bool = True, **options: Any,
) -> TwoSides:
    """Our engine and the reference; numbers in fp64."""
    mode = options.get("drafter", "eagle")
    right = truth(checkpoint, ops, num_steps=num_steps, adaptive=adaptive, room=room, mode=mode)
    width = {} if isinstance(right, LedgerEngine) else WIDE
    subject = engine(checkpoint, ops, room, num_steps=num_steps, adaptive=adaptive, **width, **options)
    return TwoSides(subject, right, watched=watched)
