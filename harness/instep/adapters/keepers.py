"""Commit strategies and conv forms by name: ours, and those that an op set has, a package offers, or a file holds.

A name is one of ours ("rerun"), one that the op set brings (`Ops.keepers`), one that an installed package offers under
the entry point group "instep.keepers", or `module:attribute`. Leaves out: what is then done with it.
"""

from __future__ import annotations

from dataclasses import replace

from instep_optimized.commit import known
from instep_optimized.commit.base import StrategySpec
from instep_optimized.commit.brought import OPTION
from instep_optimized.ops.base import Ops
from instep_reference.contract.errors import BadInput

from . import named

GROUP = "instep.keepers"
OPTIONS = {option.removeprefix("--"): component for component, option in OPTION.items()}  # -> what is committed


def with_keeper(ops: Ops, option: str, name: str) -> Ops:
    """The op set, which has a strategy of that name afterwards, or a refusal in one line."""
    names = known(OPTIONS[option], ops)
    if name in names:
        return ops
    found = named(name, field=f"--{option}", group=GROUP, known=names)
    if not isinstance(found, StrategySpec) or found.component != OPTIONS[option]:
        kind = f"a {type(found).__name__}" if not isinstance(found, StrategySpec) else f"which keeps {found.component}"
        expected = f"a `StrategySpec` of the component {OPTIONS[option]}"
        raise BadInput(f"--{option}", found=f"{name}, {kind}", expected=expected)
    extended = replace(ops, keepers={**ops.keepers, name: found})
    known(OPTIONS[option], extended)  # refuses what clashes
    return extended
