"""The op sets by name, each imported on first use. A new op set is one line here and one file.

Leaves out: what an op does; `op_protocols.py` has the contract of each.
"""

from instep_reference.contract.errors import BadInput

from .import_by_name import attribute_at, split
from .op_protocols import Ops

BY_NAME: dict[str, str] = {
    "ledger": "instep_optimized.ops.ledger_label_ops:LEDGER",
    "plain": "instep_optimized.ops.plain:PLAIN",
    "triton": "instep_optimized.ops.triton:TRITON",
    "precise": "instep_optimized.ops.triton_with_fp32_prefill:PRECISE",
    "invariant": "instep_optimized.ops.row_invariant_triton:INVARIANT",
}


def load(name: str) -> Ops:
    """Return an op set by its name in this table, `module:attribute` or `path/to/file.py:attribute`."""
    address = BY_NAME.get(name, name)
    if not split(address)[0]:
        raise BadInput("ops", found=repr(name), expected=f"one of {', '.join(BY_NAME)}, or module:attribute")
    try:
        found = attribute_at(address)
    except (ModuleNotFoundError, FileNotFoundError, AttributeError) as error:
        raise BadInput("ops", found=f"{name!r} ({error})", expected="a module and a name in it") from error
    if not isinstance(found, Ops):
        raise BadInput("ops", found=f"{name!r}, a {type(found).__name__}", expected="a value of instep_optimized's Ops")
    return found
