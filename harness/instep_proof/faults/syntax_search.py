"""Find a piece of Python in a syntax tree.

A piece is a run of whole statements, one expression, or a run of arguments of a call. Line breaks, quotes, comments
and the docstrings of functions and classes do not matter to the search.
Leaves out: replacing one (`syntax_edit.py`).
"""

import ast
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from instep_reference.contract.errors import BadInput

EXPRESSION, STATEMENTS, ARGUMENTS = "an expression", "statements", "arguments of a call"
KINDS = {EXPRESSION: ast.expr, STATEMENTS: ast.stmt, ARGUMENTS: ast.AST}
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
    for parent, field, run in _begins(tree, kind).get(type(piece[0]), ()):
        if len(run) >= len(piece) and all(map(same, run, piece)):
            yield Match(parent, field, run[: len(piece)])


def same(one: Any, other: Any) -> bool:
    """Whether two nodes mean the same, ignoring positions, quotes, and docstrings of functions and classes."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, ast.AST):
        value = _without_docstring if isinstance(one, DOCUMENTED) else getattr
        for name in one._fields:  # a loop, as this compares whole files
            if name != "kind":
                mine, others = value(one, name, None), value(other, name, None)
                if mine is not others and not same(mine, others):
                    return False
        return True
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def _without_docstring(node: ast.AST, field: str, default: Any) -> Any:
    value = getattr(node, field, default)
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
def _begins(tree: ast.Module, kind: str) -> dict[type, list[tuple[ast.AST, str, tuple[ast.AST, ...]]]]:
    """The runs of nodes: type of the first node -> their parent, its field, and the nodes from there on."""
    begins: dict[type, list[tuple[ast.AST, str, tuple[ast.AST, ...]]]] = {}
    for parent in ast.walk(tree):
        fields: Iterable[tuple[str, Any]] = ast.iter_fields(parent)
        if kind == ARGUMENTS:
            fields = [(ARGUMENTS, list(given(parent)))] if isinstance(parent, ast.Call) else ()
        for field, value in fields:
            values = value if isinstance(value, list) else [value]
            nodes = tuple(one for one in values if isinstance(one, KINDS[kind]))
            for number, first in enumerate(nodes):
                begins.setdefault(type(first), []).append((parent, field, nodes[number:]))
    return begins
