"""Engines driven through verbs, with the reference's model: right ones, and others that are wrong on purpose.

Some faults show only in two runs.

Found by the harness as `support.wrong.engines:NAME`. Leaves out: engines of other projects (`tests/peers`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from instep.oracle.reordered_arithmetic import Reordered as AnyOrder
from instep.run.build_compared_engines import rounding
from instep_reference import trunk
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.place_names import unseen
from instep_reference.gdn import GdnMemory
from instep_reference.weights import Weights
from support.inputs.check_contexts import declared


def with_changed_layers(memory: Sequence[Any], change: Callable[[GdnMemory], GdnMemory]) -> tuple[Any, ...]:
    """A request's memory after a change in every GDN layer."""
    return tuple(change(one) if isinstance(one, GdnMemory) else one for one in memory)


def with_changed_state(memory: Sequence[Any], change: Callable[[torch.Tensor], None]) -> tuple[Any, ...]:
    """A request's memory after a change in a copy of the first layer's state."""
    state = memory[0].state.clone()
    change(state)
    return replace(memory[0], state=state), *memory[1:]


class Right:
    """Keeps, per request, its memory after every token of the last window; `keep` goes back to one of them."""

    see = staticmethod(unseen)

    def __init__(self, model: Path, dtype: torch.dtype = torch.float32) -> None:
        self.weights = Weights.of(Checkpoint.open(model), dtype)
        self.memory: dict[str, Any] = {}
        self.nodes: dict[str, tuple[int, list[Any]]] = {}  # length before the window, memory after each token

    def step(self, rows: Sequence[Any]) -> Mapping[str, Mapping[str, torch.Tensor]]:
        logits, final = {}, {}
        for row in rows:
            final[row.request] = self.run(row)
            logits[row.request] = trunk.logits(self.weights, final[row.request], self.see, "trunk")
        return {"logits": logits, "final": final}

    def run(self, row: Any) -> torch.Tensor:
        memory = self.memory.get(row.request) or trunk.empty_memories(self.weights)
        parts = [row.tokens] if row.kind == "prefill" else [(token,) for token in row.tokens]
        found, nodes = [], []
        for number, part in enumerate(parts):
            out, memory = trunk.advance(self.weights, part, memory, row.first + number, self.see)
            found.append(out)
            nodes.append(memory)
        self.nodes[row.request] = row.first, nodes
        self.memory[row.request] = memory
        return torch.cat(found)

    def keep(self, request: str, length: int) -> None:
        first, nodes = self.nodes[request]
        self.memory[request] = nodes[length - first - 1]

    def drop(self, request: str) -> None:
        del self.memory[request]

    def state(self, request: str) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        kept = enumerate(self.memory[request])
        return {layer: (one.window, one.state) for layer, one in kept if isinstance(one, GdnMemory)}


def right(model: Path, room: Any, *, device: str, dtype: torch.dtype, **told: Any) -> Right:
    return Right(model, dtype)


class Keeping(Right):
    """With every optional verb but those of memory: copies, drafts and KV entries."""

    def __init__(self, model: Path, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(model, dtype)
        self.kept: dict[str, Any] = {}

    def save(self, request: str, name: str) -> None:
        self.kept[name] = self.memory[request]

    def load(self, request: str, name: str) -> None:
        self.memory[request] = self.kept[name]

    def preempt(self, request: str) -> None:
        self.kept[f"preempted {request}"] = self.memory.pop(request)

    def resume(self, request: str) -> None:
        self.memory[request] = self.kept.pop(f"preempted {request}")

    def drop(self, request: str) -> None:
        self.memory.pop(request, None)
        self.kept.pop(f"preempted {request}", None)

    def kv(self, request: str) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        kept = enumerate(self.memory[request])
        return {layer: (one.keys, one.values) for layer, one in kept if not isinstance(one, GdnMemory)}


class Watching(Keeping):
    """It shows what its layers compute, and hidden rows by a verb of their own."""

    def watch(self, see: Any) -> None:
        self.see = lambda place, tensor: see(tuple(place), tensor)


class Layered(Keeping):
    """Shows the hidden rows after each layer."""

    def run(self, row: Any) -> torch.Tensor:
        found: dict[int, list[torch.Tensor]] = {}

        def see(place: Any, tensor: torch.Tensor) -> torch.Tensor:
            if place.component == "hidden":
                found.setdefault(place.layer, []).append(tensor)
            return tensor

        self.see, self.hidden = see, {**getattr(self, "hidden", {}), row.request: found}
        return super().run(row)

    def layers(self, request: str) -> dict[int, torch.Tensor]:
        return {layer: torch.cat(parts) for layer, parts in self.hidden[request].items()}


class Drafting(Right):
    """Its draft head returns the drafts of the trace, and another second draft if `slip` is set.

    whole: as many drafts as the step count, also if the window has fewer
    """

    slip, whole = 0, False

    def draft(self, requests: Sequence[str], num_steps: int, picks: Any) -> Any:
        more = [num_steps - len(mine) if self.whole else 0 for mine in picks]
        return [[*(token if at != 1 else (token + self.slip) % 256 for at, token in enumerate(mine)), *[0] * rest]
                for mine, rest in zip(picks, more, strict=True)]  # fmt: skip


# Engines that are wrong in one thing


class NoRollback(Right):
    def keep(self, request: str, length: int) -> None:
        pass


class OneMore(Right):
    def keep(self, request: str, length: int) -> None:
        first, nodes = self.nodes[request]
        self.memory[request] = nodes[min(length - first, len(nodes) - 1)]


class OfAnother(Right):
    """The recurrent state after a window is that of the request that was kept before."""

    before: Any = None

    def keep(self, request: str, length: int) -> None:
        super().keep(request, length)
        mine, self.before = self.memory[request], self.memory[request]
        other = next((theirs for name, theirs in self.memory.items() if name != request), None)
        if other is not None:
            self.memory[request] = tuple(
                replace(one, state=its.state) if isinstance(one, GdnMemory) else one
                for one, its in zip(mine, other, strict=True)
            )


class StaleLogits(Right):
    """A window of the size of the one before answers with its logits; all else is right."""

    before: Any = None

    def step(self, rows: Sequence[Any]) -> Any:
        found, last = super().step(rows), self.before
        if rows[0].kind == "verify":
            self.before = dict(found["logits"])
            for name, mine in found["logits"].items():
                if last is not None and name in last and last[name].shape == mine.shape:
                    found["logits"][name] = last[name]
        return found


class Aliasing(Keeping):
    """A save keeps the request's name instead of what it holds."""

    kv = None  # type: ignore[assignment]

    def save(self, request: str, name: str) -> None:
        self.kept[name] = request

    def load(self, request: str, name: str) -> None:
        self.memory[request] = self.memory[self.kept[name]]


class NoDrop(Right):
    """A dropped request continues from the memory that it held."""

    def drop(self, request: str) -> None:
        pass


class ShiftedWindow(Right):
    """After a window the conv inputs are one place too far."""

    def keep(self, request: str, length: int) -> None:
        super().keep(request, length)
        self.memory[request] = with_changed_layers(
            self.memory[request], lambda one: replace(one, window=one.window.roll(1, 1)))


class StaleTile(Right):
    """After a window 8 columns of one head are those from before it."""

    def run(self, row: Any) -> torch.Tensor:
        self.was = {**getattr(self, "was", {}), row.request: self.memory.get(row.request)}
        return super().run(row)

    def keep(self, request: str, length: int) -> None:
        super().keep(request, length)
        was = self.was[request][0].state[1, :, 8:16]
        self.memory[request] = with_changed_state(self.memory[request], lambda state: state[1, :, 8:16].copy_(was))


class Neighbour(Right):
    """A decode or a window changes one number of the state of a request that is not in the step."""

    def step(self, rows: Sequence[Any]) -> Any:
        idle = [name for name in self.memory if name not in {row.request for row in rows}]
        for name in idle[:1]:
            self.memory[name] = with_changed_state(
                self.memory[name], lambda state: state[0, 0, 0].nextafter_(torch.tensor(9.0)))
        return super().step(rows)


class Slightly(Right):
    """Every final row is 1e-4 too large where a window is verified."""

    def run(self, row: Any) -> torch.Tensor:
        return super().run(row) * (1.0001 if row.kind == "verify" else 1)


class HiddenRollback(NoRollback):
    """It does not roll back, and it shows no states."""

    state = None  # type: ignore[assignment]


class HiddenKv(Right):
    """It shows no KV, and its first commit of a window doubles the last key row of every attention layer."""

    damaged = False

    def keep(self, request: str, length: int) -> None:
        super().keep(request, length)
        if not self.damaged:
            self.damaged = True
            self.memory[request] = tuple(
                one if isinstance(one, GdnMemory) else replace(one, keys=torch.cat([one.keys[:-1], 2 * one.keys[-1:]]))
                for one in self.memory[request]
            )


class Mute(Right):
    """It shows neither logits nor final rows nor states."""

    state = None  # type: ignore[assignment]

    def step(self, rows: Sequence[Any]) -> Any:
        super().step(rows)
        return {}


def made(kind: type[Right]) -> Any:
    def make(model: Path, room: Any, *, num_steps: int, widest: int, device: str, dtype: torch.dtype) -> Right:
        engine: Any = kind(model, dtype)
        engine.room, engine.num_steps = room, num_steps
        return engine

    return make


watching, layered, drafting = map(made, (Watching, Layered, Drafting))
drafting_all = made(type("DraftingAll", (Drafting,), {"whole": True}))
slipping = made(type("Slipping", (Drafting,), {"slip": 1}))
keeping, no_rollback, one_more, of_another = map(made, (Keeping, NoRollback, OneMore, OfAnother))
stale_logits, aliasing, no_drop, shifted_window = map(made, (StaleLogits, Aliasing, NoDrop, ShiftedWindow))
stale_tile, neighbour, slightly, hidden_rollback, hidden_kv, mute = map(
    made, (StaleTile, Neighbour, Slightly, HiddenRollback, HiddenKv, Mute)
)
slightly_keeping = made(type("SlightlyKeeping", (Slightly, Keeping), {}))


# Makers and verbs that are none


def _with(**verbs: Any) -> Any:
    """A maker of right engines with these verbs in the place of theirs."""
    return made(type("Spoiled", (Right,), verbs))


def _raises(*_: Any) -> Any:
    raise LookupError("nobody is at home")


def _changed(change: Any) -> Any:
    """A `step` whose logits are changed."""
    return lambda self, rows: {"logits": {name: change(x) for name, x in Right.step(self, rows)["logits"].items()}}


def _first_only(self: Right, rows: Sequence[Any]) -> Any:
    found = Right.step(self, rows)
    return {key: dict(list(mine.items())[:1]) for key, mine in found.items()}


def _now_and_then(self: Right, rows: Sequence[Any]) -> Any:
    found = dict(Right.step(self, rows))
    self.times = getattr(self, "times", 0) + 1
    return found if self.times < 3 else {"final": found["final"]}


class _Views(Right):
    """Everything that it shows is a view of memory that it writes into afterwards."""

    out: Any = None

    def step(self, rows: Sequence[Any]) -> Any:
        if self.out is not None:
            for tensors in self.out.values():
                for tensor in tensors.values():
                    tensor.zero_()
        self.out = super().step(rows)
        return self.out


nothing = lambda model, room, **told: None  # noqa: E731
no_keep = _with(keep=None)
no_verb = _with(kv=7)
other_arguments = lambda one, two, three: None  # noqa: E731
raising = lambda model, room, **told: _raises()  # noqa: E731
raises_step, raises_keep = _with(step=_raises), _with(keep=_raises)
raises_drop, raises_state = _with(drop=_raises), _with(state=_raises)
gives_none, gives_list = _with(step=lambda self, rows: None), _with(step=lambda self, rows: [1])
gives_other_key = _with(step=lambda self, rows: {"logit": {}})
leaves_out, forgets = _with(step=_first_only), _with(step=_now_and_then)
gives_nan, gives_narrow = _with(step=_changed(lambda x: x * float("nan"))), _with(step=_changed(lambda x: x[:, :-1]))
gives_flat, gives_text = _with(step=_changed(lambda x: x[0])), _with(step=_changed(lambda x: "logits"))
gives_bf16 = _with(step=_changed(torch.Tensor.bfloat16))
state_none, state_some = _with(state=lambda self, name: None), _with(state=lambda self, name: {0: ()})
views = made(_Views)
misdeclares, misrounds = _with(declares={"round": {}}), _with(declares={"rounds": {"everything": torch.bfloat16}})
misspells = _with(declares={"products": {"conv": "bfloat"}})
products_5, rounds_3 = _with(declares={"products": 5}), _with(declares={"rounds": 3})
shows_5, shows_lists = _with(declares={"shows": 5}), _with(declares={"shows": [["logits"]]})
order_no, kv_raises = _with(declares={"order": "no"}), _with(kv=property(_raises))
declares_raises, no_pages = _with(declares=property(_raises)), _with(pages=lambda self: {})


class _Junk(Right):
    """It shows one place that is no row of its answers, and nothing else."""

    declares = {"shows": ["watch"]}  # noqa: RUF012

    def watch(self, see: Any) -> None:
        self.other = see

    def step(self, rows: Sequence[Any]) -> Any:
        self.other(("trunk", 0, "normed"), torch.full((sum(len(row.tokens) for row in rows), 3), 7.0))
        return {}

    keep = drop = lambda self, *given: None


no_copies = dict.fromkeys(("save", "load", "preempt", "resume"))
junk, watching_no_copies = made(_Junk), made(type("WatchingNoCopies", (Watching,), no_copies))
silent_no_rollback = made(type("Silent", (Keeping,), {
    "watch": lambda self, see: None, "layers": lambda self, request: {}, "keep": lambda self, *given: None,
}))


# Right engines that round otherwise


class Reordered(Right):
    """Every sum in another order."""

    def __init__(self, model: Path, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(model, torch.float32)
        self.arithmetic = AnyOrder(torch.Generator().manual_seed(41))

    def step(self, rows: Sequence[Any]) -> Any:
        with self.arithmetic:
            return super().step(rows)


class Narrow(Reordered):
    """Everything in bf16 but gates, q, k, v and logits, and declared so; states in fp32."""

    rounds = declared(torch.bfloat16, torch.float32)
    declares = {"rounds": rounds}  # noqa: RUF012
    see = staticmethod(rounding(rounds))


class RoundsOnce(Narrow, Watching):
    """It declares that it rounds nothing but results, and shows all of them as they are stored."""

    declares = {"rounds": Narrow.rounds, "once": ("*",)}  # noqa: RUF012

    def watch(self, see: Any) -> None:
        def shown(place: Any, x: torch.Tensor) -> torch.Tensor:
            stored = self.on_the_way(tuple(place), x).to(self.rounds.get(place.component, x.dtype))
            see(tuple(place), stored)
            return stored.to(x.dtype)

        self.see = shown

    def on_the_way(self, place: tuple[str, int, str], x: torch.Tensor) -> torch.Tensor:
        return x


class RoundsTwice(RoundsOnce):
    """It rounds the norm of one layer to fp16 first, which moves a bf16 number only next to a tie."""

    def on_the_way(self, place: tuple[str, int, str], x: torch.Tensor) -> torch.Tensor:
        return x.half() if place == ("trunk", 1, "normed") else x


reordered, narrow, rounds_once, rounds_twice = made(Reordered), made(Narrow), made(RoundsOnce), made(RoundsTwice)
misnames_once = _with(declares={"once": ("norm",)})


def _scaled(found: Any, factor: float) -> Any:
    return {key: {name: x * factor for name, x in mine.items()} for key, mine in found.items()}


class InABatch(Right):
    """Its rows depend on how many requests there are in the step."""

    def step(self, rows: Sequence[Any]) -> Any:
        return _scaled(super().step(rows), 1 + (len(rows) - 1) / 100)


class LooksAhead(Right):
    """The rows of a window depend on its last token."""

    def run(self, row: Any) -> torch.Tensor:
        return super().run(row) * (1 + row.tokens[-1] * 1e-6 * (row.kind == "verify"))


class ChunksAlone(Right):
    """A chunk begins with an empty conv window."""

    def run(self, row: Any) -> torch.Tensor:
        if row.kind == "prefill" and row.first:
            self.memory[row.request] = with_changed_layers(
                self.memory[row.request], lambda one: replace(one, window=torch.zeros_like(one.window)))
        return super().run(row)


class Disturbed(Watching):
    """Observing its layers changes them."""

    def watch(self, see: Any) -> None:
        super().watch(lambda place, tensor: (see(place, tensor), tensor.mul_(1.001))[1])


class BySpeculation(Right):
    """It answers otherwise where it may draft."""

    def step(self, rows: Sequence[Any]) -> Any:
        return _scaled(super().step(rows), 1 + bool(self.num_steps) / 1000)


class BySlots(Right):
    """Declares the trace's order of slots, and the state after a window depends on the number of the slot."""

    declares = {"order": True}  # noqa: RUF012

    def slots(self) -> dict[str, int]:
        return {name: self.room.slots[number] for number, name in enumerate(self.memory)}

    def step(self, rows: Sequence[Any]) -> Any:
        return _scaled(super().step(rows), 1 + self.room.slots[0] / 1000)


class KeptWhenRead(Right):
    """A window is cut to its kept tokens only when the state is read."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.owed: dict[str, int] = {}

    def keep(self, request: str, length: int) -> None:
        self.owed[request] = length

    def state(self, request: str) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        if request in self.owed:
            super().keep(request, self.owed.pop(request))
        return super().state(request)

    def run(self, row: Any) -> torch.Tensor:
        self.owed.pop(row.request, None)
        return super().run(row)


in_a_batch, looks_ahead, chunks_alone, disturbed, by_speculation, by_slots, kept_when_read = map(
    made, (InABatch, LooksAhead, ChunksAlone, Disturbed, BySpeculation, BySlots, KeptWhenRead)
)
