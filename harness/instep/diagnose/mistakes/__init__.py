"""The catalogue of known mistakes, each with its own sentence, and the families of explanations.

Leaves out: the mistakes (each family and check has its table), and faults (`instep_proof/faults/catalogue`).
"""

from collections.abc import Mapping

from ...checks import (
    earlier_rounds,
    grown_trees,
    prefix_findings,
    recomputed_values,
    sampled_tokens,
    transfer_findings,
)
from ...checks import wrong_conv_windows as windows
from ...checks.wrong_ring_states import OLDEST_INSTEAD, SPLIT, VALUE
from ...checks.wrong_state_bank import BANK
from ...finding_problem import NamedMistake
from ...oracle import miscounted_states, recomputation_plan
from . import delta_rule, step_controller

CATALOGUE: Mapping[str, NamedMistake] = {mistake.name: mistake for mistake in (
    *BANK, VALUE, *SPLIT, OLDEST_INSTEAD, miscounted_states.LACKS_OLDEST, miscounted_states.LATER_WINDOW,
    earlier_rounds.EARLIER, earlier_rounds.FROM_EARLIER,
    windows.NEWEST_FIRST, windows.SHIFTED, windows.OF_ANOTHER, *prefix_findings.KNOWN, *transfer_findings.KNOWN,
    *recomputation_plan.KNOWN, *recomputed_values.FELL, *sampled_tokens.KNOWN,
    *grown_trees.MISTAKES, grown_trees.OF_ANOTHER, *step_controller.RULES, *delta_rule.MISTAKES,
)}  # fmt: skip
