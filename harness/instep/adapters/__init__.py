"""Subjects by name: an op set, or a whole engine of somebody else (a `Maker` makes it).

A name is one of ours ("plain"), one of the adapters here ("fla"), one that an installed package offers under the entry
point group "instep.ops", or `module:attribute`. Leaves out: what is then done with the subject.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol, runtime_checkable

import torch

from instep_optimized.layout import StateLayout
from instep_optimized.ops import BY_NAME, load
from instep_optimized.ops.base import Ops
from instep_reference.contract.adaptive import AdaptiveFile
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Capacity, Engine, Inspectable, Watched
from instep_reference.contract.errors import BadInput, InstepError
from instep_reference.contract.rounding import Product

GROUP = "instep.ops"
# Of op sets alone:
HERE = {"fla": "instep.adapters.fla:OPS"}  # kernels of other packages; the adapter is a file beside this one
OURS = (*BY_NAME, *HERE)
NEEDS = {"fla": {"fla": "fla-core", "einops": "einops"}}  # what an adapter imports: module -> its package


class Subject(Engine, Inspectable, Watched, Protocol):
    """An engine that can be tested: it serves events, shows its memory, and shows the results at its places."""


class Declares(Protocol):
    """Attributes with which a maker may declare the rounding of its engines. Without them everything must be fp32.

    rounds    (activation, state) -> component -> the dtype in which it is stored, as an op set's `rounds`
    products  form of an op -> how its operands are rounded: {"gdn.chunk": Product("tf32", block=64)}
    """

    @property
    def rounds(self) -> Callable[[torch.dtype, torch.dtype], Mapping[str, torch.dtype]]: ...

    @property
    def products(self) -> Mapping[str, Product]: ...


@runtime_checkable
class Maker(Protocol):
    """Makes an engine under test. It may declare how the engine rounds (`Declares`)."""

    def __call__(
        self, checkpoint: Checkpoint, capacity: Capacity, *, num_steps: int, adaptive: AdaptiveFile | None,
        device: str, dtype: torch.dtype, layout: StateLayout,
    ) -> Subject: ...


def find(name: str) -> Ops | Maker:
    """The op set or engine of that name."""
    if name in BY_NAME:
        return load(name)
    found = named(name, field="ops", group=GROUP, known=OURS)
    if isinstance(found, Ops):
        return found
    if isinstance(found, Maker) and makes(found):
        return found
    kind = "a callable that is no Maker: it takes other arguments" if callable(found) else f"a {type(found).__name__}"
    raise _unknown("ops", name, kind, (*OURS, *_offered(GROUP)))


def address(name: str) -> str:
    """`module:attribute` of an op set or engine by its name; what is no name stays as it is."""
    offered = _offered(GROUP)
    return offered[name].value if name in offered else {**BY_NAME, **HERE}.get(name, name)


def named(name: str, *, field: str, group: str, known: Iterable[str] = ()) -> object:
    """What a package offers under that name in an entry point group, or what stands at `module:attribute`.

    field: what an error calls it;  known: further names, for the error
    """
    ops = group == GROUP
    offered = {} if ":" in name else _offered(group)  # to ask every package that is installed takes milliseconds
    try:
        return offered[name].load() if name in offered else _attribute(HERE.get(name, name) if ops else name)
    except _NoName as error:
        raise _unknown(field, name, str(error), (*known, *_offered(group))) from None
    except InstepError:
        raise
    except (Exception, SystemExit) as error:  # the module is foreign code and may raise anything
        needs = NEEDS.get(name, {}) if ops else {}
        if isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] in needs:
            raise _not_installed(name) from None
        raise _unknown(field, name, f"{type(error).__name__}: {error}", (*known, *_offered(group))) from None


def _offered(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


class _NoName(Exception):
    """No subject has this name, and it is no `module:attribute`."""


def makes(found: Maker) -> bool:
    """Whether it can be called with the arguments of a `Maker`."""
    try:
        inspect.signature(found).bind(
            None, None, num_steps=0, adaptive=None, device="cpu", dtype=torch.float32, layout="VK"
        )
    except (TypeError, ValueError):  # it takes other arguments, or Python cannot tell which
        return False
    return True


def _attribute(name: str) -> object:
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise _NoName("no such name")
    return getattr(import_module(module), attribute)


def _not_installed(name: str) -> BadInput:
    packages = list(NEEDS[name].values())
    return BadInput(
        "ops", found=f"{name!r}, whose package is not installed", expected=" and ".join(packages),
        hint=f"pip install {' '.join(packages)}",
    )


def _unknown(field: str, name: str, why: str, names: Iterable[str]) -> BadInput:
    expected = ", ".join([*names, "or module:attribute" if names else "module:attribute"])
    return BadInput(field, found=f"{name!r} ({why})", expected=expected)
