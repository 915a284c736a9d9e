"""Marks the tests that run Triton kernels interpreted, which `make check` leaves to `make test`.

Leaves out: a GPU, where the same tests run natively.
"""

from collections.abc import Iterator
from functools import cache
from types import CodeType
from typing import Any

import pytest
import torch

import instep_optimized.kernels
from instep_optimized.ops import BY_NAME
from instep_optimized.ops.op_protocols import Ops
from instep_reference.contract.checkpoint import Checkpoint
from support.inputs.checkpoints import TWO_LAYERS, write

INTERPRETED = ("triton", "precise", "invariant")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and not torch.cuda.is_available() and _interprets(item):
            item.add_marker(pytest.mark.interpreted)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A random checkpoint with two layers."""
    return Checkpoint.open(write(tmp_path_factory.mktemp("model"), **TWO_LAYERS))


@pytest.fixture
def garbage_in_fresh_memory() -> Iterator[None]:
    """NaN in all unwritten memory, so that a row that is never written cannot happen to be zero."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # with its default of filling what `empty` gives
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test without the marker launches no interpreted kernel, so the marker cannot be forgotten."""
    if "interpreted" in request.keywords or torch.cuda.is_available():
        yield
        return
    from triton.runtime.interpreter import GridExecutor

    launched: list[str] = []
    run = GridExecutor.__call__

    def noted(self: Any, *given: Any, **named: Any) -> Any:
        launched.append(self.fn.__name__)
        return run(self, *given, **named)

    monkeypatch.setattr(GridExecutor, "__call__", noted)
    yield
    assert not launched, f"mark it `interpreted`: it launched {', '.join(dict.fromkeys(launched))}"


def _interprets(item: pytest.Function) -> bool:
    """The op sets in its parameters, or the ones in its code and in the helpers that it calls."""
    spec = getattr(item, "callspec", None)
    named = {_name(value) for value in spec.params.values()} if spec is not None else set()
    if not named & {*BY_NAME}:
        return _asks(item.function)
    return bool(named & {*INTERPRETED})


@cache
def _asks(function: Any) -> bool:
    """Once for all rows of a test."""
    return _mentions(function, set())


def _name(value: Any) -> Any:
    """The name of an op set, given as itself or by name."""
    return value.name if isinstance(value, Ops) else value if isinstance(value, str) else None


def _mentions(function: Any, seen: set[Any]) -> bool:
    """Whether a test's code names kernels or an op set of kernels, itself or by what it calls in its own module."""
    while (inner := getattr(getattr(function, "hypothesis", function), "inner_test", None)) is not None:
        function = inner
    code = getattr(function, "__code__", None)
    if code is None or code in seen:
        return False
    seen.add(code)
    for name in _named_in(code):
        held = function.__globals__.get(name)
        if name in INTERPRETED or _name(held) in INTERPRETED:
            return True
        if getattr(held, "__module__", "").startswith(instep_optimized.kernels.__name__):
            return True
        if getattr(held, "__module__", None) == function.__module__ and _mentions(held, seen):
            return True
    return False


def _named_in(code: CodeType) -> Iterator[str]:
    """Names and words in a code, and in the functions and comprehensions inside it."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _named_in(each)
        elif isinstance(each, str):
            yield each
