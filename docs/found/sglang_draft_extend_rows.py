"""SGLang: draft extend in a CUDA graph attends to another request's draft KV once accepted counts differ.

    python sglang_draft_extend_rows.py      needs sglang, torch; no GPU (one function of its source runs with stubs)

Run: the replay metadata of `TritonAttnBackend` for a draft extend after 1, 1, 4, 1, 4 and 4 accepted tokens (steps 3).
`EAGLEWorker` packs these 15 rows without gaps. Expected: `qo_indptr` is the running sum of the accepted counts. Got:
multiples of steps + 1, so 14 of 15 rows attend as those of another request, among them the last rows of five requests,
from which their next drafts come. Texts stay right, and fewer drafts are accepted. In a recording of 0.5.12 this
attention gives all drafts up to the first switch; with the right one 4 windows differ. 0.5.12, with overlap off: with
overlap, and from 0.5.13 on, `EAGLEWorkerV2` has steps + 1 rows per request (0.5.13: 162 of 162 drafts are right).
"""
# Longer than 30 lines: the function runs without its module, whose imports need a GPU and 60 packages.

import ast
import sys
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import torch

ACCEPTED, STEPS = [1, 1, 4, 1, 4, 4], 3
srt = next(Path(place) / "sglang" / "srt" for place in sys.path if (Path(place) / "sglang" / "srt").is_dir())
if not (srt / "speculative" / "eagle_worker.py").exists():
    print("this release has no EAGLEWorker, which packs the rows")
    raise SystemExit(0)


class Kernel:
    def __getitem__(self, grid):
        return lambda *given: None


tree = ast.parse((srt / "layers" / "attention" / "triton_backend.py").read_text())
node = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
            and node.name == "init_forward_metadata_replay_cuda_graph")  # fmt: skip
future = ast.parse("from __future__ import annotations").body
known = {"torch": torch, "create_flashinfer_kv_indices_triton": Kernel()}
exec(compile(ast.Module([*future, node], []), "sglang", "exec"), known)
count, accepted = len(ACCEPTED), torch.tensor(ACCEPTED)
backend = SimpleNamespace(
    speculative_num_steps=STEPS, device="cpu", qo_indptr=torch.zeros(count + 1, dtype=torch.int32),
    kv_indptr=torch.zeros(count + 1, dtype=torch.int32), cuda_graph_kv_indices=None, req_to_token=torch.zeros(1, 1),
    sliding_window_size=None)  # fmt: skip
mode = SimpleNamespace(is_decode_or_idle=lambda: False, is_target_verify=lambda: False,
                       is_draft_extend=lambda include_v2=False: True)  # fmt: skip
inputs = SimpleNamespace(num_accept_tokens=accepted, num_correct_drafts=accepted - 1)
known[node.name](backend, count, torch.arange(count), 100 + accepted, 0, None, mode, inputs, None)
right = [request for request, rows in enumerate(ACCEPTED) for _ in range(rows)]
starts = backend.qo_indptr.tolist()
read = [max(request for request in range(count) if starts[request] <= row) for row in range(len(right))]
wrong = [row for row in range(len(right)) if read[row] != right[row]]
last = [row - 1 for row in accumulate(ACCEPTED)]
print(f"qo_indptr {starts}, packed rows begin at {[0, *accumulate(ACCEPTED)]}")
print(f"{len(wrong)} of {len(right)} rows are read as another request's: " + ", ".join(
    f"request {right[row]}'s last as request {read[row]}'s" for row in last if row in wrong))
raise SystemExit(bool(wrong))
