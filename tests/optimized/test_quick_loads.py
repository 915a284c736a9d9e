"""A load in an interpreted kernel gives what Triton's own way gives, also where the short way was learnt before.

Leaves out: operators and broadcasts (`test_kernels_runtime.py`).
"""

from functools import partial
from typing import Any

import numpy as np
import pytest

from instep_optimized.kernels import quick_operators, runtime

pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
pytestmark = pytest.mark.skipif(not runtime.INTERPRETED, reason="kernels are native")

MEMORY = np.random.default_rng(0).integers(0, 255, 64, dtype=np.uint8)  # of any numbers, NaN among them
MASKS = ([True, False, True, True], [False, False, False, False], [True])
NUMBERS = np.array([1, 0, 1, 1], dtype=np.int8)  # a mask as some versions make it: Triton refuses or converts it
OTHERS = (0, 0.0, -0.0, 1, False, None)
KINDS = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "int1", "uint8")


def block(data: Any, scalar: Any) -> Any:
    from triton.runtime.interpreter import TensorHandle

    return tl.tensor(TensorHandle(data, scalar), tl.block_type(scalar, [*data.shape]))


def said(load: Any, *given: Any) -> object:
    """The result of a load: bits and the tensor's attributes, or its error."""
    try:
        found = load(*given)
    except Exception as error:
        return type(error)
    handle = found.handle
    return handle.data.tobytes(), handle.data.dtype, handle.data.shape, handle.dtype, found.type, found.dtype


def test_quick_load_agrees_with_tritons() -> None:
    from triton.runtime import interpreter

    inner = getattr(tl.load, "__wrapped__", tl.load)
    right = partial(inner, _semantic=interpreter.interpreter_semantic)
    quick = quick_operators.Quick(interpreter, tl.core).load(inner)
    for kind in KINDS:
        scalar = getattr(tl, kind)
        apart = np.arange(4, dtype=np.uint64) * max(1, scalar.primitive_bitwidth // 8)
        pointers = block(MEMORY.ctypes.data + apart, tl.pointer_type(scalar))
        for other in OTHERS:
            for mask in (*(block(np.array(one), tl.int1) for one in (*MASKS, NUMBERS)), True, None):
                given = pointers, mask, other
                assert said(quick, *given) == said(right, *given), (kind, mask, other)
    known = next(cell.cell_contents for cell in quick.__closure__ or () if type(cell.cell_contents) is dict)
    learnt = [str(kinds[0]) for kinds, template in known.items() if template is not None]
    assert len(learnt) == len(KINDS) - 1, "bools are read as whole numbers, in Triton's own way"
