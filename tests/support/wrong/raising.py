"""Engines and op sets that raise, or give a wrong answer, in one method each.

Leaves out: what is wrong with numbers (`small_errors.py`). Found by the harness as `support.wrong.raising:NAME`.
"""

from dataclasses import replace
from typing import Any

import torch

from instep_optimized import OptimizedEngine
from instep_reference.contract.engine import Commit, Event
from instep_reference.contract.place_names import Place
from support.wrong.subjects import PLAIN, maker


class _Fallen(OptimizedEngine):
    """Correct up to the first commit; from then on `wrong` of its class replaces one of its methods."""

    def may_change(self, event: Event) -> dict[str, set[int]]:
        self.committing = isinstance(event, Commit)
        return super().may_change(event)


def engine(method: str, wrong: Any) -> Any:
    """A maker of a right engine, but for one method."""
    return maker(_Fallen, **{method: wrong})


def _raises(self: Any, *given: Any, **named: Any) -> Any:
    raise LookupError("nobody is at home")


def _gives(value: Any) -> Any:
    return lambda self, *given, **named: value


class Silent(Exception):
    """Asking for its message raises, too."""

    def __str__(self) -> str:
        raise ValueError("no message can be made")


class Panic(BaseException):
    """No `Exception`, as a panic of an extension in Rust is none."""


def _throws(kind: type[BaseException]) -> Any:
    def method(self: Any, *given: Any, **named: Any) -> Any:
        raise kind

    return method


METHODS = ("may_change", "regions", "budget", "slots", "pages", "state", "next_num_steps", "watch")
RAISING = {name: engine(name, _raises) for name in METHODS}
ODD = {"silent": engine("commit", _throws(Silent)), "panic": engine("state", _throws(Panic)),
       "panicking": engine("commit", _throws(Panic))}  # fmt: skip
GARBAGE = {name: engine(name, _gives(value)) for name, value in {
    "may_change": ["slot 1"], "regions": None, "budget": {"state": 0.5}, "slots": None, "pages": {"a": 3},
    "state": None, "next_num_steps": "three", "draft": None, "forward": 7, "commit": (),
}.items()}  # fmt: skip


def _shows(component: str, turned: Any) -> Any:
    """A maker of a right engine that shows something else at the places of one component."""

    def watch(self: Any, see: Any) -> None:
        def seen(place: Place, tensor: torch.Tensor) -> torch.Tensor:
            see(place, turned(tensor) if place.component == component else tensor)
            return tensor

        OptimizedEngine.watch(self, seen)

    return engine("watch", watch)


def _holds(field: str, turned: Any) -> Any:
    """The same of a part of its states."""

    def state(self: Any, request: str) -> Any:
        found = OptimizedEngine.state(self, request)
        return replace(found, **{field: {layer: turned(held) for layer, held in getattr(found, field).items()}})

    return engine("state", state)


SHOWS = {
    "meta": _shows("normed", lambda x: x.to("meta")), "sparse": _shows("residual", torch.Tensor.to_sparse),
    "whole": _shows("k", torch.Tensor.long), "scalar": _shows("mixed", torch.Tensor.sum),
    "complex": _shows("pick", lambda x: x.to(torch.complex64)), "none": _shows("gated", lambda x: None),
    "turned": _shows("z", lambda x: x if len(x) > 6 else x.flatten(1)),
    "bfloat16": _shows("logits", torch.Tensor.bfloat16),
}  # fmt: skip
HOLDS = {
    "meta": _holds("values", lambda x: x.to("meta")), "whole": _holds("state", torch.Tensor.long),
    "flat": _holds("conv", torch.Tensor.flatten), "heads": _holds("keys", lambda x: x.repeat(1, 2, 1)),
    "channels": _holds("conv", lambda x: x[:-1]), "double": _holds("values", lambda x: x.double() if len(x) > 6 else x),
    "sparse": _holds("keys", torch.Tensor.to_sparse), "complex": _holds("conv", lambda x: x.to(torch.complex64)),
}  # fmt: skip


def _unmade(*given: Any, adaptive: Any, layout: str, **named: Any) -> Any:
    raise AssertionError("no such card")


def _none(*given: Any, adaptive: Any, layout: str, **named: Any) -> Any:
    return None


def _exits(*given: Any, adaptive: Any, layout: str, **named: Any) -> Any:
    raise SystemExit(0)


MAKERS = {"raises": _unmade, "none": _none, "exits": _exits}


def _in_the_target(*, to: Place, **given: Any) -> torch.Tensor:
    if to.stage == "trunk":
        given["query"][:, 99]  # torch raises, in the line above all that is torch's
    return PLAIN.attend(to=to, **given)


IN_AN_OP = replace(PLAIN, name="in an op", attend=_in_the_target)


def __getattr__(name: str) -> Any:
    """RAISING_state, GARBAGE_slots, MAKER_none."""
    table, _, key = name.partition("_")
    found = {"RAISING": RAISING, "GARBAGE": GARBAGE, "ODD": ODD, "MAKER": MAKERS, "SHOWS": SHOWS, "HOLDS": HOLDS}.get(
        table, {})
    if key not in found:
        raise AttributeError(name)
    return found[key]
