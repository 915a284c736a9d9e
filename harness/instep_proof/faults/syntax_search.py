"""Find a piece of Python in a syntax tree.

A piece is a run of whole statements, one expression, or a run of arguments of a call. Line breaks, quotes, comments
and the docstrings of functions and classes do not matter to the search.
Leaves out: replacing one (`syntax_edit.py`).
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from instep_reference.contract.errors import BadInput

DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Match:
    """The place of a piece: the nodes of `parent.field` from `nodes[0]` to `nodes[-1]`; the field may be no list.

    A run of arguments covers two fields of a call. Its field is "arguments" here.
    """

    parent: ast.AST
    field: str
    nodes: tuple[ast.AST, ...]

    @property
    def line(self) -> int:
        return start(self.nodes[0])[0]


def body_of(text: str) -> tuple[ast.stmt, ...] | None:
    try:
        return tuple(ast.parse(dedented(text)).body)
    except SyntaxError:
        return None


def arguments_of(text: str) -> tuple[ast.AST, ...] | None:
    """The arguments in the order in which they are written."""
    try:
        call = ast.parse(f"_(\n{dedented(text)}\n)", mode="eval").body
    except SyntaxError:
        return None
    return given(call) or None if isinstance(call, ast.Call) else None


def given(call: ast.Call) -> tuple[ast.AST, ...]:
    return tuple(sorted([*call.args, *call.keywords], key=start))


def found(tree: ast.Module, reading: tuple[ast.AST, ...]) -> Iterator[Match]:
    first = reading[0]
    for parent in _nodes(tree):
        if isinstance(first, ast.stmt):
            for field, value in ast.iter_fields(parent):
                if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                    yield from (Match(parent, field, run) for run in _runs(value, reading))
        elif len(reading) > 1 or isinstance(first, ast.keyword):
            if isinstance(parent, ast.Call):
                yield from (Match(parent, "arguments", run) for run in _runs(given(parent), reading))
        else:
            for field, value in ast.iter_fields(parent):
                for one in value if isinstance(value, list) else (value,):
                    if isinstance(one, ast.expr) and same(one, first):
                        yield Match(parent, field, (one,))


def _runs(nodes: Sequence[ast.AST], wanted: tuple[ast.AST, ...]) -> Iterator[tuple[ast.AST, ...]]:
    for begin in range(len(nodes) - len(wanted) + 1):
        run = tuple(nodes[begin : begin + len(wanted)])
        if all(map(same, run, wanted)):
            yield run


def same(one: Any, other: Any) -> bool:
    """Whether two nodes mean the same, ignoring positions, quotes, and docstrings of functions and classes."""
    if type(one) is not type(other):
        return False
    if isinstance(one, ast.AST):
        return all(same(_plain(one, field), _plain(other, field)) for field in one._fields if field != "kind")
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def _plain(node: ast.AST, field: str) -> Any:
    value = getattr(node, field, None)
    if field == "body" and isinstance(node, DOCUMENTED) and len(node.body) > 1 and ast.get_docstring(node) is not None:
        return node.body[1:]
    return value


def missing(tree: ast.Module, old: str) -> str:
    """The first of several statements that is missing."""
    for number, one in enumerate(body_of(old) or (), start=1):
        if not any(found(tree, (one,))):
            return f": no statement of it is {ast.unparse(one).splitlines()[0]!r}" if number > 1 else ""
    return ""


def start(node: ast.AST) -> tuple[int, int]:
    """Line and byte of the line where its text begins, decorators included."""
    assert isinstance(node, ast.stmt | ast.expr | ast.keyword)
    decorators = getattr(node, "decorator_list", ())
    return decorators[0].lineno if decorators else node.lineno, node.col_offset


def dedented(text: str) -> str:
    return textwrap.dedent(text).strip("\n").rstrip()


def first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")


@lru_cache(maxsize=64)
def parsed(text: str, field: str) -> ast.Module:
    """A file's tree, which must not be changed."""
    try:
        return ast.parse(text)
    except SyntaxError as broken:
        raise BadInput(field, found=f"a file that is no Python: {broken}", expected="Python") from None


@lru_cache(maxsize=64)
def _nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))
