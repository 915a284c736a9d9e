"""Imports single modules out of an unpacked wheel, without the packages that the rest of the wheel needs.

    bare("sglang", Path("unpacked/sglang-0.5.23"), keep=("sglang.kernels.ops",))
    from sglang.kernels.ops.attention.fla.chunk import chunk_gated_delta_rule

Modules under `keep` are the wheel's own, unchanged. Parent packages are there without their `__init__`. Every other
module of the package is a stub: each name in it is a function that answers False. Leaves out: what the modules are
used for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch


class Absent:
    """What a stub gives for a name: callable, with attributes, and false."""

    def __call__(self, *args: object, **options: object) -> Any:
        """False; a function that it decorates stays as it is."""
        return args[0] if len(args) == 1 and callable(args[0]) and not isinstance(args[0], Absent) else Absent()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent()

    def __bool__(self) -> bool:
        return False

    def __enter__(self) -> None: ...

    def __exit__(self, *raised: object) -> None: ...


class _Stub(Loader):
    """Makes a module in which every name is there; of a folder under `keep`, one that has its submodules alone."""

    def __init__(self, names: Mapping[str, object], kept: bool) -> None:
        self.names, self.kept = names, kept

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        answers = {} if self.kept else {"__getattr__": Absent.__getattr__}
        made: ModuleType = type("Stub", (ModuleType,), answers)(spec.name)
        return made

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self.names)


class _Mended(SourceFileLoader):
    """Loads a file. Where Triton interprets, its kernels are then given what the interpreter lacks."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        from triton import knobs

        if knobs.runtime.interpret:
            mend(module)


class Bare(MetaPathFinder):
    """Finds the modules of one package as the top of this file says."""

    def __init__(
        self, package: str, root: Path, keep: Sequence[str], names: Mapping[str, Mapping[str, object]]
    ) -> None:
        self.package, self.root, self.keep, self.names = package, root, tuple(keep), names

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] != self.package:
            return None
        place = self.root.joinpath(*name.split("."))
        kept = any(f"{name}.".startswith(f"{one}.") for one in self.keep)
        if kept and place.with_suffix(".py").is_file():
            file = str(place.with_suffix(".py"))
            spec = ModuleSpec(name, _Mended(name, file), origin=file)
            spec.has_location = True
            return spec
        if kept and not place.is_dir():
            return None  # then Python says that there is no such module
        spec = ModuleSpec(name, _Stub(self.names.get(name, {}), kept), is_package=True)
        spec.submodule_search_locations = [str(place)]
        return spec


def bare(
    package: str, root: Path | None = None, *, keep: Sequence[str],
    names: Mapping[str, Mapping[str, object]] | None = None,
) -> Bare:
    """From now on `package` comes from `root`, or from the first place of Python's path that has it.

    names   stub module -> names that it must have, with their values
    """
    places = [Path(place) for place in sys.path] if root is None else [root]
    root = next((place for place in places if (place / package).is_dir()), None)
    if root is None:
        raise ModuleNotFoundError(f"no {package} in {', '.join(map(str, places))}", name=package)
    # An import of the whole package that failed has left some of its modules without their parent.
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]
    finder = Bare(package, root, keep, names or {})
    sys.meta_path.insert(0, finder)
    return finder


def mend(module: ModuleType) -> None:
    """Give the kernels of a module what Triton's interpreter lacks.

    tuning    the first configuration is taken: to tune there must be a driver
    loops     an index is a scalar of Triton's, with its methods, as in a compiled kernel
    names     a builtin under a name of its own (exp = tl.exp) is looked up when it is called
    masks     conditions that came out as numbers are truth values again
    """
    import triton.language as tl
    from triton.language.core import is_builtin
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

    names = vars(module)
    for name, value in list(names.items()):
        while isinstance(value, Autotuner | Heuristics):
            if isinstance(value, Autotuner):
                value.configs = value.configs[:1]
            value = value.fn
        if isinstance(value, InterpretedFunction):
            names.setdefault("range", indices)
        elif callable(value) and is_builtin(value):
            names[name] = lambda *args, _name=value.__name__, **options: getattr(tl, _name)(*args, **options)
    for member, place in (("create_masked_load", 1), ("create_masked_store", 2)):
        if not hasattr(real := getattr(InterpreterBuilder, member), "__wrapped__"):
            setattr(InterpreterBuilder, member, _truth(real, place))
    if not hasattr(torch.cpu, "device"):  # kernels enter the device of their tensors; the CPU has none to enter
        torch.cpu.device = lambda index: nullcontext()  # type: ignore[attr-defined]


def _truth(member: Callable[..., Any], place: int) -> Callable[..., Any]:
    """A load or store of the interpreter's builder; its mask, argument number `place`, as truth values."""

    @wraps(member)
    def run(builder: Any, *args: Any) -> Any:
        if isinstance(mask := getattr(args[place], "data", None), np.ndarray):
            args[place].data = mask.astype(bool)
        return member(builder, *args)

    return run


def indices(*bounds: Any) -> Iterator[Any]:
    """`range`. Where a bound is a scalar of Triton's, the indices are."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    numbers = [int(bound.handle.data.item()) if hasattr(bound, "handle") else int(bound) for bound in bounds]
    inside = any(hasattr(bound, "handle") for bound in bounds)
    for index in range(*numbers):
        yield tl.core.tensor(TensorHandle(np.array([index], dtype=np.int32), tl.int32), tl.int32) if inside else index
