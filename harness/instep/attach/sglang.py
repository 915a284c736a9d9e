"""Hooks that record a running SGLang: its rounds, step counts, slots and chosen states. No file of it is edited.

SGLang calls `load` in every process, by the entry point group "sglang.srt.plugins". Hooks wrap five functions
(`sglang_names.py`): the launch of a batch, the forward, the commit, the processing of results, and a retraction. During
a launch they copy tokens and states on the device, in the engine's own stream. The results, which come one batch later
with overlap, complete the round, and then its events are written. An exception of a hook never reaches the engine: it
marks the recording as incomplete, and recording stops.
Leaves out: trees, sampled requests, pipeline stages, and rings for decode without speculation.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..audit.write import Recording
from . import PREFIX, RETRACTION, SWITCH, Options, options_in
from .sglang_names import REGISTRY, SCHEDULER, Names, names_of, resolved
from .sglang_states import States, Writer, copied, ring_in, to_device, to_host

READ_FOR_DIGEST = 1 << 30  # bytes of a checkpoint whose digest is computed without a request
# How SGLang's Triton kernels round in bf16 (docs/audit-record.md).
ROUNDS = {"beta": "bfloat16"}
PRODUCTS: dict[str, dict[str, Any]] = {
    "conv": {"format": "bf16", "results": True}, "gdn.chunk": {"format": "bf16", "block": 64},
}
PREFILL, DECODE, VERIFY = "prefill", "decode", "verify"
TREES = "trees of drafts are not recorded"
MOST_FLYING = 8  # batches that are launched before their results are processed; overlap has one

_loaded = False


def load() -> None:
    """Register the hooks if INSTEP_ATTACH is set. SGLang calls this; a process without a scheduler gets none."""
    global _loaded
    if _loaded or SCHEDULER not in sys.modules:
        return
    try:
        options = options_in(os.environ)
        if options is not None:
            _loaded = True
            register(Recorder(options, *_release()))
    except Exception as error:
        say(f"not recording: {error}")


def say(text: str) -> None:
    print(f"[instep attach] {text}", file=sys.stderr, flush=True)


def register(recorder: Recorder) -> None:
    """Wrap every function that this release has; a missing one is noted in the recording."""
    registry = resolved(f"{REGISTRY}:HookRegistry")
    around = resolved(f"{REGISTRY}:HookType").AROUND
    for name, target in recorder.names.hooks.items():
        try:
            resolved(target)
        except (ImportError, AttributeError) as error:
            recorder.missing[name] = str(error)
            continue
        registry.register(target.replace(":", "."), getattr(recorder, name), around)
    if {"run", "processed", "forward"} & recorder.missing.keys():
        say(f"not recording: {recorder.missing}")


def _release() -> tuple[str, Names, str]:
    import sglang  # type: ignore[import-not-found]

    release = str(sglang.__version__)
    return (release, *names_of(release))


@dataclass
class Live:
    """A request of the engine that is recorded. there: it still has its memory."""

    name: str
    prompt: list[int]
    there: bool = True


@dataclass
class Round:
    """One launched batch, until its results are processed.

    requests   the recorded requests by batch row
    counts     tokens of each row of the batch
    tokens, positions   of the whole batch, on the host
    states     of the batch rows in `rows`;  slots: of the same rows
    causes     why its states are written; empty: they may be dropped
    event      the number of the event that wrote states: a commit, or a forward without windows
    """

    requests: dict[int, Live]
    size: int
    counts: list[int]
    causes: list[str]
    kind: str = ""
    tokens: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    final: torch.Tensor | None = None
    states: States | None = None
    slots: torch.Tensor | None = None
    rows: list[int] = field(default_factory=list)
    pool_rows: torch.Tensor | None = None
    ready: Any = None
    result: Any = None
    event: int = -1

    def wait(self) -> None:
        """Wait until the copies of the device are done."""
        if self.ready is not None:
            self.ready.synchronize()

    def mark(self) -> None:
        """Note that the copies so far are in the current stream, which with overlap is not that of the scheduler."""
        if self.pool_rows is not None and self.pool_rows.is_cuda:
            self.ready = self.ready or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.ready.record()


class Recorder:
    """The hooks of one process, and the recording that they write.

    release, nearest   the engine's release, and the one whose names are used
    missing   hooks whose function this release does not have, with the reason
    """

    def __init__(self, options: Options, release: str, names: Names, nearest: str) -> None:
        self.options, self.release, self.names, self.nearest = options, release, names, nearest
        self.missing: dict[str, str] = {}
        self.stopped = ""
        self.recording: Recording | None = None
        self.layers: dict[int, int] = {}  # layer -> its index in the pool
        self.live: dict[str, Live] = {}
        self.left_out, self.leaving = 0, set[str]()  # requests that are not recorded: their number, those still there
        self.runner: Any = None
        self.launching: Round | None = None
        self.flying: dict[int, Round] = {}  # id of a result -> its round
        self.held: deque[Round] = deque()  # rounds whose states are on the device and not written
        self.writer = Writer()
        self.width: int | None = None
        self.following = 0  # events with states that are still to be written after a cause
        self.with_states = self.written = self.dropped = 0
        self.retractions = False
        self.no_states = ""
        self.overlap = False

    # -- hooks: each calls the engine's function exactly once -------------------------------------

    def run(self, original: Callable[..., Any], scheduler: Any, batch: Any, *given: Any, **named: Any) -> Any:
        self._safely(self._begin, scheduler, batch)
        try:
            result = original(scheduler, batch, *given, **named)
        finally:
            launched, self.launching = self.launching, None
        if launched is not None:
            self._safely(self._launched, launched, result)
        return result

    def forward(self, original: Callable[..., Any], runner: Any, batch: Any, *given: Any, **named: Any) -> Any:
        recorded = self.launching is not None and not getattr(runner, "is_draft_worker", False)
        if recorded:
            self._safely(self._before_forward, runner, batch)
        output = original(runner, batch, *given, **named)
        if recorded:
            self._safely(self._after_forward, runner, output)
        return output

    def commit(self, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        done = original(*given, **named)
        if self.launching is not None:
            self._safely(self._committed)
        return done

    def processed(
        self, original: Callable[..., Any], scheduler: Any, batch: Any, result: Any, *given: Any, **named: Any
    ) -> Any:
        requests = list(getattr(batch, "reqs", None) or ())
        done = original(scheduler, batch, result, *given, **named)
        self._safely(self._complete, result, requests)
        return done

    def retracted(self, original: Callable[..., Any], request: Any, *given: Any, **named: Any) -> Any:
        done = original(request, *given, **named)
        self._safely(self._retract, request)
        return done

    def _safely(self, function: Callable[..., None], *given: Any) -> None:
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
                self._note()
        except Exception as error:
            say(f"the reason could not be written: {error}")

    # -- launch -------------------------------------------------------------------------------------

    def _begin(self, scheduler: Any, batch: Any) -> None:
        self.overlap = bool(getattr(scheduler, "enable_overlap", False))
        mode = batch.forward_mode
        if not (mode.is_extend() or mode.is_decode()):
            return
        requests, counts, causes = dict[int, Live](), list[int](), list[str]()
        for number, request in enumerate(batch.reqs):
            count = int(batch.extend_lens[number]) if mode.is_extend() else 1
            live = self.live.get(request.rid)
            if live is None and mode.is_extend():
                live = self._admitted(request, int(batch.prefix_lens[number]), causes)
            if live is not None:
                requests[number] = live
            counts.append(count)
        self.launching = Round(requests, len(counts), counts, causes, PREFILL if mode.is_extend() else DECODE)

    def _admitted(self, request: Any, cached: int, causes: list[str]) -> Live | None:
        """Record a request at its first chunk, unless the options exclude it or it samples.

        cached: tokens from the prefix cache
        """
        name = str(request.rid)
        if self.options.requests and not name.startswith(self.options.requests):
            return None
        if not plain(request):
            self.left_out += name not in self.leaving
            self.leaving.add(name)
            return None
        prompt = [int(token) for token in (*request.origin_input_ids, *request.output_ids)]
        live = self.live[name] = Live(name, prompt)
        if cached:
            causes.append(PREFIX)
        return live

    def _before_forward(self, runner: Any, batch: Any) -> None:
        now = self._now()
        if self.recording is None:
            self._open(runner)
        if batch.forward_mode.is_target_verify():
            if (getattr(batch.spec_info, "topk", 1) or 1) > 1:
                raise NotImplementedError(TREES)
            now.kind = VERIFY
            now.counts = [len(batch.input_ids) // now.size] * now.size
        total = sum(now.counts)
        now.tokens, now.positions = to_host(batch.input_ids[:total]), to_host(batch.positions[:total])
        now.pool_rows = batch.req_pool_indices[: now.size]
        now.rows = list(now.requests)

    def _after_forward(self, runner: Any, output: Any) -> None:
        now = self._now()
        output = output.logits_output
        if self.options.logits and output.next_token_logits is not None:
            now.logits = output.next_token_logits.detach().clone()  # a graph writes the same buffer again
        if self.options.final and getattr(output, "hidden_states", None) is not None:
            now.final = output.hidden_states.detach().clone()
        self.runner = runner
        if now.kind != VERIFY:
            self._take(runner, now)
        now.mark()

    def _committed(self) -> None:
        now = self._now()
        self._take(self.runner, now)
        now.mark()

    def _launched(self, launched: Round, result: Any) -> None:
        if launched.tokens is None or not launched.requests:
            return
        if launched.kind == VERIFY and launched.states is None and not self.no_states:
            self.missing.setdefault("commit", "a verify ran without it")
        launched.result = result
        self.flying[id(result)] = launched
        if len(self.flying) > MOST_FLYING:
            raise RuntimeError(f"the results of {len(self.flying)} batches were not processed")

    def _now(self) -> Round:
        assert self.launching is not None, "called within a launch"
        return self.launching

    def _take(self, runner: Any, now: Round) -> None:
        """Copy the chosen states of the recorded rows, in the engine's stream."""
        if not now.rows or now.pool_rows is None:
            return
        pool = runner.req_to_token_pool
        rows = now.pool_rows
        if len(now.rows) < now.size:
            rows = rows.index_select(0, to_device(now.rows, rows.device))
        slots = pool.get_mamba_indices(rows)
        if self.names.physical is not None:
            slots = getattr(pool, self.names.physical)(slots)
        now.slots = to_host(slots)
        if not self.no_states:
            now.states = copied(pool.mamba_pool, self.names, self.layers, rows, slots)

    # -- results ------------------------------------------------------------------------------------

    def _complete(self, result: Any, requests: Sequence[Any]) -> None:
        done = self.flying.pop(id(result), None)
        if done is not None:
            done.wait()
            self._write(done, self._answers(done, result))
            done.result = None
            self._judge(done)
        for request in requests:
            if request.finished():
                self._finish(str(request.rid))
        if self.recording is not None and not self.live and not self.flying:
            self.writer.finish()
            self._note()
            self.recording.close()

    def _answers(self, done: Round, result: Any) -> dict[int, list[int]]:
        """The new tokens of each recorded row: accepted drafts and the bonus, or one token."""
        tokens = numbers(result.next_token_ids)
        if done.kind != VERIFY:
            return {row: [tokens[row]] for row in done.requests}
        if result.accept_lens is None:  # workers of 0.5.12 without overlap: no padding between requests
            found, begin = list[list[int]](), 0
            for count in numbers(result.num_correct_drafts_per_req_cpu):
                found.append(tokens[begin : begin + count + 1])
                begin += count + 1
            return {row: found[row] for row in done.requests}
        stride = getattr(result, self.names.stride, None) or result.speculative_num_draft_tokens
        lengths = numbers(result.accept_lens)
        return {row: tokens[row * stride : row * stride + lengths[row]] for row in done.requests}

    def _write(self, done: Round, answers: dict[int, list[int]]) -> None:
        """Write the events of a round, without requests that ended or lost their memory meanwhile."""
        recording = self._recording()
        assert done.tokens is not None and done.positions is not None
        tokens, positions = done.tokens.tolist(), done.positions.tolist()
        names, counts, ran, at, said = list[str](), list[int](), list[int](), list[int](), list[list[int] | None]()
        begin = 0
        for row, count in enumerate(done.counts):
            live, span = done.requests.get(row), slice(begin, begin + count)
            begin += count
            if live is None or not live.there:
                done.requests.pop(row, None)
                continue
            if not recording.knows(live.name):
                recording.admit(live.name, live.prompt)
            names.append(live.name)
            counts.append(count)
            ran += tokens[span]
            at += positions[span]
            ended = positions[span.stop - 1] + 1 >= len(live.prompt)
            said.append(None if done.kind == VERIFY else answers[row] if ended else [])
        if not names:
            return
        shown = {kind: self._rows(done, tensor.float().cpu())
                 for kind, tensor in (("logits", done.logits), ("final", done.final)) if tensor is not None}
        recording.forward(names, counts, at, ran, said, **shown)
        if done.kind == VERIFY:
            recording.accepted({live.name: answers[row] for row, live in done.requests.items()})
        done.event = recording.events - 1
        slots = [] if done.slots is None else done.slots.tolist()
        where = {row: slot for row, slot in zip(done.rows, slots, strict=True) if row in done.requests} if slots else {}
        recording.batch(done.event, done.size, {live.name: row for row, live in done.requests.items()},
                        {done.requests[row].name: slot for row, slot in where.items()})  # fmt: skip

    def _judge(self, done: Round) -> None:
        """Write or keep the states of a round: causes write those of some rounds before and after, too."""
        if done.kind == VERIFY:
            if self.width is not None and done.counts[0] != self.width:
                done.causes.append(SWITCH)
            self.width = done.counts[0]
        if self.retractions:
            done.causes.append(RETRACTION)
            self.retractions = False
        if done.states is None or done.event < 0:
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
        names = {number: done.requests[row].name for number, row in enumerate(done.rows) if row in done.requests}
        self.writer.submit(self._store, done.event, done.states, names, done.slots)
        self.written += 1

    def _store(self, event: int, states: States, names: dict[int, str], slots: torch.Tensor | None) -> None:
        """Write the states of an event. The thread runs this. names: number of a row in the copies -> request."""
        found, states = dict[str, torch.Tensor](), states.on_host()
        for number, name in names.items():
            if slots is not None:
                found[f"slot.{name}"] = slots[number : number + 1]
            for place, layer in enumerate(self.layers):
                window, state = states.of(place, number, self.names)
                found |= {f"conv.{name}.{layer}": window, f"state.{name}.{layer}": state}
        self._recording().add(event, found)

    def _rows(self, done: Round, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The rows of each recorded request: all of a window, else the last one."""
        found, begin = dict[str, torch.Tensor](), 0
        every = len(tensor) == sum(done.counts)
        for row, count in enumerate(done.counts):
            first, last = (begin, begin + count) if every else (row, row + 1)
            begin += count
            if row in done.requests:
                found[done.requests[row].name] = tensor[first if done.kind == VERIFY else last - 1 : last]
        return found

    def _retract(self, request: Any) -> None:
        live = self.live.pop(str(request.rid), None)
        if live is None:
            return
        live.there = False
        self.retractions = True
        if self._recording().knows(live.name):
            self._recording().retract(live.name)

    def _finish(self, name: str) -> None:
        live = self.live.pop(name, None)
        self.leaving.discard(name)
        if live is not None:
            live.there = False
            if self._recording().knows(name):
                self._recording().finish(name)

    # -- the recording ------------------------------------------------------------------------------

    def _recording(self) -> Recording:
        assert self.recording is not None, "opened before the first forward"
        return self.recording

    def _open(self, runner: Any) -> None:
        pool = runner.req_to_token_pool
        known = getattr(pool, "mamba_map", {})
        wanted = sorted(known) if self.options.layers == () else self.options.layers or sorted({min(known), max(known)})
        self.layers = {layer: known[layer] for layer in wanted if layer in known}
        memory = getattr(pool, "mamba_pool", None)
        cursor = self.names.decode_ring
        if cursor and ring_in(memory, self.names) is None and getattr(memory, cursor, None) is not None:
            self.no_states = "the ring for decode without speculation is on"
        if not self.layers:
            self.no_states = "no recurrent layer that was chosen"
        if not self.options.states:
            self.no_states = "no trigger was chosen, and not every n-th event"
        dtype = word(runner.dtype)
        model = str(runner.model_config.model_path)
        narrow = dtype == "bfloat16"
        self.recording = Recording(
            self._folder(), engine=f"sglang {self.release}", model=self._model(model), dtype=dtype,
            state="float32" if memory is None else word(memory.mamba_cache.temporal.dtype),
            rounds=ROUNDS if narrow else {}, products=PRODUCTS if narrow else {}, layout="VK", overlap=self.overlap,
        )  # fmt: skip
        self._note()
        say(f"recording to {self.recording.directory}")

    def _folder(self) -> Path:
        """The directory of this process: that of the options, or one in it for each rank."""
        folder = Path(self.options.folder)
        group = torch.distributed
        if group.is_available() and group.is_initialized() and group.get_world_size() > 1:
            folder = folder / f"rank{group.get_rank()}"
        taken = [folder, *(folder / f"engine{number}" for number in range(2, 1000))]
        return next(one for one in taken if not (one / "recording.json").exists())

    def _model(self, model: str) -> str | None:
        """The checkpoint's directory, of which the recording then has the digest; None: too large, or no weights."""
        sizes = [file.stat().st_size for file in Path(model).glob("*.safetensors")]
        if self.options.digest is False or not sizes:
            return None
        return model if self.options.digest or sum(sizes) <= READ_FOR_DIGEST else None

    def _note(self) -> None:
        """State in recording.json what is recorded, what was dropped, and why recording stopped."""
        ring = self.names.ring
        self._recording().note(
            layers=list(self.layers), triggers=list(self.options.triggers), every=self.options.every,
            before=self.options.before, after=self.options.after, written=self.written, dropped=self.dropped,
            left_out=self.left_out, missing=self.missing, names=self.nearest, no_states=self.no_states,
            folded="" if ring is None else "a ring, if it is on, is folded by the recorder", stopped=self.stopped,
        )  # fmt: skip


def plain(request: Any) -> bool:
    """Whether its tokens are the argmax of the model's logits: no sampling, penalty, grammar, adapter or image."""
    how = request.sampling_params
    penalties = (("frequency_penalty", 0), ("presence_penalty", 0), ("repetition_penalty", 1), ("min_new_tokens", 0))
    return (
        how.top_k == 1 and all(getattr(how, name, usual) in (usual, None) for name, usual in penalties)
        and not getattr(how, "logit_bias", None)
        and all(getattr(request, name, None) is None
                for name in ("grammar", "lora_id", "input_embeds", "multimodal_inputs"))
    )  # fmt: skip


def word(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def numbers(values: Any) -> list[int]:
    """The integers of a list, or of a tensor on any device, read at once."""
    return [int(value) for value in (values.tolist() if hasattr(values, "tolist") else values)]
