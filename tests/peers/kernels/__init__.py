"""Kernels of SGLang, vLLM and FLA from unpacked wheels, interpreted on the CPU: the entries of `make peers`.

Leaves out: how each kernel is called (the other files here), and native kernels (`tests/perf/`).
"""

from collections.abc import Sequence
from typing import Any

from .recorded import FOLDER

# The windows of a trace: `wider` 2, 4, 2 in pools of 4; `ragged` 5, rolled back to 3, 1, 5, 2; `lengths` 8, rolled
# back to every length, then 4, 2, 8; `kept` saves, loads, preempts, resumes and aborts; `steps` has rounds without
# drafts.
NAMES = ("faults/wider", "faults/ragged", "faults/kept", "peers/lengths")
WINDOWS = [f"fixtures/traces/{name}.jsonl" for name in NAMES]
PLAIN = ["fixtures/traces/faults/steps.jsonl"]
SHORT = ["fixtures/traces/faults/short.jsonl"]
# Chunks of several lengths, requests that come while others run. Its kernels need block pointers: triton before 3.9.
PROMPTS = ["fixtures/traces/faults/arriving.jsonl", "fixtures/traces/faults/mixed.jsonl"]
WIDTH = "snapshot_state row; changed at position; this event writes only; T1"
LOST = "holds the state from before the step"
EMPTY, NEIGHBOUR = "chunks after an empty sequence", "sequences [0, 1]"
MODULE = {"sglang": "sglang", "vllm": "vllm", "fla-core": "fla"}
LIBRARY = "a library: its users call it"
# The option of SGLang's ring, and names of its source with the values that the option gives them to a GDN model.
RING_SWITCH = {"0.5.16": "--enable-gdn-replayssm-spec"}
RING = {"enable_linear_replayssm_spec": True, "enable_gdn_replayssm_spec": True, "is_kda": False}
NO_RING = {**RING, "enable_linear_replayssm_spec": False, "enable_gdn_replayssm_spec": False}
SPECULATIVE = "--speculative-algorithm"
VERIFY: dict[str, Any] = {"switch": SPECULATIVE, "facts": NO_RING,
                          "calls": ["fused_sigmoid_gating_delta_rule_update(intermediate_states_buffer)"]}  # fmt: skip
DECODE: dict[str, Any] = {"switch": "default", "calls": ["fused_recurrent_gated_delta_rule_packed_decode"]}
SPECULATES = {"switch": "--speculative-config"}
PREFILL: dict[str, Any] = {"switch": "default", "calls": ["chunk_gated_delta_rule"]}


def _entry(name: str, package: str, version: str, command: str, **more: Any) -> dict[str, Any]:
    """An entry of door 1: `command` is the op set and its options."""
    return {
        "name": name, "package": package, "version": version, "door": "op", "traces": WINDOWS,
        "command": f"instep replay {{trace}} --no-ladder --ops {command}",
        "unpacked": [f"{package}=={version}", "einops==0.8.2"], "modules": [MODULE[package]], **more,
    }  # fmt: skip


def _script(file: str, name: str, package: str, version: str, expected: str, **more: Any) -> dict[str, Any]:
    """A script of `docs/found`, which ends with 1 where it finds what it is about."""
    command = f"python -m peers.script docs/found/{file}.py"
    return {**_entry(name, package, version, ""), "door": "script", "command": command, "expected": expected, **more}


def _sglang(version: str) -> list[dict[str, Any]]:
    """SGLang's kernels in one release: all traces in the newest, two in others."""
    fixed, sglang = version != "0.5.12", "peers.kernels.sglang:"
    traces = WINDOWS if version == "0.5.23" else WINDOWS[:2]
    older = {"unpacked": [f"sglang=={version}", "einops==0.8.2", "triton==3.6.0"], "seconds": 400}
    conv = ["causal_conv1d_update(intermediate_conv_window)", "causal_conv1d_update", "causal_conv1d_fn"]
    own: dict[str, dict[str, Any]] = {
        "fused_sigmoid_gating_delta_rule_update": {
            "command": f"{sglang}SIGMOID --strategy snapshot", "since": "" if fixed else "0.5.10", "traces": traces,
            "expected": "agree" if fixed else WIDTH, **VERIFY,
        },
        "chunk_gated_delta_rule": {
            "command": f"{sglang}CHUNKED --strategy snapshot", **older, "traces": PROMPTS, **PREFILL,
        },
        "chunk_gated_delta_rule, strided pool": {
            "command": f"{sglang}CHUNKED_STRIDED --strategy snapshot", "expected": LOST, "since": "0.5.9", **older,
            "traces": SHORT, **PREFILL,
        },
        "causal_conv1d_update, causal_conv1d_fn": {
            "command": f"{sglang}CONV", "traces": traces, "switch": SPECULATIVE, "calls": conv, "facts": NO_RING,
        },
        "fused_mamba_state_scatter_with_mask": {
            "command": f"{sglang}SCATTER --strategy snapshot", "traces": traces, "switch": SPECULATIVE,
            "calls": ["fused_mamba_state_scatter_with_mask"], "facts": NO_RING,
        },
    }  # fmt: skip
    found = [_entry(name, "sglang", version, **one) for name, one in own.items()]
    beta = "fused_recurrent_gated_delta_rule_packed_decode beside verify"
    budget, old = "sglang_budget_initial_steps", version == "0.5.12"
    return [
        *found,
        _script(budget, "memory budget of adaptive speculation", "sglang", version,
                "agree" if old else "diverged; 4 in the budget, 8 in the pool", since="" if old else "0.5.13",
                switch="--speculative-adaptive",
                calls=["_handle_max_mamba_cache" if version == "0.5.23" else "handle_max_mamba_cache"]),
        _script("sglang_decode_beta", beta, "sglang", version, "diverged; states are; apart", since="0.5.10",
                **{**DECODE, "calls": [*DECODE["calls"], *VERIFY["calls"]]}),
        _script("sglang_empty_sequence", EMPTY, "sglang", version, f"diverged; sglang.; {NEIGHBOUR}", since="0.5.9",
                **PREFILL),
        _script("sglang_slot_4096", "slot 4096 of states of 32 x 128 x 128", "sglang", version,
                "agree" if version == "0.5.23" else "dies; SIGSEGV; slot 4096 is written",
                since="" if version == "0.5.23" else "0.5.9", **VERIFY),
    ]  # fmt: skip


# Release -> the functions of its ring, and what is found when the step count rises.
RINGS: dict[str, tuple[list[str], str]] = {
    "0.5.16": (
        ["gdn_replayssm_spec_decode", "commit_gdn_replayssm_spec"],
        "diverged; wrong after; 6 x 2, 4; 14 x 1, 4; 6 x 2, 8",
    ),
    "0.5.18": (["fused_sigmoid_gating_delta_rule_update(cache_ring)", "commit_gdn_replayssm_fold_all_layers"], "agree"),
    **dict.fromkeys(("0.5.20", "0.5.23"), (
        ["gdn_replayssm_spec_decode(replay_indices)", "commit_gdn_replayssm_spec", "commit_gdn_replayssm_circular"],
        "diverged; wrong after; 14 x 1, 4; 6 x 2, 8",
    )),
}  # fmt: skip


def _ring(version: str) -> list[dict[str, Any]]:
    """The ring of a GDN verify, as a strategy: windows of one width, and step counts that rise."""
    calls, rises = RINGS[version]
    how = {"switch": RING_SWITCH.get(version, "--enable-linear-replayssm-spec"), "calls": calls, "facts": RING}
    replay = "peers.kernels.sglang:RING --strategy sglang_ring"
    return [
        _entry("ring of a GDN verify", "sglang", version, replay, traces=WINDOWS, **how, door="keeper"),
        _entry("ring of a GDN verify, rising step counts", "sglang", version, "", **how, door="keeper",
               expected=rises) | {"command": "python -m support.inputs.step_schedules"},
        _script("sglang_ring_steps", "ring of a GDN verify, alone", "sglang", version,
                "agree" if rises == "agree" else "diverged; windows; 14 x 1, 4", **how),
        _script("sglang_ring_prefix", "ring of a GDN verify, kept prefixes", "sglang", version,
                "diverged; 231 tokens; one of 239" if version in ("0.5.20", "0.5.23") else "agree",
                **how | {"calls": ["prepare_for_caching_req"]}),
    ]  # fmt: skip


def _recorded(kinds: Sequence[str], policies: Sequence[str]) -> list[str]:
    return [f"{{unpacked}}/{FOLDER}/{kind}-{policy}.jsonl" for kind in kinds for policy in policies]


def _kda() -> list[dict[str, Any]]:
    """Kernels of Kimi Delta Attention: models with a gate per channel without a bound (kimi) and with one (ling)."""
    both = ("kimi", "ling")
    verify = [*_recorded(both[:1], ("wider", "kept", "lengths")), *_recorded(both[1:], ("wider", "ragged"))]
    prompts = [*_recorded(both, ("prompts",)), *_recorded(both[:1], ("mixed",))]
    gated = "fused_sigmoid_gating_delta_rule_update"
    kda, ring = NO_RING | {"is_kda": True}, RING | {"is_kda": True}
    tuned: dict[str, Any] = {"seconds": 400}
    rows: list[tuple[str, str, str, str, dict[str, Any]]] = [
        (gated, "sglang", "sglang_kda:VERIFY", "snapshot", {"traces": verify, **VERIFY, "facts": kda}),
        (f"{gated}, bf16 rows", "sglang", "sglang_kda:VERIFY", "snapshot --dtype bfloat16",
         {"traces": _recorded(both, ("wider",)), **VERIFY, "facts": kda}),
        ("fused_recurrent_kda_packed_decode", "sglang", "sglang_kda:DECODE", "snapshot",
         {"traces": _recorded(both, ("steps", "kept")), "switch": "default", "facts": kda,
          "calls": ["fused_recurrent_kda_packed_decode"]}),
        ("chunk_kda", "sglang", "sglang_kda:CHUNKED", "snapshot",
         {"traces": prompts, "switch": "default", "facts": kda, "calls": ["chunk_kda(beta_is_raw)"], **tuned}),
        ("commit_kda_replayssm_after_verify", "sglang", "sglang_kda:RING", "kda_ring",
         {"traces": verify, "switch": "--enable-linear-replayssm-spec", "facts": ring, "door": "keeper",
          "calls": ["commit_kda_replayssm_after_verify", f"{gated}(cache_ring)"]}),
        ("fused_recurrent_kda and its packed decode, columns", "vllm", "vllm_kda:RECURRENT", "columns",
         {"traces": [*verify, *_recorded(both[:1], ("steps",))], **SPECULATES, "facts": {"is_kda": True},
          "calls": ["fused_recurrent_kda(num_accepted_tokens)", "fused_recurrent_kda_packed_decode"]}),
        ("chunk_kda_with_fused_gate", "vllm", "vllm_kda:CHUNKED", "columns",
         {"traces": prompts, "switch": "default", "facts": {"is_kda": True},
          "calls": ["chunk_kda_with_fused_gate", "gather_initial_states"], **tuned}),
        ("fused_recurrent_kda", "fla-core", "fla_kda:RECURRENT", "snapshot", {"traces": verify, "switch": LIBRARY}),
        ("fused_kda_gate", "fla-core", "fla_kda:GATED", "snapshot",
         {"traces": _recorded(both, ("wider",)), "switch": LIBRARY}),
        ("chunk_kda", "fla-core", "fla_kda:CHUNKED", "snapshot", {"traces": prompts, "switch": LIBRARY, **tuned}),
    ]  # fmt: skip
    return [_newest(f"KDA: {name}", *one) for name, *one in rows]  # type: ignore[arg-type]


NEWEST = {"sglang": "0.5.23", "vllm": "0.33.0", "fla-core": "0.6.0"}


def _newest(name: str, package: str, ops: str, strategy: str, more: dict[str, Any]) -> dict[str, Any]:
    """An entry of the newest release. Prefill has block pointers, which need a triton before 3.9."""
    version = NEWEST[package]
    older = {"unpacked": [f"{package}=={version}", "einops==0.8.2", "triton==3.6.0"]} if "CHUNKED" in ops else {}
    return _entry(name, package, version, f"peers.kernels.{ops} --strategy {strategy}", **more, **older)


def _mamba2() -> list[dict[str, Any]]:
    """Kernels of Mamba2: windows of one width and of several, steps dt of at least 0.3, and small ones (committed)."""
    update, mamba = "selective_state_update", ("nemotron",)
    verify, prompts = {"switch": SPECULATIVE, "calls": [f"{update}(intermediate_states_buffer)"]}, ("prompts", "mixed")
    windows = _recorded(mamba, ("wider", "ragged", "kept", "lengths"))
    rows: list[tuple[str, str, str, str, dict[str, Any]]] = [
        (f"{update}, windows of several widths", "sglang", "sglang_mamba2:UPDATE", "snapshot",
         {"traces": windows[:1], **verify, "expected": WIDTH, "since": "0.5.12"}),
        (f"{update}, snapshots as wide as the window", "sglang", "sglang_mamba2:EXACT", "snapshot",
         {"traces": [*windows, *_recorded(mamba, ("steps",))], **verify}),
        (f"{update}, steps dt of 0.0001", "sglang", "sglang_mamba2:EXACT", "snapshot",
         {"traces": ["fixtures/traces/faults/nemotron.jsonl"], **verify, "expected": "read-out; relative error; T2"}),
        ("mamba_chunk_scan_combined", "sglang", "sglang_mamba2:CHUNKED", "snapshot",
         {"traces": _recorded(mamba, prompts), "switch": "default", "calls": ["mamba_chunk_scan_combined"]}),
        (f"{update}, columns", "vllm", "vllm_mamba2:UPDATE", "columns",
         {"traces": [*windows, *_recorded(mamba, ("steps",))], **SPECULATES,
          "calls": [f"{update}(num_accepted_tokens)"]}),
        ("mamba_chunk_scan_combined_varlen", "vllm", "vllm_mamba2:CHUNKED", "columns",
         {"traces": _recorded(mamba, prompts), "switch": "default",
          "calls": ["mamba_chunk_scan_combined_varlen(final_states_out)"]}),
    ]  # fmt: skip
    alone = [_script("sglang_mamba2_stride", "Mamba2: a verify narrower than its snapshots, alone", "sglang", version,
                     "diverged; belong: False; request 0: True", since="0.5.12", **verify)
             for version in ("0.5.12", "0.5.13", *RINGS)]  # fmt: skip
    return [*(_newest(f"Mamba2: {name}", *one) for name, *one in rows), *alone]  # type: ignore[arg-type]


# Live kernels that need a card: name, package, option, functions that the release calls, and why.
NATIVE: list[tuple[str, str, str, list[str], str]] = [
    ("KDA: kda_packed_decode, large batches", "sglang", "default", ["kda_packed_decode"], "CUDA kernel, K = V = 128"),
    ("KDA: recurrent_kda of FlashInfer, fused accept", "sglang", "--linear-attn-verify-backend",
     ["recurrent_kda", "build_fused_accept_indices"], "CuTe kernel, SM100"),
    ("Mamba2: selective_state_update of FlashInfer", "sglang", "--mamba-backend", ["FlashInferSSUBackend"],
     "CUDA kernel"),
    ("Mamba2: checkpointing_ssu of FlashInfer", "vllm", "--mamba-backend",
     ["selective_state_update_replayssm_flashinfer"], "CUDA kernel"),
]  # fmt: skip


def _native(name: str, package: str, switch: str, calls: list[str], why: str) -> dict[str, Any]:
    made = _entry(name, package, NEWEST[package], "", switch=switch, calls=calls, door="native", traces=[],
                  expected=f"needs a card: {why}", facts={"is_kda": name.startswith("KDA")})  # fmt: skip
    return {**made, "command": ""}


VLLM, COLUMNS, FLA = "peers.kernels.vllm", "--strategy columns", "fla --strategy snapshot"
ENTRIES = [
    *(one for version in ("0.5.12", "0.5.13") for one in _sglang(version)),
    *(one for version in ("0.5.16", "0.5.18", "0.5.20") for one in _ring(version)),
    *_sglang("0.5.23"),
    _entry("fused_recurrent_gated_delta_rule_packed_decode", "sglang", "0.5.23",
           "peers.kernels.sglang:DECODE --strategy snapshot", traces=PLAIN, **DECODE),
    _entry("fused_recurrent_gated_delta_rule_packed_decode, bf16 rows", "sglang", "0.5.23",
           "peers.kernels.sglang:DECODE --strategy snapshot --dtype bfloat16", traces=PLAIN, since="0.5.10",
           expected="read-out; from the op's own inputs; T2", **DECODE),
    _entry("fused_sigmoid_gating_delta_rule_update, bf16 rows", "sglang", "0.5.23",
           "peers.kernels.sglang:SIGMOID --strategy snapshot --dtype bfloat16", traces=WINDOWS[:2], **VERIFY),
    *_ring("0.5.23"),
    _entry("fused_recurrent_gated_delta_rule, columns", "vllm", "0.33.0", f"{VLLM}:RECURRENT {COLUMNS}", **SPECULATES,
           calls=["fused_recurrent_gated_delta_rule(num_accepted_tokens)"]),
    _entry("fused_sigmoid_gating_delta_rule_update, columns", "vllm", "0.33.0", f"{VLLM}:SIGMOID {COLUMNS}",
           **SPECULATES, calls=["fused_sigmoid_gating_delta_rule_update(num_accepted_tokens)"]),
    _script("sglang_empty_sequence", EMPTY, "vllm", "0.33.0", f"diverged; vllm.; {NEIGHBOUR}", since="0.32.0",
            switch="default", calls=["chunk_gated_delta_rule"]),
    _entry("fused_recurrent_gated_delta_rule", "fla-core", "0.6.0", FLA, traces=WINDOWS[:3], switch=LIBRARY),
    _script("sglang_empty_sequence", EMPTY, "fla-core", "0.6.0", "agree", switch=LIBRARY),
    *_kda(),
    *_mamba2(),
    *(_native(*one) for one in NATIVE),
]  # fmt: skip
