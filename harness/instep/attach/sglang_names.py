"""Names of SGLang that the recorder hooks and reads, in one table per release.

`Names` has the names of 0.5.14; `RELEASES` has what differs. A hook is `module:Class.function`. The names were read in
the released wheels, and a test reads them again (`tests/harness/test_attach_cost.py`).
Leaves out: their use (`sglang.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from .releases import nearest

SCHEDULER = "sglang.srt.managers.scheduler"
REGISTRY = "sglang.srt.plugins.hook_registry"  # HookRegistry.register(target, hook, HookType.AROUND)

POOL = "sglang.srt.mem_cache.memory_pool"
RESULT = "sglang.srt.managers.utils:GenerationBatchResult"
MAMBA_POOL, CACHE = f"{POOL}:MambaPool", f"{POOL}:MambaPool.State"

READS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    f"{SCHEDULER}:Scheduler": ("enable_overlap", "server_args", "draft_worker"),
    "sglang.srt.speculative.eagle_worker_v2:EAGLEWorkerV2": ("adaptive_controller", "speculative_num_steps"),
    "sglang.srt.speculative.adaptive_runtime_state:AdaptiveController": ("params",),
    "sglang.srt.managers.schedule_batch:ScheduleBatch": ("reqs", "prefix_lens", "extend_lens", "forward_mode"),
    "sglang.srt.managers.schedule_batch:Req": (
        "rid", "origin_input_ids", "output_ids", "finished", "sampling_params", "grammar", "lora_id", "input_embeds",
        "multimodal_inputs",
    ),
    "sglang.srt.sampling.sampling_params:SamplingParams": (
        "top_k", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "logit_bias",
    ),
    "sglang.srt.model_executor.model_runner:ModelRunner": (
        "is_draft_worker", "dtype", "model_config", "req_to_token_pool",
    ),
    "sglang.srt.configs.model_config:ModelConfig": ("model_path",),
    "sglang.srt.model_executor.model_runner:ModelRunnerOutput": ("logits_output",),
    "sglang.srt.layers.logits_processor:LogitsProcessorOutput": ("next_token_logits", "hidden_states"),
    "sglang.srt.model_executor.forward_batch_info:ForwardBatch": (
        "input_ids", "positions", "req_pool_indices", "forward_mode", "spec_info",
    ),
    "sglang.srt.model_executor.forward_batch_info:ForwardMode": (
        "is_extend", "is_target_verify", "is_decode",
    ),
    "sglang.srt.speculative.eagle_info:EagleVerifyInput": ("topk",),
    RESULT: ("next_token_ids", "accept_lens", "num_correct_drafts_per_req_cpu", "speculative_num_draft_tokens"),
    f"{POOL}:HybridReqToTokenPool": ("mamba_pool", "mamba_map", "get_mamba_indices"),
    MAMBA_POOL: ("mamba_cache",),
    CACHE: ("conv", "temporal"),
})  # fmt: skip


@dataclass(frozen=True)
class Ring:
    """A ring of the last tokens' inputs, from which a recurrent state is folded only now and then.

    The ring is on if `base` of the pool is a tensor, and `other_rule` is false: Kimi's rule has another gate.
    position, base: cursors, one per slot, or one per request row if `by_row`.
    raw: the entries are v, k before its norm, and beta; if not, they are updates d and keys k, with low parts.
    """

    position: str
    raw: bool
    by_row: bool
    base: str = "replayssm_cache_base"
    gate: str = "replayssm_g"
    other_rule: str = "replayssm_is_kda"

    @property
    def entries(self) -> tuple[str, ...]:
        low = "replayssm_rawv", "replayssm_rawk"
        return (*low, "replayssm_beta") if self.raw else ("replayssm_d", "replayssm_k", *low)


@dataclass(frozen=True)
class Names:
    """Names of one release.

    run, processed  launch one batch; process its results, which come one batch later with overlap
    forward         one forward of a model, the draft model's too
    commit          writes the accepted states of a verify
    retracted       takes all memory from a request, which is computed again later
    ring            None: recurrent states are in `temporal` after every commit
    decode_ring     cursor of a ring for decode without speculation; None: there is none. Its states are not recorded
    physical        the method that translates virtual slots, if the pool has one
    arguments       the class that has the path of the file of step counts;  parallel: that of the sizes of groups
    captured        batch sizes of captured graphs, to which a batch is padded for its step count; None: it is not
    """

    commit: str = "sglang.srt.speculative.spec_utils:commit_mamba_states_after_verify"
    run: str = f"{SCHEDULER}:Scheduler.run_batch"
    processed: str = f"{SCHEDULER}:Scheduler.process_batch_result"
    forward: str = "sglang.srt.model_executor.model_runner:ModelRunner.forward"
    retracted: str = "sglang.srt.managers.schedule_batch:Req.reset_for_retract"
    ring: Ring | None = None
    decode_ring: str | None = None
    physical: str | None = None
    stride: str = "speculative_num_draft_tokens"
    arguments: str = "sglang.srt.server_args:ServerArgs"
    parallel: str = "sglang.srt.server_args:ServerArgs"
    captured: str | None = "_cuda_graph_bs"
    also: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def hooks(self) -> dict[str, str]:
        return {name: getattr(self, name) for name in ("run", "processed", "forward", "commit", "retracted")}

    @property
    def reads(self) -> dict[str, tuple[str, ...]]:
        """Class -> attributes that the recorder reads."""
        found = dict(READS)
        found[RESULT] = *READS[RESULT], self.stride
        found[self.arguments] = ("speculative_adaptive_config",)
        sizes = "tp_size", "pp_size", "attn_cp_size", "enable_dp_attention"
        found[self.parallel] = *found.get(self.parallel, ()), *sizes
        if self.captured is not None:
            found["sglang.srt.speculative.adaptive_spec_params:AdaptiveSpeculativeParams"] = (self.captured,)
        for where, names in self.also.items():
            found[where] = *found[where], *names
        pool = [] if self.decode_ring is None else [self.decode_ring]
        if self.ring is not None:
            pool += [self.ring.position, self.ring.base, self.ring.other_rule]
            found[CACHE] = *found[CACHE], *self.ring.entries, self.ring.gate
        found[MAMBA_POOL] = *found[MAMBA_POOL], *pool
        if self.physical is not None:
            where = f"{POOL}:HybridReqToTokenPool"
            found[where] = *found[where], self.physical
        return found


_0_5_13 = Names(commit="sglang.srt.layers.attention.hybrid_linear_attn_backend:"
                       "HybridLinearAttnBackend.update_mamba_state_after_mtp_verify")  # fmt: skip
_0_5_12 = replace(_0_5_13, captured=None)
_0_5_14 = Names()
_0_5_15 = replace(_0_5_14, decode_ring="replayssm_write_pos", physical="translate_mamba_indices")
_0_5_16 = replace(_0_5_15, ring=Ring("replayssm_write_pos", raw=True, by_row=False))
_0_5_20 = replace(_0_5_15, ring=Ring("replayssm_spec_write_pos", raw=False, by_row=True),
                  stride="speculative_output_stride", arguments="sglang.srt.arg_groups.fields.spec:Spec",
                  parallel="sglang.srt.arg_groups.fields.parallel:Parallel")  # fmt: skip

# 0.5.17 to 0.5.19 fold the ring at every commit, so `temporal` is the state, as without a ring.
RELEASES: Mapping[str, Names] = MappingProxyType({
    "0.5.12": _0_5_12, "0.5.13": _0_5_13, "0.5.14": _0_5_14, "0.5.15": _0_5_15, "0.5.16": _0_5_16, "0.5.17": _0_5_15,
    "0.5.18": _0_5_15, "0.5.19": _0_5_15, "0.5.20": _0_5_20, "0.5.21": _0_5_20, "0.5.22": _0_5_20, "0.5.23": _0_5_20,
})  # fmt: skip


def names_of(release: str) -> tuple[Names, str]:
    """The names of a release, and the release whose names they are: the same one, or the nearest before it."""
    return nearest(release, RELEASES)
