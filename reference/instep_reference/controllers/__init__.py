"""Controllers of the step count, one file per dialect. The rules are the text of `contract/controllers.py`.

Leaves out: reading the files (the contract does that), and when a wish comes into force (the driver decides that).
"""

from collections.abc import Callable, Mapping

from ..contract.adaptive_controller_file import AdaptiveFile, Dialect
from ..contract.controllers import Controlled
from ..contract.errors import BadInput
from . import constant, sglang_0_5_12, sglang_0_5_13, sglang_0_5_14, vllm_counts_by_batch
from .base import Controller as Controller

TABLE: Mapping[Dialect, Callable[[Controlled, int | None, int], Controller]] = {
    "sglang-0.5.12": sglang_0_5_12.controller,
    "sglang-0.5.13": sglang_0_5_13.controller,
    "sglang-0.5.14": sglang_0_5_14.controller,
    "vllm-table": vllm_counts_by_batch.controller,
    "constant": constant.controller,
}


def controller(
    controlled: Controlled | None, num_steps: int | None, file: AdaptiveFile | None = None, lag: int = 0
) -> Controller:
    """Make a controller. controlled: None means sglang-0.5.12 with `file`, or no controller without a file."""
    if controlled is not None:
        controlled.check(num_steps)
        return TABLE[controlled.dialect](controlled, num_steps, lag)
    if num_steps is None:
        raise BadInput("num_steps", found="none", expected="the initial step count")
    return sglang_0_5_12.Brackets(sglang_0_5_12.resolve(file, num_steps))
