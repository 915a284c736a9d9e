"""The op sets by name, each imported on first use. A new op set is one line here and one file.

Leaves out: what an op does; `base.py` has the contract of each.
"""

from __future__ import annotations

from importlib import import_module

from instep_reference.contract.errors import BadInput

from .base import Ops

BY_NAME: dict[str, str] = {
    "ledger": "instep_optimized.ops.ledger:LEDGER",
    "plain": "instep_optimized.ops.plain:PLAIN",
    "triton": "instep_optimized.ops.triton:TRITON",
    "precise": "instep_optimized.ops.precise:PRECISE",
    "invariant": "instep_optimized.ops.invariant:INVARIANT",
}


def load(name: str) -> Ops:
    """Return an op set by its name in this table, or any other one as `module:attribute`."""
    address = BY_NAME.get(name, name)
    module, _, attribute = address.partition(":")
    expected = f"one of {', '.join(BY_NAME)}, or module:attribute"
    if not attribute:
        raise BadInput("ops", found=repr(name), expected=expected)
    try:
        found = getattr(import_module(module), attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        raise BadInput("ops", found=f"{name!r} ({error})", expected=expected) from error
    if not isinstance(found, Ops):
        raise BadInput("ops", found=f"{name!r}, a {type(found).__name__}", expected="a value of instep_optimized's Ops")
    return found
