"""Triton's interpreter without its repeated work per call: the same numpy functions run on the same numbers.

At every launch the interpreter patches `triton.language`, and again at every call of a function from a kernel, although
the patches are already in place. It creates the type of every block again, and checks whether a sum of integers
overflows, although it reports that only in debug mode. Together that is half of the time of a kernel. Here a launch
restores the patches that the first one found, arguments stay on the host, shapes are cached, and overflow is checked
only in debug mode. Leaves out: how kernels compute and round (`runtime.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import torch

from .quick_operators import Quick


class Patches:
    """Cached `_patch_lang` of the interpreter: the changes of a launch in `triton.language`, found once."""

    def __init__(
        self, patch: Callable[[Any], Any], scope: Callable[[], Any], absent: object, languages: tuple[Any, ...]
    ) -> None:
        self.patch, self.absent, self.languages = patch, absent, languages
        self.named: dict[Any, tuple[int, ...]] = {}  # function -> the languages that its module names
        self.found: dict[tuple[int, ...], Changes] = {}
        self.were: dict[tuple[int, ...], Changes] = {}  # the values before the changes
        self.holds: set[int] = set()  # the languages that a launch has changed now; none: no kernel runs
        self.left: set[int] = set()  # those that a call within a launch has changed; these are never restored
        self.outer: Changes = []  # the changes that restore the state before the running launch
        self.nothing = scope()

    def __call__(self, function: Any) -> Any:
        if function not in self.named:
            values = [*function.__globals__.values()]
            numbered = enumerate(self.languages)
            self.named[function] = tuple(number for number, one in numbered if any(value is one for value in values))
        mine = self.named[function]
        if self.holds:
            if not (self.holds | self.left).issuperset(mine):
                self.patch(function)
                self.left.update({*mine} - self.holds)
                self.were.clear()  # the stored values may be out of date
            return self.nothing  # nothing to restore, as for a call within a launch
        if mine not in self.found:
            changes = self.patch(function)._changes
            self.found[mine] = grouped((obj, name, vars(obj)[name]) for obj, name, _ in changes)
            self.were[mine] = grouped(reversed(changes))  # reversed: a name that changes twice keeps its first value
        else:
            if mine not in self.were:  # only launches change these names, so the current values are the originals
                self.were[mine] = [(obj, {name: getattr(obj, name, self.absent) for name in values})
                                   for obj, values in self.found[mine]]  # fmt: skip
            self.put(self.found[mine])
        self.outer = self.were[mine]
        self.holds.update(mine)
        return self

    def restore(self) -> None:
        """Restore the state before the launch, at its end."""
        self.holds.clear()
        self.put(self.outer)

    def put(self, changes: Changes) -> None:
        """Apply changes; a module takes all of them at once."""
        for obj, values in changes:
            if isinstance(obj, ModuleType) and self.absent not in values.values():
                vars(obj).update(values)
                continue
            for name, value in values.items():
                if value is self.absent:
                    delattr(obj, name)
                else:
                    setattr(obj, name, value)


Changes = list[tuple[Any, dict[str, Any]]]  # modules and classes, each with its values by name


def grouped(changes: Iterable[tuple[Any, str, Any]]) -> Changes:
    """Group changes by module or class; the last change of a name counts."""
    found = dict[int, tuple[Any, dict[str, Any]]]()
    for obj, name, value in changes:
        found.setdefault(id(obj), (obj, {}))[1][name] = value
    return [*found.values()]


class Asked:
    """`inspect` for the interpreter, which looks up the names of a kernel's arguments at every launch."""

    def __init__(self, inspect: Any) -> None:
        self.inspect = inspect
        self.getfullargspec, self.get_annotations = cache(inspect.getfullargspec), cache(inspect.get_annotations)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inspect, name)

    def getcallargs(self, function: Any, *given: Any, **named: Any) -> dict[str, Any]:
        spec = self.getfullargspec(function)
        values, ends = dict(zip(spec.args, given, strict=False)), spec.defaults or ()
        found: dict[str, Any] = dict(zip(spec.args[len(spec.args) - len(ends) :], ends, strict=True)) | values | named
        if len(given) > len(spec.args) or values.keys() & named.keys() or found.keys() != {*spec.args}:
            found = self.inspect.getcallargs(function, *given, **named)  # or the exception that it raises
        return found


def quicken() -> None:
    """Install the fast paths in this process; an interpreter with other internals stays as it is."""
    interpreter: Any = import_module("triton.runtime.interpreter")
    language: Any = import_module("triton.language")
    for part in (_patches, _launches, _arguments, _kinds, _types, _calls, _operators):
        try:
            part(interpreter, language)
        except AttributeError:  # this version has this part in another place
            continue


def _patches(interpreter: Any, language: Any) -> None:
    languages = language, language.core
    interpreter._patch_lang = Patches(
        interpreter._patch_lang, interpreter._LangPatchScope, interpreter._MISSING, languages)


def _launches(interpreter: Any, language: Any) -> None:
    interpreter.inspect = Asked(interpreter.inspect)


def _arguments(interpreter: Any, language: Any) -> None:
    """Leave arguments on the host that are there already, and do not copy them back after the launch."""
    executor, convert = interpreter.GridExecutor, interpreter._implicit_cvt
    there, back = executor._init_args_hst, executor._restore_args_dev
    handle, tensor, types = interpreter.TensorHandle, language.core.tensor, dict[torch.dtype, Any]()
    plain = {int, float, bool, str, type(None), language.core.dtype, language.core.constexpr}

    def here(x: Any) -> bool:
        if isinstance(x, tuple):
            return all(map(here, x))
        return x.is_cpu if type(x) is torch.Tensor else type(x) in plain

    def brought(self: Any, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        return (given, named) if all(map(here, (*given, *named.values()))) else there(self, given, named)

    def taken_back(self: Any, given: Any, on_host: Any, named: Any, named_on_host: Any) -> None:
        if on_host is not given:
            back(self, given, on_host, named, named_on_host)

    def converted(given: Any) -> Any:
        """Return a tensor's address, as a pointer of the type that follows from its dtype."""
        if type(given) is not torch.Tensor:
            return convert(given)
        if given.dtype not in types:
            types[given.dtype] = convert(given).type
        kind = types[given.dtype]
        return tensor(handle(np.array([given.data_ptr()], dtype=np.uint64), kind), kind)

    executor._init_args_hst, executor._restore_args_dev, interpreter._implicit_cvt = brought, taken_back, converted


def _kinds(interpreter: Any, language: Any) -> None:
    wide, known = interpreter._get_np_dtype, dict[str, Any]()

    def kind(of: Any) -> Any:
        """Return the numpy type of a type of Triton's, or of the elements of a block."""
        one = of.element_ty if type(of) is language.block_type else of
        if one.name not in known:
            known[one.name] = wide(one)
        return known[one.name]

    interpreter._get_np_dtype = kind


def _types(interpreter: Any, language: Any) -> None:
    """Let blocks of one shape share the objects that follow from the shape."""
    core = language.core
    make_type, make_tensor, unwrap = core.block_type.__init__, core.tensor.__init__, core._unwrap_if_constexpr
    types, tensors = dict[tuple[Any, ...], dict[str, Any]](), dict[tuple[Any, ...], dict[str, Any]]()
    plain = {int, float, bool, str, type(None), core.tensor, core.block_type, core.dtype, core.pointer_type}

    def of(shape: Any) -> tuple[Any, ...]:
        return tuple(getattr(shape, "values", shape))

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *of(shape)
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
        vars(self).update(types[key])
        self.element_ty = element_ty

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = of(type.shape) if type.is_block() else ()
        if key not in tensors:
            make_tensor(self, handle, type)
            own = "handle", "type", "dtype"
            tensors[key] = {name: value for name, value in vars(self).items() if name not in own}
        vars(self).update(tensors[key])
        self.handle, self.type, self.dtype = handle, type, type.scalar

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        return value.value if kind is core.constexpr else value if kind in plain else unwrap(value)

    core.block_type.__init__, core.tensor.__init__, core._unwrap_if_constexpr = block_type, tensor, unwrapped


def _calls(interpreter: Any, language: Any) -> None:
    """Call a function of the language directly: its wrapper only looks for arguments that are given here."""
    semantic, _ = interpreter.interpreter_semantic, interpreter._LangPatchScope
    tensor, quick = language.core.tensor, Quick(interpreter, language.core)

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner = getattr(member, "__wrapped__", member)

        def call(*given: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return inner(*given, **named)

        if obj is tensor:
            scope.set_attr(obj, name, quick.of(name, inner) or call)
        else:
            scope.set_attr(obj, name, quick.load(inner) if (obj, name) == (language, "load") else call)

    interpreter._patch_attr = patch


def _operators(interpreter: Any, language: Any) -> None:
    own = type(interpreter.interpreter_semantic)
    sanitize, broadcast = own.binary_op_sanitize_overflow_impl, own.broadcast_impl_value

    def sanitized(self: Any, *given: Any) -> None:
        if self.builder.options.debug:  # without debug it does not report what it finds
            sanitize(self, *given)

    def broadcasted(self: Any, left: Any, right: Any) -> Any:
        one, other = (tuple(x.type.shape) if x.type.is_block() else () for x in (left, right))
        if one == other:
            return left, right
        if len(one) != len(other) or any(1 not in pair and pair[0] != pair[1] for pair in zip(one, other, strict=True)):
            return broadcast(self, left, right)
        both = [x * y if 1 in (x, y) else x for x, y in zip(one, other, strict=True)]
        return tuple(x if tuple(x.type.shape) == tuple(both) else self.tensor(
            self.builder.create_broadcast(x.handle, both), language.block_type(x.type.scalar, both)
        ) for x in (left, right))

    own.binary_op_sanitize_overflow_impl, own.broadcast_impl_value = sanitized, broadcasted
