"""Commit strategies and drafters as a user names them: refused in one line when there is no such name.

Leaves out: what they do (`instep_optimized.commit`, `.draft`), and combinations that an engine refuses.
"""

from __future__ import annotations

from typing import Any

from instep_optimized.commit import CONV_FORMS, STRATEGIES
from instep_optimized.draft import MODES
from instep_reference.contract.errors import BadInput

KNOWN = {"strategy": tuple(STRATEGIES), "conv": tuple(CONV_FORMS), "drafter": tuple(MODES)}


def chosen(**named: str | None) -> dict[str, Any]:
    """The fields of a `Plan` that were named, as keywords; `lazy-rerun` is as good as `lazy_rerun`."""
    found = {field: name.replace("-", "_") for field, name in named.items() if name is not None}
    for field, name in found.items():
        if name not in KNOWN[field]:
            raise BadInput(f"--{field}", found=named[field], expected=f"one of {', '.join(KNOWN[field])}")
    return found
