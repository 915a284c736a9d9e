"""Hooks that record a running vLLM: its rounds, accepted drafts, blocks and chosen states. No file of it is edited.

vLLM calls `load` in every process, by the entry point group "vllm.general_plugins". A worker's model runner gets hooks
when its device is ready: the launch of a batch, the metadata of its attention, and the sampling, which also verifies
drafts (`vllm_names.py`). A `worker_extension_cls` would not do: vLLM adds it after the worker's own base classes, so it
overrides nothing, and it needs an argument of the command.

With K drafts a request has 1 + K blocks for the states of a layer. After a window, block t has the state after token t.
So the state of the accepted tokens is in the block of the last accepted one. The conv window begins in the first block,
at the column with the same number. Blocks are those of the metadata that the kernels read, in every mode of the prefix
cache.
Leaves out: rounds and their events (`recorder.py`); pipeline stages, which are not recorded.
"""

import atexit
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

import torch

from . import PREFIX, Options, options_in
from .device_states import States, to_device, to_host
from .recorder import MOST_FLYING, ROUNDS, Chooses, Live, Recorder, Round, numbers, say
from .releases import resolved
from .vllm_names import RELEASES, STARTED, WORKER, Names, Runner, names_of

# Beta's tensors are bf16. For q, k and products it is a guess, since the kernels are compiled: with it, right runs of
# 0.32.0 use least of their allowance, and without it one was accused.
ROUNDS_ON_CPU = {**ROUNDS, "q": "bfloat16", "k": "bfloat16"}
DRAFTED = {"mtp", "eagle", "eagle3"}  # methods that propose as many drafts as the step asks for
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_loaded = False


def load() -> None:
    """Hook the start of a worker if INSTEP_ATTACH is set. vLLM calls this in every process."""
    global _loaded
    if _loaded:
        return
    try:
        options = options_in(os.environ)
        if options is not None:
            _loaded = True
            wrapper = resolved(WORKER)
            setattr(wrapper, STARTED, hooked_start(getattr(wrapper, STARTED), options))
    except Exception as error:
        say(f"not recording: {error}")


def hooked_start(original: Callable[..., Any], options: Options) -> Callable[..., Any]:
    """The method of a worker that makes its model runner, with hooks for the runner."""
    def started(worker: Any, *given: Any, **named: Any) -> Any:
        done = original(worker, *given, **named)
        try:
            register(VllmRecorder(options, *_release()), worker.worker.model_runner)
        except Exception as error:
            say(f"not recording: {error}")
        return done

    return started


def register(recorder: "VllmRecorder", runner: Any) -> None:
    """Wrap the functions of a model runner; a missing one is noted in the recording."""
    recorder.runner, recorder.its = runner, recorder.names.of(runner)
    for name, function in recorder.its.hooks.items():
        original = getattr(runner, function, None)
        if original is None:
            recorder.missing[name] = f"{type(runner).__name__} has no {function}"
        else:
            setattr(runner, function, partial(getattr(recorder, name), original))
    if {"run", "sampled"} & recorder.missing.keys():
        say(f"not recording: {recorder.missing}")
    atexit.register(recorder.settle)  # a child of multiprocessing runs its finalizers instead
    Finalize(None, recorder.settle, exitpriority=0)


def _release() -> tuple[str, Names, str]:
    import vllm  # type: ignore[import-not-found]

    release = str(vllm.__version__)
    return (release, *names_of(release))


@dataclass
class Launched(Round):
    """A round of vLLM.

    scheduled   what its scheduler decided
    before      requests that ended (False) or lost their memory (True) before it, in this order
    metadata    layer name -> the metadata of its attention
    sampled, lengths   new tokens of every row, and their number, on the host
    steps       the step count that its windows show; None: no row shows it
    windows     batch rows with drafts, of all requests
    """

    scheduled: Any = None
    steps: int | None = None
    windows: list[int] = field(default_factory=list)
    before: list[tuple[Live, bool]] = field(default_factory=list)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    sampled: torch.Tensor | None = None
    lengths: torch.Tensor | None = None


@dataclass(frozen=True)
class Places:
    """The places of a layer's states by batch row: blocks of state and conv window, and its first column."""

    state: torch.Tensor
    conv: torch.Tensor
    column: torch.Tensor

    def rows(self, chosen: torch.Tensor) -> "Places":
        return Places(*(one.index_select(0, chosen) for one in (self.state, self.conv, self.column)))


class VllmRecorder(Recorder):
    """The hooks of one worker. its: the names of its model runner. `flying` has the rounds in the order of launches."""

    engine = "vllm"

    def __init__(self, options: Options, release: str, names: Names, nearest: str) -> None:
        super().__init__(options, release, nearest)
        self.names = names
        self.runner: Any = None
        self.its: Runner = names.v1
        self.recurrent: dict[int, str] = {}  # layer -> its name in vLLM
        self.choices: dict[str, Chooses] = {}
        self.before: list[tuple[Live, bool]] = []
        self.launches, self.overlap = 0, False
        self.last, self.tight = set[str](), False  # requests of the launch before, and whether it had less room

    # -- hooks: each calls the engine's function exactly once -------------------------------------

    def run(self, original: Callable[..., Any], scheduled: Any, *given: Any, **named: Any) -> Any:
        if named.get("dummy_run"):
            return original(scheduled, *given, **named)
        self.safely(self._begin, scheduled)
        try:
            result = original(scheduled, *given, **named)
        except BaseException:
            self.launching = None
            raise
        self.safely(self._ran, result)
        return result

    def prepared(self, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        found = original(*given, **named)
        if self.launching is not None:
            self.safely(self._prepared, found)
        return found

    def sampled(self, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        output = original(*given, **named)
        if self.launching is not None:
            self.safely(self._sampled, output)
        return output

    # -- launch -------------------------------------------------------------------------------------

    def _begin(self, scheduled: Any) -> None:
        causes = list[str]()
        for name in sorted(scheduled.preempted_req_ids or ()):
            self._gone(name, retracted=True)
        for name in sorted(scheduled.finished_req_ids):
            self._gone(name)
        for new in scheduled.scheduled_new_reqs:  # the runner V2 gets a preempted request as a new one
            prompt = new.prefill_token_ids or new.prompt_token_ids
            self.choices[str(new.req_id)] = chooses(new)
            self._came(str(new.req_id), prompt, new.num_computed_tokens, causes)
        cached = scheduled.scheduled_cached_reqs
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if name in cached.resumed_req_ids:
                prompt = cached.all_token_ids.get(name) or self._text(name)
                self._came(str(name), prompt, computed, causes)
        if scheduled.total_num_scheduled_tokens:
            self.launching = Launched({}, 0, [], causes, scheduled=scheduled)
        else:
            self._settle()

    def _came(self, name: str, prompt: Any, cached: int, causes: list[str]) -> None:
        """Record a request from its first chunk on. cached: tokens from the prefix cache."""
        self._gone(name, retracted=True)  # it is computed again
        if prompt is not None and self.admitted(name, prompt, self.choices[name]) is not None and cached:
            causes.append(PREFIX)

    def _text(self, name: str) -> list[int]:
        """All tokens of a request that the runner V1 knows."""
        request = self.runner.requests[name]
        return [*request.prompt_token_ids, *request.output_token_ids]

    def _gone(self, name: str, *, retracted: bool = False) -> None:
        live = self.live.pop(name, None)
        if not retracted:
            self.leaving.discard(name)
            self.choices.pop(name, None)
        if live is not None:
            self.before.append((live, retracted))

    def _prepared(self, found: Any) -> None:
        metadata = found[0] if isinstance(found, tuple) else found
        self._now().metadata = metadata if isinstance(metadata, dict) else {}

    def _ran(self, result: Any) -> None:
        """Copy the tokens of the batch, which the model has read by now."""
        state = getattr(self.runner, "execute_model_state", None)
        if self.launching is None or result is not None or state is None:
            self.launching = None
            return
        now = self._now()
        if self.its is self.names.v2:
            batch = inputs = state.input_batch
            self._prepared(state.attn_metadata)
        else:
            batch, inputs = self.runner.input_batch, self.runner
        order = [str(name) for name in batch.req_ids]
        now.counts = [int(now.scheduled.num_scheduled_tokens[name]) for name in order]
        now.requests = {row: self.live[name] for row, name in enumerate(order) if name in self.live}
        self._see_steps(now, order)
        now.size = len(order)
        now.rows = list(now.requests)
        if self.recording is None:
            self._open(now)
        now.before, self.before = self.before, []
        total = sum(now.counts)
        now.tokens, now.positions = (to_host(on_device(one)[:total]) for one in (inputs.input_ids, inputs.positions))
        if self.options.final and state.hidden_states is not None:
            now.final = state.hidden_states[:total].detach().clone()
        if self.options.logits:
            now.logits = self._logits(state, batch)

    def _see_steps(self, now: Launched, order: list[str]) -> None:
        """Note the drafts of a row that had the whole step count: it generates, as in the launch before.

        vLLM cuts windows near the end of a model's context, and where a batch has no room for another token.
        """
        config, given, cached = self.runner.vllm_config, now.scheduled, now.scheduled.scheduled_cached_reqs
        speculative = config.speculative_config
        widest = 1 + (0 if speculative is None else speculative.num_speculative_tokens)
        computed = {str(new.req_id): new.num_computed_tokens for new in given.scheduled_new_reqs}
        computed |= zip(map(str, cached.req_ids), cached.num_computed_tokens, strict=True)
        drafts = {str(name): len(tokens) for name, tokens in given.scheduled_spec_decode_tokens.items()}
        before, self.last = self.last, set(order)
        ends = max(computed[name] + count for name, count in zip(order, now.counts, strict=True))
        tight, self.tight = self.tight, (
            ends + 2 * widest > config.model_config.max_model_len
            or given.total_num_scheduled_tokens >= config.scheduler_config.max_num_batched_tokens)
        now.windows = [row for row, name in enumerate(order) if drafts.get(name)]
        shown = [drafts.get(live.name, 0) for live in now.requests.values()
                 if live.name in before and computed[live.name] >= len(live.prompt)]  # fmt: skip
        now.steps = None if tight or self.tight else max(shown, default=None)

    def _logits(self, state: Any, batch: Any) -> torch.Tensor | None:
        """The rows that are sampled. The runner V2 computes them while sampling, so they are computed once more."""
        if self.its is self.names.v1:
            return None if state.logits is None else state.logits.detach().clone()
        found: torch.Tensor = self.runner.model.compute_logits(state.hidden_states[batch.logits_indices])
        return found.detach()

    def _sampled(self, output: Any) -> None:
        """Copy new tokens, and the states of the accepted ones, which the next launch overwrites."""
        now, self.launching = self._now(), None
        if now.tokens is None:
            return
        if isinstance(output, tuple):
            sampled, lengths = output[0].sampled_token_ids, output[1]
        else:
            sampled = output.sampled_token_ids
            lengths = (sampled != -1).sum(dim=1)
        now.lengths = to_host(lengths[: now.size])
        if now.rows:
            now.sampled = to_host(sampled[: now.size])
            self._take(now, lengths[: now.size])
        now.mark(sampled.is_cuda)
        now.metadata = {}
        self.launches += 1
        self.flying[self.launches] = now
        self._complete(wait=False)

    def _now(self) -> Launched:
        assert isinstance(self.launching, Launched), "called within a launch"
        return self.launching

    def _take(self, now: Launched, lengths: torch.Tensor) -> None:
        """Copy the chosen states of the recorded rows, in the engine's stream."""
        context = self.runner.vllm_config.compilation_config.static_forward_context
        conv, state = list[torch.Tensor](), list[torch.Tensor]()
        chosen = to_device(now.rows, lengths.device)
        known = dict[int, Places]()
        for layer in self.layers:
            name = self.recurrent[layer]
            metadata = now.metadata.get(name)
            if metadata is None:
                self.missing.setdefault("prepared", f"no metadata of {name}")
                return
            if id(metadata) not in known:  # layers of one group share theirs
                known[id(metadata)] = places(metadata, lengths, now.size).rows(chosen)
            at, module = known[id(metadata)], context[name]
            if now.slots is None:
                now.slots = to_host(at.state)
            if self.no_states:
                return
            windows, states = module.kv_cache
            conv.append(window(windows.index_select(0, at.conv), at.column, module.conv_kernel_size - 1))
            state.append(states.index_select(0, at.state))
        if state:
            now.states = States(torch.stack(conv), torch.stack(state))

    # -- results ------------------------------------------------------------------------------------

    def _complete(self, *, wait: bool) -> None:
        """Write the rounds whose copies are on the host. wait: write all of them."""
        while self.flying:
            number, done = next(iter(self.flying.items()))
            ready = done.ready is None or done.ready.query()
            if not (ready or wait or len(self.flying) > MOST_FLYING):
                return
            del self.flying[number]
            self._left(done.before)
            done.wait()
            lengths = numbers(done.lengths)
            self.rounds.append({
                "launch": number, "processed": number + 1 + self.overlap, "steps": done.steps,
                "accepted": [max(lengths[row] - 1, 0) for row in done.windows], "scheduled": done.size})  # fmt: skip
            if done.rows:
                self.complete(done, partial(_answers, done))

    def _left(self, before: list[tuple[Live, bool]]) -> None:
        for live, retracted in before:
            (self.retract if retracted else self.finish)(live)

    def settle(self) -> None:
        """Write everything, when the engine is idle or ends."""
        self.safely(self._settle)

    def _settle(self) -> None:
        if self.recording is None:
            return
        self._complete(wait=True)
        self._left(self.before)
        self.before = []
        self.close()

    # -- the recording ------------------------------------------------------------------------------

    def _open(self, now: Launched) -> None:
        config = self.runner.vllm_config
        context = config.compilation_config.static_forward_context
        found = {name: LAYER.search(name) for name, one in now.metadata.items()
                 if hasattr(one, "non_spec_state_indices_tensor")}  # fmt: skip
        self.recurrent = {int(one[1]): name for name, one in found.items() if one is not None and name in context}
        self.choose_layers(self.recurrent)
        memory = None if not self.recurrent else context[next(iter(self.recurrent.values()))].kv_cache[1]
        cpu = memory is not None and memory.device.type == "cpu"
        dtype = config.model_config.dtype
        self.overlap = bool(config.scheduler_config.async_scheduling)
        ruled, steps = controller_of(config.speculative_config, self.release, self.names)
        # The CPU kernels have keys before values in a state, in memory that is declared the other way round.
        self.open(str(config.model_config.model), dtype, torch.float32 if memory is None else memory.dtype,
                  "KV" if cpu else "VK", self.overlap, ROUNDS_ON_CPU if cpu else ROUNDS, ruled, steps,
                  int(getattr(getattr(config, "parallel_config", None), "tensor_parallel_size", 1)))


def controller_of(config: Any, release: str, names: Names) -> tuple[dict[str, Any] | None, int | None]:
    """The controller of the number of drafts as a recording names it, and the initial number; (None, None): not known.

    config: vLLM's speculative config
    """
    if config is None:
        return {"dialect": "constant"}, 0
    if release not in RELEASES or config.method not in DRAFTED:
        return None, None
    most, table = int(config.num_speculative_tokens), getattr(config, names.table, None) if names.table else None
    if table is None:
        return {"dialect": "constant"}, most
    entries = sorted([int(number) for number in entry] for entry in table)
    return {"dialect": "vllm-table", "table": entries, "num_speculative_tokens": most}, most


def places(metadata: Any, lengths: torch.Tensor, size: int) -> Places:
    """The places of a layer's states by batch row after a round. lengths: the accepted tokens of each row.

    Rows with a window are in `spec_state_indices_tensor`, in batch order, and the others in the tensor of one block
    each.
    """
    mask, single = metadata.spec_sequence_masks, metadata.non_spec_state_indices_tensor
    if single is not None and single.dim() > 1:
        single = single[:, 0]
    if mask is None:
        blocks = single[:size].long()
        return Places(blocks, blocks, torch.zeros_like(blocks))
    mask, columns = mask[:size].bool(), metadata.spec_state_indices_tensor.long()
    column = (lengths.long().clamp(1, columns.shape[1]) - 1).where(mask, 0)
    own = columns.index_select(0, (mask.long().cumsum(0) - 1).clamp(min=0))
    state, conv = own.gather(1, column[:, None]).squeeze(1), own[:, 0]
    if single is not None and len(single):
        others = single.long().index_select(0, ((~mask).long().cumsum(0) - 1).clamp(0, len(single) - 1))
        state, conv = state.where(mask, others), conv.where(mask, others)
    return Places(state, conv, column)


def window(rows: torch.Tensor, column: torch.Tensor, width: int) -> torch.Tensor:
    """The conv windows [rows, C, width]. rows: [rows, C, columns] or [rows, columns, C]; column: their first ones."""
    rows = rows if rows.shape[1] >= rows.shape[2] else rows.mT
    index = (column[:, None] + torch.arange(width, device=column.device))[:, None].expand(-1, rows.shape[1], -1)
    return rows.gather(2, index)


def on_device(buffer: Any) -> torch.Tensor:
    """The tensor of a buffer that is on the host, too."""
    found: torch.Tensor = getattr(buffer, "gpu", buffer)
    return found


def _answers(done: Launched) -> dict[int, list[int]]:
    """The new tokens of each recorded row: accepted drafts and the bonus, or one token."""
    assert done.sampled is not None and done.lengths is not None
    sampled, lengths = done.sampled.tolist(), numbers(done.lengths)
    return {row: [int(token) for token in sampled[row][: lengths[row]]] for row in done.requests}


def chooses(new: Any) -> Chooses:
    """Read how a new request of vLLM chooses its tokens."""
    how = new.sampling_params
    if (how is None or new.pooling_params is not None or getattr(how, "structured_outputs", None)
            or new.lora_request is not None or new.mm_features or new.prompt_embeds is not None):  # fmt: skip
        return Chooses.BY_MORE
    usual = (("presence_penalty", 0), ("frequency_penalty", 0), ("repetition_penalty", 1), ("min_tokens", 0))
    argmax = (
        how.temperature == 0 and all(getattr(how, name, value) == value for name, value in usual)
        and not any(getattr(how, name, None) for name in ("logit_bias", "allowed_token_ids", "bad_words"))
        and getattr(how, "thinking_token_budget", None) is None
    )  # fmt: skip
    return Chooses.ARGMAX if argmax else Chooses.GIVEN
