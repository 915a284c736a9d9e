"""Typed access to the fields of a `config.json`: any fault in one is a `BadInput` that names the field.

Leaves out: the fields of each model type (`config.py`).
"""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, TypeVar

from .errors import BadInput

LARGEST = (1 << 63) - 1  # largest length of a tensor's axis
ROPE_OBJECTS = ("rope_parameters", "rope_scaling")  # today's name and the older one
Block = TypeVar("Block", bound=str)


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


def turning_heads(f: Fields, hidden: int) -> tuple[int, int, int]:
    """Heads, KV heads and head_dim of attention in which positions turn all channels of a head."""
    heads, kv_heads = multiple(f, "num_attention_heads", "num_key_value_heads")
    if hidden % heads and f.get("head_dim") is None:
        raise bad("num_attention_heads", heads, f"a divisor of hidden_size ({hidden})")
    head_dim = f.whole("head_dim", default=hidden // heads)
    if head_dim % 2:
        raise bad("head_dim", head_dim, "an even number: rotary turns pairs of channels")
    return heads, kv_heads, head_dim


def mixers_of(stated: Any, layers: int, blocks: Mapping[str, Block]) -> tuple[Block, ...]:
    """The mixer of every layer. stated: `layer_types`;  blocks: our mixers by the names in it"""
    if not isinstance(stated, list) or len(stated) != layers:
        found = f"{len(stated)} entries" if isinstance(stated, list) else stated
        raise bad("layer_types", found, f"a list of {layers} entries (num_hidden_layers)")
    for index, kind in enumerate(stated):
        if not isinstance(kind, str) or kind not in blocks:
            raise bad(f"layer_types[{index}]", kind, f"one of {', '.join(blocks)}")
    return tuple(blocks[kind] for kind in stated)


def experts_per_token(f: Fields, experts: int, name: str = "num_experts_per_tok") -> int:
    count = f.whole(name)
    if count > experts:
        raise bad(name, count, f"at most num_experts ({experts})")
    return count


def limits_of(f: Fields, name: str, layers: Sequence[Sequence[str]]) -> tuple[float, ...]:
    """Read one limit per layer; null and 0: none. Engines read limits of layers with experts alone.

    layers: their blocks
    """
    stated = f.get(name)
    if stated is None:
        return ()
    numbers: list[Any] = [limit or 0.0 for limit in stated] if isinstance(stated, list) else [None]
    if not all(isinstance(one, int | float) and not isinstance(one, bool) and 0 <= one < inf for one in numbers):
        raise bad(name, stated, "a list of limits, each null or a number of at least 0")
    limited = {layer for layer, limit in enumerate(numbers) if limit}
    sparse = {layer for layer, blocks in enumerate(layers) if "moe" in blocks}
    if limited and (len(numbers) < len(layers) or limited - sparse):
        raise bad(name, stated, f"{len(layers)} limits (num_hidden_layers), 0 for layers without experts")
    return tuple(map(float, numbers)) if limited else ()
