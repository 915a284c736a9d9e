"""Names of vLLM that the recorder hooks and reads, in one table per release.

vLLM has two model runners. `Runner` has the names of one: V1 is `v1/worker/gpu_model_runner.py`, which the CPU build
has too, and V2 is `v1/worker/gpu/model_runner.py`, the default for Qwen3-Next and Qwen3.5 from 0.29 on. The names were
read in the released wheels, and a test reads them again (`tests/harness/test_attach_cost.py`).
Leaves out: their use (`vllm.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from .releases import nearest

WORKER = "vllm.v1.worker.worker_base:WorkerWrapperBase"
STARTED = "init_device"  # of the worker: it has made the model runner when it returns

V1, V2 = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"
OUTPUT = "vllm.v1.core.sched.output"
SPECULATIVE = "vllm.config.speculative:SpeculativeConfig"
METADATA = "vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadata"
LAYER = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention"

READS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    f"{OUTPUT}:SchedulerOutput": (
        "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "total_num_scheduled_tokens",
        "finished_req_ids", "preempted_req_ids", "scheduled_spec_decode_tokens",
    ),
    f"{OUTPUT}:CachedRequestData": ("req_ids", "resumed_req_ids", "all_token_ids", "num_computed_tokens"),
    f"{OUTPUT}:NewRequestData": (
        "req_id", "prompt_token_ids", "prefill_token_ids", "num_computed_tokens", "sampling_params", "pooling_params",
        "lora_request", "mm_features", "prompt_embeds",
    ),
    "vllm.sampling_params:SamplingParams": (
        "temperature", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "logit_bias",
        "allowed_token_ids", "bad_words", "structured_outputs", "thinking_token_budget",
    ),
    METADATA: ("spec_state_indices_tensor", "non_spec_state_indices_tensor", "spec_sequence_masks"),
    LAYER: ("conv_kernel_size",),
    "vllm.config.vllm:VllmConfig": (
        "compilation_config", "model_config", "scheduler_config", "speculative_config", "parallel_config",
    ),
    "vllm.config.parallel:ParallelConfig": ("tensor_parallel_size",),
    "vllm.config.compilation:CompilationConfig": ("static_forward_context",),
    "vllm.config.scheduler:SchedulerConfig": ("async_scheduling", "max_num_batched_tokens"),
    "vllm.config.model:ModelConfig": ("model", "dtype", "max_model_len"),
    SPECULATIVE: ("method", "num_speculative_tokens"),
})  # fmt: skip


@dataclass(frozen=True)
class Runner:
    """The functions of a model runner that are hooked, by the name of the hook, and the attributes that are read."""

    runner: str
    hooks: Mapping[str, str]
    reads: Mapping[str, tuple[str, ...]]


RUNNER_V1 = Runner(
    f"{V1}:GPUModelRunner", {"run": "execute_model", "prepared": "_build_attention_metadata", "sampled": "_sample"},
    {f"{V1}:GPUModelRunner": ("vllm_config", "input_batch", "input_ids", "positions", "execute_model_state"),
     f"{V1}:ExecuteModelState": ("logits", "hidden_states"), "vllm.v1.outputs:SamplerOutput": ("sampled_token_ids",),
     "vllm.v1.worker.gpu_input_batch:InputBatch": ("req_ids",)},
)  # fmt: skip
RUNNER_V2 = Runner(
    f"{V2}:GPUModelRunner", {"run": "execute_model", "sampled": "sample"},
    {f"{V2}:GPUModelRunner": ("vllm_config", "req_states", "execute_model_state", "model"),
     f"{V2}:ExecuteModelState": ("input_batch", "attn_metadata", "hidden_states"),
     "vllm.v1.worker.gpu.sample.output:SamplerOutput": ("sampled_token_ids",),
     "vllm.v1.worker.gpu.input_batch:InputBatch": ("req_ids", "input_ids", "positions", "logits_indices")},
)  # fmt: skip


@dataclass(frozen=True)
class Names:
    """Names of one release.

    v1, v2: its model runners.  own: an attribute that only the runner V2 has
    table: that of the number of drafts by batch size, in the speculative config; empty: the release has none
    """

    v1: Runner = RUNNER_V1
    v2: Runner = RUNNER_V2
    own: str = "req_states"
    table: str = "num_speculative_tokens_per_batch_size"
    reads: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: READS)

    def of(self, runner: object) -> Runner:
        return self.v2 if hasattr(runner, self.own) else self.v1


# The other names are the same from 0.22 to 0.33. 0.23 to 0.26 were not read.
RELEASES: Mapping[str, Names] = MappingProxyType(
    dict.fromkeys(("0.22.0", "0.22.1"), Names(table=""))
    | dict.fromkeys(("0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"), Names())
)


def names_of(release: str) -> tuple[Names, str]:
    """The names of a release, and the release whose names they are: the same one, or the nearest before it."""
    return nearest(release, RELEASES)
