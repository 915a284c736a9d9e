"""Find a piece of Python in a syntax tree, and replace it; or wrap a function. Everything outside keeps its text.

A piece is a run of whole statements, one expression, or a run of arguments of a call. Line breaks, quotes, comments
and the docstrings of functions and classes do not matter to the search.
Leaves out: the pieces (`catalogue/`), and copies of the source (`plant.py`).
"""

import ast
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from instep_reference.contract.errors import BadInput

from .catalogue.fault import Wrap

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


WHOLE = "whole statements, one expression, or arguments of a call"
RIGHT, RESULT = "right", "result"  # the original function; its result


def replaced(text: str, old: str, new: str, where: str) -> str:
    """Replace `old` by `new`. Refuses unless `old` is in the syntax tree exactly once."""
    field, was, now = f"planting in {where}", readings(old), readings(new)
    tree = parsed(text, field)
    if not any(was.values()):
        raise BadInput(field, found=f"{first_line(old)!r} is not whole", expected=WHOLE)
    kinds = [kind for kind in was if kind in now]
    if not kinds:
        raise BadInput(field, found=f"the new text {first_line(new)!r} is not whole", expected=next(iter(was)))
    if EXPRESSION in kinds:  # a statement or an argument that is the expression is no further match
        kinds = [kind for kind in kinds if kind == EXPRESSION or len(was[kind]) > 1]
    matches = [(match, now[kind]) for kind in kinds for match in found(tree, kind, was[kind])]
    if len(matches) != 1:
        at = sorted(match.line for match, _ in matches)
        lines = f", in lines {', '.join(map(str, at))}" if at else missing(tree, old)
        raise BadInput(
            field, found=f"{first_line(old)!r} stands there {len(matches)} times{lines}",
            expected="exactly once", hint="the source has changed: move the fault's text with it",
        )
    ((match, piece),) = matches
    with _in_its_place(match, piece):
        for candidate in _candidates(text, match, new):
            with suppress(SyntaxError):
                if same(ast.parse(candidate), tree):
                    return candidate
    raise BadInput(
        field, found=f"line {match.line} cannot take {first_line(new)!r}: the rest would change, too",
        expected="a piece that can be replaced alone", hint="let the fault's text be the whole statement",
    )


@contextmanager
def _in_its_place(match: Match, piece: tuple[ast.AST, ...]) -> Iterator[None]:
    """The tree contains the piece within the block, and is restored afterwards."""
    fields = vars(match.parent)
    before = dict(fields)
    nodes = given(match.parent) if isinstance(match.parent, ast.Call) and match.field == ARGUMENTS else (
        before[match.field])  # fmt: skip
    after: Sequence[ast.AST] = piece
    if isinstance(nodes, Sequence):
        begin = nodes.index(match.nodes[0])
        after = [*nodes[:begin], *piece, *nodes[begin + len(match.nodes) :]]
    try:
        if match.field == ARGUMENTS:
            fields["args"] = [one for one in after if isinstance(one, ast.expr)]
            fields["keywords"] = [one for one in after if isinstance(one, ast.keyword)]
        else:
            fields[match.field] = after if isinstance(nodes, Sequence) else piece[0]
        yield
    finally:
        fields.update(before)


def _candidates(text: str, match: Match, new: str) -> Iterator[str]:
    """The text with the new piece in it: as it is, or in brackets if its surroundings bind closer."""
    (line, column), bare = start(match.nodes[0]), dedented(new)
    before = text.encode().splitlines()[line - 1][:column].decode()
    if isinstance(match.nodes[0], ast.stmt):
        fitted = [indented(bare, before[: len(before) - len(before.lstrip())])]
    else:
        bare = bare.strip().removesuffix(",") if match.field == ARGUMENTS else bare.strip()
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


def _whole_statements(text: str, field: str) -> tuple[ast.AST, ...]:
    body = readings(text).get(STATEMENTS)
    if body is None:
        raise BadInput(field, found=f"{text.strip().splitlines()[0]!r} is not whole", expected="whole statements")
    return body


def _around(
    function: ast.FunctionDef, arguments: tuple[ast.AST, ...], result: tuple[ast.AST, ...]
) -> ast.FunctionDef:
    inner, around, taken = deepcopy(function), deepcopy(function), function.args
    inner.name, inner.decorator_list = RIGHT, []
    passed = [each.arg for each in (*taken.posonlyargs, *taken.args)]
    passed += [f"*{taken.vararg.arg}"] if taken.vararg else []
    passed += [f"{each.arg}={each.arg}" for each in taken.kwonlyargs]
    passed += [f"**{taken.kwarg.arg}"] if taken.kwarg else []
    (call,), (back,) = (ast.parse(text).body for text in (
        f"{RESULT} = {RIGHT}({', '.join(passed)})", f"return {RESULT}"))  # fmt: skip
    vars(around)["body"] = [inner, *arguments, call, *result, back]
    return ast.fix_missing_locations(around)
