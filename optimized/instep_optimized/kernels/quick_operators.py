"""Fast operators of interpreted kernels: Triton's per-call type analysis is cached by the operands' types.

Around one numpy function Triton calls some twenty others: for the type to which both operands are cast, for the size
of both, for the type of the result. So the first call with some types runs Triton's own operator and also the fast
path: the numpy function on the same numbers. If both give the same bits and the same tensor attributes, later calls
with these types use the fast path. If they do not, and in all cases that are not plainly equal (16-bit floats, other
numbers, debugging), every call runs Triton's operator. Leaves out: the other fast paths (`quick_interpreter.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

FLOATS, WHOLE, BOOLS = ("fp32", "fp64"), ("int32", "int64"), ("int1",)
INT32 = 1 << 31
ZEROS = ("0", "0.0")  # as Python writes them: -0.0 has other bits


def _divided(left: Any, right: Any) -> Any:
    return (left - np.fmod(left, right)) // right


# By the name of the operator: numpy's function, as the interpreter has it, and the kinds of numbers that it supports.
OPERATORS: Mapping[str, tuple[Callable[[Any, Any], Any], tuple[str, ...]]] = {
    "__add__": (np.add, FLOATS + WHOLE), "__sub__": (np.subtract, FLOATS + WHOLE),
    "__mul__": (np.multiply, FLOATS + WHOLE), "__truediv__": (np.divide, FLOATS),
    "__floordiv__": (_divided, WHOLE), "__mod__": (np.fmod, WHOLE),
    "__lt__": (np.less, FLOATS + WHOLE), "__le__": (np.less_equal, FLOATS + WHOLE),
    "__gt__": (np.greater, FLOATS + WHOLE), "__ge__": (np.greater_equal, FLOATS + WHOLE),
    "__eq__": (np.equal, FLOATS + WHOLE), "__ne__": (np.not_equal, FLOATS + WHOLE),
    "__and__": (np.bitwise_and, BOOLS + WHOLE), "__or__": (np.bitwise_or, BOOLS + WHOLE),
}
REVERSED = {"__radd__": "__add__", "__rsub__": "__sub__", "__rmul__": "__mul__", "__rtruediv__": "__truediv__"}

Plan = Callable[[Any, Any], Any]  # two operands -> the result's tensor


class Quick:
    """Makes the fast version of a member of `triton.language.tensor`; None if there is none."""

    def __init__(self, interpreter: Any, core: Any) -> None:
        self.tensor, self.constexpr, self.handle = core.tensor, core.constexpr, interpreter.TensorHandle
        self.numpy_type, self.semantic = interpreter._get_np_dtype, interpreter.interpreter_semantic
        self.read = interpreter._interpreter.load

    def of(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any] | None:
        """Wrap an operator. inner: Triton's own implementation."""
        if name in OPERATORS or name in REVERSED:
            function, kinds = OPERATORS[REVERSED.get(name, name)]
            return self._operator(inner, function, kinds, turned=name in REVERSED)
        return {"__getitem__": self._getitem, "to": self._to}.get(name, lambda inner: None)(inner)

    def load(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `tl.load` of a block with a mask of its shape, 0 where the mask is false; other calls run Triton's."""
        semantic, tensor, known = self.semantic, self.tensor, dict[tuple[str, str], dict[str, Any] | None]()

        def call(pointer: Any, mask: Any = None, other: Any = None, **named: Any) -> Any:
            plain = not named and type(mask) is tensor and str(other) in ZEROS and type(other) in (int, float)
            plain = plain and mask.handle.data.dtype == np.bool_  # Triton refuses or converts others
            key = (pointer.type.name, mask.type.name) if plain else None
            template = None if key is None else known.get(key)
            if template is not None:
                return self._loaded(template, pointer, mask)
            right = inner(pointer, mask, other, **named, _semantic=semantic)
            if key is not None and key not in known:
                shapes = {part.handle.data.shape for part in (pointer, mask, right)}
                alike = pointer.type.is_block() and len(shapes) == 1 and right.dtype.name not in BOOLS
                template = {**vars(right), "handle": None}
                known[key] = template if alike and self._same(self._loaded(template, pointer, mask), right) else None
            return right

        return call

    def _loaded(self, template: dict[str, Any], pointer: Any, mask: Any) -> Any:
        kind, at = template["dtype"], pointer.handle.data
        numbers = self.numpy_type(kind)
        return self._made(template, self.read(at, mask.handle.data, np.zeros(at.shape, numbers), numbers), kind)

    def _operator(
        self, inner: Callable[..., Any], function: Callable[[Any, Any], Any], kinds: tuple[str, ...], *, turned: bool
    ) -> Callable[..., Any]:
        tensor, constexpr, builder = self.tensor, self.constexpr, self.semantic.builder
        semantic, known = self.semantic, dict[tuple[Any, Any], Plan]()
        inner_alone: Plan = partial(inner, _semantic=semantic)

        def call(self_: Any, other: Any) -> Any:
            kind = type(other)
            if kind is constexpr:
                other = other.value
                kind = type(other)
            key = self_.type.name, other.type.name if kind is tensor else kind
            plan = known.get(key)
            if builder.options.debug or (kind is int and not -INT32 <= other < INT32):
                plan = inner_alone
            elif plan is None:
                right = inner(self_, other, _semantic=semantic)
                plan = self._planned(function, kinds, self_, other, right, turned)
                known[key] = plan if plan is not None and self._same(plan(self_, other), right) else inner_alone
                return right
            return plan(self_, other)

        return call

    def _planned(
        self, function: Callable[[Any, Any], Any], kinds: tuple[str, ...], left: Any, other: Any, right: Any,
        turned: bool,
    ) -> Plan | None:
        """Plan how the result is computed from two operands of such types."""
        mine, template = left.dtype, {**vars(right), "handle": None}
        number = type(other) is int or (type(other) is float and mine.name in FLOATS)
        if mine.is_ptr():
            whole = other.dtype.name in WHOLE if type(other) is self.tensor else type(other) is int
            return self._pointer(template, mine) if function is np.add and whole and not turned else None
        if mine.name not in kinds or not (number or (type(other) is self.tensor and other.dtype.name in kinds)):
            return None
        if number:
            if mine.name in BOOLS:
                return None
            return partial(self._with_number, function, template, self.numpy_type(mine), right.handle.dtype, turned)
        if {mine.name, other.dtype.name} not in ({mine.name}, {*WHOLE}) or turned:
            return None
        return partial(self._with_tensor, function, template, None if mine.name == other.dtype.name else
                       right.handle.dtype)  # fmt: skip

    def _with_number(
        self, function: Any, template: dict[str, Any], numbers: Any, kind: Any, turned: bool, left: Any, other: Any
    ) -> Any:
        data, number = left.handle.data, np.array([other], dtype=numbers)
        if turned:
            return self._made(template, function(number, data), kind)
        return self._made(template, function(data, number), left.handle.dtype.scalar)

    def _with_tensor(self, function: Any, template: dict[str, Any], kind: Any, left: Any, other: Any) -> Any:
        data = function(left.handle.data, other.handle.data)
        return self._made(template, data, left.handle.dtype.scalar if kind is None else kind)

    def _pointer(self, template: dict[str, Any], kind: Any) -> Plan:
        width = max(1, kind.element_ty.primitive_bitwidth // 8)

        def moved(left: Any, other: Any) -> Any:
            by = other.handle.data if type(other) is self.tensor else np.array([other], dtype=np.int32)
            return self._made(template, left.handle.data + width * by.astype(np.uint64), left.handle.dtype)

        return moved

    def _getitem(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap indexing that adds axes of length 1 to a block, such as `x[:, None]`."""
        semantic, known = self.semantic, dict[tuple[str, tuple[bool, ...]], dict[str, Any] | None]()

        def call(block: Any, slices: Any) -> Any:
            if type(slices) is not tuple or not all(one is None or one == slice(None) for one in slices):
                return inner(block, slices, _semantic=semantic)
            key = block.type.name, tuple(one is None for one in slices)
            template = known.get(key)
            if template is not None:
                return self._made(template, block.handle.data[slices], block.handle.dtype.scalar)
            right = inner(block, slices, _semantic=semantic)
            if key not in known:
                template, known[key] = {**vars(right), "handle": None}, None
                if block.type.is_block():
                    quick = self._made(template, block.handle.data[slices], block.handle.dtype.scalar)
                    known[key] = template if self._same(quick, right) else None
            return right

        return call

    def _to(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a cast: a cast to the same type returns the tensor itself."""
        constexpr, semantic = self.constexpr, self.semantic

        def call(given: Any, dtype: Any, *how: Any, **named: Any) -> Any:
            kind = dtype.value if type(dtype) is constexpr else dtype
            if not how and not named and kind.scalar == given.dtype:
                return given
            return inner(given, dtype, *how, **named, _semantic=semantic)

        return call

    def _made(self, template: dict[str, Any], data: Any, kind: Any) -> Any:
        """Make a tensor with the attributes of its template and these numbers."""
        handle, made = object.__new__(self.handle), object.__new__(self.tensor)
        handle.data, handle.dtype, handle.attr = data, kind, {}
        vars(made).update(template)
        made.handle = handle
        return made

    def _same(self, quick: Any, right: Any) -> bool:
        """Return whether two tensors have the same bits and the same attributes."""
        told = [(x.handle.dtype, x.handle.attr, x.handle.data.dtype, x.handle.data.shape, x.handle.data.tobytes())
                for x in (quick, right)]  # fmt: skip
        return bool(told[0] == told[1])
