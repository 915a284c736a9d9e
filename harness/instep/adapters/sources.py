"""Where the kernels of each package stand in its wheel, and what the rest of the wheel must answer.

Leaves out: the kernels' arguments (one file per package beside this one).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from instep_optimized.kernels.runtime import INTERPRETED

from .unpacked import bare

# Where SGLang's kernels stand since 0.5.23, and where before.
SGLANG = ("sglang.kernels.ops", "sglang.srt.layers.attention.fla", "sglang.srt.layers.attention.mamba")
VLLM = ("vllm.third_party.flash_linear_attention.ops", "vllm.model_executor.layers.mamba.ops.causal_conv1d")
assert INTERPRETED in (True, False)  # the import decides whether Triton interprets; so it comes before Triton's


def load(module: str, unpacked: Callable[[], None]) -> Any:
    """Import a module of an installed package, or else, after `unpacked`, from sources on Python's path.

    A package without its requirements may raise any error, not only ImportError.
    """
    try:
        return import_module(module)
    except Exception:
        unpacked()
        return import_module(module)


def sglang() -> None:
    """SGLang's kernels without SGLang's other 60 requirements. On a card they are told what it is, as SGLang would."""
    common: dict[str, object] = {"torch_release": (2, 11)}
    names: dict[str, dict[str, object]] = {"sglang.srt.utils.common": common}
    if not INTERPRETED:
        card = torch.cuda.get_device_properties()
        model = 10 * card.major + card.minor
        common["get_device_core_count"] = lambda *device: card.multi_processor_count
        names["sglang.kernels.jit.utils"] = {"is_arch_support_pdl": lambda: model >= 90}
        names["sglang.srt.utils"] = {
            "is_cuda": lambda: True, "get_device_sm": lambda: model, "is_sm90_supported": lambda *device: model == 90,
        }
    bare("sglang", keep=SGLANG, names=names)


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
