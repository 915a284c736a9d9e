"""Declarations of a subject about its rounding: storage per component, and products per form of an op.

An op set declares them in its fields `rounds`, `products` and `once`, an engine of the user in attributes of its maker
with the same names (`adapters.Declares`). Leaves out: how yardsticks use them (`oracle/declared_product_rounding.py`,
`oracle/recomputation.py`).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from instep_reference.contract.declared_rounding import (
    CHUNK,
    KEPT,
    NAMED_APART,
    PREFIXES,
    RING,
    Blocked,
    Product,
    Storage,
    checked,
)
from instep_reference.contract.errors import BadInput, InstepError
from instep_reference.contract.place_names import COMPONENTS

from ..oracle.storage_rounding import ENTRY, narrower
from .guarded_calls import calling

EVERY = "*"  # in `once`, and in `rounds` of an engine with verbs: every component that is not named
MADE = {CHUNK: "states of prefixes that end with a chunk", KEPT: "states of prefixes"}


@dataclass(frozen=True)
class Declared:
    """rounds: component -> storage; others have full width. products: form of an op -> operand format; others fp32.
    once: components whose op rounds its result alone.
    """

    rounds: Mapping[str, Storage]
    products: Mapping[str, Product]
    once: frozenset[str] = frozenset()

    def narrow(self, width: torch.dtype) -> dict[str, Storage]:
        """The components that are stored narrower than `width`, the dtype of the computation."""
        return {name: storage for name, storage in self.rounds.items()
                if name not in NAMED_APART and narrower(storage, width)}

    def said(self, width: torch.dtype) -> str:
        """One line: stores bfloat16 but for q, k (float32); multiplies gdn.chunk as tf32 in blocks of 64."""
        parts, narrow = [], self.narrow(width)
        for dtype in dict.fromkeys(narrow.values()):
            named = [name for name, stored in narrow.items() if stored == dtype]
            wide = [name for name, stored in self.rounds.items()
                    if name not in (*narrow, *NAMED_APART) and stored.is_floating_point]
            short = f"all but {', '.join(wide)}" if len(named) > len(COMPONENTS) // 2 else ", ".join(named)
            parts.append(f"stores {short} in {_name(dtype)}")
        parts += [f"keeps {MADE[name]} in {_name(self.rounds[name])}" for name in PREFIXES if name in self.rounds]
        parts += [f"keeps tokens of windows as two parts in {_name(self.rounds[name])}"
                  for name in (RING,) if name in self.rounds]
        parts += [f"multiplies {form} as {product}" for form, product in self.products.items()]
        once = "everything" if len(self.once) == len(COMPONENTS) else ", ".join(sorted(self.once))
        parts += [f"rounds {once} only when it is stored"] * bool(self.once)
        return "; ".join(parts)


NOTHING = Declared({}, {})


def declared(
    subject: object, activation: torch.dtype, state: Storage, kv: Storage | None = None,
    apart: Mapping[str, Storage] = MappingProxyType({}),
) -> Declared:
    """The declarations of an op set or of a maker of engines for these widths; none if they are absent.

    kv: the storage of KV if it differs from the op set's. apart: roundings of tracked prefixes and of rings
    """
    rounds = getattr(subject, "rounds", None)
    products: object = getattr(subject, "products", {})
    with calling("rounds"):
        stored = rounds(activation, state) if callable(rounds) else rounds or {}
        if kv is not None and getattr(subject, "tiled", False):
            stored = {**stored, **dict.fromkeys(ENTRY.values(), kv)}
    try:
        labels = "state" in stored and not stored["state"].is_floating_point  # which are moved as they are
        stored = stored if labels else {**stored, **apart}
        said = checked(dict(products))  # type: ignore[call-overload]
        once = rounded_once(getattr(subject, "once", ()))
        return Declared(_components(dict(stored)), of_width(said, activation), once)
    except InstepError:
        raise
    except Exception as error:  # the declaration is the user's code
        raise BadInput(
            "what is declared", found=f"{type(error).__name__}: {error}", expected="`rounds` (activation dtype, state "
            "dtype -> a dtype per component), `products` (a Product per form of an op) and `once` (components); see "
            "docs/declare.md",
        ) from None


def of_width(products: Mapping[str, Product], activation: torch.dtype) -> dict[str, Product]:
    """The declared products for activations of this width."""
    return {form: one for form, one in products.items() if not (one.narrow and activation.itemsize > 2)}


def rounded_once(said: object) -> frozenset[str]:
    """The components that a subject declares in `once`, by name or all of them."""
    names = tuple(said) if isinstance(said, Collection) and not isinstance(said, str) else (said,)
    if unknown := [name for name in names if name not in (EVERY, *COMPONENTS)]:
        expected = f"components: {', '.join(COMPONENTS)}; or \"{EVERY}\" for all of them"
        raise BadInput("once", found=", ".join(map(repr, unknown)), expected=expected)
    return frozenset(COMPONENTS if EVERY in names else names)


def _components(rounds: dict[str, Storage]) -> dict[str, Storage]:
    for name, dtype in rounds.items():
        if name not in (*COMPONENTS, *NAMED_APART):
            raise BadInput("rounds", found=repr(name), expected=f"components: {', '.join((*COMPONENTS, *NAMED_APART))}")
        if not isinstance(dtype, torch.dtype | Blocked):
            raise BadInput(f"rounds[{name!r}]", found=repr(dtype), expected="a torch.dtype, or `Blocked`")
        if name == RING and dtype not in (torch.bfloat16, torch.float16):
            raise BadInput(f"rounds[{name!r}]", found=str(dtype), expected="torch.bfloat16 or torch.float16")
    return rounds


def _name(dtype: Storage) -> str:
    return str(dtype).removeprefix("torch.")
