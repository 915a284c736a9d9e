"""Typed access to the fields of a `config.json`: any fault in one is a `BadInput` that names the field.

Leaves out: the fields of each model type (`config.py`).
"""

from __future__ import annotations

from typing import Any

from .errors import BadInput

LARGEST = (1 << 63) - 1  # largest length of a tensor's axis
ROPE_OBJECTS = ("rope_parameters", "rope_scaling")  # today's name and the older one


class Fields:
    """Typed access to the fields of a file. A field is looked up in the text part first, then at the top level."""

    def __init__(self, text: dict[str, Any], top: dict[str, Any]) -> None:
        self.text, self.top = text, top

    def get(self, name: str) -> Any:
        return next((part[name] for part in (self.text, self.top) if part.get(name) is not None), None)

    def rope(self, name: str) -> Any:
        """Look up a rotary field, at the top level or in a separate object; if it is in both, they must agree."""
        objects = {inner: self.get(inner) or {} for inner in ROPE_OBJECTS}
        for inner, found in objects.items():
            if not isinstance(found, dict):
                raise bad(inner, found, "an object")
        places = {"": self.text, **{f"{inner}.": found for inner, found in objects.items()}}
        stated = {f"{at}{name}": part[name] for at, part in places.items() if part.get(name) is not None}
        if any(value != next(iter(stated.values())) for value in stated.values()):
            raise bad(name, stated, "one value")
        return next(iter(stated.values()), self.top.get(name))

    def whole(self, name: str, least: int = 1, default: int | None = None, most: int = LARGEST) -> int:
        value = self.get(name)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise bad(name, value, f"a whole number of at least {least}")
        if value > most:
            raise bad(name, value, f"at most {most}")
        return value

    def positive(self, name: str) -> float:
        return positive(name, self.get(name))

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise bad(name, value, "true or false")
        return value


def only(name: str, found: object, value: object) -> None:
    """Refuse a field with any value but the supported one: it would be computed wrongly."""
    if found is not None and found != value:
        raise bad(name, found, value)


def positive(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise bad(name, value, "a positive number")
    return float(value)


def bad(name: str, found: object, expected: object) -> BadInput:
    return BadInput(f"config.json: {name}", found="nothing" if found is None else repr(found), expected=expected)


def multiple(f: Fields, name: str, of: str) -> tuple[int, int]:
    """Two numbers of heads, the first a multiple of the second."""
    heads, groups = f.whole(name), f.whole(of)
    if heads % groups:
        raise bad(name, heads, f"a multiple of {of} ({groups})")
    return heads, groups


def experts_per_token(f: Fields, experts: int, name: str = "num_experts_per_tok") -> int:
    count = f.whole(name)
    if count > experts:
        raise bad(name, count, f"at most num_experts ({experts})")
    return count
