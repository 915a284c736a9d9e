"""Find the names of an engine's release, and the objects that they name.

Leaves out: the names (`sglang_names.py`, `vllm_names.py`).
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, TypeVar

NamesT = TypeVar("NamesT")


def nearest(release: str, table: Mapping[str, NamesT]) -> tuple[NamesT, str]:
    """The names of a release, and the release whose names they are: the same one, or the nearest before it."""
    known = {_numbers(one): one for one in table}
    before = [one for one in known if one <= _numbers(release)]
    found = known[max(before)] if before else known[min(known)]
    return table[found], found


def resolved(target: str) -> Any:
    """The object of `module:Class.function`; an ImportError or AttributeError names what is missing."""
    module, _, path = target.partition(":")
    found: Any = import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _numbers(release: str) -> tuple[int, ...]:
    """0.5.12.post1 -> (0, 5, 12)."""
    found = list[int]()
    for part in release.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        found.append(int(digits))
        if digits != part:
            break
    return tuple(found)
