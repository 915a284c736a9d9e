"""Cases of recurrences, conv and attention at real sizes, for kernels compiled for one width.

The sizes are those of a layer of Qwen3.5-9B, and of Kimi-Linear-48B-A3B for attention over latents.

Leaves out: products and rows, which have only small cases, and whole layers (`instep shapes`).
"""

from dataclasses import replace
from functools import partial

from instep_reference.contract.recurrences import RECURRENCES

from .case import BF16, FP32, Case
from .conv_and_gdn import Heads, Shape, conv_case, gdn_case
from .paged_kv import Latent, Reading, attend_case, latents_case

HEADS = Heads(H=16, HV=32, K=128, V=128)
CHANNELS, WIDTH = 2 * HEADS.H * HEADS.K + HEADS.HV * HEADS.V, 4
SHAPES: dict[str, tuple[Shape, ...]] = {
    "decode": (Shape("window", (1, 0, 1), (3, 1, 4), (0, 0, 0), store=(3, 1, 4)),),
    "verify": (Shape("window", (4, 2), (3, 1), (0, 0), per_row=(1, 0)),),
    "prefill": (Shape("chunk", (70, 5), (1, 2), (1, 0), store=(1, 2), skip=1),),  # more rows than a block of 64
}
pages_of = partial(Reading, page_size=16, heads=16, kv_heads=4, head_dim=256)
PAGES = {
    "decode": pages_of(((9, 2, 5), (7, 4, -1)), before=(40, 17), count=(1, 1)),
    "verify": pages_of(((9, 2, 5), (7, 4, -1)), before=(40, 17), count=(4, 2)),
    "prefill": pages_of(((3, 1, 8, 5, 2, 6), (7, -1, -1, -1, -1, -1)), before=(13, 0), count=(70, 5)),
}

REAL: list[Case] = [
    *(Case(row.name, f"real-{name}-{'VK' if swap else 'KV'}-{str(state)[6:]}-{str(dtype)[6:]}",
           gdn_case(700 + i, SHAPES[name], HEADS, state, swap, dtype, row), narrow=name == "prefill" and dtype == BF16)
      for row in RECURRENCES.values() for i, (name, swap, state, dtype) in enumerate([
          ("decode", True, FP32, BF16), ("verify", True, FP32, BF16), ("prefill", True, FP32, BF16),
          ("decode", False, FP32, FP32), ("verify", True, FP32, FP32), ("prefill", True, FP32, FP32),
          ("decode", True, BF16, BF16), ("verify", True, BF16, BF16)])),
    *(Case("conv", f"real-{name}-{str(dtype)[6:]}",
           conv_case(720 + i, SHAPES[name], CHANNELS, WIDTH, dtype, swap=True), exact_memory=True)
      for i, (name, dtype) in enumerate((name, dtype) for name in SHAPES for dtype in (FP32, BF16))),
    *(Case("attend", f"real-{name}-{str(dtype)[6:]}", attend_case(740 + i, PAGES[name], dtype))
      for i, (name, dtype) in enumerate((name, dtype) for name in PAGES for dtype in (FP32, BF16))),
    *(Case("attend_latents", f"real-{name}-{str(dtype)[6:]}", latents_case(
          760 + i, replace(PAGES[name], heads=32, head_dim=192), Latent(width=512, shared=64, value=128), dtype))
      for i, (name, dtype) in enumerate((name, dtype) for name in PAGES for dtype in (FP32, BF16))),
]  # fmt: skip
