"""How kernels become interpreted or native, and the refusals.

Leaves out: the kernels.
"""

import sys
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from instep_optimized import load
from instep_optimized.kernels import quick_operators, runtime
from instep_optimized.ops.interpreter import wanted_on
from instep_reference.contract.errors import InstepError
from support.running import processes

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


def witness(kind: str) -> dict[str, object]:
    """The contents of `sys.modules` after Triton was imported one way or the other."""
    return {"triton.language.standard": SimpleNamespace(sum=type(kind, (), {})())}


def test_without_a_device_kernels_are_interpreted() -> None:
    environment: dict[str, str] = {}
    assert runtime.decide(environment, {}, cuda=False) is True
    assert environment == {"TRITON_INTERPRET": "1"}


def test_with_a_device_the_environment_decides() -> None:
    assert runtime.decide({}, {}, cuda=True) is False
    assert runtime.decide({"TRITON_INTERPRET": "1"}, {}, cuda=True) is True


@pytest.mark.parametrize(
    ("kind", "environment", "cuda"),
    [("JITFunction", {}, False), ("JITFunction", {"TRITON_INTERPRET": "1"}, True), ("InterpretedFunction", {}, True)],
)
def test_triton_imported_the_other_way_is_refused(kind: str, environment: dict[str, str], cuda: bool) -> None:
    with pytest.raises(InstepError) as refused:
        runtime.decide(environment, witness(kind), cuda)
    assert "\n" not in str(refused.value) and "TRITON_INTERPRET=" in str(refused.value)


@pytest.mark.parametrize(("kind", "cuda"), [("JITFunction", True), ("InterpretedFunction", False)])
def test_triton_imported_the_right_way_is_accepted(kind: str, cuda: bool) -> None:
    assert runtime.decide({}, witness(kind), cuda) is not cuda


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is here: native Triton is right")
def test_process_that_imported_triton_first_gets_a_message() -> None:
    program = "import triton, triton.language\nimport instep_optimized.kernels"
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = processes.run([sys.executable, "-c", program], timeout=120, env=environment)
    assert done.returncode == 1
    assert "Triton was imported native before instep could choose" in done.stderr.splitlines()[-1]


def test_cpu_engine_on_a_gpu_machine_uses_interpreted_kernels() -> None:
    environment: dict[str, str] = {}
    wanted_on("cuda:0", environment, {})
    assert environment == {}
    wanted_on("cpu", environment, {})
    assert environment == {"TRITON_INTERPRET": "1"} and runtime.decide(environment, {}, cuda=True)


def test_choice_of_the_user_or_an_earlier_import_stays() -> None:
    environment = {"TRITON_INTERPRET": "0"}
    wanted_on("cpu", environment, {})
    assert environment == {"TRITON_INTERPRET": "0"}
    wanted_on("cpu", environment := {}, {"instep_optimized.kernels.runtime": runtime})
    assert environment == {}


@pytest.mark.skipif(not runtime.INTERPRETED, reason="kernels are native: the card rounds")
def test_interpreter_rounds_to_bf16_as_a_gpu_does() -> None:
    """As torch does: numbers near a tie, those that overflow, tiny ones, signed zeros, and what is not finite."""
    import triton.language as tl
    from triton.runtime import interpreter

    near = torch.arange(0x3F7E7FF0, 0x3F83801F, 7, dtype=torch.int32).view(torch.float32)
    odd = torch.tensor([0.0, -0.0, 3.4e38, -3.4e38, 1e-40, -1e-45, torch.inf, -torch.inf, torch.nan])
    exact = torch.cat((near, -near, odd))
    handle = interpreter.TensorHandle(exact.numpy(), tl.float32)
    found = interpreter.InterpreterBuilder().create_fp_trunc(handle, tl.bfloat16).data
    assert found.dtype == "uint16"
    rounded = torch.from_numpy(found.view("int16")).view(torch.bfloat16)
    assert torch.equal(rounded.nan_to_num(7.0).view(torch.int16), exact.bfloat16().nan_to_num(7.0).view(torch.int16))
    every = np.arange(1 << 16, dtype=np.uint16)
    handle = interpreter.TensorHandle(every, tl.bfloat16)
    wide = interpreter.InterpreterBuilder().create_fp_ext(handle, tl.float32).data
    assert (wide.view("uint32") == every.astype("uint32") << 16).all()


def test_truncating_interpreter_is_refused_only_for_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "ROUNDS", False)
    types = load("triton").types
    types(torch.float32, torch.float32)
    types(torch.float16, torch.float32)
    for given in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        with pytest.raises(InstepError) as refused:
            types(*given)
        assert "cuts fp32 off to bfloat16" in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.skipif(not runtime.INTERPRETED, reason="kernels are native")
def test_differently_built_interpreter_is_not_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter, "_convert_float", lambda data, *how: data.view("uint32").astype("uint16"))
    assert runtime.mend(), "what converts wrongly is replaced"
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fp_trunc", lambda *given: given[1])
    assert not runtime.mend(), "what does not go through it is not"
    monkeypatch.delattr(interpreter, "TensorHandle")
    assert not runtime.mend()


@pytest.mark.skipif(not runtime.INTERPRETED, reason="kernels are native")
def test_interpreter_incompatible_with_numpy_is_refused_in_one_line() -> None:
    class Kernel:
        arg_names = ()

        def __init__(self, said: str) -> None:
            self.said = said

        def __getitem__(self, grid: object) -> "Kernel":
            return self

        def __call__(self, *arguments: object, **options: object) -> None:
            raise TypeError(self.said)

    with pytest.raises(InstepError, match="does not run with numpy") as refused:
        runtime.launch(Kernel(f"TypeError('{runtime.NUMPY_REFUSES}')"), (1,), torch.zeros(1))
    assert "\n" not in str(refused.value)
    with pytest.raises(TypeError, match="a kernel's own"):
        runtime.launch(Kernel("a kernel's own mistake"), (1,), torch.zeros(1))


def test_tile_helpers_cover_all_elements() -> None:
    assert [runtime.power_of_2(n) for n in (0, 1, 2, 3, 16, 17)] == [1, 1, 2, 4, 16, 32]
    assert [runtime.ceil_div(n, 16) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_versions_name_the_platform() -> None:
    assert runtime.versions()["kernels"] == ("interpreted" if runtime.INTERPRETED else "native")


@triton.jit
def _outer(left, right, into, N: tl.constexpr, M: tl.constexpr):
    n, m = tl.arange(0, N), tl.arange(0, M)
    tl.store(into + (n[:, None] * M + m[None, :]), tl.load(left + n)[:, None] + tl.load(right + m)[None, :])


@triton.jit
def _of_rows(rows, N: tl.constexpr):
    n = tl.arange(0, N)
    added = 0 if rows.added is None else rows.added
    tl.store(rows.at + n * rows.step, tl.load(rows.at + n * rows.step) * rows.factor + added)


@triton.jit
def _unlike(left, N: tl.constexpr, M: tl.constexpr):
    tl.store(left + tl.arange(0, N), tl.arange(0, N) + tl.arange(0, M))


@pytest.mark.interpreted
@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is interpreted here")
def test_a_quick_interpreter_broadcasts_and_refuses_as_the_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import interpreter_builder as builder

    left, right = torch.tensor([1, 2**31 - 1, 3, 4], dtype=torch.int32), torch.arange(2, dtype=torch.int32)
    into = torch.zeros(4, 2, dtype=torch.int32)
    with np.errstate(over="ignore"):
        runtime.launch(_outer, (1,), left, right, into, N=4, M=2)
    assert torch.equal(into, left[:, None] + right)
    with pytest.raises(Exception, match="incompatible dimensions at index 0: 4 and 2"):
        runtime.launch(_unlike, (1,), left, N=4, M=2)
    monkeypatch.setattr(builder, "options", replace(builder.options, debug=True))
    with pytest.raises(Exception, match="int32 overflow detected for operation add"):  # as in a debugging session
        runtime.launch(_outer, (1,), left, right, into, N=4, M=2)


class Rows(NamedTuple):
    """Arguments of a kernel in one tuple."""

    at: torch.Tensor
    step: int
    factor: Any
    added: int | None = None


@pytest.mark.skipif(not runtime.INTERPRETED, reason="kernels are native")
@pytest.mark.interpreted
@pytest.mark.parametrize("added", [None, 1, 5])
def test_launch_takes_arguments_in_a_tuple(added: int | None) -> None:
    x = torch.arange(8, dtype=torch.float32)
    runtime.launch(_of_rows, (1,), Rows(x, 2, tl.constexpr(3), added), N=4)
    assert x.tolist() == [n * 3 + (added or 0) if n % 2 == 0 else n for n in range(8)]


@triton.jit
def _summed(x, N: tl.constexpr):
    tl.store(x, tl.sum(tl.load(x + tl.arange(0, N)), axis=0))


@pytest.mark.skipif(not runtime.INTERPRETED, reason="kernels are native")
@pytest.mark.interpreted
@pytest.mark.filterwarnings("error")
def test_large_numbers_that_are_dropped_later_give_no_warning() -> None:
    """Memory that nothing has written may hold any number."""
    x = torch.tensor([3e38, 3e38])
    with pytest.raises(Exception, match="overflow"):
        _summed[(1,)](x, N=2)
    runtime.launch(_summed, (1,), x, N=2)
    assert x[0] == torch.inf


def operand(kind: str, shape: tuple[int, ...], seed: int) -> object:
    """A tensor of the interpreter, or a number; floats include values with special comparisons and sums."""
    from triton.runtime.interpreter import TensorHandle, _get_np_dtype

    if kind in ("int", "float", "bool"):
        return {"int": 3 + seed, "float": -0.5 * seed, "bool": bool(seed)}[kind]
    scalar = tl.pointer_type(tl.float32) if kind == "pointer" else getattr(tl, kind)
    numbers = np.random.default_rng(seed).integers(1, 100, shape or (1,))
    data = numbers.astype(_get_np_dtype(scalar))
    if kind in ("float32", "float64"):
        data.flat[:4] = [np.nan, -0.0, np.inf, -1e-30][: data.size]
    return tl.tensor(TensorHandle(data, scalar), tl.block_type(scalar, [*shape]) if shape else scalar)


def said(name: str, call: object, *given: object) -> object:
    """The result of an operator: bits and the tensor's attributes, or its error."""
    try:
        found = call(*given)  # type: ignore[operator]
    except Exception as error:
        return type(error)
    data = found.handle.data
    return (data.tobytes(), data.dtype, data.shape, found.handle.dtype, found.type, found.dtype, found.shape,
            found.numel.value)  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not runtime.INTERPRETED, reason="kernels are native")
def test_quick_operators_agree_with_tritons() -> None:
    """For any two operands: the first time, and after the short way was learnt from other numbers."""
    from triton.runtime import interpreter

    quick = quick_operators.Quick(interpreter, tl.core)
    kinds = ("float32", "float16", "bfloat16", "int1", "uint32", "int32", "int64", "pointer")
    several = [(kind, shape) for kind in kinds for shape in ((), (4,), (4, 1))[: 2 + (kind in ("float32", "int64"))]]
    numbers: list[tuple[str, tuple[int, ...]]] = [("int", ()), ("float", ()), ("bool", ())]
    short = 0
    for name in (*list(quick_operators.OPERATORS)[::2], *quick_operators.REVERSED):
        inner = getattr(vars(tl.tensor)[name], "__wrapped__", vars(tl.tensor)[name])
        made = quick.of(name, inner)
        with np.errstate(all="ignore"):
            for one, other in product(several, several + numbers):
                for seed in (1, 2):
                    given = operand(*one, seed), operand(*other, seed + 5)
                    right = said(name, partial(inner, _semantic=interpreter.interpreter_semantic), *given)
                    assert said(name, made, *given) == right, (name, one, other, seed)
        known = [cell.cell_contents for cell in made.__closure__ or () if isinstance(cell.cell_contents, dict)]
        short += sum(getattr(plan, "func", None) is not inner for plan in known[0].values())
    assert short > 200, "hardly any operator is quick"
    rows, cut = operand("int64", (4,), 1), (None, slice(None))
    getitem = quick.of("__getitem__", getattr(tl.tensor.__getitem__, "__wrapped__", tl.tensor.__getitem__))
    shapes_ = {said("", getitem, rows, cut)[2] for _ in range(3)}  # type: ignore[index]
    assert shapes_ == {(1, 4)}
