"""Hooks that record a running SGLang: its rounds, step counts, slots and chosen states. No file of it is edited.

SGLang calls `load` in every process, by the entry point group "sglang.srt.plugins". Hooks wrap five functions
(`sglang_names.py`): the launch of a batch, the forward, the commit, the processing of results, and a retraction.
Leaves out: rounds and their events (`recorder.py`); trees, pipeline stages, and rings for decode without speculation,
which are not recorded.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import PREFIX, Options, options_in
from .device_states import States, to_device, to_host
from .recorder import MOST_FLYING, Chooses, Live, Recorder, Round, numbers, say
from .releases import resolved
from .sglang_names import REGISTRY, RELEASES, SCHEDULER, Names, Ring, names_of

SQUARES = 1e-6  # added to the sum of a key's squares by the l2 norm of the gated delta rule


@dataclass
class RingStates(States):
    """Copies of states.  ring: its entries [layers, rows, ..] and cursors [rows], empty without one.  names: theirs."""

    ring: dict[str, torch.Tensor] = field(default_factory=dict)
    names: Ring | None = None

    def of(self, layer: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The conv window [C, W-1] and the state [HV, V, K], with the tokens of the ring."""
        window, state = super().of(layer, row)
        if self.ring and self.names is not None:
            ring = {name: part[layer, row] if part.dim() > 1 else part[row] for name, part in self.ring.items()}
            state = folded(state, ring, self.names)
        return window, state


def copied(
    pool: Any, names: Names, layers: Mapping[int, int], rows: torch.Tensor, slots: torch.Tensor
) -> RingStates:
    """Copy states in the current stream. layers: layer -> its index in the pool; rows, slots: of the requests."""
    def chosen(tensor: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        found = tensor.new_empty(len(layers), len(at), *tensor.shape[2:])
        for place, index in enumerate(layers.values()):
            torch.index_select(tensor[index], 0, at, out=found[place])
        return found

    cache, ring = pool.mamba_cache, ring_in(pool, names)
    conv = [chosen(part, slots) for part in cache.conv]
    taken = RingStates(conv[0] if len(conv) == 1 else torch.cat(conv, dim=-2), chosen(cache.temporal, slots))
    if ring is not None:
        taken.names = ring
        at = rows if ring.by_row else slots
        entries = {name: getattr(cache, name, None) for name in (*ring.entries, ring.gate)}
        taken.ring = {name: chosen(part, at) for name, part in entries.items() if part is not None}
        taken.ring |= {name: getattr(pool, name).index_select(0, at) for name in (ring.position, ring.base)}
    return taken


def ring_in(pool: Any, names: Names) -> Ring | None:
    """The ring of a pool, if it has one for speculation."""
    ring = names.ring
    if ring is None or getattr(pool, ring.base, None) is None or getattr(pool, ring.other_rule, False):
        return None
    return ring


def folded(state: torch.Tensor, ring: dict[str, torch.Tensor], names: Ring) -> torch.Tensor:
    """The state after the tokens of a ring, by the gated delta rule token by token, in fp32.

        S <- exp(g) S;  S <- S + d k^T      with d = beta (v - S k) if the entries are raw

    Shapes: state [HV, V, K]; ring: values or updates [HV, L, V], keys [H, L, K], g and beta [HV, L].
    Differs from SGLang: it folds all tokens at once with cumulated gates. The index is taken modulo L, as there.
    """
    parts = {name: part.float() for name, part in ring.items()}
    count, base = (int(parts[name]) for name in (names.position, names.base))
    if names.raw:
        values, keys, beta = (parts[name] for name in names.entries)
        keys = keys / (keys.square().sum(-1, keepdim=True) + SQUARES).sqrt()
    else:
        values, keys = (parts[high] + parts.get(low, 0) for high, low in
                        zip(names.entries[:2], names.entries[2:], strict=True))
    gate, length, now = parts[names.gate], values.shape[1], state.float()
    keys = keys.repeat_interleave(len(values) // len(keys), 0)
    for token in range(base, base + count):
        at = token % length
        now = now * gate[:, at].exp()[:, None, None]
        update = values[:, at]
        if names.raw:
            update = beta[:, at, None] * (update - torch.einsum("hvk,hk->hv", now, keys[:, at]))
        now = now + update[:, :, None] * keys[:, at, None, :]
    return now


NEWEST_RULES = "0.5.14"  # the release whose rules of step counts all later ones have
TREES = "trees of drafts are not recorded"

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
            register(SglangRecorder(options, *_release()))
    except Exception as error:
        say(f"not recording: {error}")


def register(recorder: "SglangRecorder") -> None:
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
class Launched(Round):
    """A round of SGLang.

    number     of the launch, from 1.  decodes: whether its rows generate, with windows or without
    pool_rows  rows of the request pool.  result: that of the launch, until it is processed
    """

    number: int = 0
    decodes: bool = False
    pool_rows: torch.Tensor | None = None
    result: Any = None


class SglangRecorder(Recorder):
    """The hooks of one process. `flying` has the rounds by the id of their result."""

    engine = "sglang"

    def __init__(self, options: Options, release: str, names: Names, nearest: str) -> None:
        super().__init__(options, release, nearest)
        self.names = names
        self.runner: Any = None
        self.pool_layers: dict[int, int] = {}  # layer -> its index in the pool
        self.overlap = False
        self.launches = 0
        self.controller: tuple[dict[str, Any] | None, int | None] = None, None  # and the initial step count
        self.ranks = 1

    # -- hooks: each calls the engine's function exactly once -------------------------------------

    def run(self, original: Callable[..., Any], scheduler: Any, batch: Any, *given: Any, **named: Any) -> Any:
        self.safely(self._begin, scheduler, batch)
        try:
            result = original(scheduler, batch, *given, **named)
        finally:
            launched, self.launching = self.launching, None
        if launched is not None:
            self.safely(self._launched, launched, result)
        return result

    def forward(self, original: Callable[..., Any], runner: Any, batch: Any, *given: Any, **named: Any) -> Any:
        recorded = self.launching is not None and not getattr(runner, "is_draft_worker", False)
        if recorded:
            self.safely(self._before_forward, runner, batch)
        output = original(runner, batch, *given, **named)
        if recorded:
            self.safely(self._after_forward, runner, output)
        return output

    def commit(self, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        done = original(*given, **named)
        if self.launching is not None:
            self.safely(self._committed)
        return done

    def processed(
        self, original: Callable[..., Any], scheduler: Any, batch: Any, result: Any, *given: Any, **named: Any
    ) -> Any:
        requests = list(getattr(batch, "reqs", None) or ())
        done = original(scheduler, batch, result, *given, **named)
        self.safely(self._complete, result, requests)
        return done

    def retracted(self, original: Callable[..., Any], request: Any, *given: Any, **named: Any) -> Any:
        done = original(request, *given, **named)
        self.safely(self._retract, request)
        return done

    # -- launch -------------------------------------------------------------------------------------

    def _begin(self, scheduler: Any, batch: Any) -> None:
        self.overlap = bool(getattr(scheduler, "enable_overlap", False))
        mode = batch.forward_mode
        if not (mode.is_extend() or mode.is_decode()):
            return
        self.launches += 1
        if self.recording is None:
            self.controller = controller_of(scheduler, self.release, self.names)
            self.ranks = ranks_of(getattr(scheduler, "server_args", None))
        requests, counts, causes = dict[int, Live](), list[int](), list[str]()
        for number, request in enumerate(batch.reqs):
            count = int(batch.extend_lens[number]) if mode.is_extend() else 1
            live = self.live.get(request.rid)
            if live is None and mode.is_extend():
                live = self._admitted(request, int(batch.prefix_lens[number]), causes)
            if live is not None:
                requests[number] = live
            counts.append(count)
        self.launching = Launched(
            requests, len(counts), counts, causes, number=self.launches, decodes=mode.is_decode())

    def _admitted(self, request: Any, cached: int, causes: list[str]) -> Live | None:
        """Record a request at its first chunk. cached: tokens from the prefix cache"""
        live = self.admitted(str(request.rid), [*request.origin_input_ids, *request.output_ids], chooses(request))
        if live is not None and cached:
            causes.append(PREFIX)
        return live

    def _before_forward(self, runner: Any, batch: Any) -> None:
        now = self._now()
        if self.recording is None:
            self._open(runner)
        if batch.forward_mode.is_target_verify():
            if (getattr(batch.spec_info, "topk", 1) or 1) > 1:
                raise NotImplementedError(TREES)
            now.verify = True
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
        if not now.verify:
            self._take(runner, now)
        now.mark(now.pool_rows is not None and now.pool_rows.is_cuda)

    def _committed(self) -> None:
        now = self._now()
        self._take(self.runner, now)
        now.mark(now.pool_rows is not None and now.pool_rows.is_cuda)

    def _launched(self, launched: Launched, result: Any) -> None:
        if launched.tokens is None:
            return
        if launched.requests and launched.verify and launched.states is None and not self.no_states:
            self.missing.setdefault("commit", "a verify ran without it")
        launched.result = result
        self.flying[id(result)] = launched
        if len(self.flying) > MOST_FLYING:
            raise RuntimeError(f"the results of {len(self.flying)} batches were not processed")

    def _now(self) -> Launched:
        assert isinstance(self.launching, Launched), "called within a launch"
        return self.launching

    def _take(self, runner: Any, now: Launched) -> None:
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
            now.states = copied(pool.mamba_pool, self.names, self.pool_layers, rows, slots)

    # -- results ------------------------------------------------------------------------------------

    def _complete(self, result: Any, requests: Sequence[Any]) -> None:
        done = self.flying.pop(id(result), None)
        if done is not None:
            done.result = None
            self._count(done, result)
            if done.requests:
                self.complete(done, lambda: self._answers(done, result))
        for request in requests:
            if request.finished():
                live = self.live.pop(str(request.rid), None)
                self.leaving.discard(str(request.rid))
                if live is not None:
                    self.finish(live)
        if not self.live and not self.flying:
            self.close()

    def _count(self, done: Launched, result: Any) -> None:
        """Note what the controller of the step count saw of a round: the accepted drafts of all its rows."""
        if not done.decodes:
            return
        if not done.verify:
            accepted = [0] * done.size
        elif result.accept_lens is None:
            accepted = numbers(result.num_correct_drafts_per_req_cpu)
        else:
            accepted = [length - 1 for length in numbers(result.accept_lens)]
        self.rounds.append({"launch": done.number, "processed": self.launches + 1,
                            "steps": done.counts[0] - 1 if done.verify else 0, "accepted": accepted})  # fmt: skip

    def _answers(self, done: Launched, result: Any) -> dict[int, list[int]]:
        """The new tokens of each recorded row: accepted drafts and the bonus, or one token."""
        tokens = numbers(result.next_token_ids)
        if not done.verify:
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

    def _retract(self, request: Any) -> None:
        live = self.live.pop(str(request.rid), None)
        if live is not None:
            self.retract(live)

    # -- the recording ------------------------------------------------------------------------------

    def _open(self, runner: Any) -> None:
        pool = runner.req_to_token_pool
        known = getattr(pool, "mamba_map", {})
        self.choose_layers(known)
        self.pool_layers = {layer: known[layer] for layer in self.layers}
        memory = getattr(pool, "mamba_pool", None)
        cursor = self.names.decode_ring
        if cursor and ring_in(memory, self.names) is None and getattr(memory, cursor, None) is not None:
            self.no_states = "the ring for decode without speculation is on"
        state = torch.float32 if memory is None else memory.mamba_cache.temporal.dtype
        self.open(str(runner.model_config.model_path), runner.dtype, state, "VK", self.overlap,
                  controller=self.controller[0], num_steps=self.controller[1], ranks=self.ranks)  # fmt: skip

    def folded(self) -> str:
        return "" if self.names.ring is None else "a ring, if it is on, is folded by the recorder"


def controller_of(scheduler: Any, release: str, names: Names) -> tuple[dict[str, Any] | None, int | None]:
    """The controller of the step count as a recording names it, and the initial count; (None, None): not known.

    It is read before the first launch, when the worker still has the initial count.
    """
    worker = getattr(scheduler, "draft_worker", None)
    if worker is None:
        return {"dialect": "constant"}, 0
    steps, adaptive = getattr(worker, "speculative_num_steps", None), getattr(worker, "adaptive_controller", None)
    if adaptive is None:
        return ({"dialect": "constant"}, steps) if steps else (None, None)
    if release not in RELEASES:
        return None, None
    found: dict[str, Any] = {"dialect": f"sglang-{min(release, NEWEST_RULES)}"}
    written = scheduler.server_args.speculative_adaptive_config
    if written is not None:
        found["file"] = json.loads(Path(written).read_text())
    elif release >= NEWEST_RULES:
        found["defaults"] = release
    captured = names.captured and getattr(adaptive.params, names.captured)
    return found | ({"captured": sorted(set(captured))} if captured else {}), steps


def ranks_of(arguments: Any) -> int:
    """The ranks of tensor parallelism; 1 if its processes also split layers, requests or positions, or if unknown."""
    others = ("pp_size", "attn_cp_size", "attn_dp_size")  # the last one since 0.5.22
    apart = getattr(arguments, "enable_dp_attention", False) or any(
        getattr(arguments, name, None) not in (None, 1) for name in others)
    return 1 if apart else int(getattr(arguments, "tp_size", 1))


def chooses(request: Any) -> Chooses:
    """Read how a request of SGLang chooses its tokens."""
    how = request.sampling_params
    if any(getattr(request, name, None) is not None
           for name in ("grammar", "lora_id", "input_embeds", "multimodal_inputs")):  # fmt: skip
        return Chooses.BY_MORE
    penalties = (("frequency_penalty", 0), ("presence_penalty", 0), ("repetition_penalty", 1), ("min_new_tokens", 0))
    argmax = how.top_k == 1 and not getattr(how, "logit_bias", None) and all(
        getattr(how, name, usual) in (usual, None) for name, usual in penalties)
    return Chooses.ARGMAX if argmax else Chooses.GIVEN
