"""Op sets with a planted mistake: the state of a window is not stored; an op raises.

Leaves out: other mistakes (`ops.py` makes engines wrong, `tests/harness/test_kit.py` single ops).
"""

from dataclasses import replace
from typing import Any

import torch

from instep import kit

PLAIN = kit.load("plain")


def _forgetful(**given: Any) -> torch.Tensor:
    windows = tuple(replace(part, store=None) if part.form == "window" else part for part in given["parts"])
    return PLAIN.gdn(**{**given, "parts": windows})


FORGETFUL = replace(PLAIN, name="forgetful", gdn=_forgetful)


def _raising(**given: Any) -> torch.Tensor:
    return 1 / 0


RAISING = replace(PLAIN, name="raising", gdn=_raising)
