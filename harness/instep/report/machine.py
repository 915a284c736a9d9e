"""The machine of a result: versions, device, and a digest of the installed kernels.

The digest is of syntax trees, so that comments, docstrings and line breaks do not change it. Torch is imported only for
the name of a CUDA device. Leaves out: whether a result is too old for the installed kernels (the repository's tests
decide that).
"""

import ast
import os
import platform
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE = "instep_optimized"
KERNELS, LAUNCHES = "kernels", "ops/triton.py"  # inside the package: a folder, and the op set that calls it

def machine(device: str) -> dict[str, str | None]:
    """Versions, device, and the digest of the kernels; None for packages that are not installed."""
    return {
        "python": platform.python_version(), "system": system(), "device": device,
        "device_name": _name(device), **{package: installed(package) for package in ("torch", "triton", "instep")},
        "kernels_syntax": kernels_syntax(),
    }


def fingerprint(device: str) -> dict[str, str | None]:
    """Everything about the machine that changes a speed, and how busy it was; None: a value cannot be read here."""
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 0)
    return {
        **machine(device), "processor": _processor(), "cores": str(len(usable)),
        "load": None if load is None else f"{load[0]:.1f} in the last minute",
    }


def _processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def system() -> str:
    """The system, as in "Linux x86_64, glibc 2.39", without the Linux kernel's build, which changes no result."""
    library = " ".join(filter(None, platform.libc_ver()))
    return f"{platform.system()} {platform.machine()}" + (f", {library}" if library else "")


def installed(package: str) -> str | None:
    """The version of an installed package, without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def release(name: str, *packages: str) -> str:
    """A project and its version: that of the first installed package. Sources on Python's path have no metadata."""
    version = next(filter(None, map(installed, packages or (name,))), "(no version metadata)")
    return f"{name} {version}"


def _name(device: str) -> str:
    if not device.startswith("cuda"):
        return platform.processor() or platform.machine()
    import torch

    return str(torch.cuda.get_device_name(device))


def digest(sources: Mapping[str, str]) -> str:
    """The digest of source texts by path. Names and the order of statements count, docstrings and comments do not."""
    trees = [f"({path!r}, {_as_tuples(ast.parse(text))})" for path, text in sorted(sources.items())]
    return sha256(f"[{', '.join(trees)}]".encode()).hexdigest()


@cache
def kernels_syntax() -> str | None:
    """The digest of the kernels that an import would load; None if their source cannot be read."""
    spec = find_spec(PACKAGE)  # finds a package without importing it
    top = Path(spec.origin).parent if spec and spec.origin else None
    if top is None or not (top / LAUNCHES).is_file():
        return None
    files = (top / LAUNCHES, *(top / KERNELS).rglob("*.py"))
    return digest({path.relative_to(top).as_posix(): path.read_text(encoding="utf-8") for path in files})


def _as_tuples(node: Any) -> str:
    """The syntax tree as text, in nested tuples.

    `ast.dump` would not do, as the empty fields that it writes depend on Python's version. This function is fast,
    because every command that writes a result waits for it.
    """
    if isinstance(node, list):
        return _tuple([_as_tuples(item) for item in node if not _is_text_alone(item)])
    name = type(node).__name__
    if not isinstance(node, ast.AST):
        return repr((name, repr(node)))
    inside = []
    for field in node._fields:
        value = getattr(node, field, None)
        if value is not None and value != [] and (said := _as_tuples(value)) != "()":
            inside.append(f"({field!r}, {said})")
    return f"({name!r}, {_tuple(inside)})"


def _tuple(parts: list[str]) -> str:
    return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"


def _is_text_alone(node: object) -> bool:
    """Whether a node is a docstring or another string that is a whole statement."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
