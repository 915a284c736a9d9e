"""The kind of value that an op returns, as its protocol in `op_protocols.py` is annotated: a tensor, or a named tuple.

Leaves out: shapes (`op_shapes.py`), and ops that only write: their return values are not checked.
"""

from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

import torch

from . import op_protocols


def unlike(name: str, result: Any) -> str:
    """Describe a wrong kind: "a tuple came back, a tensor is due"; empty if the kind is right."""
    due = _due(name)
    if due is torch.Tensor:
        return _unlike_tensor(result)
    if only_writes(name):
        return ""
    if get_origin(due) is tuple:  # several launches in one: as many results as there are weights
        names, right = tuple(map(str, range(len(result)))) if isinstance(result, tuple) else (), "a tuple of tensors"
        fits = isinstance(result, tuple)
    else:
        names, right = due._fields, f"{due.__name__} ({', '.join(due._fields)})"
        fits = getattr(result, "_fields", None) == names
    if not fits:
        return f"{_spelled(result)} came back, {right} is due"
    inner = ((field, _unlike_tensor(value)) for field, value in zip(names, result, strict=True))
    return next((f"{field}: {says}" for field, says in inner if says), "")


def only_writes(name: str) -> bool:
    return _due(name) is type(None)


def _unlike_tensor(found: Any) -> str:
    if not isinstance(found, torch.Tensor):
        return f"{_spelled(found)} came back, a tensor is due"
    if found.is_meta or found.layout is not torch.strided or found.is_complex():
        what = "a meta" if found.is_meta else "a complex" if found.is_complex() else "a sparse"
        return f"{what} tensor came back, a dense one of real numbers is due"
    return "" if found.dim() else "a tensor without axes came back, one with rows is due"


@cache
def _due(name: str) -> Any:
    """Return the type of the result; None if it is not checked."""
    protocol = get_type_hints(op_protocols.Ops)[name]
    protocol = next((one for one in get_args(protocol) if one is not type(None)), protocol)
    return get_type_hints(protocol.__call__, localns=vars(op_protocols))["return"]


def _spelled(value: Any) -> str:
    """Spell out a value's kind: None; a tuple; a numpy.ndarray"""
    kind = type(value)
    if value is None:
        return "None"
    return f"a {kind.__qualname__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"
