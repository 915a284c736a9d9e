"""Compile modules with a switch at each mutant: an expression that has the mutant's value while the switch is on.

A mutated expression `x < y` becomes `__switch__(7, x < y, lambda: x <= y)`, so the switch sees whether the two values
differ. The site is the largest expression around the edit that can be computed twice. If there is none, it becomes
`(x <= y if __switch__(7) else x < y)`. Leaves out: choosing mutants, and when a switch is on (`harness_mutants.py`).
"""

import ast
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

SWITCH = "__switch__"  # a builtin
# Expressions that compute the same twice.
REPEATABLE = (
    ast.Attribute, ast.BinOp, ast.BoolOp, ast.Compare, ast.Constant, ast.Dict, ast.DictComp, ast.FormattedValue,
    ast.GeneratorExp, ast.IfExp, ast.JoinedStr, ast.List, ast.ListComp, ast.Name, ast.Set, ast.SetComp, ast.Slice,
    ast.Starred, ast.Subscript, ast.Tuple, ast.UnaryOp,
)  # fmt: skip
CALLS = {
    "abs", "all", "any", "bool", "dict", "enumerate", "float", "frozenset", "getattr", "hasattr", "int", "isinstance",
    "len", "list", "max", "min", "range", "reversed", "set", "sorted", "str", "sum", "tuple", "zip",
}  # fmt: skip
METHODS = {
    "abs", "all", "amax", "amin", "any", "bool", "count", "cummax", "cummin", "dim", "double", "endswith", "float",
    "flatten", "get", "index", "isfinite", "isnan", "item", "items", "keys", "max", "mean", "min", "numel",
    "removeprefix", "removesuffix", "reshape", "size", "split", "startswith", "sum", "tolist", "union", "values",
}  # fmt: skip


class NoSite(Exception):
    """The edit changes something other than an expression of a function."""


def install(texts: Mapping[Path, str], mutated: Sequence[tuple[Path, str]]) -> None:
    """Let later imports of these files have a switch for each mutated text, by its number in `mutated`."""
    sys.meta_path.insert(0, _Finder(switched(texts, mutated)))


def switched(texts: Mapping[Path, str], mutated: Sequence[tuple[Path, str]]) -> dict[str, CodeType]:
    """Compile the files with switches."""
    trees = {file: ast.parse(text) for file, text in texts.items()}
    sites: dict[Path, dict[ast.AST, list[tuple[int, ast.expr]]]] = {file: {} for file in texts}
    for number, (file, text) in enumerate(mutated):
        here, there = site(trees[file], texts[file], text)
        sites[file].setdefault(here, []).append((number, there))
    trees = {file: _Switches(sites[file]).visit(tree) for file, tree in trees.items()}
    return {str(file): compile(ast.fix_missing_locations(tree), str(file), "exec", dont_inherit=True)
            for file, tree in trees.items()}  # fmt: skip


def site(tree: ast.Module, text: str, mutated: str) -> tuple[ast.expr, ast.expr]:
    """The expression that a mutant changes, in the tree of a text and in that of the mutated text."""
    at = next(index for index, (old, new) in enumerate(zip(text, mutated, strict=False)) if old != new)
    line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at) - 1
    pairs = [*_path(_statement(tree, line, column), _statement(ast.parse(mutated), line, column))]
    several = [(here, there) for here, there in pairs if isinstance(here, ast.expr) and isinstance(there, ast.expr)
               and isinstance(getattr(here, "ctx", ast.Load()), ast.Load)  # a value, and no target
               and not isinstance(here, ast.Starred | ast.Slice | ast.FormattedValue)]  # parts of an expression
    if not several or any(isinstance(here, ast.pattern) for here, _ in pairs):
        raise NoSite
    good = [pair for pair in several if all(map(repeatable, pair))]
    return good[0] if good and good[-1] == several[-1] else several[-1]


def _statement(tree: ast.Module, line: int, column: int) -> ast.stmt:
    """The innermost statement at a position."""
    begun = (node for node in ast.walk(tree) if isinstance(node, ast.stmt)
             and (node.lineno, node.col_offset) <= (line, column))  # fmt: skip
    return max(begun, key=lambda node: (node.lineno, node.col_offset))


def _path(here: ast.AST, there: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """The nodes from a statement down to the smallest that contains all differences between two trees."""
    while type(here) is type(there):
        ours, theirs = [*ast.iter_child_nodes(here)], [*ast.iter_child_nodes(there)]
        if len(ours) != len(theirs):
            return
        differ = [pair for pair in zip(ours, theirs, strict=True) if ast.dump(pair[0]) != ast.dump(pair[1])]
        if len(differ) != 1 or not isinstance(differ[0][0], ast.expr | ast.comprehension | ast.keyword | ast.pattern
                                              | ast.match_case | ast.withitem):  # fmt: skip
            return
        here, there = differ[0]
        yield here, there


def repeatable(node: ast.AST) -> bool:
    """Whether an expression can be computed twice: it calls only functions that change nothing."""
    if isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name not in CALLS and method not in METHODS and not (isinstance(node.func, ast.Attribute) and isinstance(
                node.func.value, ast.Name) and node.func.value.id == "math"):  # fmt: skip
            return False
    elif isinstance(node, ast.expr) and not isinstance(node, REPEATABLE):
        return False
    return all(repeatable(below) for below in ast.iter_child_nodes(node) if not isinstance(below, ast.expr_context))


class _Switches(ast.NodeTransformer):
    """sites: expression -> the numbers of its mutants, and what it is in each"""

    def __init__(self, sites: Mapping[ast.AST, Sequence[tuple[int, ast.expr]]]) -> None:
        self.sites = sites

    def visit(self, node: ast.AST) -> ast.AST:
        new = self.generic_visit(node)
        for number, other in self.sites.get(node, ()):
            assert isinstance(new, ast.expr)
            called, which = ast.Name(SWITCH, ast.Load()), ast.Constant(number)
            if repeatable(other):
                none = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
                new = ast.Call(called, [which, new, ast.Lambda(none, other)], [])
            else:
                new = ast.IfExp(ast.Call(called, [which], []), other, new)
            ast.copy_location(new, node)
        return new


class _Finder:
    """Finds the modules that are compiled here."""

    def __init__(self, codes: Mapping[str, CodeType]) -> None:
        self.codes = codes

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name.startswith("instep.") else None
        if spec is None or spec.origin not in self.codes:
            return None
        spec.loader = _Loader(name, spec.origin, self.codes[spec.origin])
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, code: CodeType) -> None:
        super().__init__(name, path)
        self.code = code

    def get_code(self, fullname: str) -> CodeType:
        return self.code


def equal(one: object, other: object) -> bool:
    """Whether two values are the same for all code that reads them; False if that is unknown."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return [*one] == [*other] and all(map(equal, one.values(), other.values()))
    try:
        if hasattr(one, "untyped_storage"):  # a tensor
            return _equal_tensors(one, other)
        return bool(one == other)
    except Exception:
        return False


def _equal_tensors(one: object, other: object) -> bool:
    alike = one.dtype == other.dtype and one.shape == other.shape  # type: ignore[attr-defined]
    return bool(alike and ((one == other) | ((one != one) & (other != other))).all())  # type: ignore[attr-defined]
