"""How kernels run: interpreted or native, decided before Triton is first imported, and one launcher with fixed options.

No other file checks a version or passes launch options. Only `ops/interpreter.py` also sets the variable.
Leaves out: the kernels.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, MutableMapping
from functools import cache
from importlib import import_module, metadata
from typing import Any

import numpy
import torch

from instep_reference.contract.declared_rounding import Blocked, Storage
from instep_reference.contract.errors import Unsupported

from ..ops.interpreter import VARIABLE, imported
from .quick_interpreter import quicken


def decide(environment: MutableMapping[str, str], loaded: Mapping[str, Any], cuda: bool) -> bool:
    """Whether kernels are interpreted: always without a CUDA device, else if the environment asks for it.

    Triton reads the variable when a kernel is decorated. It decorates its own helpers when it is imported, so the
    variable must be set before the first import. If Triton was imported the other way before, this raises Unsupported.
    """
    if not cuda:
        environment[VARIABLE] = "1"
    wanted = environment.get(VARIABLE, "0").lower() in ("1", "true", "on", "yes", "y")
    due = "interpreted" if wanted else "native"
    if (found := imported(loaded)) not in ("", due):
        raise Unsupported(
            f"Triton was imported {found} before instep could choose, and {due} kernels are needed here; import "
            f"instep_optimized.kernels first, or start Python with {VARIABLE}={int(wanted)}"
        )
    return wanted


_FP8 = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # fp8 numbers from 0 up, in byte order
HALF_WAY: Any = ((_FP8[1:] + _FP8[:-1]) / 2).numpy()  # not a tensor: reading a tensor inside an op is a host read


def to_nearest(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the interpreter's conversion between float formats, so that bf16 and fp8 round as on a GPU: ties to even.

    Triton's own function (3.6 to 3.9, `_convert_float`) cuts off the lower 16 bits for bf16. Its error is up to twice
    that of rounding, and always towards zero. A kernel that requests rounding towards zero (RTZ) still gets it. For fp8
    it rounds, but halves a number that rounds up to a power of 2. From bf16 it loses the smallest numbers.
    """

    def converted(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source.name, target.name) == ("fp32", "fp8e4nv"):
            code = HALF_WAY.searchsorted(abs(data))  # the larger of two neighbours starts above half way
            tie = (code < len(HALF_WAY)) & (abs(data) == HALF_WAY[code.clip(max=len(HALF_WAY) - 1)])
            code = code + (tie & (code % 2 == 1)) + 0x80 * (data.view("uint32") >> 31)
            code[data != data] = 0x7F
            return code.astype("uint8")
        if (source.name, target.name) == ("bf16", "fp32"):
            return data.astype("uint32") << 16  # exact: bf16 is the upper half of fp32
        if (source.name, target.name) != ("fp32", "bf16") or "RTZ" in str(mode):
            return convert(data, source, target, mode)
        bits = data.astype("float32", order="C", copy=False).view("uint32")
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # half of the last bit kept, less 1 if that bit is even
        nearest[data != data] = 0x7FC0  # a NaN stays one, whatever its lower bits
        return nearest.astype("uint16")

    return converted


def mend() -> bool:
    """Make the interpreter round to bf16 -> whether it does now. This is tested, not inferred from its version."""
    interpreter: Any = import_module("triton.runtime.interpreter")
    tl: Any = import_module("triton.language")

    def rounds() -> bool:
        exact = torch.tensor([1.0078124, 1.01171875, -1.00390625, 3.4e38, -0.0], dtype=torch.float32)
        handle = interpreter.TensorHandle(exact.numpy(), tl.float32)
        builder = interpreter.InterpreterBuilder()
        found = builder.create_fp_trunc(handle, tl.bfloat16).data
        eighth = torch.tensor([7.9, -31.8, 2**-10 * 1.5, 460.0], dtype=torch.float32)
        narrow = builder.create_fp_to_fp(interpreter.TensorHandle(eighth.numpy(), tl.float32), tl.float8e4nv, None).data
        if narrow.view("uint8").tolist() != [0x50, 0xE0, 0x01, 0x7E]:
            return False
        if found.dtype != "uint16":  # this interpreter holds bf16 in another form than the one known here
            return False
        return torch.equal(torch.from_numpy(found.view("int16")), exact.bfloat16().view(torch.int16))

    try:
        if not rounds():
            interpreter._convert_float = to_nearest(interpreter._convert_float)
        return rounds()
    except (AttributeError, TypeError, ValueError, RuntimeError):  # an interpreter with other internals
        return False


# The error of numpy 2.4 when the interpreter of Triton 3.6 reads the bound of a loop.
NUMPY_REFUSES = "only 0-dimensional arrays can be converted to Python scalars"

INTERPRETED: bool = decide(os.environ, sys.modules, torch.cuda.is_available())
ROUNDS = mend() if INTERPRETED else True
if INTERPRETED:
    quicken()


def must_round(*stored: Storage) -> None:
    """Refuse to store bf16 or fp8 if the interpreter would not round: that divergence is not the engine's fault."""
    if not ROUNDS and any(one is torch.bfloat16 or isinstance(one, Blocked) for one in stored):
        raise Unsupported(
            f"the interpreter of Triton {metadata.version('triton')} cuts fp32 off to bfloat16 and float8 instead of "
            "rounding it: use float32 or float16 here, or a GPU"
        )


def explicit(name: str) -> Any:
    """Import a module of this package with explicit layouts, such as "gdn_windows.launches_gluon".

    None if kernels are interpreted, or Gluon lacks something that such a module needs here. Errors in our own files are
    raised.
    """
    if INTERPRETED:
        return None
    try:
        import_module(".device.gluon_helpers", __package__)
    except (ImportError, AttributeError):
        return None
    return import_module(f".{name}", __package__)


def tile(native: int, interpreted: int) -> int:
    """Choose a tile size. An interpreted program takes milliseconds at any size, so those tiles are few and large."""
    return interpreted if INTERPRETED else native


def power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n (and at least 1): the width of a masked tile."""
    return 1 << (max(n, 1) - 1).bit_length()


def ceil_div(n: int, block: int) -> int:
    """Return how many blocks cover n."""
    return -(-n // block)


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int = 4, stages: int = 1, registers: int | None = None,
    **constants: Any,
) -> None:
    """Run `kernel` over `grid`; an empty grid returns at once.

    registers: maximum number that a thread may use; None: no limit.

    If the GPU can, it launches a kernel with an argument EARLY while the previous launch ends. Such a kernel calls
    `wait` first, or before that loads only weights, which no launch writes. Tables that it reads before the wait are a
    guess, which it checks after the wait. `carry_staged` may wait for signals instead (`signals_between_launches.py`).

    Floating-point fusion is off. A kernel that needs a fused multiply-add calls `tl.fma`. So the same source gives the
    same bits wherever it is inlined, and Triton's default, which changes between versions, does not matter.
    """
    if 0 in grid:
        return
    flattened = (x for one in arguments for x in (one if isinstance(one, tuple) else (one,)))
    first = next(x for x in flattened if isinstance(x, torch.Tensor))
    if not INTERPRETED and not first.is_cuda:
        raise Unsupported(
            f"native kernels need CUDA tensors, found one on {first.device}; run on the GPU (--device cuda), or start "
            f"with {VARIABLE}=1"
        )
    options = {"num_warps": warps, "num_stages": stages, "maxnreg": registers, "enable_fp_fusion": False, **constants}
    if "EARLY" in kernel.arg_names and "EARLY" not in constants:
        options["EARLY"] = not INTERPRETED and launches_early(first.device)
        if options["EARLY"]:
            options["launch_pdl"] = True
    run = kernel[grid]
    if INTERPRETED:  # it computes with numpy, also what nothing has written and a mask drops later
        run = numpy.errstate(over="ignore", invalid="ignore")(run)
    try:
        run(*arguments, **options)
    except Exception as error:
        if INTERPRETED and NUMPY_REFUSES in str(error):
            raise Unsupported(
                f"the interpreter of Triton {metadata.version('triton')} does not run with numpy "
                f"{metadata.version('numpy')} ({NUMPY_REFUSES}); run on the GPU (--device cuda), or install another "
                "Triton or numpy"
            ) from error
        raise


@cache
def launches_early(device: torch.device) -> bool:
    """Return whether a launch may begin while the previous one ends (programmatic dependent launch, from Hopper)."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def hopper(device: torch.device) -> bool:
    """Return whether the device has products of four warps together, and copies of boxes."""
    return torch.cuda.get_device_capability(device)[0] == 9


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the minimum number of programs that run at the same time."""
    return 2 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


def versions() -> dict[str, str]:
    """Describe the platform of the kernels for reports and baselines: versions, device, interpreted or native."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "torch": torch.__version__,
        "triton": metadata.version("triton"),
        "kernels": "interpreted" if INTERPRETED else "native",
        "device": device,
    }
