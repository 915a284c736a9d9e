"""Read in the source of a release whether an engine still calls a function: as data, nothing of it is run.

`Source(root, facts).calls("commit_fold")` returns the places that call it and that `facts` do not exclude. A condition
around a call is decided from facts (the values of names, as an option of the engine sets them), from the assignments
of the same function, and from those of an attribute in the package, if all give it one value. A condition that stays
open does not exclude the call. A call in a private function or in a package of kernels counts if that function is
called, too. `"fold(track)"` asks for calls that pass the keyword `track`. Leaves out: whether an open condition holds.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

# Parts of a path whose calls do not serve a model on a GPU: tests, benchmarks, other hardware.
ASIDE = ("test", "tests", "benchmark", "hardware_backend", "warmup")
OTHER = ("bench", "test_")  # beginnings of the names of such files
LAYERS = {True: "gdn", False: "kda"}  # by the fact `is_kda`: that of files of the other layer
KERNELS = ("kernels", "third_party", "jit_kernel")  # packages of functions that only others call
DEEPEST = 8  # callers of callers


class Open:
    """A value that is not known; SOMETHING: one that is not None."""


UNKNOWN, SOMETHING = Open(), Open()


def truth(value: object) -> bool | None:
    return None if isinstance(value, Open) else bool(value)


@dataclass(frozen=True)
class Call:
    """A place that refers to a function: its file, line and enclosing function."""

    file: str
    line: int
    inside: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f" in {self.inside}" if self.inside else "")


class Module:
    """A parsed file: each node with its parent."""

    def __init__(self, path: Path, name: str) -> None:
        self.name, self.tree = name, ast.parse(path.read_bytes())
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def above(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """(ancestor, its child on the way down), from the inside out."""
        while node in self.parents:
            above = self.parents[node]
            yield above, node
            node = above

    def function(self, node: ast.AST) -> ast.FunctionDef | None:
        return next((one for one, _ in self.above(node) if isinstance(one, ast.FunctionDef)), None)


@dataclass
class Source:
    """The Python files of a package, and what is known about the values of names."""

    root: Path
    facts: Mapping[str, object] = field(default_factory=dict)
    _modules: dict[Path, Module] = field(default_factory=dict)
    _asked: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def texts(self) -> dict[Path, str]:
        other = (*OTHER, LAYERS[bool(self.facts.get("is_kda"))])
        files = (path for path in self.root.rglob("*.py") if not _aside(path.relative_to(self.root), other))
        return {path: path.read_text(errors="replace") for path in files}

    def module(self, path: Path) -> Module:
        if path not in self._modules:
            self._modules[path] = Module(path, str(path.relative_to(self.root)))
        return self._modules[path]

    def references(self, name: str) -> Iterator[tuple[Module, ast.AST]]:
        """Uses of a name, and of the names under which files import it."""
        for path in [path for path, text in self.texts.items() if name in text]:
            module = self.module(path)
            aliases = {one.asname or one.name for node in ast.walk(module.tree) if isinstance(node, ast.ImportFrom)
                       for one in node.names if one.name == name} | {name}  # fmt: skip
            for node in ast.walk(module.tree):
                named = isinstance(node, ast.Name) and node.id in aliases
                if (named or (isinstance(node, ast.Attribute) and node.attr == name)) and isinstance(
                    node.ctx, ast.Load  # type: ignore[attr-defined]
                ):
                    yield module, node

    # Values

    def value(self, expr: ast.AST, module: Module, depth: int = 0) -> object:
        """The value of an expression, as far as it is known."""
        if depth > DEEPEST:
            return UNKNOWN
        match expr:
            case ast.Constant():
                return expr.value
            case ast.BoolOp():
                return self._joined(expr, module, depth)
            case ast.UnaryOp(op=ast.Not()):
                known = truth(self.value(expr.operand, module, depth))
                return UNKNOWN if known is None else not known
            case ast.IfExp():
                known = truth(self.value(expr.test, module, depth))
                both = [self.value(one, module, depth) for one in (expr.body, expr.orelse)]
                return both[not known] if known is not None else both[0] if both[0] is both[1] else UNKNOWN
            case ast.Compare(ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]):
                found = self.value(expr.left, module, depth)
                return UNKNOWN if found is UNKNOWN else (found is None) == isinstance(expr.ops[0], ast.Is)
            case ast.Call(func=ast.Name(id="bool"), args=[only]):
                known = truth(self.value(only, module, depth))
                return UNKNOWN if known is None else known
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str() as name), *_]):
                return self.named(name, None, module, depth)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"))):
                return SOMETHING  # a tensor
            case ast.Attribute():
                return self.named(expr.attr, None, module, depth)
            case ast.Name():
                return self.named(expr.id, module.function(expr), module, depth)
        return UNKNOWN

    def _joined(self, expr: ast.BoolOp, module: Module, depth: int) -> object:
        found = [truth(self.value(one, module, depth)) for one in expr.values]
        ends = isinstance(expr.op, ast.Or)  # the value that decides the whole
        return ends if ends in found else UNKNOWN if None in found else not ends

    def named(self, name: str, inside: ast.FunctionDef | None, module: Module, depth: int) -> object:
        """The value of a name: a fact, its only assignment in the function, or that of an attribute in the package."""
        if name in self.facts:
            return self.facts[name]
        if inside is not None:
            given = [node.value for node in ast.walk(inside) if isinstance(node, ast.Assign)
                     and [one.id for one in node.targets if isinstance(one, ast.Name)] == [name]]  # fmt: skip
            return self.value(given[0], module, depth + 1) if len(given) == 1 else UNKNOWN
        if name not in self._asked:
            self._asked[name] = UNKNOWN  # while it is looked up
            found = [self.value(node.value, where, depth + 1)
                     for node, where in self._assigned(name) if node.value is not None]  # fmt: skip
            alike = all(one is found[0] or (not isinstance(one, Open) and one == found[0]) for one in found)
            self._asked[name] = found[0] if found and alike else UNKNOWN
        return self._asked[name]

    def _assigned(self, name: str) -> Iterator[tuple[ast.Assign | ast.AnnAssign, Module]]:
        for path in [path for path, text in self.texts.items() if f".{name} =" in text or f".{name}: " in text]:
            module = self.module(path)
            for node in ast.walk(module.tree):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(
                    node, ast.AnnAssign) else []  # fmt: skip
                if any(isinstance(one, ast.Attribute) and one.attr == name for one in targets):
                    assert isinstance(node, ast.Assign | ast.AnnAssign)
                    yield node, module

    # Calls

    def excluded(self, node: ast.AST, module: Module) -> bool:
        """Whether a condition around a node, or a return before it, is known to keep it from running."""
        for above, below in module.above(node):
            if isinstance(above, ast.If | ast.IfExp):
                body = above.body if isinstance(above.body, list) else [above.body]
                if below is not above.test and truth(self.value(above.test, module)) is (below not in body):
                    return True
            if isinstance(above, ast.BoolOp) and isinstance(above.op, ast.And):
                before = above.values[: above.values.index(below)]  # type: ignore[arg-type]
                if any(truth(self.value(one, module)) is False for one in before):
                    return True
            for block in (getattr(above, name, None) for name in ("body", "orelse", "finalbody")):
                if isinstance(block, list) and below in block and any(
                    self._leaves(one, module) for one in block[: block.index(below)]
                ):  # fmt: skip
                    return True
            if isinstance(above, ast.FunctionDef):
                return False
        return False

    def _leaves(self, statement: ast.stmt, module: Module) -> bool:
        """Whether a statement is known to return or raise."""
        if isinstance(statement, ast.Return | ast.Raise):
            return True
        return isinstance(statement, ast.If) and truth(self.value(statement.test, module)) is True and any(
            self._leaves(one, module) for one in statement.body)  # fmt: skip

    def calls(self, wanted: str, depth: int = 0, seen: frozenset[str] = frozenset()) -> list[Call]:
        """The places that call a function and are not excluded. wanted: name, or name(keyword)."""
        name, _, keyword = wanted.rstrip(")").partition("(")
        found = []
        for module, node in self.references(name):
            function = module.function(node)
            inside = function.name if function else ""
            if inside == name or self.excluded(node, module) or (keyword and not _passes(node, module, keyword)):
                continue
            if _hidden(module, inside) and (
                depth >= DEEPEST or inside in seen or not self.calls(inside, depth + 1, seen | {name, inside})
            ):
                continue
            found.append(Call(module.name, node.lineno, inside))  # type: ignore[attr-defined]
        return found


def _aside(path: Path, other: tuple[str, ...]) -> bool:
    return path.name.startswith(other) or any(part in ASIDE for part in path.parts)


def _hidden(module: Module, inside: str) -> bool:
    """Whether only other code of the package calls a function: a private one, or one of a package of kernels."""
    private = inside.startswith("_") and not inside.startswith("__")
    return bool(inside) and (private or any(part in KERNELS for part in Path(module.name).parts[:3]))


def _passes(node: ast.AST, module: Module, keyword: str) -> bool:
    """Whether the call of this name passes a keyword, or keywords that only run time knows."""
    call = module.parents.get(node)
    while isinstance(call, ast.Attribute):  # name.apply(..)
        call = module.parents.get(call)
    return isinstance(call, ast.Call) and any(one.arg in (keyword, None) for one in call.keywords)
