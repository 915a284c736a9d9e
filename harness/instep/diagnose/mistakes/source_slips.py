"""Slips in a function of the reference: its source with one operator, number or function changed, as code.

Leaves out: where such code is run (`formula_slips.py`, `step_controller.py`).
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import accumulate, islice
from types import CodeType, FunctionType
from typing import NamedTuple

OPERATORS: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.Add, ast.Div), ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult, ast.Mod), ast.Mod: (ast.FloorDiv,),
}  # fmt: skip
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
FUNCTIONS = {
    "mean": "sum", "sum": "mean", "sin": "cos", "cos": "sin", "rsqrt": "sqrt", "silu": "sigmoid", "sigmoid": "tanh",
    "softplus": "relu", "triu": "tril", "min": "max", "max": "min", "amax": "amin", "amin": "amax", "any": "all",
    "all": "any", "exp": "exp2",
}  # fmt: skip


SYMBOLS: dict[type[ast.operator], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%",
}  # fmt: skip
SHOWN = 80  # characters of a formula that are printed at most


class Slip(NamedTuple):
    """A changed function: the right and the wrong form of the expression that differs, and the code with the change."""

    right: str
    wrong: str
    code: CodeType


@contextmanager
def slipped(function: FunctionType, slip: Slip) -> Iterator[None]:
    """Let every caller of a function run its changed code."""
    right, function.__code__ = function.__code__, slip.code
    try:
        yield
    finally:
        function.__code__ = right


@cache
def of_function(function: FunctionType) -> tuple[Slip, ...]:
    """Every slip of a function, each program once; none in a `while`."""
    text = textwrap.dedent(inspect.getsource(function))
    whole = ast.parse(text)
    # A changed condition of a `while` may never end.
    endless = {below for loop in ast.walk(whole) if isinstance(loop, ast.While) for below in ast.walk(loop)}
    found, seen = list[Slip](), {ast.unparse(whole)}

    def add(right: ast.AST, wrong: ast.AST, program: str) -> None:
        if program not in seen and (code := _code(program, function)) is not None:
            found.append(Slip(ast.unparse(right), ast.unparse(wrong), code))
        seen.add(program)

    for number, node in enumerate(ast.walk(whole)):
        for change in () if node in endless else range(len(others(node))):
            tree = ast.parse(text)
            parents = {below: above for above in ast.walk(tree) for below in ast.iter_child_nodes(above)}
            changed = next(islice(ast.walk(tree), number, None))
            top, right = _shown(changed, parents), ast.unparse(_shown(changed, parents))
            other = others(changed)[change]
            _replace(parents[changed], changed, other)
            add(ast.parse(right), other if top is changed else top, ast.unparse(tree))
    parents = {below: above for above in ast.walk(whole) for below in ast.iter_child_nodes(above)}
    for node in (each for each in ast.walk(whole) if isinstance(each, ast.BinOp) and each not in endless):
        for top, wrong, program in _other_symbols(text, node, _shown(node, parents)):
            add(top, wrong, program)
    return tuple(found)


def _other_symbols(text: str, node: ast.BinOp, top: ast.AST) -> Iterator[tuple[ast.AST, ast.AST, str]]:
    """Write another symbol of an operator into the text, which also changes what it binds: a - b * c is a - b + c."""
    lines = [0, *accumulate(len(line) for line in text.encode().splitlines(keepends=True))]

    def at(line: int, column: int) -> int:
        return lines[line - 1] + column

    source, old = text.encode(), SYMBOLS.get(type(node.op), "").encode()
    begin, end = (at(node.left.end_lineno, node.left.end_col_offset),  # type: ignore[arg-type]
                  at(node.right.lineno, node.right.col_offset))  # fmt: skip
    first, last = (at(top.lineno, top.col_offset), at(top.end_lineno, top.end_col_offset))  # type: ignore[attr-defined]
    for other in OPERATORS.get(type(node.op), ()) if old else ():
        new = SYMBOLS[other].encode()
        gap = source[begin:end].replace(old, new)
        program = source[:begin] + gap + source[end:]
        part = program[first : last + len(new) - len(old)].decode()
        try:
            yield top, ast.parse(part), ast.unparse(ast.parse(program))
        except SyntaxError:  # a part of several lines, without its brackets
            continue


def others(node: ast.AST) -> list[ast.AST]:
    """Return the expressions that a slip may put in the place of one."""
    match node:
        case ast.BinOp(left=left, op=op, right=right):
            made: list[ast.AST] = [ast.BinOp(left, other(), right) for other in OPERATORS.get(type(op), ())]
            made += _without_brackets(left, op, right)
            return made + ([left, right] if isinstance(op, ast.Add | ast.Sub | ast.Mult | ast.Div) else [])
        case ast.UnaryOp(op=ast.USub(), operand=ast.Name() | ast.BinOp() | ast.Call() as operand):
            return [operand]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return [operand]
        case ast.BoolOp(op=op, values=[left, right]):
            return [ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), [left, right]), left, right]
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
            return [ast.Compare(left, [COMPARISONS[type(op)]()], [right])]
        case ast.Constant(value=bool(value)):
            return [ast.Constant(not value)]
        case ast.Constant(value=int(value)):
            return [ast.Constant(value + 1), ast.Constant(value - 1)]
        case ast.Call(func=ast.Attribute(value=owner, attr=name), args=given, keywords=named) if name in FUNCTIONS:
            return [ast.Call(ast.Attribute(owner, FUNCTIONS[name]), given, named)]
    return []


def _without_brackets(left: ast.expr, op: ast.operator, right: ast.expr) -> list[ast.AST]:
    """a * (b + c) as a * b + c, and (a + b) * c as a + b * c."""
    sums, made = ast.Add | ast.Sub, list[ast.AST]()
    if isinstance(op, ast.Mult | ast.Div):
        if isinstance(right, ast.BinOp) and isinstance(right.op, sums):
            made.append(ast.BinOp(ast.BinOp(left, op, right.left), right.op, right.right))
        if isinstance(left, ast.BinOp) and isinstance(left.op, sums):
            made.append(ast.BinOp(left.left, left.op, ast.BinOp(left.right, op, right)))
    return made


def _shown(node: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> ast.AST:
    """The largest expression around a node that is short enough to be printed; of `x += 1` the statement."""
    around = ast.expr | ast.AugAssign | ast.keyword
    while isinstance(above := parents[node], around) and len(ast.unparse(above)) <= SHOWN:
        node = above
    return node


def _replace(parent: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for name, value in ast.iter_fields(parent):
        if value is old:
            setattr(parent, name, new)
        elif isinstance(value, list):
            setattr(parent, name, [new if one is old else one for one in value])


def _code(program: str, function: FunctionType) -> CodeType | None:
    """The code of a changed function; None if it cannot take the place of the right one."""
    method = "__class__" in function.__code__.co_freevars  # it calls `super()`
    try:
        made = compile(f"class _:\n{textwrap.indent(program, '    ')}" if method else program, "<slip>", "exec")
    except (SyntaxError, ValueError):
        return None
    code = next(one for one in _codes(made) if one.co_name == function.__name__)
    return code if code.co_freevars == function.__code__.co_freevars else None


def _codes(code: CodeType) -> Iterator[CodeType]:
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield one
            yield from _codes(one)
