"""The part of a recorder that all engines share: rounds, their events, and which states are written.

A subclass has the hooks of an engine. During a launch they copy tokens and states on the device, in the engine's own
stream. The results, which may come after the next launch, complete the round, and then its events are written. An
exception of a hook never reaches the engine: it marks the recording as incomplete, and recording stops.
Leaves out: hooks (`sglang.py`, `vllm.py`), and copies of states (`device_states.py`).
"""

import sys
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from ..audit.write import Recording
from . import RETRACTION, SWITCH, Options
from .device_states import States, Writer

READ_FOR_DIGEST = 1 << 30  # bytes of a checkpoint whose digest is computed without a request
MOST_FLYING = 8  # batches that are launched before their results are known; overlap has one
# How the Triton kernels of SGLang and vLLM round in bf16 (docs/audit-record.md).
ROUNDS = {"beta": "bfloat16"}
PRODUCTS: dict[str, dict[str, Any]] = {
    "conv": {"format": "bf16", "results": True}, "gdn.chunk": {"format": "bf16", "block": 64},
}
SUMS = ("linear", "mlp", "moe")  # forms whose results are sums over the ranks; each rank stores its part in bf16


def say(text: str) -> None:
    print(f"[instep attach] {text}", file=sys.stderr, flush=True)


class Chooses(Enum):
    """How a request of the engine chooses its tokens."""

    ARGMAX = "the argmax of the model's logits"
    GIVEN = "drawn from the model's logits, or with penalties"
    BY_MORE = "with a grammar, an adapter, an image or embeddings: the model alone does not compute it"


@dataclass
class Live:
    """A request of the engine that is recorded.

    given   its tokens are not the argmax of the model's logits
    there   it still has its memory
    """

    name: str
    prompt: list[int]
    given: bool
    there: bool = True


@dataclass
class Round:
    """One launched batch, until its results are known.

    requests   the recorded requests by batch row
    counts     tokens of each row of the batch
    verify     whether every row is a window, also one of a single token
    tokens, positions   of the whole batch, on the host
    states     of the batch rows in `rows`;  slots: of the same rows
    causes     why its states are written; empty: they may be dropped
    events     batch row -> the event that wrote its states: a commit, or a forward without a window
    width      tokens of the widest window; 0: it has none
    """

    requests: dict[int, Live]
    size: int
    counts: list[int]
    causes: list[str]
    verify: bool = False
    tokens: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    final: torch.Tensor | None = None
    states: States | None = None
    slots: torch.Tensor | None = None
    rows: list[int] = field(default_factory=list)
    ready: Any = None
    events: dict[int, int] = field(default_factory=dict)
    width: int = 0

    def wait(self) -> None:
        """Wait until the copies of the device are done."""
        if self.ready is not None:
            self.ready.synchronize()

    def mark(self, on_gpu: bool) -> None:
        """Note that the copies so far are in the current stream, which with overlap is not that of the scheduler."""
        if on_gpu:
            self.ready = self.ready or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.ready.record()


class Recorder:
    """The recording of one process, and the choice of what is written.

    release, nearest   the engine's release, and the one whose names are used
    missing   hooks whose function this release does not have, with the reason
    layers    the recurrent layers whose states are recorded, in the order of the copies
    """

    engine = "engine"

    def __init__(self, options: Options, release: str, nearest: str) -> None:
        self.options, self.release, self.nearest = options, release, nearest
        self.missing: dict[str, str] = {}
        self.stopped = ""
        self.recording: Recording | None = None
        self.layers: Collection[int] = ()
        self.live: dict[str, Live] = {}
        self.left_out, self.leaving = 0, set[str]()  # requests of another model: their number, those still there
        self.launching: Any = None  # the round that is launched now
        self.flying: dict[int, Any] = {}  # rounds without results
        self.held: deque[Round] = deque()  # rounds whose states are on the device and not written
        self.rounds = list[dict[str, Any]]()  # what the controller saw since the last batch that was recorded
        self.writer = Writer()
        self.width: int | None = None
        self.following = 0  # events with states that are still to be written after a cause
        self.with_states = self.written = self.dropped = 0
        self.retractions = False
        self.no_states = ""

    def safely(self, function: Callable[..., None], *given: Any) -> None:
        """Call a part of the recorder. Its exception stops the recording and nothing else."""
        if self.stopped:
            return
        try:
            function(*given)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            self.stop(f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})")

    def stop(self, why: str) -> None:
        """Record nothing from here on, and state why."""
        self.stopped = why
        self.launching = None
        self.flying.clear()
        self.held.clear()
        say(f"recording stopped: {why}")
        try:
            if self.recording is not None:
                self.note()
        except Exception as error:
            say(f"the reason could not be written: {error}")

    # -- requests -----------------------------------------------------------------------------------

    def admitted(self, name: str, prompt: Iterable[int], chooses: Chooses) -> Live | None:
        """Record a request from its first chunk on, unless the options exclude it or it needs more than the model."""
        if self.options.requests and not name.startswith(self.options.requests):
            return None
        if chooses is Chooses.BY_MORE:
            self.left_out += name not in self.leaving
            self.leaving.add(name)
            return None
        live = self.live[name] = Live(name, [int(token) for token in prompt], chooses is Chooses.GIVEN)
        return live

    def retract(self, live: Live) -> None:
        """Record that a request loses its memory."""
        live.there = False
        self.retractions = True
        if self.opened().knows(live.name):
            self.opened().retract(live.name)

    def finish(self, live: Live) -> None:
        """Record that a request is over."""
        live.there = False
        if self.opened().knows(live.name):
            self.opened().finish(live.name)

    # -- the events of a round ----------------------------------------------------------------------

    def complete(self, done: Round, answers: Callable[[], dict[int, list[int]]]) -> None:
        """Write the events of a round whose results are known, and its states if they have a cause.

        answers: the new tokens of each recorded row: accepted drafts and the bonus, or one token. It is called when the
        copies are on the host
        """
        done.wait()
        self._write(done, answers())
        self._judge(done)

    def _write(self, done: Round, answers: dict[int, list[int]]) -> None:
        """Write the events of a round, without requests that ended or lost their memory meanwhile."""
        recording = self.opened()
        assert done.tokens is not None and done.positions is not None
        tokens, positions = done.tokens.tolist(), done.positions.tolist()
        names, counts, ran, at, said = list[str](), list[int](), list[int](), list[int](), list[list[int] | None]()
        begin, padding, windows = 0, dict[int, int](), dict[int, list[int]]()
        for row, count in enumerate(done.counts):
            live, first, end = done.requests.get(row), begin, begin + count
            begin = end
            if live is None or not live.there:
                done.requests.pop(row, None)
                continue
            length = len(live.prompt)
            window = done.verify or (positions[first] >= length and count > 1)
            if not window and positions[first] < length:  # the end of a prompt may be padded to a window's width
                padding[row] = max(0, positions[first] + count - length)
                end -= padding[row]
            if not recording.knows(live.name):
                recording.admit(live.name, live.prompt, given=live.given)
            names.append(live.name)
            counts.append(end - first)
            ran += tokens[first:end]
            at += positions[first:end]
            ended = positions[end - 1] + 1 >= length
            if window:
                windows[row] = answers[row]
            elif ended and len(answers[row]) != 1:
                raise NotImplementedError(f"{len(answers[row])} tokens after the prompt of {live.name}")
            said.append(None if window else answers[row] if ended else [])
        if not names:
            return
        shown = {kind: self._rows(done, tensor.float().cpu(), windows, padding)
                 for kind, tensor in (("logits", done.logits), ("final", done.final)) if tensor is not None}
        recording.forward(names, counts, at, ran, said, **shown)
        done.width = max((done.counts[row] for row in windows), default=0)
        if windows:
            recording.accepted({done.requests[row].name: answer for row, answer in windows.items()})
        last = recording.events - 1
        for row in done.requests:
            done.events[row] = last if row in windows or not windows else last - 1
        slots = [] if done.slots is None else done.slots.tolist()
        places = dict(zip(done.rows, slots, strict=True)) if slots else {}
        for event in sorted(set(done.events.values())):
            rows = {row: live.name for row, live in done.requests.items() if done.events[row] == event}
            recording.batch(event, done.size, {name: row for row, name in rows.items()},
                            {name: places[row] for row, name in rows.items() if row in places}, self.rounds)
            self.rounds = []

    def _rows(
        self, done: Round, tensor: torch.Tensor, windows: Collection[int], padding: Mapping[int, int]
    ) -> dict[str, torch.Tensor]:
        """The rows of each recorded request: all of a window, else the last one.

        The tensor has a row for every token of the batch, or the rows that the output matrix read.
        """
        read = [count if done.verify or row in windows else 1 + padding.get(row, 0)
                for row, count in enumerate(done.counts)]  # fmt: skip
        sizes = next((one for one in (done.counts, read) if sum(one) == len(tensor)), None)
        if sizes is None:
            raise ValueError(f"{len(tensor)} rows of {sum(done.counts)} tokens")
        found, begin = dict[str, torch.Tensor](), 0
        for row, size in enumerate(sizes):
            end = begin + size - padding.get(row, 0)
            if row in done.requests:
                found[done.requests[row].name] = tensor[begin if row in windows else end - 1 : end]
            begin += size
        return found

    # -- which states are written -------------------------------------------------------------------

    def _judge(self, done: Round) -> None:
        """Write or keep the states of a round: causes write those of some rounds before and after, too."""
        if done.width:
            if self.width is not None and done.width != self.width:
                done.causes.append(SWITCH)
            self.width = done.width
        if self.retractions:
            done.causes.append(RETRACTION)
            self.retractions = False
        if done.states is None or not done.events:
            return
        self.with_states += 1
        fires = any(cause in self.options.triggers for cause in done.causes)
        if fires:
            self.following = self.options.after + 1
            while self.held:
                self._show(self.held.popleft())
        if self.following:
            self.following -= 1
            self._show(done)
        elif self.options.every and self.with_states % self.options.every == 0:
            self._show(done)
        else:
            self.held.append(done)
            while len(self.held) > self.options.before:
                self.held.popleft()
                self.dropped += 1

    def _show(self, done: Round) -> None:
        """Let the thread write the states of a round."""
        assert done.states is not None
        rows = [(done.events[row], number, done.requests[row].name)
                for number, row in enumerate(done.rows) if row in done.requests]  # fmt: skip
        self.writer.submit(self._store, done.states, rows, done.slots)
        self.written += 1

    def _store(self, states: States, rows: list[tuple[int, int, str]], slots: torch.Tensor | None) -> None:
        """Write states. The thread runs this. rows: event, number of a row in the copies, request."""
        found, states = dict[int, dict[str, torch.Tensor]](), states.on_host()
        for event, number, name in rows:
            shown = found.setdefault(event, {})
            if slots is not None:
                shown[f"slot.{name}"] = slots[number : number + 1]
            for place, layer in enumerate(self.layers):
                window, state = states.of(place, number)
                shown |= {f"conv.{name}.{layer}": window, f"state.{name}.{layer}": state}
        for event, shown in found.items():
            self.opened().add(event, shown)

    # -- the recording ------------------------------------------------------------------------------

    def opened(self) -> Recording:
        assert self.recording is not None, "opened before the first forward"
        return self.recording

    def choose_layers(self, known: Collection[int]) -> None:
        """Choose the layers whose states are recorded. known: the recurrent layers of the engine."""
        ends = sorted({min(known), max(known)}) if known else []
        wanted = sorted(known) if self.options.layers == () else self.options.layers or ends
        self.layers = [layer for layer in wanted if layer in known]
        if not self.layers:
            self.no_states = "no recurrent layer that was chosen"
        if not self.options.states:
            self.no_states = "no trigger was chosen, and not every n-th event"

    def open(
        self, model: str, dtype: torch.dtype, state: torch.dtype, layout: str, overlap: bool,
        rounds: dict[str, str] = ROUNDS, controller: dict[str, Any] | None = None, num_steps: int | None = None,
        ranks: int = 1,
    ) -> None:
        """Begin the recording.

        rounds: values that the engine's kernels round, for dtype bf16.  controller, num_steps: as in `Recording`
        ranks: of tensor parallelism, if the processes of the engine differ in nothing else
        """
        narrow, products = dtype == torch.bfloat16, PRODUCTS
        if ranks > 1:
            products = products | {form: {"format": "ieee", "parts": ranks, "stored": "bf16"} for form in SUMS}
        folder, rank = self._place(ranks)
        self.recording = Recording(
            folder, engine=f"{self.engine} {self.release}", model=self._model(model), dtype=word(dtype),
            state=word(state), rounds=rounds if narrow else {}, products=products if narrow else {}, layout=layout,
            overlap=overlap, selected=True, controller=controller, num_steps=num_steps, **rank,
        )  # fmt: skip
        self.note()
        say(f"recording to {self.recording.directory}")

    def close(self) -> None:
        """Write everything that is waiting. The recording continues if another request comes."""
        if self.recording is not None:
            self.writer.finish()
            self.note()
            self.recording.close()

    def _place(self, ranks: int) -> tuple[Path, dict[str, Any]]:
        """The directory of the recording, and the rank of this process if all processes are ranks of one engine.

        Other processes are separate engines, as with data-parallel attention, or stages. Each has a directory.
        """
        folder, inside, rank = Path(self.options.folder), Path(), dict[str, Any]()
        group = torch.distributed
        size = group.get_world_size() if group.is_available() and group.is_initialized() else 1
        if size > 1 and ranks == size:
            rank = {"rank": group.get_rank(), "ranks": size, "run": self.options.run}
            inside = Path(f"rank-{rank['rank']}")  # as `Recording` names it
        elif size > 1:
            folder = folder / f"process{group.get_rank()}"
        tried = [folder, *(folder / f"engine{number}" for number in range(2, 1000))]
        return next(one for one in tried if not (one / inside / "recording.json").exists()), rank

    def _model(self, model: str) -> str | None:
        """The checkpoint's directory, of which the recording then has the digest; None: too large, or no weights."""
        sizes = [file.stat().st_size for file in Path(model).glob("*.safetensors")]
        if self.options.digest is False or not sizes:
            return None
        return model if self.options.digest or sum(sizes) <= READ_FOR_DIGEST else None

    def note(self) -> None:
        """State in recording.json what is recorded, what was dropped, and why recording stopped."""
        self.opened().note(
            layers=list(self.layers), triggers=list(self.options.triggers), every=self.options.every,
            before=self.options.before, after=self.options.after, written=self.written, dropped=self.dropped,
            left_out=self.left_out, missing=self.missing, names=self.nearest, no_states=self.no_states,
            folded=self.folded(), stopped=self.stopped,
        )  # fmt: skip

    def folded(self) -> str:
        """A note on states that the recorder computes; empty: it copies them as they are."""
        return ""


def word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def numbers(values: Any) -> list[int]:
    """The integers of a list, or of a tensor on any device, read at once."""
    return [int(value) for value in (values.tolist() if hasattr(values, "tolist") else values)]
