"""What a subject declares about its rounding: what it stores narrower, component by component, and how it multiplies.

An op set declares it in its fields `rounds` and `products`, somebody's engine in attributes of its maker that have the
same names (`adapters.Declares`). Leaves out: what a yardstick makes of it (`observe/products.py`,
`observe/recomputation.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from instep_reference.contract.errors import BadInput, InstepError
from instep_reference.contract.place import COMPONENTS
from instep_reference.contract.rounding import Blocked, Product, Storage, checked

from ..observe.storage import ENTRY, narrower
from .guard import calling


@dataclass(frozen=True)
class Declared:
    """rounds: component -> how it is stored, in full width where none is named; products: form of an op
    -> the format of its operands, fp32 where none is named."""

    rounds: Mapping[str, Storage]
    products: Mapping[str, Product]

    def narrow(self, width: torch.dtype) -> dict[str, Storage]:
        """The components that are stored narrower than `width`, in which the engine computes."""
        return {name: storage for name, storage in self.rounds.items() if narrower(storage, width)}

    def said(self, width: torch.dtype) -> str:
        """In a line: stores bfloat16 but for q, k (float32); multiplies gdn.chunk as tf32 in blocks of 64."""
        parts, narrow = [], self.narrow(width)
        for dtype in dict.fromkeys(narrow.values()):
            named = [name for name, stored in narrow.items() if stored == dtype]
            wide = [name for name, stored in self.rounds.items() if name not in narrow and stored.is_floating_point]
            short = f"all but {', '.join(wide)}" if len(named) > len(COMPONENTS) // 2 else ", ".join(named)
            parts.append(f"stores {short} in {_name(dtype)}")
        parts += [f"multiplies {form} as {product}" for form, product in self.products.items()]
        return "; ".join(parts)


NOTHING = Declared({}, {})


def declared(subject: object, activation: torch.dtype, state: Storage, kv: Storage | None = None) -> Declared:
    """What an op set, or a maker of engines, declares for these widths; absent: nothing.

    kv: how KV is to be stored, where not as an op set says.
    """
    rounds = getattr(subject, "rounds", None)
    products: object = getattr(subject, "products", {})
    with calling("rounds"):
        stored = rounds(activation, state) if callable(rounds) else rounds or {}
        if kv is not None and getattr(subject, "tiled", False):
            stored = {**stored, **dict.fromkeys(ENTRY.values(), kv)}
    try:
        said = checked(dict(products))  # type: ignore[call-overload]
        return Declared(_components(dict(stored)), of_width(said, activation))
    except InstepError:
        raise
    except Exception as error:  # whatever it is: the declaration may be anybody's
        raise BadInput(
            "what is declared", found=f"{type(error).__name__}: {error}", expected="`rounds` (activation dtype, state "
            "dtype -> a dtype per component) and `products` (a Product per form of an op); see docs/declare.md",
        ) from None


def of_width(products: Mapping[str, Product], activation: torch.dtype) -> dict[str, Product]:
    """What is said of activations of this width."""
    return {form: one for form, one in products.items() if not (one.narrow and activation.itemsize > 2)}


def _components(rounds: dict[str, Storage]) -> dict[str, Storage]:
    for name, dtype in rounds.items():
        if name not in COMPONENTS:
            raise BadInput("rounds", found=repr(name), expected=f"components: {', '.join(COMPONENTS)}")
        if not isinstance(dtype, torch.dtype | Blocked):
            raise BadInput(f"rounds[{name!r}]", found=repr(dtype), expected="a torch.dtype, or `Blocked`")
    return rounds


def _name(dtype: Storage) -> str:
    return str(dtype).removeprefix("torch.")
