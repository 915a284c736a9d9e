"""Which kernels a process wants, said before they are imported: interpreted ones, where the engine runs on the CPU.

Leaves out: the decision (`kernels/runtime.py`), which also looks at the machine. Imports neither torch nor Triton.
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
    """Ask for interpreted kernels on the CPU of a machine that has a GPU, too: native ones take CUDA tensors alone.

    What the user has set stays, and once the kernels are imported it is too late: then `launch` says what to do.
    """
    if device.partition(":")[0] == "cpu" and _DECIDED not in loaded:
        environment.setdefault(VARIABLE, "1")
