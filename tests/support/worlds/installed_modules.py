"""Put functions into modules of a library that is not installed, below packages that hold nothing else."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest


def public(kernels: Any) -> dict[str, Any]:
    return {name: getattr(kernels, name) for name in dir(kernels) if not name.startswith("_")}


def put_modules(patch: pytest.MonkeyPatch, functions: Mapping[str, Mapping[str, Any]], *readers: str) -> None:
    """From now on these modules have these functions, and each reader imports them again."""
    for module in readers:
        sys.modules.pop(module, None)
    for name, mine in functions.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            made = ModuleType(".".join(parts[:end]))
            made.__path__, made.__spec__ = [], ModuleSpec(made.__name__, None, is_package=True)
            patch.setitem(sys.modules, made.__name__, sys.modules.get(made.__name__, made))
        vars(sys.modules[name]).update(mine)


@contextmanager
def forgotten(*readers: str) -> Iterator[None]:
    """Modules that read a made-up library do not outlive it."""
    yield
    for module in readers:
        sys.modules.pop(module, None)
