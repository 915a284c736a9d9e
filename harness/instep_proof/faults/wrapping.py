"""Wrap a function of a file, so that its arguments or its result are changed.

The function keeps its name, its parameters and its decorators, so that every caller calls the wrapped one.
Leaves out: edits inside a function (`syntax_edit.py`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from copy import deepcopy

from instep_reference.contract.errors import BadInput

from .catalogue.fault import Wrap
from .syntax_edit import indented, spliced_text
from .syntax_search import body_of, parsed, start

RIGHT, RESULT = "right", "result"  # the original function; its result


def wrapped(text: str, wrap: Wrap) -> str:
    """Wrap the function in this text. Refuses unless the function is there exactly once."""
    field = f"planting in {wrap.file}"
    functions = list(_functions(parsed(text, field), wrap.seam.split(".")))
    if len(functions) != 1:
        raise BadInput(
            field, found=f"{len(functions)} functions {wrap.seam}", expected="exactly one",
            hint="the source has changed: move the fault's seam with it",
        )
    (function,) = functions
    names = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
    if taken := sorted(names & {RIGHT, RESULT}):
        raise BadInput(field, found=f"{wrap.seam} has a parameter {taken[0]}", expected="another name")
    around = _around(function, _statements(wrap.arguments, field), _statements(wrap.result, field))
    margin = text.splitlines()[function.lineno - 1]
    new = indented(ast.unparse(around), margin[: len(margin) - len(margin.lstrip())])
    return spliced_text(text, start(function), function, new)


def _functions(tree: ast.AST, path: list[str]) -> Iterator[ast.FunctionDef]:
    """Definitions by their dotted name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and path == [node.name]:
            yield node
        elif isinstance(node, ast.ClassDef) and path[:1] == [node.name]:
            yield from _functions(node, path[1:])


def _statements(text: str, field: str) -> tuple[ast.stmt, ...]:
    body = body_of(text)
    if body is None:
        raise BadInput(field, found=f"{text.strip().splitlines()[0]!r} is not whole", expected="whole statements")
    return body


def _around(
    function: ast.FunctionDef, arguments: tuple[ast.stmt, ...], result: tuple[ast.stmt, ...]
) -> ast.FunctionDef:
    inner = deepcopy(function)
    inner.name, inner.decorator_list = RIGHT, []
    given = function.args
    call = ast.Call(
        ast.Name(RIGHT, ast.Load()),
        [ast.Name(each.arg, ast.Load()) for each in (*given.posonlyargs, *given.args)]
        + ([ast.Starred(ast.Name(given.vararg.arg, ast.Load()), ast.Load())] if given.vararg else []),
        [ast.keyword(each.arg, ast.Name(each.arg, ast.Load())) for each in given.kwonlyargs]
        + ([ast.keyword(None, ast.Name(given.kwarg.arg, ast.Load()))] if given.kwarg else []),
    )
    around = deepcopy(function)
    around.body = [
        inner, *arguments, ast.Assign([ast.Name(RESULT, ast.Store())], call), *result,
        ast.Return(ast.Name(RESULT, ast.Load())),
    ]
    return ast.fix_missing_locations(around)
