"""Says, before kernels are imported, which ones a process wants: interpreted ones where the engine runs on the CPU.

Leaves out: the decision (`kernels/runtime.py`), which also depends on the machine. Imports neither torch nor Triton.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping

VARIABLE = "TRITON_INTERPRET"  # Triton reads it when a kernel is decorated
_DECIDED = "instep_optimized.kernels.runtime"


def wanted_on(
    device: str, environment: MutableMapping[str, str] = os.environ, loaded: Mapping[str, object] = sys.modules
) -> None:
    """Ask for interpreted kernels if the engine runs on the CPU, also on a machine with a GPU.

    Native kernels take only CUDA tensors. A value that the user has set stays. Once the kernels are imported it is too
    late: then nothing is changed, and `launch` raises an error that says what to do.
    """
    if device.partition(":")[0] == "cpu" and _DECIDED not in loaded:
        environment.setdefault(VARIABLE, "1")
