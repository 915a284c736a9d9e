"""Switch Triton's interpreter on if kernels run on the CPU, before Triton is imported.

Leaves out: the decision for our own kernels (`kernels/runtime.py`), which also depends on the machine. Imports neither
torch nor Triton, except that `wanted_without_gpu` imports torch.
"""

import os
import sys
import traceback
from collections.abc import Iterator, Mapping, MutableMapping
from types import FrameType

VARIABLE = "TRITON_INTERPRET"  # Triton reads it when a kernel is decorated
_DECIDED = "instep_optimized.kernels.runtime"
_WITNESS = "triton.language.standard"  # the type of its functions shows how Triton was imported
_LAUNCHERS = ("triton.runtime.jit", "triton.runtime.autotuner")  # modules of Triton that launch a native kernel


def wanted_on(
    device: str, environment: MutableMapping[str, str] = os.environ, loaded: Mapping[str, object] = sys.modules
) -> None:
    """Select interpreted kernels if the engine runs on the CPU, also on a machine with a GPU.

    Native kernels take only CUDA tensors. A value that the user has set stays. After the kernels are imported it is too
    late: then nothing changes, and `launch` raises an error with the remedy.
    """
    if device.partition(":")[0] == "cpu" and _DECIDED not in loaded:
        environment.setdefault(VARIABLE, "1")


def wanted_without_gpu() -> None:
    """Select interpreted kernels on a machine without a GPU, because Triton cannot run native ones there."""
    from torch.cuda import is_available

    wanted_on("cuda" if is_available() else "cpu")


def imported(loaded: Mapping[str, object] = sys.modules) -> str:
    """How Triton was imported: "interpreted" or "native"; empty if it is not imported."""
    if _WITNESS not in loaded:
        return ""
    helper = getattr(loaded[_WITNESS], "sum", None)
    return "interpreted" if type(helper).__name__ == "InterpretedFunction" else "native"


def is_native_on_cpu(error: BaseException) -> bool:
    """Whether a native kernel raised this error because its tensors are on the CPU.

    Without a GPU Triton raises "0 active drivers", and an interpreted kernel that calls a native helper (`tl.zeros`)
    raises "Cannot call @triton.jit'd outside of the scope of a kernel". Neither text names the cause.
    """
    if imported() != "native":
        return False
    for frame in _frames(error):
        if frame.f_globals.get("__name__") in _LAUNCHERS:
            given = [*frame.f_locals.get("args", ()), *frame.f_locals.get("kwargs", {}).values()]
            if frame.f_code.co_name == "__call__" or any(getattr(x, "is_cpu", False) for x in given):
                return True
    return False


def _frames(error: BaseException | None) -> Iterator[FrameType]:
    """The frames of the error, and of the errors that it was raised from."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield from (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        error = error.__cause__ or error.__context__
