"""Find a commit strategy or conv form by name: in instep, in the op set, in a package or in a file.

A name is one of ours ("rerun"), one that the op set brings (`Ops.keepers`), one that an installed package offers under
the entry point group "instep.keepers", or an address such as `module:attribute`. Leaves out: how an engine uses it.
"""

from dataclasses import replace

from instep_optimized.commit import known
from instep_optimized.commit.base import StrategySpec
from instep_optimized.commit.external_strategies import OPTION
from instep_optimized.ops.op_protocols import Ops
from instep_reference.contract.errors import BadInput

from . import named

GROUP = "instep.keepers"
OPTIONS = {option.removeprefix("--"): component for component, option in OPTION.items()}  # -> what is committed


def with_keeper(ops: Ops, option: str, name: str) -> Ops:
    """Return the op set extended by the strategy of this name. Raises BadInput if there is none."""
    names = known(OPTIONS[option], ops)
    if name in names:
        return ops
    found = named(name, field=f"--{option}", group=GROUP, known=names)
    if not isinstance(found, StrategySpec) or found.component != OPTIONS[option]:
        kind = f"a {type(found).__name__}" if not isinstance(found, StrategySpec) else f"which keeps {found.component}"
        expected = f"a `StrategySpec` of the component {OPTIONS[option]}"
        raise BadInput(f"--{option}", found=f"{name}, {kind}", expected=expected)
    extended = replace(ops, keepers={**ops.keepers, name: found})
    known(OPTIONS[option], extended)  # refuses a name that is taken
    return extended
