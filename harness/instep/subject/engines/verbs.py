"""The callbacks of an external engine: required ones, optional ones, and how the engine is found by name.

A user's file need not import anything of instep: `make` is a function, its rows are named tuples, its answers are
tensors in dicts. Leaves out: what the harness derives (`engine_from_verbs.py`), and which checks they feed
(`watch/visible_places.py`).

    def make(model, room, *, num_steps, widest, device, dtype): ...
        model      directory of the checkpoint (a `pathlib.Path`);  room: the `Capacity` of the trace
        num_steps  largest step count;  widest: maximum tokens of one window;  device: str;  dtype: of activations
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from instep_reference.contract.declared_rounding import FORMATS, RESIDUAL, RESULTS, SUMMED, Product
from instep_reference.contract.engine import Capacity
from instep_reference.contract.errors import BadInput

from ...adapters import Maker, makes, named
from ...watch.visible_places import FEEDS

GROUP = "instep.engines"
MUST = ("step", "keep", "drop")
# Verbs that have a meaning only together: one that lets go, and one that brings back.
PAIRS = (("save", "load"), ("preempt", "resume"))
MEMORY = ("slots", "pages", "regions", "may_change")
MAY = ("state", "kv", "layers", "draft", "watch", *MEMORY, *(verb for pair in PAIRS for verb in pair))
DECLARES = ("rounds", "products", "once", "shows", "order")


class Tokens(NamedTuple):
    """One row of a step: tokens of a request, the first of them at position `first`.

    prefill  commits its tokens at once;  decode: one token, committed at once
    verify   a window: nothing of it is committed until `keep` is called
    """

    request: str
    kind: str
    first: int
    tokens: tuple[int, ...]


class Verbs(Protocol):
    """The required result of `make`. Optional callbacks are in `MAY`; `declares` is an optional mapping (`DECLARES`).

    step   rows -> {"logits": {request: [n, vocab]}, "final": {request: [n, D]}}; either key may be absent. n: every
           token of a window, 1 of a decode row; of a prefill row every token or the last one alone
    keep   after a window: restore the state at `length` committed tokens
    drop   forget the request; its name may come again
    """

    def step(self, rows: Sequence[Tokens]) -> Mapping[str, Mapping[str, torch.Tensor]]: ...
    def keep(self, request: str, length: int) -> None: ...
    def drop(self, request: str) -> None: ...


@dataclass(frozen=True)
class ByVerbs:
    """A `make` function that was found by its name; its result is driven through callbacks."""

    name: str
    make: Callable[..., Any]


def find(name: str) -> ByVerbs | Maker:
    """The engine of that name: `module:attribute`, or what a package offers in the group "instep.engines"."""
    found = named(name, field="--engine", group=GROUP)
    if callable(found) and is_make(found):
        return ByVerbs(name, found)
    if isinstance(found, Maker) and makes(found):
        return found
    kind = "a callable that takes other arguments" if callable(found) else f"a {type(found).__name__}"
    raise BadInput("--engine", found=f"{name!r} ({kind})",
                   expected="make(model, room, *, num_steps, widest, device, dtype); see docs/your-engine.md")


def is_make(found: Callable[..., Any]) -> bool:
    """Whether it is called as `make` is."""
    return not _by_the_contract(found) and _takes(found)


def must_have(made: object, name: str) -> Any:
    """The object, if it has the verbs that every engine needs."""
    missing = [verb for verb in MUST if not callable(getattr(made, verb, None))]
    if missing:
        raise BadInput("--engine", found=f"{name!r} makes {type(made).__name__}, which has no {', '.join(missing)}",
                       expected=f"an object with {', '.join(MUST)}; see docs/your-engine.md")
    no_verb = [verb for verb in MAY if getattr(made, verb, None) is not None and not callable(getattr(made, verb))]
    if no_verb:
        raise BadInput("--engine", found=f"{', '.join(no_verb)} of {name!r}, which cannot be called", expected="a verb")
    return made


def declaration(made: object, make: object) -> dict[str, Any]:
    """The declarations of the object, or of the function that made it; only known words are allowed."""
    said: object = getattr(made, "declares", None) or getattr(make, "declares", None) or {}
    if not isinstance(said, Mapping):
        raise BadInput("declares", found=repr(said), expected=f"a mapping with {', '.join(DECLARES)}")
    if unknown := [key for key in said if key not in DECLARES]:
        raise BadInput("declares", found=", ".join(map(repr, unknown)), expected=f"some of {', '.join(DECLARES)}")
    for key in ("rounds", "products"):
        if not isinstance(said.get(key, {}), Mapping):
            expected = "a mapping; see docs/your-engine-verbs.md"
            raise BadInput(f"declares: {key}", found=repr(said[key]), expected=expected)
    if not isinstance(said.get("order", False), bool):
        raise BadInput("declares: order", found=repr(said["order"]), expected="True or False")
    shows = said.get("shows", ())
    if not isinstance(shows, list | tuple | set | frozenset) or any(feed not in [*FEEDS] for feed in shows):
        raise BadInput("declares: shows", found=repr(shows), expected=f"a list with some of {', '.join(FEEDS)}")
    return dict(said)


def product_of(said: object) -> object:
    """A `Product`, also as it is spelled: "bf16", "tf32 in blocks of 64"."""
    if not isinstance(said, str):
        return said
    how, _, sums = said.partition(SUMMED)
    format, _, block = how.removesuffix(RESIDUAL).removesuffix(RESULTS).partition(" in blocks of ")
    if format not in FORMATS or (block and not block.isdecimal()):
        raise BadInput("products", found=repr(said), expected=f'{", ".join(FORMATS)}, or "tf32 in blocks of 64"')
    return Product(format, int(block) if block else None, residual=how.endswith(RESIDUAL), sums=sums or "fp32",
                   results=how.endswith(RESULTS))


def _by_the_contract(found: Any) -> bool:
    """Whether it names what only a `Maker` is given; a function that takes anything is led by verbs."""
    try:
        return not {"adaptive", "layout"}.isdisjoint(inspect.signature(found).parameters)
    except (TypeError, ValueError):
        return False


def _takes(found: Callable[..., Any]) -> bool:
    room = Capacity((), (), 1, 1)
    try:
        inspect.signature(found).bind(Path(), room, num_steps=1, widest=2, device="cpu", dtype=torch.float32)
    except (TypeError, ValueError):
        return False
    return True
