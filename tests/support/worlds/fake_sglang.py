"""A package `sglang` in a temporary folder: a small engine with the modules, classes and attributes of a release.

Its numbers are those of the reference, so its recordings agree. It has pools whose slots are in another order than its
rows, plugins, overlap, prefix hits, retraction, rings, and faults to plant.
Leaves out: scheduling, which a test does (`Served`).
"""

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from instep_reference import gdn, trunk
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.place_names import Place, See, unseen
from instep_reference.weights import Weights

TOPK = 1  # more: the engine claims that its windows are trees
REGISTRY = '''
from enum import Enum
from importlib import import_module
HookType = Enum("HookType", "BEFORE AFTER AROUND REPLACE")
class HookRegistry:
    hooks = []
    @classmethod
    def register(cls, target, hook, hook_type):
        assert hook_type is HookType.AROUND
        cls.hooks.append((target, hook))
    @classmethod
    def apply_hooks(cls):
        for target, hook in cls.hooks:
            names = target.split(".")
            for count in range(len(names) - 1, 0, -1):
                try:
                    owner = import_module(".".join(names[:count]))
                    break
                except ImportError:
                    pass
            for name in names[count:-1]:
                owner = getattr(owner, name)
            setattr(owner, names[-1], cls.around(getattr(owner, names[-1]), hook))
        cls.hooks = []
    @staticmethod
    def around(original, hook):
        def wrapper(*args, **kwargs):
            return hook(original, *args, **kwargs)
        return wrapper
'''
PLUGINS = '''
import os
from importlib.metadata import entry_points
from sglang.srt.plugins.hook_registry import HookRegistry
def load_plugins():
    allowed = os.environ.get("SGLANG_PLUGINS", "").split(",")
    for entry in entry_points(group="sglang.srt.plugins"):
        if allowed == [""] or entry.name in allowed:
            entry.load()()
    HookRegistry.apply_hooks()
'''
SCHEDULER = '''
class Scheduler:
    def __init__(self, worker, enable_overlap):
        self.model_worker, self.enable_overlap = worker, enable_overlap
    def run_batch(self, batch):
        return self.model_worker.forward_batch_generation(batch)
    def process_batch_result(self, batch, result):
        said = self.model_worker.answers(batch, result)
        for request, tokens in zip(batch.reqs, said, strict=True):
            if not request.finished() and not request.is_retracted and not request.chunked:
                request.output_ids += tokens
'''
BATCH = '''
from types import SimpleNamespace
class Req:
    def __init__(self, rid, prompt, limit, top_k=1, lora_id=None):
        self.rid, self.origin_input_ids, self.output_ids, self.limit = rid, list(prompt), [], limit
        self.sampling_params, self.lora_id = SimpleNamespace(top_k=top_k), lora_id
        self.is_retracted = self.chunked = False
        self.req_pool_idx = None
    def finished(self):
        return len(self.output_ids) >= self.limit
    def reset_for_retract(self):
        self.is_retracted, self.req_pool_idx = True, None
class ScheduleBatch:
    def __init__(self, reqs, forward_mode, prefix_lens=None, extend_lens=None):
        self.reqs, self.forward_mode = reqs, forward_mode
        self.prefix_lens, self.extend_lens = prefix_lens, extend_lens
'''
RESULT = '''
from types import SimpleNamespace
class GenerationBatchResult(SimpleNamespace):
    accept_lens = num_correct_drafts_per_req_cpu = speculative_num_draft_tokens = speculative_output_stride = None
'''
FORWARD = '''
from types import SimpleNamespace
class ForwardMode:
    def __init__(self, name):
        self.name = name
    def is_extend(self):
        return self.name in ("extend", "target_verify")
    def is_target_verify(self):
        return self.name == "target_verify"
    def is_decode(self):
        return self.name == "decode"
class ForwardBatch(SimpleNamespace):
    spec_info = None
'''
RUNNER = '''
import torch
class ModelRunnerOutput:
    def __init__(self, logits_output):
        self.logits_output = logits_output
class ModelRunner:
    is_draft_worker = False
    def __init__(self, pool, model_config, compute):
        self.req_to_token_pool, self.model_config, self.dtype, self.compute = pool, model_config, torch.float32, compute
    def forward(self, forward_batch):
        return ModelRunnerOutput(self.compute(forward_batch))
'''
POOL = '''
class MambaPool:
    def __init__(self, cache, **fields):
        self.mamba_cache = cache
        vars(self).update(fields)
class HybridReqToTokenPool:
    def __init__(self, mamba_pool, mamba_map, mapping):
        self.mamba_pool, self.mamba_map, self.mapping = mamba_pool, mamba_map, mapping
    def get_mamba_indices(self, rows):
        return self.mapping[rows]
    def translate_mamba_indices(self, slots):
        return slots
'''
COMMIT = {
    "method": ("layers/attention/hybrid_linear_attn_backend", '''
class HybridLinearAttnBackend:
    def __init__(self, write):
        self.write = write
    def update_mamba_state_after_mtp_verify(self, last_correct_step_indices, mamba_track_indices, model):
        self.write(last_correct_step_indices)
'''),
    "function": ("speculative/spec_utils", '''
def commit_mamba_states_after_verify(target_worker, batch, accept_lens, accept_index, draft_token_num):
    target_worker.write(accept_lens - 1)
'''),
}  # fmt: skip
KNOWN, NEW = "commit_mamba_states_after_verify", "keep_accepted_states"
MODULES = {
    "plugins/hook_registry": REGISTRY, "plugins/__init__": PLUGINS, "managers/scheduler": SCHEDULER,
    "managers/schedule_batch": BATCH, "managers/utils": RESULT, "model_executor/forward_batch_info": FORWARD,
    "model_executor/model_runner": RUNNER, "mem_cache/memory_pool": POOL,
}


def commits_by(release: str) -> str:
    return "method" if release in ("0.5.12", "0.5.13") else "function"


def write(folder: Path, release: str, *, renamed: bool = False) -> Path:
    """Write the package of a release. renamed: its commit has a name that no release has."""
    commit, source = COMMIT[commits_by(release)]
    for name, text in {**MODULES, commit: source.replace(KNOWN, NEW) if renamed else source}.items():
        file = folder / "sglang" / "srt" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (folder / "sglang" / "__init__.py").write_text(f'__version__ = "{release}"\n')
    return folder


@contextmanager
def imported(folder: Path) -> Iterator[None]:
    """The package can be imported within the block, and is gone after it."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
            del sys.modules[name]


class Model:
    """The reference in fp32 on a checkpoint: rows and memories of a request."""

    def __init__(self, checkpoint: Path) -> None:
        opened = Checkpoint.open(checkpoint)
        self.weights = Weights.of(opened, torch.float32)
        self.config = opened.config
        self.gdn = self.config.recurrent

    def nothing(self) -> tuple[Any, ...]:
        return trunk.empty_memories(self.weights)

    def run(
        self, tokens: Sequence[int], memory: Sequence[Any], first: int, see: See = unseen
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Logits and final rows of every token, and the memory after the last."""
        final, after = trunk.advance(self.weights, list(tokens), memory, first, see)
        return trunk.logits(self.weights, final), final, after

    def text(self, prompt: Sequence[int], count: int, samples: bool = False) -> list[int]:
        """The prompt and its continuation."""
        logits, _, memory = self.run(prompt, self.nothing(), 0)
        tokens = list(prompt)
        for _ in range(count):
            tokens += picked(logits[-1:], samples)
            logits, _, memory = self.run(tokens[-1:], memory, len(tokens) - 1)
        return tokens


def picked(logits: torch.Tensor, samples: bool) -> list[int]:
    """The token of each row: the argmax, or of a request that samples the second one."""
    found: list[int] = logits.topk(2).indices[:, int(samples)].tolist()
    return found


class Served:
    """The engine and its schedule: requests come, run, are retracted and end as a test says.

    overlap   results of a batch are processed after the next one is launched
    wrong     number of the commit that keeps one token too few of every request; None: all are right
    speaks_v1 worker of 0.5.12 without overlap: accepted tokens without padding
    ring      the length of the ring of this release; 0: it is off
    adaptive  a file of step counts whose initial count is 3, with graphs up to 8; the test chooses the counts
    rank, ranks   of tensor parallelism: its memory has the heads of this rank
    """

    def __init__(
        self, model: Model, release: str, checkpoint: Path, *, overlap: bool = False, wrong: int | None = None,
        speaks_v1: bool = False, ring: int = 0, room: int = 8, adaptive: Path | None = None, rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.model, self.release, self.wrong, self.speaks_v1 = model, release, wrong, speaks_v1
        self.rank, self.ranks = rank, ranks
        self.at = {name: importlib.import_module(f"sglang.srt.{name.replace('/', '.')}".removesuffix(".__init__"))
                   for name in (*MODULES, COMMIT[commits_by(release)][0])}  # fmt: skip
        self.at["plugins/__init__"].load_plugins()
        config, layers = model.config, len(model.gdn)
        empty: Any = model.nothing()[model.gdn[0]]
        self.conv = torch.zeros(layers, 2 * room + 2, empty.window.shape[0] // ranks, empty.window.shape[1])
        self.temporal = torch.zeros(layers, 2 * room + 2, config.value_heads // ranks, config.value_dim, config.key_dim)
        self.cache = SimpleNamespace(conv=[self.conv], temporal=self.temporal)
        self.mapping = torch.tensor([2 * (room - row) + 1 for row in range(room)], dtype=torch.int32)
        pools = self.at["mem_cache/memory_pool"]
        self.pool = pools.MambaPool(self.cache)
        self.ring, self.by_row = ring, release >= "0.5.20"
        if ring:
            self._make_ring(layers, 2 * room + 2)
        rows = pools.HybridReqToTokenPool(
            self.pool, {layer: index for index, layer in enumerate(model.gdn)}, self.mapping)
        runner = self.at["model_executor/model_runner"].ModelRunner
        self.runner = runner(rows, SimpleNamespace(model_path=str(checkpoint)), self._computed)
        self.scheduler = self.at["managers/scheduler"].Scheduler(self, overlap)
        controller = SimpleNamespace(params=SimpleNamespace(_cuda_graph_bs=[1, 2, 4, 4, 8]))
        self.scheduler.server_args = SimpleNamespace(
            speculative_adaptive_config=str(adaptive), tp_size=ranks, pp_size=1, enable_dp_attention=False)
        self.scheduler.draft_worker = SimpleNamespace() if adaptive is None else SimpleNamespace(
            speculative_num_steps=3, adaptive_controller=controller)
        self.overlap = overlap
        self.free = list(range(room))
        self.requests: dict[str, Any] = {}
        self.tokens: dict[str, list[int]] = {}  # committed, and the root
        self.memory: dict[str, Any] = {}
        self.right: dict[str, list[int]] = {}
        self.flying: list[tuple[Any, Any]] = []
        self.commits = 0

    # -- what a test calls ------------------------------------------------------------------------

    def request(
        self, name: str, prompt: Sequence[int], limit: int, top_k: int = 1, lora_id: str | None = None
    ) -> None:
        self.requests[name] = self.at["managers/schedule_batch"].Req(name, prompt, limit, top_k, lora_id)
        self.right[name] = self.model.text(prompt, limit + 8, top_k > 1)

    def prefill(self, *names: str, tokens: int | None = None, cached: int = 0) -> None:
        """Run a chunk of each prompt. tokens: its length, None: the rest; cached: tokens from the prefix cache."""
        reqs, prefix, extend = [self.requests[name] for name in names], [], []
        for one in reqs:
            if one.req_pool_idx is None:
                one.req_pool_idx, one.is_retracted = self.free.pop(), False
                told = [*one.origin_input_ids, *one.output_ids]
                _, _, self.memory[one.rid] = self.model.run(told[:cached], self.model.nothing(), 0) if cached else (
                    None, None, self.model.nothing())
                self.tokens[one.rid] = told[:cached]
            whole = len(one.origin_input_ids) + len(one.output_ids)
            prefix.append(len(self.tokens[one.rid]))
            extend.append(min(tokens or whole, whole - prefix[-1]))
            one.chunked = prefix[-1] + extend[-1] < whole
        self._launch(reqs, "extend", prefix, extend)

    def verify(self, width: int, **right: int) -> None:
        """One round of the named requests: so many drafts of each are right."""
        self.width, self.drafted = width, right
        self._launch([self.requests[name] for name in right], "decode")

    def decode(self, *names: str) -> None:
        self.width, self.drafted = 0, dict.fromkeys(names, 0)
        self._launch([self.requests[name] for name in names], "decode")

    def retract(self, name: str) -> None:
        self.free.append(self.requests[name].req_pool_idx)
        self.requests[name].reset_for_retract()

    def settle(self) -> None:
        """Process all results."""
        while self.flying:
            self.scheduler.process_batch_result(*self.flying.pop(0))

    # -- the engine -------------------------------------------------------------------------------

    def _launch(self, reqs: list[Any], mode: str, prefix: Any = None, extend: Any = None) -> None:
        modes = self.at["model_executor/forward_batch_info"].ForwardMode
        batch = self.at["managers/schedule_batch"].ScheduleBatch(reqs, modes(mode), prefix, extend)
        self.flying.append((batch, self.scheduler.run_batch(batch)))
        while len(self.flying) > self.overlap:
            self.scheduler.process_batch_result(*self.flying.pop(0))

    def forward_batch_generation(self, batch: Any) -> Any:
        info, make = self.at["model_executor/forward_batch_info"], self.at["managers/utils"].GenerationBatchResult
        extends = batch.forward_mode.is_extend()
        self.ran = []
        for number, one in enumerate(batch.reqs):
            told, name = self.tokens[one.rid], one.rid
            if extends:
                whole = [*one.origin_input_ids, *one.output_ids]
                begin = batch.prefix_lens[number]
                self.ran.append((name, begin, whole[begin : begin + batch.extend_lens[number]]))
            elif self.width:
                good = self.right[name][len(told) : len(told) + self.drafted[name]]
                drafts = good + [(token + 1) % 256 for token in self.right[name][len(told) + len(good) :]]
                self.ran.append((name, len(told) - 1, [told[-1], *drafts[: self.width - 1]]))
            else:
                self.ran.append((name, len(told) - 1, told[-1:]))
        mode = batch.forward_mode if extends or not self.width else info.ForwardMode("target_verify")
        rows = torch.tensor([one.req_pool_idx for one in batch.reqs])
        output = self.runner.forward(info.ForwardBatch(
            forward_mode=mode, req_pool_indices=rows,
            input_ids=torch.tensor([token for _, _, ran in self.ran for token in ran]),
            positions=torch.tensor([at + n for _, at, ran in self.ran for n in range(len(ran))]),
            spec_info=SimpleNamespace(topk=TOPK),
        )).logits_output  # fmt: skip
        parts = output.next_token_logits.split([len(ran) if mode.is_target_verify() else 1 for _, _, ran in self.ran])
        picks = torch.tensor([token for one, part in zip(batch.reqs, parts, strict=True)
                              for token in picked(part, one.sampling_params.top_k > 1)])  # fmt: skip
        self.rows = rows
        if not mode.is_target_verify():
            for (name, _, ran), pick, one in zip(self.ran, picks.tolist(), batch.reqs, strict=True):
                self.tokens[name] = [*(self.tokens[name] if extends else self.tokens[name][:-1]), *ran]
                if not one.chunked or not extends:
                    self.tokens[name].append(pick)
            return make(next_token_ids=picks)
        width, lengths, padded = self.width, [], []
        for number, (name, _, ran) in enumerate(self.ran):
            own = picks[number * width : (number + 1) * width].tolist()
            count = next((n for n in range(width - 1) if own[n] != ran[n + 1]), width - 1) + 1
            lengths.append(count)
            padded += own
            self.tokens[name] += own[:count]
        accepted = torch.tensor(lengths)
        if commits_by(self.release) == "method":
            backend = self.at[COMMIT["method"][0]].HybridLinearAttnBackend(self.write)
            backend.update_mamba_state_after_mtp_verify(accepted - 1, None, None)
        else:
            index = torch.arange(len(padded)).view(-1, width)
            module = self.at[COMMIT["function"][0]]
            getattr(module, KNOWN if hasattr(module, KNOWN) else NEW)(self, batch, accepted, index, width)
        if self.speaks_v1:
            flat = [token for number, count in enumerate(lengths) for token in padded[number * width :][:count]]
            return make(next_token_ids=torch.tensor(flat), num_correct_drafts_per_req_cpu=[n - 1 for n in lengths])
        return make(next_token_ids=torch.tensor(padded), accept_lens=accepted, speculative_num_draft_tokens=width)

    def _computed(self, batch: Any) -> Any:
        """Run the rows of the batch, and write the states of those that are committed at once."""
        verify, scores, finals, begin = batch.forward_mode.is_target_verify(), [], [], 0
        for (name, at, ran), row in zip(self.ran, batch.req_pool_indices.tolist(), strict=True):
            assert batch.input_ids[begin : begin + len(ran)].tolist() == ran
            begin += len(ran)
            logits, final, after = self.model.run(ran, self.memory[name], at)
            scores.append(logits if verify else logits[-1:])
            finals.append(final)
            if not verify:
                self._put(name, row, after)
        return SimpleNamespace(next_token_logits=torch.cat(scores), hidden_states=torch.cat(finals))

    def write(self, steps: torch.Tensor) -> None:
        """Commit: the memory after the accepted tokens of each window."""
        for (name, at, ran), row, step in zip(self.ran, self.rows.tolist(), steps.tolist(), strict=True):
            kept = step + 1 - (self.commits == self.wrong)
            _, _, after = self.model.run(ran[: step + 1], self.memory[name], at)
            shown = self.model.run(ran[:kept], self.memory[name], at)[2] if kept else self.memory[name]
            kept_in_ring = self.ring and self._append(row, ran[:kept], self.memory[name], at, len(ran))
            self._put(name, row, after, shown, states=not kept_in_ring)
        self.commits += 1

    def _put(self, name: str, row: int, memory: Any, shown: Any = None, *, states: bool = True) -> None:
        self.memory[name], slot = memory, int(self.mapping[row])
        for index, layer in enumerate(self.model.gdn):
            one = (shown or memory)[layer]
            assert isinstance(one, gdn.GdnMemory)
            self.conv[index, slot] = self._part(one.window, 2)
            if states:
                self.temporal[index, slot] = self._part(one.state.mT, 0)
        if states and self.ring:
            self.position[row if self.by_row else slot] = 0

    def _part(self, memory: torch.Tensor, keys: int) -> torch.Tensor:
        """The part of this rank. keys: how many segments of keys come before that of values"""
        config = self.model.config
        width = config.key_heads * config.key_dim
        sizes = [width] * keys + [len(memory) - keys * width]
        return torch.cat([one.chunk(self.ranks)[self.rank] for one in memory.split(sizes)])

    # -- the ring ---------------------------------------------------------------------------------

    def _make_ring(self, layers: int, places: int) -> None:
        """Entries and cursors of the ring: raw by slot (0.5.16), finished updates by request row (0.5.20)."""
        config = self.model.config
        values = torch.zeros(layers, places, config.value_heads, self.ring, config.value_dim)
        keys = torch.zeros(layers, places, config.key_heads, self.ring, config.key_dim)
        scalars = torch.zeros(layers, places, config.value_heads, self.ring)
        entries = {"replayssm_g": scalars, "replayssm_rawv": None, "replayssm_rawk": None}
        entries |= {"replayssm_d": values, "replayssm_k": keys} if self.by_row else {
            "replayssm_rawv": values, "replayssm_rawk": keys, "replayssm_beta": scalars.clone()}
        vars(self.cache).update(entries)
        self.position = torch.zeros(places, dtype=torch.int32)
        self.pool.replayssm_write_pos = None if self.by_row else self.position
        self.pool.replayssm_spec_write_pos = self.position
        self.pool.replayssm_cache_base = torch.full((places,), self.ring - 3, dtype=torch.int32)

    def _append(self, row: int, tokens: Sequence[int], memory: Any, first: int, width: int) -> bool:
        """Put the inputs of the tokens into the ring. False: it is so full that the state must be folded now."""
        at, shown = row if self.by_row else int(self.mapping[row]), dict[tuple[int, str], torch.Tensor]()

        def see(place: Place, tensor: torch.Tensor) -> torch.Tensor:
            shown[place.layer, place.component] = tensor
            return tensor

        self.model.run(tokens, memory, first, see)
        for index, layer in enumerate(self.model.gdn):
            for token in range(len(tokens)):
                place = index, at, slice(None), int(self.pool.replayssm_cache_base[at] + self.position[at] + token)
                place = *place[:3], place[3] % self.ring
                self.cache.replayssm_g[place] = shown[layer, "log_decay"][token]
                if self.by_row:
                    self.cache.replayssm_d[place] = shown[layer, "update"][token]
                    self.cache.replayssm_k[place] = shown[layer, "k"][token]
                else:
                    self.cache.replayssm_rawv[place] = shown[layer, "v"][token]
                    self.cache.replayssm_rawk[place] = keys_before_norm(shown[layer, "mixed"][token], self.model.config)
                    self.cache.replayssm_beta[place] = shown[layer, "beta"][token]
        self.position[at] += len(tokens)
        return bool(self.position[at] + 2 * width <= self.ring)

    def answers(self, batch: Any, result: Any) -> list[list[int]]:
        """The tokens of each request, as the scheduler takes them from a result."""
        tokens, count = result.next_token_ids.tolist(), len(batch.reqs)
        if result.accept_lens is not None:
            stride = result.speculative_num_draft_tokens
            return [tokens[n * stride :][: int(result.accept_lens[n])] for n in range(count)]
        if result.num_correct_drafts_per_req_cpu is None:
            return [[token] for token in tokens]
        found: list[list[int]] = []
        for correct in result.num_correct_drafts_per_req_cpu:
            begin = sum(map(len, found))
            found.append(tokens[begin : begin + correct + 1])
        return found


def keys_before_norm(mixed: torch.Tensor, config: Any) -> torch.Tensor:
    """The keys [H, K] of one token after conv and silu: q, k and v are packed."""
    size = config.key_heads * config.key_dim
    return mixed[size : 2 * size].view(config.key_heads, config.key_dim)
