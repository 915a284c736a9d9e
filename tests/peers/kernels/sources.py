"""Where the kernels of each package stand in its wheel, and what the rest of the wheel must answer.

Leaves out: the kernels' arguments (one file per package beside this one).
"""

from __future__ import annotations

from instep_optimized.kernels.runtime import INTERPRETED

from ..loading import bare

# Where SGLang's kernels stand since 0.5.23, and where before.
SGLANG = ("sglang.kernels.ops", "sglang.srt.layers.attention.fla", "sglang.srt.layers.attention.mamba")
VLLM = ("vllm.third_party.flash_linear_attention.ops", "vllm.model_executor.layers.mamba.ops.causal_conv1d")
assert INTERPRETED in (True, False)  # the import decides whether Triton interprets; so it comes before Triton's


def sglang() -> None:
    """SGLang's kernels without SGLang's other 60 requirements."""
    bare("sglang", keep=SGLANG, names={"sglang.srt.utils.common": {"torch_release": (2, 11)}})


def vllm() -> None:
    """vLLM's kernels without vLLM's platform."""
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    ours = {"triton": triton, "tl": tl, "tldevice": libdevice}
    bare("vllm", keep=VLLM, names={
        "vllm.triton_utils": ours, "vllm.v1.attention.backends.utils": {"NULL_BLOCK_ID": 0, "PAD_SLOT_ID": -1},
        "vllm.utils.torch_utils": {"async_tensor_h2d": lambda data, device, dtype: data.to(device, dtype)},
    })  # fmt: skip
