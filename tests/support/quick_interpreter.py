"""Triton's interpreter without what it does again at every call: the same numpy functions run on the same numbers.

It puts its own functions into `triton.language` at every launch, and once more at every call of a function from a
kernel, where they stand already: a fifth of the time of interpreted tests. Here the second time is left out, and a
launch puts back what the first one found. Leaves out: how kernels compute and round (`kernels/runtime.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


class Patches:
    """`_patch_lang` of the interpreter: what a launch changes in `triton.language`, found once and kept."""

    def __init__(self, patch: Callable[[Any], Any], scope: Callable[[], Any], languages: tuple[Any, ...]) -> None:
        self.patch, self.scope, self.languages = patch, scope, languages
        self.found: dict[tuple[int, ...], list[tuple[Any, str, Any]]] = {}
        self.holds: set[int] = set()  # the languages that a launch has changed now; none: no kernel runs
        self.left: set[int] = set()  # those that a call within a launch has changed, which nobody puts back
        self.outer: Any = None

    def __call__(self, function: Any) -> Any:
        mine = tuple(
            number for number, language in enumerate(self.languages)
            if any(value is language for value in function.__globals__.values())
        )
        if self.holds:
            if not (self.holds | self.left).issuperset(mine):
                self.patch(function)
                self.left.update({*mine} - self.holds)
            return self.scope()  # with nothing to put back, as a call within a launch has it
        if mine not in self.found:
            self.outer = self.patch(function)
            self.found[mine] = [(obj, name, vars(obj)[name]) for obj, name, _ in self.outer._changes]
        else:
            self.outer = self.scope()
            for change in self.found[mine]:
                self.outer.set_attr(*change)
        self.holds.update(mine)
        return self

    def restore(self) -> None:
        """A launch has ended."""
        self.holds.clear()
        self.outer.restore()


def quicken() -> None:
    """Do so from now on, in this process; an interpreter with other internals stays as it is."""
    interpreter: Any = import_module("triton.runtime.interpreter")
    language: Any = import_module("triton.language")
    try:
        patches = Patches(interpreter._patch_lang, interpreter._LangPatchScope, (language, language.core))
        wide = interpreter._get_np_dtype
    except AttributeError:
        return

    known: dict[str, Any] = {}

    def kind(of: Any) -> Any:
        """The numpy type of a type of Triton's, or of the elements of a block."""
        one = of.element_ty if type(of) is language.block_type else of
        if one.name not in known:
            known[one.name] = wide(one)
        return known[one.name]

    interpreter._patch_lang, interpreter._get_np_dtype = patches, kind
