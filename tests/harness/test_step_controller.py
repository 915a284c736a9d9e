"""Name a wrong rule of the step controller if it gives this wish and all earlier correct ones.

Leaves out: the correct rules (`tests/reference`), and an engine's controller (`test_diagnose_planted.py`).
"""

from __future__ import annotations

import pytest

from instep.diagnose.mistakes.step_controller import MOST, RULES, Told, _wishes, wrong_rule
from instep_reference.contract.adaptive_controller_file import AdaptiveFile
from instep_reference.controllers.sglang_0_5_12 import Brackets, resolve

FILE = AdaptiveFile.of({"candidate_steps": [0, 1, 3, 7], "ema_alpha": 0.3, "update_interval": 3, "warmup_batches": 2,
                        "down_hysteresis": -0.5, "up_hysteresis": 0.25})  # fmt: skip
CANDIDATES = resolve(FILE, 3)
# Accepted drafts of consecutive batches of two, with idle steps between some of them.
BATCHES = ((7, 3), (0, 3), (7, 0), (7, 2), (1, 3), None, (1, 0), (7, 3), None, (1, 3), (2, 0), (1, 3), (3, 1), (2, 7),
           (7, 3), (7, 7), (3, 7), (3, 3), (3, 3), (3, 3))  # fmt: skip


def history() -> list[Told]:
    """With the right wishes, each of which is put in force."""
    controller, said = Brackets(CANDIDATES), list[Told]()
    for counts in BATCHES:
        if counts is not None:
            controller.update(len(counts), [min(count, controller.in_force) for count in counts])
        given = () if counts is None else tuple(min(count, controller.in_force) for count in counts)
        said.append(Told(len(given) or None, given, None, counts is None, controller.wish()))
        if controller.wish() != controller.in_force:
            controller.set_num_steps(controller.wish())
            said.append(Told(None, (), controller.wish(), False, controller.wish()))
    return said


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.says)
def test_wrong_rule_explains_the_first_wrong_wish(rule):
    past = history()
    for end in range(1, len(past) + 1):
        for wish in {0, 1, 3, 7} - {past[end - 1].wish}:
            alike = [other.says for other in RULES if _wishes(CANDIDATES, other, past[:end], wish)]
            if rule.says in alike:
                told = wrong_rule(CANDIDATES, past[:end], wish)
                assert told is None if len(alike) > MOST else told is not None and all(says in told for says in alike)
                return
    pytest.fail("these batches do not show it")


def test_rule_that_contradicts_an_earlier_wish_explains_nothing():
    past = history()
    assert wrong_rule(CANDIDATES, [past[0]._replace(wish=7), *past[1:]], 0) is None
