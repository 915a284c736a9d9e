"""Modules of `vllm`, and a small engine with either model runner and the attributes that the recorder reads.

Its numbers are those of the reference, so its recordings agree. A request has 1 + K blocks for states, in another order
than rows, its conv window moves through a wider buffer, and metadata says which blocks a kernel reads.
Leaves out: scheduling, which a test does (`Served.step`).
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from support.worlds.fake_sglang import Model, picked

DRAFTS = 3  # K
PLACEHOLDER = -1
ATTENTION = "language_model.model.layers.3.self_attn"


@contextmanager
def imported(release: str) -> Iterator[SimpleNamespace]:
    """The modules that the recorder imports, within the block."""
    class WorkerWrapperBase:
        def __init__(self, make: Any) -> None:
            self.make = make

        def init_device(self) -> None:
            self.worker = SimpleNamespace(model_runner=self.make())

    def load_general_plugins() -> None:
        for entry in entry_points(group="vllm.general_plugins"):
            entry.load()()

    modules = {name: ModuleType(name) for name in ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.worker_base")}
    vars(modules["vllm"])["__version__"] = release
    vars(modules["vllm.v1.worker.worker_base"])["WorkerWrapperBase"] = WorkerWrapperBase
    sys.modules.update(modules)
    try:
        yield SimpleNamespace(worker=WorkerWrapperBase, load_general_plugins=load_general_plugins)
    finally:
        for name in modules:
            del sys.modules[name]


class RunnerV1:
    """The model runner V1: `_build_attention_metadata` and `_sample` are methods, and buffers are the runner's own."""

    def __init__(self, served: "Served") -> None:
        self.served, self.vllm_config = served, served.config
        self.input_batch = SimpleNamespace(req_ids=[])
        self.input_ids = SimpleNamespace(gpu=torch.zeros(512, dtype=torch.int32))
        self.positions = torch.zeros(512, dtype=torch.long)
        self.requests = served.requests
        self.execute_model_state: Any = None

    def execute_model(self, scheduled: Any) -> Any:
        if not scheduled.total_num_scheduled_tokens:
            return "nothing ran"
        self.input_batch.req_ids = list(scheduled.num_scheduled_tokens)
        self.served.run(scheduled, lambda metadata: self._build_attention_metadata(metadata)[0])
        total = scheduled.total_num_scheduled_tokens
        self.input_ids.gpu[:total], self.positions[:total] = self.served.tokens, self.served.positions
        self.execute_model_state = SimpleNamespace(logits=self.served.logits, hidden_states=self.served.final)
        return None

    def _build_attention_metadata(self, metadata: Any) -> Any:
        return metadata, None

    def _sample(self, logits: torch.Tensor, metadata: Any) -> Any:
        sampled, _ = self.served.accept()
        return SimpleNamespace(sampled_token_ids=sampled)

    def sample_tokens(self, grammar_output: Any) -> Any:
        self._sample(self.execute_model_state.logits, None)
        self.execute_model_state = None


class RunnerV2:
    """The model runner V2: a batch has its buffers, `sample` returns counts, and a dummy run calls `execute_model`."""

    def __init__(self, served: "Served") -> None:
        self.served, self.vllm_config, self.req_states = served, served.config, object()
        self.model = SimpleNamespace(compute_logits=lambda final: served.logits)
        self.execute_model_state: Any = None
        self.execute_model(SimpleNamespace(total_num_scheduled_tokens=4), dummy_run=True)

    def execute_model(self, scheduled: Any, intermediate_tensors: Any = None, dummy_run: bool = False) -> Any:
        if dummy_run or not scheduled.total_num_scheduled_tokens:
            return None if dummy_run else "nothing ran"
        metadata = self.served.run(scheduled, lambda metadata: metadata)
        batch = SimpleNamespace(req_ids=list(scheduled.num_scheduled_tokens), input_ids=self.served.tokens,
                                positions=self.served.positions, logits_indices=slice(None))  # fmt: skip
        self.execute_model_state = SimpleNamespace(input_batch=batch, attn_metadata=metadata,
                                                   hidden_states=self.served.final)  # fmt: skip
        return None

    def sample(self, hidden_states: torch.Tensor, input_batch: Any, grammar_output: Any) -> Any:
        sampled, lengths = self.served.accept()
        return SimpleNamespace(sampled_token_ids=sampled), lengths, DRAFTS + 1 - lengths

    def sample_tokens(self, grammar_output: Any) -> Any:
        state = self.execute_model_state
        self.sample(state.hidden_states, state.input_batch, grammar_output)
        self.execute_model_state = None


RUNNERS = {"v1": RunnerV1, "v2": RunnerV2}


class Served:
    """The engine and its schedule.

    runner  "v1" or "v2";  dims_first: conv buffers are [blocks, C, columns] and not [blocks, columns, C]
    dtype   the activation that the engine states
    table   the number of drafts by batch size;  longest: tokens of the model's context
    wrong   the step whose windows leave in every block the state from before their token; None: all are right
    """

    def __init__(
        self, at: SimpleNamespace, model: Model, checkpoint: Path, runner: str = "v1", *, dims_first: bool = False,
        wrong: int | None = None, overlap: bool = False, blocks: int = 40, dtype: torch.dtype = torch.float32,
        table: Sequence[tuple[int, int, int]] | None = None, method: str = "ngram",
        longest: int = 200,
    ) -> None:
        self.model, self.wrong = model, wrong
        config, empty = model.config, model.nothing()[model.gdn[0]]
        channels, self.kernel = empty.window.shape[0], empty.window.shape[1] + 1
        self.names = {layer: f"language_model.model.layers.{layer}.linear_attn" for layer in model.gdn}
        shape = (blocks, channels, self.kernel - 1 + DRAFTS)
        self.conv = {layer: torch.zeros(shape if dims_first else (shape[0], shape[2], shape[1])) for layer in model.gdn}
        self.state = {layer: torch.zeros(blocks, config.value_heads, config.key_dim, config.value_dim)
                      for layer in model.gdn}  # fmt: skip
        self.dims_first = dims_first
        context = {self.names[layer]: SimpleNamespace(kv_cache=(self.conv[layer], self.state[layer]),
                                                      conv_kernel_size=self.kernel) for layer in model.gdn}  # fmt: skip
        self.config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context={**context, ATTENTION: object()}),
            model_config=SimpleNamespace(model=str(checkpoint), dtype=dtype, max_model_len=longest),
            scheduler_config=SimpleNamespace(async_scheduling=overlap, max_num_batched_tokens=64),
            speculative_config=SimpleNamespace(
                method=method, num_speculative_tokens=DRAFTS, num_speculative_tokens_per_batch_size=table))  # fmt: skip
        self.free = list(range(blocks - 1, 0, -1))
        self.requests: dict[str, Any] = {}
        self.right: dict[str, list[int]] = {}
        self.ended, self.preempted = set[str](), set[str]()
        self.steps = 0
        wrapper = at.worker(lambda: RUNNERS[runner](self))
        at.load_general_plugins()
        wrapper.init_device()
        self.runner, self.resumes = wrapper.worker.model_runner, runner == "v1"

    # -- what a test calls ------------------------------------------------------------------------

    def request(
        self, name: str, prompt: Sequence[int], limit: int, temperature: float = 0.0, lora: str | None = None
    ) -> None:
        self.right[name] = self.model.text(prompt, limit + 8, temperature > 0)
        self.requests[name] = SimpleNamespace(
            name=name, prompt_token_ids=list(prompt), output_token_ids=[], limit=limit, temperature=temperature,
            lora=lora, blocks=None, computed=0, accepted=1, new=True, memory=self.model.nothing())  # fmt: skip

    def step(
        self, *, prefill: Mapping[str, int] | None = None, verify: Mapping[str, tuple[int, int]] | None = None,
        decode: Sequence[str] = (), cached: int = 0, padded: Sequence[str] = (),
    ) -> None:
        """Run one batch.

        prefill  request -> tokens of its chunk;  cached: tokens that a new one has from the prefix cache
        verify   request -> the width of its window, and how many drafts are right
        padded   requests of `prefill` whose chunk is padded by placeholder drafts
        """
        new, resumed, counts = list[Any](), list[str](), dict[str, int]()
        self.ran = dict[str, tuple[int, list[int], int]]()  # position, tokens, and how many of them are drafts
        for name, width_and_right in {**(verify or {}), **dict.fromkeys(decode, (1, 0))}.items():
            one, (width, good) = self.requests[name], width_and_right
            told = [*one.prompt_token_ids, *one.output_token_ids]
            rest = self.right[name][len(told) :]
            drafts = rest[:good] + [(token + 1) % 256 for token in rest[good:]]
            self.ran[name] = len(told) - 1, [told[-1], *drafts[: width - 1]], width - 1
        for name, tokens in (prefill or {}).items():
            one = self.requests[name]
            told = [*one.prompt_token_ids, *one.output_token_ids]
            if one.blocks is None:
                one.blocks = [self.free.pop(0) for _ in range(DRAFTS + 1)]
                one.computed, one.accepted = cached, 1
                one.memory = self.model.run(told[:cached], self.model.nothing(), 0)[2] if cached else one.memory
                (new if one.new or not self.resumes else resumed).append(one if one.new or not self.resumes else name)
            ids = told[one.computed : one.computed + tokens]
            pad = DRAFTS if name in padded else 0
            self.ran[name] = one.computed, ids + [0] * pad, pad
        counts = {name: len(ids) for name, (_, ids, _) in self.ran.items()}
        scheduled = SimpleNamespace(
            scheduled_new_reqs=[self._new(one) for one in new],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[name for name in counts if self.requests[name] not in new], resumed_req_ids=set(resumed),
                all_token_ids={name: self._told(name) for name in resumed},
                num_computed_tokens=[self.ran[name][0] for name in counts if self.requests[name] not in new]),
            num_scheduled_tokens=counts, total_num_scheduled_tokens=sum(counts.values()),
            scheduled_spec_decode_tokens={name: ids[-drafts:] for name, (_, ids, drafts) in self.ran.items() if drafts},
            finished_req_ids=self.ended, preempted_req_ids=self.preempted)  # fmt: skip
        for one in new:
            one.new = False
        self.ended, self.preempted = set(), set()
        if self.runner.execute_model(scheduled) is None:
            self.runner.sample_tokens(None)
            self.steps += 1

    def preempt(self, name: str) -> None:
        one = self.requests[name]
        self.free += one.blocks
        one.blocks, one.memory = None, self.model.nothing()
        self.preempted.add(name)

    def idle(self) -> None:
        """The step without tokens that tells the worker which requests ended."""
        self.step()

    # -- the engine -------------------------------------------------------------------------------

    def _told(self, name: str) -> list[int]:
        return [*self.requests[name].prompt_token_ids, *self.requests[name].output_token_ids]

    def _new(self, one: Any) -> Any:
        params = SimpleNamespace(temperature=one.temperature, presence_penalty=0.0, frequency_penalty=0.0,
                                 repetition_penalty=1.0, min_tokens=0, logit_bias=None, allowed_token_ids=None,
                                 bad_words=None, structured_outputs=None, thinking_token_budget=None)  # fmt: skip
        return SimpleNamespace(
            req_id=one.name, prompt_token_ids=one.prompt_token_ids, num_computed_tokens=one.computed,
            prefill_token_ids=None if self.resumes else self._told(one.name), sampling_params=params,
            pooling_params=None, lora_request=one.lora, mm_features=[], prompt_embeds=None)  # fmt: skip

    def _is_window(self, name: str) -> bool:
        return self.ran[name][2] > 0

    def run(self, scheduled: Any, build: Any) -> dict[str, Any]:
        """Prepare the batch, run it, and write the blocks of every row."""
        names = list(scheduled.num_scheduled_tokens)
        mask = torch.tensor([self._is_window(name) for name in names])
        spec = [self.requests[name].blocks for name in names if self._is_window(name)]
        single = [self.requests[name].blocks[0] for name in names if not self._is_window(name)]
        metadata = SimpleNamespace(
            spec_sequence_masks=mask if mask.any() else None,
            spec_state_indices_tensor=torch.tensor(spec, dtype=torch.int32) if spec else None,
            non_spec_state_indices_tensor=torch.tensor(single, dtype=torch.int32) if single or not spec else None)
        found = build({**dict.fromkeys(self.names.values(), metadata), ATTENTION: object()})
        self.tokens = torch.tensor([token for name in names for token in self.ran[name][1]], dtype=torch.int32)
        self.positions = torch.tensor([self.ran[name][0] + n for name in names for n in range(len(self.ran[name][1]))])
        scores, finals = list[torch.Tensor](), list[torch.Tensor]()
        for name in names:
            at, ids, drafts = self.ran[name]
            one = self.requests[name]
            logits, final, _ = self.model.run(ids, one.memory, at)
            scores.append(logits if drafts else logits[-1:])
            finals.append(final)
            first = len(ids) - drafts  # tokens before the first state that a window may keep
            for column in range(drafts + 1):
                kept = first + column - (self.steps == self.wrong and drafts > 0)
                after = self.model.run(ids[:kept], one.memory, at)[2] if kept else one.memory
                self._put(one.blocks, column, after)
        self.logits, self.final = torch.cat(scores), torch.cat(finals)
        return dict(found)

    def _put(self, blocks: Sequence[int], column: int, memory: Any) -> None:
        """The state into its own block, and the conv window into the first block, one column later for each token."""
        for layer in self.model.gdn:
            one = memory[layer]
            self.state[layer][blocks[column]] = one.state
            buffer = self.conv[layer][blocks[0]]
            columns = buffer if self.dims_first else buffer.mT
            columns[:, column : column + self.kernel - 1] = one.window

    def accept(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose tokens and verify drafts -> tokens [rows, 1 + K], padded by -1, and their numbers."""
        begin, sampled, lengths = 0, list[list[int]](), list[int]()
        for name, (at, ids, drafts) in self.ran.items():
            one = self.requests[name]
            own = picked(self.logits[begin : begin + drafts + 1], one.temperature > 0)
            begin += drafts + 1
            told, first = self._told(name), len(ids) - drafts
            unfinished = at + first < len(told)
            padded = at < len(one.prompt_token_ids)
            count = next((n for n in range(drafts) if padded or own[n] != ids[first + n]), drafts) + 1
            one.memory = self.model.run(ids[: first + count - 1], one.memory, at)[2]
            one.computed = at + first + count - 1
            tokens = own[:count]
            if not unfinished:
                one.output_token_ids += tokens
            if len(one.output_token_ids) >= one.limit:
                self.ended.add(name)
            sampled.append(tokens + [PLACEHOLDER] * (DRAFTS + 1 - count))
            lengths.append(0 if unfinished and not self.resumes else count)
        return torch.tensor(sampled, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
