"""Import the kernels of SGLang and vLLM from an unpacked wheel, with stubs for the rest of the package.

Leaves out: the kernels' arguments (`sglang.py`, and the peers of the benchmark).
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from instep_optimized.kernels.runtime import INTERPRETED

from .wheel_modules import Absent, bare

# Packages with SGLang's kernels: since 0.5.23, and before.
SGLANG = ("sglang.kernels.ops", "sglang.srt.layers.attention.fla", "sglang.srt.layers.attention.mamba")
VLLM = ("vllm.third_party.flash_linear_attention.ops", "vllm.model_executor.layers.mamba.ops",
        "vllm.models.kimi_k3.nvidia.ops.third_party.kda", "vllm.utils.math_utils")  # fmt: skip
assert INTERPRETED in (True, False)  # its import decides how Triton runs, so it precedes that of Triton


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
    """Import SGLang's kernels without its other 60 requirements. On a GPU the stubs return its properties."""
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


class Platform(Absent):
    """vLLM's `current_platform`. Whether a kernel may start before the one before it has ended is passed to kernels."""

    def is_arch_support_pdl(self) -> bool:
        return not INTERPRETED and torch.cuda.get_device_properties().major >= 9


def vllm() -> None:
    """Import vLLM's kernels without its platform code."""
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    ours = {"triton": triton, "tl": tl, "tldevice": libdevice, "HAS_TRITON": True}
    bare("vllm", keep=VLLM, names={
        "vllm.triton_utils": ours, "vllm.v1.attention.backends.utils": {"NULL_BLOCK_ID": 0, "PAD_SLOT_ID": -1},
        "vllm.platforms": {"current_platform": Platform()}, "vllm.envs": {"VLLM_TUNED_CONFIG_FOLDER": None},
        "vllm.utils.torch_utils": {"async_tensor_h2d": lambda data, device, dtype: data.to(device, dtype)},
    })  # fmt: skip
