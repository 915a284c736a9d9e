"""SGLang: the memory budget counts the first number of drafts for recurrent states, and the pool the largest one.

    python sglang_budget_initial_steps.py      needs sglang, torch; no GPU (parts of its source run with stubs)

Run: adaptive speculation with the default file and start, 8 requests, no radix cache: the function that takes the
states out of the memory budget, and the pool, on the meta device. Expected: as many snapshots in the budget as in the
pool. Got: 4 states per request in the budget (3 steps), 8 in the pool (7 steps). For 48 layers of 32 x 128 x 128 in
fp32 the pool takes 3.4 GiB that the KV cache also gets. 0.5.13 to 0.5.23; in 0.5.12 both have the first number.
"""

# Longer than 30 lines: these two functions run without their module, whose imports need a GPU and 60 packages.
import ast
import builtins
import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

LAYERS, STATE, REQUESTS, GIB = range(48), (32, 128, 128), 8, 2**30
FILES = ("speculative/adaptive_spec_params", "mem_cache/memory_pool", "mem_cache/kv_cache_configurator", "server_args",
         "model_executor/model_runner_kv_cache_mixin", "speculative/spec_info")  # fmt: skip
srt = next(Path(place) / "sglang" / "srt" for place in sys.path if (Path(place) / "sglang" / "srt").is_dir())
trees = [ast.parse((srt / f"{name}.py").read_text()) for name in FILES if (srt / f"{name}.py").exists()]
nodes = [node for tree in trees for node in ast.walk(tree)]


class Stub(contextlib.nullcontext):
    """The engine's arguments and helpers as one object: a name that is not set is the object itself."""

    def __getattr__(self, name):
        return object.__getattribute__(self, name) if name.startswith("__") else self

    def __call__(self, *given, **named):
        return self

    def __iter__(self):
        return iter((False, None, None))  # there is no custom memory pool

    def __truediv__(self, other):
        return 0.0  # a size in the log

    def override(self, why, **fields):
        vars(self).update(fields)


class Names(dict):
    def __missing__(self, name):
        return vars(builtins).get(name, stub)


def run(among, *names):
    """Define the first of these functions as the release has it, without its decorators."""
    node = next(node for node in among if isinstance(node, ast.FunctionDef) and node.name in names)
    node.decorator_list, future = [], ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, node], []), "sglang", "exec"), known)
    return known[node.name]


def argument(call, name):
    """Evaluate an argument of the call of this name."""
    made = next(node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == call)
    value = next(one.value for one in made.keywords if one.arg == name)
    if isinstance(value, ast.Name):  # a local variable
        value = next(one.value for one in nodes if isinstance(one, ast.Assign) and ast.unparse(one.targets) == value.id)
    return eval(compile(ast.Expression(value), "sglang", "eval"), known)


table = [ast.literal_eval(node.value) for node in trees[0].body if isinstance(node, ast.AnnAssign)]
slots = table[0].values() if table else [{"candidate_steps": [1, 3, 7]}]
steps = sorted({count for slot in slots for count in slot["candidate_steps"]})
each = len(LAYERS) * 4 * torch.Size(STATE).numel()  # bytes of the states of one request
shape = SimpleNamespace(conv=[], temporal=STATE, conv_kernel=4, disable_conv_window_dedup=True)
dtype = SimpleNamespace(conv=torch.bfloat16, temporal=torch.float32)
states = SimpleNamespace(layers=LAYERS, mamba_cache_per_req=each, shape=shape, dtype=dtype, is_kda=False)
stub, no = Stub(), lambda *given: False
stub.override(
    "", speculative_num_draft_tokens=steps[len(steps) // 2] + 1, mamba2_cache_params=states, dp_size=1, attn_dp_size=1,
    pp_size=1, max_running_requests=REQUESTS, max_mamba_cache_size=None, is_none=no, enable_linear_replayssm_spec=False,
    enable_dp_attention=False, extra_mamba_cache_bytes_per_req=0, fused_entry_bytes=lambda name: None,
    resolve_candidate_steps_from_config=lambda cfg_path: steps)
known = Names(torch=torch, self=stub, isinstance=no, _is_npu=False, _is_cpu=False, conv_window_dedup_enabled=no,
              _pd_prefill_skips_mamba_spec_state=no)  # fmt: skip
sys.modules |= {f"sglang.srt.{name}": stub for name in ("arg_groups.overrides", "speculative.adaptive_spec_params")}
if table:
    largest = run(nodes, "max_speculative_num_draft_tokens", "resolve_max_speculative_num_draft_tokens")
    most = largest(*[stub] * largest.__code__.co_argcount)
    stub.override("", max_speculative_num_draft_tokens=most)
    known["max_speculative_num_draft_tokens"] = lambda: most
budget = 1000.0 - run(nodes, "_handle_max_mamba_cache", "handle_max_mamba_cache")(stub, 1000.0)  # GiB
zeros, made = torch.zeros, []
torch.zeros = lambda size, dtype, device: made.append(zeros(size, dtype=dtype, device="meta")) or made[-1]
pool = next(node for node in nodes if isinstance(node, ast.ClassDef) and node.name == "MambaPool")
run(pool.body, "__init__")(
    stub, size=REQUESTS, spec_state_size=REQUESTS, cache_params=states, mamba_layer_ids=LAYERS, device="meta",
    speculative_num_draft_tokens=argument("HybridReqToTokenPool", "speculative_num_draft_tokens"))
counted, held = round(budget * GIB / each) // REQUESTS - 1, made[-1].shape[2]
taken = sum(one.nbytes for one in made) / GIB
print(f"snapshots per request: {counted} in the budget, {held} in the pool; {budget:.1f} and {taken:.1f} GiB")
raise SystemExit(counted != held)
