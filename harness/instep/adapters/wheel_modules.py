"""Import single modules from an unpacked wheel, without the packages that the rest of the wheel needs.

    bare("sglang", Path("unpacked/sglang-0.5.23"), keep=("sglang.kernels.ops",))
    from sglang.kernels.ops.attention.fla.chunk import chunk_gated_delta_rule

Modules under `keep` are the wheel's own, unchanged. Parent packages exist without their `__init__`. Every other module
of the package is a stub: each name in it is a function that returns a false value. Leaves out: the use of the modules.
"""

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
    """The value of every name in a stub: callable, with attributes, and false."""

    def __call__(self, *args: object, **options: object) -> Any:
        """Return a false value. As a decorator, return the function unchanged."""
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
    """Make a module in which every name exists. For a folder under `keep`, only its submodules exist."""

    def __init__(self, names: Mapping[str, object], kept: bool) -> None:
        self.names, self.kept = names, kept

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        answers = {} if self.kept else {"__getattr__": Absent.__getattr__}
        made: ModuleType = type("Stub", (ModuleType,), answers)(spec.name)
        return made

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self.names)


class _Mended(SourceFileLoader):
    """Load a file. If Triton interprets kernels, add what its interpreter lacks to the module."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        from triton import knobs

        if knobs.runtime.interpret:
            mend(module)


class Bare(MetaPathFinder):
    """Find the modules of one package, as this file's docstring describes."""

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
            return None  # Python raises ModuleNotFoundError
        spec = ModuleSpec(name, _Stub(self.names.get(name, {}), kept), is_package=True)
        spec.submodule_search_locations = [str(place)]
        return spec


def bare(
    package: str, root: Path | None = None, *, keep: Sequence[str],
    names: Mapping[str, Mapping[str, object]] | None = None,
) -> Bare:
    """Import `package` from `root`, or from the first folder of Python's path that has it, from now on.

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
    """Add to the kernels of a module what Triton's interpreter lacks.

    tuning    the first configuration is used, because tuning needs a driver
    loops     a loop index is a Triton scalar with its methods, as in a compiled kernel
    names     a builtin under another name (exp = tl.exp) is looked up when it is called
    library   a function of libdevice, which interpreted returns None, is Triton's own of that name
    masks     conditions that were computed as numbers become truth values again
    products  operands in bf16 are widened first: the interpreter multiplies the integers that hold their bits
    """
    import triton.language as tl
    from triton.language.core import is_builtin
    from triton.language.extra import libdevice
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

    names = vars(module)
    for name, value in list(names.items()):
        while isinstance(value, Autotuner | Heuristics):
            if isinstance(value, Autotuner):
                value.configs = value.configs[:1]
            value = value.fn
        if value is libdevice:
            names[name] = tl
        elif isinstance(value, InterpretedFunction):
            names.setdefault("range", indices)
        elif callable(value) and is_builtin(value):
            names[name] = lambda *args, _name=value.__name__, **options: getattr(tl, _name)(*args, **options)
    for member, place in (("create_masked_load", 1), ("create_masked_store", 2)):
        if not hasattr(real := getattr(InterpreterBuilder, member), "__wrapped__"):
            setattr(InterpreterBuilder, member, _truth(real, place))
    if not hasattr(real := InterpreterBuilder.create_dot, "__wrapped__"):
        InterpreterBuilder.create_dot = _widened(real)
    if not hasattr(torch.cpu, "device"):  # kernels enter the device of their tensors, which the CPU lacks
        torch.cpu.device = lambda index: nullcontext()  # type: ignore[attr-defined]


def _truth(member: Callable[..., Any], place: int) -> Callable[..., Any]:
    """Wrap a load or store of the interpreter's builder: its mask, argument number `place`, becomes truth values."""

    @wraps(member)
    def run(builder: Any, *args: Any) -> Any:
        if isinstance(mask := getattr(args[place], "data", None), np.ndarray):
            args[place].data = mask.astype(bool)
        return member(builder, *args)

    return run


def _widened(member: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a product of the interpreter's builder: it gets operands in bf16 as fp32, with the same values."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def wide(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    @wraps(member)
    def run(builder: Any, a: Any, b: Any, *args: Any) -> Any:
        return member(builder, wide(a), wide(b), *args)

    return run


def indices(*bounds: Any) -> Iterator[Any]:
    """`range` whose indices are Triton scalars if a bound is one."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    numbers = [int(bound.handle.data.item()) if hasattr(bound, "handle") else int(bound) for bound in bounds]
    inside = any(hasattr(bound, "handle") for bound in bounds)
    for index in range(*numbers):
        yield tl.core.tensor(TensorHandle(np.array([index], dtype=np.int32), tl.int32), tl.int32) if inside else index
