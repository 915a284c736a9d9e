"""SGLang: with the ring of a GDN verify, a kept prefix lacks the tokens that are still in the ring.

    python sglang_ring_prefix.py      needs sglang, torch; no GPU (one function of its source runs with stubs)

Run: a request of 239 tokens ends while its ring holds 8 tokens, and the default prefix cache takes its state (strategy
`no_buffer`). Expected: a prefix of 231 tokens, those that the state in the pool has. Got: 239. The cache reads only the
cursor of the ring for decode (`replayssm_write_pos`), which is None with `--enable-linear-replayssm-spec`. So each
request that continues this prefix starts from a state that is 8 tokens old. On an H200 with a 4-layer model, states
after such hits are off by 0.18 to 0.22 of their norm, and the text stays plausible. 0.5.20 to 0.5.23; in 0.5.16 the
length is right, and the conv window of the prefix is that of the end; 0.5.17 to 0.5.19 keep nothing in the ring.
"""

# Longer than 30 lines: the function runs without its module, and the lines above say what was seen with whole engines.
import ast
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

TOKENS, IN_RING = 239, 8
srt = next(Path(place) / "sglang" / "srt" for place in sys.path if (Path(place) / "sglang" / "srt").is_dir())
file = next(file for file in sorted((srt / "mem_cache").rglob("mamba*.py")) if "unified_cache" in str(file))
function = next(node for node in ast.walk(ast.parse(file.read_text()))
                if isinstance(node, ast.FunctionDef) and node.name == "prepare_for_caching_req")  # fmt: skip
known = {}
future = ast.parse("from __future__ import annotations").body
exec(compile(ast.Module([*future, function], []), str(file), "exec"), known)
cursor = torch.tensor([0, IN_RING])
of_verify = "self.replayssm_spec_write_pos = (" in (srt / "mem_cache" / "memory_pool.py").read_text()
pool = SimpleNamespace(replayssm_write_pos=None if of_verify else cursor, replayssm_spec_write_pos=cursor)
cache = SimpleNamespace(enable_mamba_extra_buffer=False, req_to_token_pool=SimpleNamespace(mamba_pool=pool))
slot = torch.tensor(1)
request = SimpleNamespace(mamba_pool_idx=slot, kv=SimpleNamespace(mamba_pool_idx=slot, req_pool_idx=slot))
component = SimpleNamespace(cache=cache, int8_ckpt_pool=None, **vars(cache))
kept = known[function.name](component, request, SimpleNamespace(), TOKENS, True)
print(f"the state in the pool has {TOKENS - IN_RING} tokens; the prefix is kept as one of {kept}")
raise SystemExit(kept != TOKENS - IN_RING)
