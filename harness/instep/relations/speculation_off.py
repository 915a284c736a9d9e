"""Path parity: a prefill leaves the same bits with speculation enabled and without, in both layouts of a state.

Leaves out: what follows the prompt. Without speculation the pools are as narrow as can be, and no controller is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from instep_optimized.layout import StateLayout

from ..verdict import Tier
from .arms import alike, nobody_decodes
from .base import Case, Relation, Results
from .retold import Told, alone, prompt_only

LAYOUTS: Sequence[StateLayout] = ("VK", "KV")


def hold(case: Case) -> Results:
    prompts = alone(case.trace, prompt_only)
    for layout in LAYOUTS:
        options = {"layout": layout}
        enabled = case.told(f"speculation, {layout}", lambda: prompts, options=options)
        without = case.told(f"no speculation, {layout}", lambda: _without(prompts), options=options)
        yield from alike("speculation_off", case, enabled, without, exact=True)


def _without(told: Told) -> Told:
    header = msgspec.structs.replace(told.header, num_steps=0, candidates=(0,), adaptive=None)
    return replace(told, header=header)


RELATION = Relation(
    "speculation_off", "a prefill leaves the same state with speculation and without", (Tier.BITWISE,), hold,
    nobody_decodes,
)
