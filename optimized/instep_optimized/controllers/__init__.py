"""Controllers of the step count on this side: one file per dialect, and the table of the dialects.

Leaves out: when a wish is put in force (the driver's choice), and the effect of a switch (`round_for_step_count.py`).
The specification is the text of `instep_reference.contract.controllers`; the reference implements it separately, and
the harness compares the wishes.
"""

from collections.abc import Callable, Mapping

from instep_reference.contract.adaptive_controller_file import AdaptiveFile, Dialect
from instep_reference.contract.controllers import Controlled
from instep_reference.contract.errors import BadInput

from .base import Controller, Made
from .constant import Constant
from .sglang_0_5_12 import Brackets
from .sglang_slots import Slots
from .vllm_counts_by_batch import BySize

__all__ = ["TABLE", "Controller", "controller"]

TABLE: Mapping[Dialect, Callable[[Made], Controller]] = {
    "sglang-0.5.12": Brackets,
    "sglang-0.5.13": lambda made: Slots(made, rises_after_a_fall=True),
    "sglang-0.5.14": lambda made: Slots(made, rises_after_a_fall=False),
    "vllm-table": BySize,
    "constant": Constant,
}


def controller(
    controlled: Controlled | None, num_steps: int | None, file: AdaptiveFile | None = None, lag: int = 0
) -> Controller:
    """Make the controller of a dialect.

    controlled: None means sglang-0.5.12 with `file`, or no rule at all if that is None, too
    num_steps: the initial count; None means the dialect's own
    lag: rounds by which results are late
    """
    if controlled is None:
        controlled = Controlled("sglang-0.5.12")
    else:
        controlled.check(num_steps)
        file = controlled.adaptive_file()
    if num_steps is not None and num_steps < 0:
        raise BadInput("num_steps", found=num_steps, expected="at least 0")
    return TABLE[controlled.dialect](Made(controlled, num_steps, file, lag))
