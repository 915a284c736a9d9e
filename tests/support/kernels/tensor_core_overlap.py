"""The work of a compiled kernel that overlaps products of tensor cores. Leaves out: the rest (`compiled.py`)."""

from __future__ import annotations

_WAIT, _BUT_LAST, _POWER = "WARPGROUP.DEPBAR", "gsb0, 0x1", "MUFU.EX2"


def made_beside(code: str) -> int:
    """Count the powers that are computed after a wait for all products but the last, and before the next wait."""
    made, runs = 0, False
    for line in code.splitlines():
        if _WAIT in line:
            runs = _BUT_LAST in line
        made += runs and _POWER in line
    return made
