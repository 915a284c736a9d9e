"""How kernels run: interpreted or native, decided before Triton is first imported, and one launcher with fixed options.

Leaves out: the kernels. No other file asks for a version or passes launch options, and none but `interpreter.py` sets
the variable.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from importlib import metadata
from typing import Any

import torch

from instep_reference.contract.errors import Unsupported

from ..interpreter import VARIABLE

_WITNESS = "triton.language.standard"  # its functions were decorated when Triton was imported, one way or the other


def decide(environment: MutableMapping[str, str], loaded: Mapping[str, Any], cuda: bool) -> bool:
    """Whether kernels are interpreted: always without a CUDA device, else if the environment asks for it.

    Triton reads the variable when a kernel is decorated, its own helpers included, so it must be set before
    the first import; if somebody imported Triton natively before us, nothing here could run.
    """
    if not cuda:
        environment[VARIABLE] = "1"
    wanted = environment.get(VARIABLE, "0").lower() in ("1", "true", "on", "yes", "y")
    if _WITNESS in loaded:
        found = type(loaded[_WITNESS].sum).__name__ == "InterpretedFunction"
        if found != wanted:
            raise Unsupported(
                f"Triton was imported {'interpreted' if found else 'native'} before instep could choose, and "
                f"{'interpreted' if wanted else 'native'} kernels are needed here; import "
                f"instep_optimized.kernels first, or start Python with {VARIABLE}={int(wanted)}"
            )
    return wanted


INTERPRETED: bool = decide(os.environ, sys.modules, torch.cuda.is_available())


def tile(native: int, interpreted: int) -> int:
    """A tile size: an interpreted program costs milliseconds whatever its size, so few large ones run there."""
    return interpreted if INTERPRETED else native


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n (and at least 1): the width of a masked tile."""
    return 1 << (max(n, 1) - 1).bit_length()


def ceil_div(n: int, block: int) -> int:
    """How many blocks cover n."""
    return -(-n // block)


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int = 4, stages: int = 1, registers: int | None = None,
    **constants: Any,
) -> None:
    """Run `kernel` over `grid`; an empty grid returns at once. registers: the most of a thread, None: any number.

    Floating-point fusion is off: where a fused multiply-add is meant the kernel says `tl.fma`, so the same
    source gives the same bits wherever it is inlined, and Triton's changing default cannot matter.
    """
    if 0 in grid:
        return
    first = next(x for x in arguments if isinstance(x, torch.Tensor))
    if not INTERPRETED and not first.is_cuda:
        raise Unsupported(
            f"native kernels need CUDA tensors, found one on {first.device}; run on the GPU (--device cuda), or start "
            f"with {VARIABLE}=1"
        )
    kernel[grid](*arguments, num_warps=warps, num_stages=stages, maxnreg=registers, enable_fp_fusion=False, **constants)


def versions() -> dict[str, str]:
    """What serves: for reports, results and baselines."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "torch": torch.__version__,
        "triton": metadata.version("triton"),
        "kernels": "interpreted" if INTERPRETED else "native",
        "device": device,
    }
