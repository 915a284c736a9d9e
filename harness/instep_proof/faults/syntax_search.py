"""Find a piece of Python in a syntax tree.

A piece is a run of whole statements, one expression, or a run of arguments of a call. Line breaks, quotes, comments
and the docstrings of functions and classes do not matter to the search.
Leaves out: replacing one (`syntax_edit.py`).
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from instep_reference.contract.errors import BadInput

EXPRESSION, STATEMENTS, ARGUMENTS = "an expression", "statements", "arguments of a call"
KINDS = {EXPRESSION: ast.expr, STATEMENTS: ast.stmt}
DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Match:
    """The place of a piece: the nodes of `parent.field` from `nodes[0]` to `nodes[-1]`; the field may be no list.

    A run of arguments covers two fields of a call. Its field is ARGUMENTS here.
    """

    parent: ast.AST
    field: str
    nodes: tuple[ast.AST, ...]

    @property
    def line(self) -> int:
        return start(self.nodes[0])[0]


def readings(text: str) -> dict[str, tuple[ast.AST, ...]]:
    """The readings of a text, by kind. `theta=x` is an assignment, and also an argument by name."""
    bare, read = dedented(text), dict[str, tuple[ast.AST, ...]]()
    with suppress(SyntaxError):
        body = ast.parse(bare).body
        if len(body) == 1 and isinstance(body[0], ast.Expr):
            read[EXPRESSION] = (body[0].value,)
        read[STATEMENTS] = tuple(body)
    with suppress(SyntaxError):
        call = ast.parse(f"_(\n{bare}\n)", mode="eval").body
        if isinstance(call, ast.Call) and given(call):
            read[ARGUMENTS] = given(call)
    return read


def given(call: ast.Call) -> tuple[ast.AST, ...]:
    """The arguments in the order in which they are written."""
    return tuple(sorted([*call.args, *call.keywords], key=start))


def found(tree: ast.Module, kind: str, piece: tuple[ast.AST, ...]) -> Iterator[Match]:
    for parent in _nodes(tree):
        if kind == ARGUMENTS:
            if isinstance(parent, ast.Call):
                yield from (Match(parent, ARGUMENTS, run) for run in _runs(given(parent), piece))
            continue
        for field, value in ast.iter_fields(parent):
            nodes = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, KINDS[kind])]
            yield from (Match(parent, field, run) for run in _runs(nodes, piece))


def _runs(nodes: Sequence[ast.AST], wanted: tuple[ast.AST, ...]) -> Iterator[tuple[ast.AST, ...]]:
    for begin in range(len(nodes) - len(wanted) + 1):
        if type(nodes[begin]) is type(wanted[0]):  # most are not
            run = tuple(nodes[begin : begin + len(wanted)])
            if all(map(same, run, wanted)):
                yield run


def same(one: Any, other: Any) -> bool:
    """Whether two nodes mean the same, ignoring positions, quotes, and docstrings of functions and classes."""
    if type(one) is not type(other):
        return False
    if isinstance(one, ast.AST):
        for field in one._fields:
            if field != "kind" and not same(_plain(one, field), _plain(other, field)):
                return False
        return True
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
    for number, one in enumerate(readings(old).get(STATEMENTS, ()), start=1):
        if not any(found(tree, STATEMENTS, (one,))):
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
