"""Find the engine under test by name: an op set, or a whole external engine, which a `Maker` makes.

A name is one of ours ("plain"), one of the adapters here ("fla"), one that an installed package offers under the entry
point group "instep.ops", `module:attribute`, or `path/to/file.py:attribute`. Leaves out: what is then done with it.
"""

import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from instep_optimized.memory_addresses import StateLayout
from instep_optimized.ops import BY_NAME, load
from instep_optimized.ops import import_by_name as addresses
from instep_optimized.ops.import_by_name import attribute_at, root_of, split
from instep_optimized.ops.op_protocols import Ops
from instep_reference.contract.adaptive_controller_file import AdaptiveFile
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.declared_rounding import Product
from instep_reference.contract.engine import Capacity, Engine, Inspectable, Watched
from instep_reference.contract.errors import BadInput, InstepError

GROUP = "instep.ops"
IMPORTING = (__file__, addresses.__file__)  # files of ours that import a module of the user
HERE = {"fla": "instep.adapters.fla:OPS"}  # op sets with kernels of other packages
OURS = (*BY_NAME, *HERE)
NEEDS = {"fla": {"fla": "fla-core", "einops": "einops"}}  # what an adapter imports: module -> its package


class Subject(Engine, Inspectable, Watched, Protocol):
    """An engine under test: it serves events, and shows its memory and its intermediate results."""


class Declares(Protocol):
    """Attributes by which a maker declares how its engines round. Without them everything must be fp32.

    rounds    (activation, state) -> component -> the dtype in which it is stored, as an op set's `rounds`
    products  form of an op -> how its operands are rounded: {"gdn.chunk": Product("tf32", block=64)}
    once      components that the engine rounds only as they are stored; it may be absent
    """

    @property
    def rounds(self) -> Callable[[torch.dtype, torch.dtype], Mapping[str, torch.dtype]]: ...

    @property
    def products(self) -> Mapping[str, Product]: ...


@runtime_checkable
class Maker(Protocol):
    """Make an engine under test. A maker may declare how the engine rounds (`Declares`)."""

    def __call__(
        self, checkpoint: Checkpoint, capacity: Capacity, *, num_steps: int, adaptive: AdaptiveFile | None,
        device: str, dtype: torch.dtype, layout: StateLayout,
    ) -> Subject: ...


def find(name: str) -> Ops | Maker:
    """Return the op set or the maker of an engine with this name."""
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
    """Return the address of an op set or engine by its name. Anything else is returned unchanged."""
    offered = _offered(GROUP)
    return offered[name].value if name in offered else {**BY_NAME, **HERE}.get(name, name)


def in_a_shell(name: str, *, searched: bool = True) -> str:
    """Return the address under which a command in the current directory finds the same object.

    `module:attribute` becomes `path/to/file.py:attribute` if only this process can import the module. pytest, for
    example, adds folders to its own path. A name of an op set is returned unchanged.
    searched: whether the command searches the current directory
    """
    module, attribute = split(name)
    file = getattr(sys.modules.get(module), "__file__", None)
    root = None if file is None else root_of(Path(file), module)
    if file is None or (root is not None and _is_searched(root, searched)):
        return name
    return f"{_near(file)}:{attribute}"


def _is_searched(root: Path, searched: bool) -> bool:
    """Whether a new Python of this environment searches the folder for modules."""
    here, given = Path.cwd(), os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if (searched and root == here) or root in [here / folder for folder in given if folder]:
        return True
    path = [Path(folder) for folder in sys.path]
    standard = Path(sysconfig.get_path("stdlib"))  # folders of site-packages and of `.pth` files come after it
    begin = path.index(standard) if standard in path else 0
    return root in path[begin:] or root not in path


def named(name: str, *, field: str, group: str, known: Iterable[str] = ()) -> object:
    """Load the object that a package offers under this name in an entry point group, or the object at an address.

    field: the option or field that an error names
    known: further names that an error lists
    """
    ops = group == GROUP
    offered = {} if ":" in name else _offered(group)  # reading the entry points of all packages takes milliseconds
    where = HERE.get(name, name) if ops else name
    if name not in offered and not split(where)[0]:
        raise _unknown(field, name, "no such name", (*known, *_offered(group)))
    try:
        return offered[name].load() if name in offered else attribute_at(where)
    except InstepError:
        raise
    except (Exception, SystemExit) as error:  # the module is the user's and may raise anything
        needs = NEEDS.get(name, {}) if ops else {}
        if isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] in needs:
            raise _not_installed(name) from None
        raise _not_loaded(field, name, split(where)[0], error) from None


def _offered(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


def makes(found: Maker) -> bool:
    """Whether this callable accepts the arguments of a `Maker`."""
    try:
        inspect.signature(found).bind(
            None, None, num_steps=0, adaptive=None, device="cpu", dtype=torch.float32, layout="VK"
        )
    except (TypeError, ValueError):  # it takes other arguments, or Python cannot read its signature
        return False
    return True


def takes(found: Callable[..., object], name: str) -> bool:
    """Whether this callable accepts an argument of that name."""
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):  # Python cannot read its signature
        return True
    return any(one.name == name or one.kind is one.VAR_KEYWORD for one in parameters)


def _not_loaded(field: str, name: str, module: str, error: BaseException) -> BadInput:
    """Report the error that an import raised, with the line of the user's code that raised it."""
    frames = [each for each in traceback.extract_tb(error.__traceback__)
              if not each.filename.startswith(("<", str(Path(importlib.__file__).parent), *IMPORTING))]
    line = f", at {_near(frames[-1].filename)} line {frames[-1].lineno}" if frames else ""
    expected, hint = "a module that can be imported", ""
    if isinstance(error, FileNotFoundError) and not frames:
        expected = "a Python file"
    elif isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
        expected = f"a module in {os.getcwd()} or on Python's path"
        hint = f"write path/to/{module.rpartition('.')[2]}.py:{split(name)[1]} for a file elsewhere"
    elif isinstance(error, AttributeError) and not frames:
        expected = f"a name that {module} defines"
    return BadInput(field, found=f"{name!r} ({type(error).__name__}: {error}{line})", expected=expected, hint=hint)


def _near(file: str) -> str:
    """The path relative to the current directory if it is below it, else as it is."""
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative


def _not_installed(name: str) -> BadInput:
    packages = list(NEEDS[name].values())
    return BadInput(
        "ops", found=f"{name!r}, whose package is not installed", expected=" and ".join(packages),
        hint=f"pip install {' '.join(packages)}",
    )


def _unknown(field: str, name: str, why: str, names: Iterable[str]) -> BadInput:
    expected = ", ".join([*names, "or module:attribute" if names else "module:attribute"])
    return BadInput(field, found=f"{name!r} ({why})", expected=expected)
