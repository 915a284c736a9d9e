"""Modules of kernels with changed text: device functions are compiled from files, so a fault needs another file.

Leaves out: faults in code that Python runs (`planting.py`).
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

Texts = tuple[tuple[str, str], ...]  # old, new


def planted_kernels(name: str, texts: Texts, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module `instep_optimized.kernels.NAME` with each of `texts` replaced. Each must occur exactly once.

    It is known as its neighbour `planted_` and its name, until the test ends.
    """
    package, _, last = f"instep_optimized.kernels.{name}".rpartition(".")
    path, known = folder / f"{last}.py", f"{package}.planted_{last}"
    path.write_text(_replaced(name, texts))
    spec = importlib.util.spec_from_file_location(known, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, known, module)
    spec.loader.exec_module(module)
    return module


def on_device(*plants: tuple[str, Texts]) -> None:
    """End a test without a CUDA device here. Before, check that its kernels have the texts that it replaces."""
    for name, texts in plants:
        _replaced(name, texts)
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")


def _replaced(name: str, texts: Texts) -> str:
    """The text of the module `instep_optimized.kernels.NAME` with each of `texts` replaced."""
    found = importlib.util.find_spec(f"instep_optimized.kernels.{name}")
    assert found is not None and found.origin is not None
    text = Path(found.origin).read_text()
    for old, new in texts:
        assert text.count(old) == 1, f"{old} stands there {text.count(old)} times"
        text = text.replace(old, new)
    return text
