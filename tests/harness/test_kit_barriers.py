"""`kit.over_barriers` on the text of kernels. Leaves out: compiled kernels (`tests/optimized/test_compiled.py`)."""

from types import SimpleNamespace
from typing import Any

import pytest

from instep import kit
from instep_reference.contract.errors import BadInput, Unsupported

pytest.importorskip("triton", reason="Triton is not installed")
from triton.backends.compiler import GPUTarget

MEMORY = "!ttg.memdesc<1xi64, #shared, #smem, mutable>"
WAIT, END = f"ttng.wait_barrier %full, %zero : {MEMORY}", f"\n    ttng.inval_barrier %full : {MEMORY}"
TEXT = """
#blocked = #ttg.blocked<{{sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [4], order = [0]}}>
#shared = #ttg.swizzled_shared<{{vec = 1, perPhase = 1, maxPhase = 1, order = [0]}}>
#smem = #ttg.shared_memory
module attributes {{"ttg.num-ctas" = 1 : i32, "ttg.num-warps" = 4 : i32, ttg.target = "cuda:90",
                   "ttg.threads-per-warp" = 32 : i32}} {{
  tt.func public @summed(%out: !tt.ptr<i32>) {{
    %zero = arith.constant 0 : i32
    %full = ttg.local_alloc : () -> {memory} loc("full")
    ttng.init_barrier %full, 1 : {memory}
    {before}
    %lane = tt.make_range {{end = 128 : i32, start = 0 : i32}} : tensor<128xi32, #blocked>
    %sum = "tt.reduce"(%lane) <{{axis = 0 : i32}}> ({{
    ^bb0(%one: i32, %other: i32):
      %both = arith.addi %one, %other : i32
      tt.reduce.return %both : i32
    }}) : (tensor<128xi32, #blocked>) -> i32
    tt.store %out, %sum : !tt.ptr<i32>
    {following}
    tt.return
  }}
}}
"""


def kernel(before: str = "", following: str = "", backend: str = "cuda") -> Any:
    """A kernel that sums over its warps, as a launch returns it."""
    text = TEXT.format(memory=MEMORY, before=before, following=following)
    return SimpleNamespace(asm={"ttgir": text}, metadata=SimpleNamespace(target=GPUTarget(backend, 90, 32)))


@pytest.mark.parametrize(
    ("before", "following", "lies"),
    [(WAIT, WAIT, []), (WAIT + END, "", []), (WAIT, "", ["%full: tt.reduce"]),
     ("", "", ["%full: tt.reduce", "%full: no code waits for it"])],
    ids=["used to the end", "invalidated", "used up", "unused"],
)  # fmt: skip
def test_overlapping_memory_and_unused_barriers_are_named(before: str, following: str, lies: list[str]) -> None:
    assert kit.over_barriers(kernel(before, following)) == lies


@pytest.mark.parametrize("kind", ["i64", "f64", "f8E5M2"])
def test_memory_of_numbers_may_be_reused(kind: str) -> None:
    """For every type of number, in a kernel with a barrier and in one without."""
    memory = MEMORY.replace("1xi64", f"512x{kind}")
    numbers = f"\n    %old = ttg.local_alloc : () -> {memory} loc(\"old\")"
    assert kit.over_barriers(kernel(WAIT + numbers, WAIT)) == []
    without = kernel(numbers)
    lines = without.asm["ttgir"].splitlines()
    without.asm["ttgir"] = "\n".join(line for line in lines if "%full" not in line)
    assert kit.over_barriers(without) == []


@pytest.mark.parametrize("found", [None, "text", SimpleNamespace(asm={"ptx": ""}), kernel(backend="hip")], ids=repr)
def test_object_that_is_no_compiled_kernel_is_refused(found: Any) -> None:
    with pytest.raises(BadInput, match="a kernel that Triton compiled for a CUDA device; an interpreted launch"):
        kit.over_barriers(found)


def test_triton_without_the_allocator_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton._C.libtriton import nvidia

    monkeypatch.delattr(nvidia.passes.ttgpuir, "add_allocate_shared_memory_nv")
    with pytest.raises(Unsupported, match=r"Triton [\d.]+.* does not give the places"):
        kit.over_barriers(kernel(WAIT))
