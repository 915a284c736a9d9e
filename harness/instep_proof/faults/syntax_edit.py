"""Replace a piece of Python by another one, or wrap a function. Everything outside keeps its text.

Leaves out: finding it (`syntax_search.py`), the pieces (`catalogue/`), and copies of the source (`plant.py`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from instep_reference.contract.errors import BadInput

from .catalogue.fault import Wrap
from .syntax_search import Match, arguments_of, body_of, dedented, first_line, found, given, missing, parsed, start

WHOLE = "whole statements, one expression, or arguments of a call"
RIGHT, RESULT = "right", "result"  # the original function; its result


def replaced(text: str, old: str, new: str, where: str) -> str:
    """Replace `old` by `new`. Refuses unless `old` is in the syntax tree exactly once."""
    tree = parsed(text, f"planting in {where}")
    statements = _statements(new)
    readings = _readings(old, where, as_statements=statements is not None)
    matches = [match for reading in readings for match in found(tree, reading)]
    if len(matches) != 1:
        at = sorted(match.line for match in matches)
        lines = f", in lines {', '.join(map(str, at))}" if at else missing(tree, old)
        raise BadInput(
            f"planting in {where}", found=f"{first_line(old)!r} stands there {len(matches)} times{lines}",
            expected="exactly once", hint="the source has changed: move the fault's text with it",
        )
    (match,) = matches
    piece = _piece(match, new, statements, where)
    with _in_its_place(match, piece):
        for candidate in _candidates(text, match, new):
            try:
                if _equal(ast.parse(candidate), tree):
                    return candidate
            except SyntaxError:
                continue
    raise BadInput(
        f"planting in {where}", found=f"line {match.line} cannot take {first_line(new)!r}: the rest would change, too",
        expected="a piece that can be replaced alone", hint="let the fault's text be the whole statement",
    )


def _readings(old: str, where: str, *, as_statements: bool) -> list[tuple[ast.AST, ...]]:
    """The possible readings of the old text. `theta=x` is an assignment, and also an argument by name."""
    readings: list[tuple[ast.AST, ...]] = []
    body = body_of(old)
    if body is not None and len(body) == 1 and isinstance(body[0], ast.Expr) and not as_statements:
        readings.append((body[0].value,))
    elif body:
        readings.append(body)
    several = arguments_of(old)
    if several is not None and not as_statements and (len(several) > 1 or isinstance(several[0], ast.keyword)):
        readings.append(several)
    if not readings:
        raise BadInput(f"planting in {where}", found=f"{first_line(old)!r} is not whole", expected=WHOLE)
    return readings


def _statements(new: str) -> tuple[ast.stmt, ...] | None:
    """The new text if it can only be statements; None: an expression, arguments, or no Python."""
    body = body_of(new)
    single = body is not None and len(body) == 1 and isinstance(body[0], ast.Expr | ast.Assign)
    return None if body is None or single or arguments_of(new) else body


def _piece(match: Match, new: str, statements: tuple[ast.stmt, ...] | None, where: str) -> tuple[ast.AST, ...]:
    """The new text, parsed like the piece that it replaces."""
    piece: tuple[ast.AST, ...] | None = statements
    if isinstance(match.nodes[0], ast.stmt):
        piece = body_of(new)
    elif match.field == "arguments":
        piece = arguments_of(new)
    elif piece is None:
        body = body_of(new)
        piece = (body[0].value,) if body and len(body) == 1 and isinstance(body[0], ast.Expr) else None
    if piece is None:
        kind = "statements" if isinstance(match.nodes[0], ast.stmt) else (
            "arguments of a call" if match.field == "arguments" else "an expression")  # fmt: skip
        raise BadInput(f"planting in {where}", found=f"the new text {first_line(new)!r} is not whole", expected=kind)
    return piece


@contextmanager
def _in_its_place(match: Match, piece: tuple[ast.AST, ...]) -> Iterator[None]:
    """The tree contains the piece within the block, and is restored afterwards."""
    fields = ("args", "keywords") if match.field == "arguments" else (match.field,)
    before = {field: getattr(match.parent, field) for field in fields}
    try:
        if match.field == "arguments":
            assert isinstance(match.parent, ast.Call)
            after = _spliced(given(match.parent), match.nodes, piece)
            match.parent.args = [one for one in after if isinstance(one, ast.expr)]
            match.parent.keywords = [one for one in after if isinstance(one, ast.keyword)]
        elif isinstance(before[match.field], list):
            setattr(match.parent, match.field, _spliced(before[match.field], match.nodes, piece))
        else:
            setattr(match.parent, match.field, piece[0])
        yield
    finally:
        for field, value in before.items():
            setattr(match.parent, field, value)


def _equal(one: Any, other: Any) -> bool:
    """Whether two trees have equal dumps: positions do not count, all else does."""
    if type(one) is not type(other):
        return False
    if isinstance(one, ast.AST):
        return all(_equal(getattr(one, field, None), getattr(other, field, None)) for field in one._fields)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def _spliced(nodes: Sequence[ast.AST], run: tuple[ast.AST, ...], piece: tuple[ast.AST, ...]) -> list[ast.AST]:
    begin = next(place for place, node in enumerate(nodes) if node is run[0])
    return [*nodes[:begin], *piece, *nodes[begin + len(run) :]]


def _candidates(text: str, match: Match, new: str) -> Iterator[str]:
    """The text with the new piece in it: as it is, or in brackets if its surroundings bind closer."""
    (line, column), bare = start(match.nodes[0]), dedented(new)
    before = text.encode().splitlines()[line - 1][:column].decode()
    if isinstance(match.nodes[0], ast.stmt):
        fitted = [indented(bare, before[: len(before) - len(before.lstrip())])]
    else:
        bare = bare.strip().removesuffix(",") if match.field == "arguments" else bare.strip()
        fitted = [bare, f"({bare})"]
    for one in fitted:
        yield spliced_text(text, (line, column), match.nodes[-1], one)


def spliced_text(text: str, begin: tuple[int, int], last: ast.AST, new: str) -> str:
    """Replace the text from a line and a byte of it to the end of a node. A tree counts in bytes."""
    assert isinstance(last, ast.stmt | ast.expr | ast.keyword)
    assert last.end_lineno is not None and last.end_col_offset is not None
    source, begins = text.encode(), [0]
    for line in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    first, end = begins[begin[0] - 1] + begin[1], begins[last.end_lineno - 1] + last.end_col_offset
    return (source[:first] + new.encode() + source[end:]).decode()


def indented(text: str, margin: str) -> str:
    """Add a margin before every line except the first, and except lines that begin inside a string."""
    inside = {
        line
        for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant | ast.JoinedStr)
        for line in range(node.lineno + 1, (node.end_lineno or node.lineno) + 1)
    }  # fmt: skip
    return "\n".join(
        line if number == 1 or number in inside or not line else margin + line
        for number, line in enumerate(text.split("\n"), start=1)
    )


def wrapped(text: str, wrap: Wrap) -> str:
    """Wrap a function of this text, so that its arguments or its result are changed. Refuses unless it is there once.

    The function keeps its name, its parameters and its decorators, so that every caller calls the wrapped one.
    """
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
    around = _around(function, _whole_statements(wrap.arguments, field), _whole_statements(wrap.result, field))
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


def _whole_statements(text: str, field: str) -> tuple[ast.stmt, ...]:
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
