"""Draw faults: seeded small edits of operators, constants, indices and comparisons.

A file is edited if a fault of the built-in catalogue edits it; the drawn one gets the trace and the options of such a
fault, so its code mostly runs. Leaves out: texts of errors, annotations, kernels, and the judgement of what is found.
"""

import ast
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec

from instep.atomic_write import write_atomically
from instep.options import OPTIONS
from instep.setting import Setting
from instep_reference.contract.errors import BadInput

from .catalogue import FAMILIES
from .outside_catalogue import OutsideEdit, OutsideFault
from .plant import source

PACKAGE = "instep_optimized"
QUICK = ("ledger", "plain")  # op sets that run in seconds without a GPU
# Parts of a tree that are no computation.
SKIPPED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.AnnAssign)
OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "//", ast.BitAnd: "|", ast.BitOr: "&",
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.And: "or", ast.Or: "and",
    ast.In: "not in", ast.NotIn: "in",
}
OTHER_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "cummax": "cummin", "amax": "amin"}


class Mutation(NamedTuple):
    """One edit: the bytes from `begin` to `end` of a text become `new`. line, what: for the sentence"""

    kind: str
    begin: int
    end: int
    new: str
    line: int
    what: str


def write_catalogue(folder: Path, count: int, seed: int) -> Path:
    """Draw faults and write them to a file of a catalogue, `drawn-SEED.json`."""
    drawn = list(draw(count, seed))
    if len(drawn) < count:
        raise BadInput("--draw", found=count, expected=f"at most {len(drawn)}, the edits that there are")
    file = folder / f"drawn-{seed}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput("--catalogue", found=f"{folder}: {error.strerror}", expected="a folder") from None
    write_atomically({file: msgspec.json.format(msgspec.json.encode(drawn), indent=1) + b"\n"})
    return file


def draw(count: int, seed: int) -> Iterator[OutsideFault]:
    """Draw different faults: kinds of edits in turns, an edit of any file, and a trace with a setting of the file."""
    random, root, how = Random(seed), source(PACKAGE).parent, settings_of_files()
    texts = {file: (root / file).read_text() for file in sorted(how)}
    for number, (one, edit) in enumerate(edits_in_turns(texts, seed), start=1):
        if number > count:
            return
        trace, setting = random.choice(how[edit.file])
        options = {name: value for name in OPTIONS if (value := getattr(setting, name)) != getattr(Setting(), name)}
        what = f"{edit.file} line {one.line}: {one.what}"
        yield OutsideFault(f"drawn-{seed}-{number}", what, (edit,), trace, options)


def edits_in_turns(texts: Mapping[str, str], seed: int) -> Iterator[tuple[Mutation, OutsideEdit]]:
    """Draw the edits of several files, one of each kind in turns. texts: file, package first -> text

    An edit keeps its rank in the draw of a seed when other lines change.
    """
    kinds: dict[str, list[tuple[bytes, str, Mutation]]] = {}
    for file, text in texts.items():
        for one in mutations(text):
            kinds.setdefault(one.kind, []).append((_rank(seed, file, text.encode(), one), file, one))
    for several in kinds.values():
        several.sort()
    for drawn in (each for turn in zip_longest(*kinds.values()) for each in turn if each is not None):
        _, file, one = drawn
        if (edit := exact_edit(file, texts[file], one)) is not None:
            yield one, edit


def _rank(seed: int, file: str, text: bytes, one: Mutation) -> bytes:
    """Random bytes of an edit, derived from its line alone and the number of equal lines before it."""
    begin = text.rfind(b"\n", 0, one.begin) + 1
    line = text[begin : text.find(b"\n", one.begin)]
    what = seed, file, line, text.count(b"\n" + line + b"\n", 0, begin), one.begin - begin, one.new
    return sha256(repr(what).encode()).digest()


def settings_of_files() -> dict[str, list[tuple[str, Setting]]]:
    """Map each file that a quick fault of the catalogue edits to the traces and settings of these faults."""
    found: dict[str, list[tuple[str, Setting]]] = {}
    for faults in FAMILIES.values():
        for fault in faults:
            if fault.how.ops in QUICK and fault.relation is None:
                for edit in fault.edits:
                    pair = fault.trace, fault.how
                    if edit.file.startswith(f"{PACKAGE}/") and pair not in found.setdefault(edit.file, []):
                        found[edit.file].append(pair)
    return {file: pairs for file, pairs in found.items() if pairs}


def mutations(text: str) -> Iterator[Mutation]:
    """Every small edit of the functions of a text, in its order."""
    lines = [0]
    for line in text.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))

    def span(node: Any) -> tuple[int, int]:
        return lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset

    tree = ast.parse(text)
    indices = {below for node in ast.walk(tree) if isinstance(node, ast.Subscript) for below in ast.walk(node.slice)}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for statement in function.body:
                for node in _computing(statement):
                    yield from _of_node(node, text.encode(), span, "index" if node in indices else "constant")


def _computing(node: ast.AST) -> Iterator[ast.AST]:
    """The node and those below it that compute something; functions inside it have their own turn."""
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    asserts = isinstance(node, ast.keyword) and node.arg == "strict"  # of `zip`
    if text or asserts or isinstance(node, (*SKIPPED, ast.FunctionDef, ast.ClassDef)):
        return
    yield node
    for below in ast.iter_child_nodes(node):
        yield from _computing(below)


def _of_node(
    node: ast.AST, text: bytes, span: Callable[[Any], tuple[int, int]], constant: str
) -> Iterator[Mutation]:
    match node:
        case ast.BinOp(left=left, op=op, right=right):
            yield from _between("operator", left, op, right, text, span)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            yield from _between("comparison", left, op, right, text, span)
        case ast.BoolOp(op=op, values=[left, right]):
            yield from _between("condition", left, op, right, text, span)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            (begin, end), inner = span(node), span(operand)
            kept = text[inner[0] : inner[1]].decode()
            yield Mutation("condition", begin, end, f"({kept})", node.lineno, f"`not {kept}` is `{kept}`")
        case ast.Constant(value=bool(value)):
            yield Mutation("condition", *span(node), str(not value), node.lineno, f"`{value}` is `{not value}`")
        case ast.Constant(value=int(value)):
            for other in (value + 1, value - 1):
                yield Mutation(constant, *span(node), f"({other})" if other < 0 else str(other), node.lineno,
                               f"`{value}` is `{other}`")  # fmt: skip
        case ast.Call(func=ast.Name(id=name) as called) if name in OTHER_CALLS:
            yield Mutation("call", *span(called), OTHER_CALLS[name], node.lineno, f"`{name}` is `{OTHER_CALLS[name]}`")
        case ast.Call(func=ast.Attribute(attr=name) as called) if name in OTHER_CALLS:
            _, end = span(called)
            yield Mutation("call", end - len(name), end, OTHER_CALLS[name], node.lineno,
                           f"`{name}` is `{OTHER_CALLS[name]}`")  # fmt: skip


def _between(
    kind: str, left: ast.AST, op: ast.AST, right: ast.AST, text: bytes, span: Callable[[Any], tuple[int, int]]
) -> Iterator[Mutation]:
    """The edit of an operator: it is in the text between its two sides, apart from brackets and comments."""
    new, begin, end = OPERATORS.get(type(op)), span(left)[1], span(right)[0]
    gap = text[begin:end].decode()
    words = gap.replace("(", " ").replace(")", " ").split()
    if new is None or not words or len(words) > 2 or "#" in gap:
        return
    old = " ".join(words)
    at = gap.find(words[0])
    length = gap.find(words[-1], at) + len(words[-1]) - at
    yield Mutation(kind, begin + at, begin + at + length, new, getattr(left, "end_lineno", 0), f"`{old}` is `{new}`")


def exact_edit(file: str, text: str, one: Mutation) -> OutsideEdit | None:
    """The edit with enough whole lines around it for its text to be there once. None: it is no other program."""
    source, lines = text.encode(), text.encode().splitlines(keepends=True)
    after = (source[: one.begin] + one.new.encode() + source[one.end :]).decode()
    try:
        if ast.dump(ast.parse(after)) == ast.dump(ast.parse(text)):
            return None
    except SyntaxError:
        return None
    first, last = source.count(b"\n", 0, one.begin), source.count(b"\n", 0, one.end)
    while text.count(old := b"".join(lines[first : last + 1]).decode()) > 1 and first:
        first -= 1
    begins = sum(map(len, lines[:first]))
    ends = len(source) - begins - len(old.encode())
    return OutsideEdit(file, old, after.encode()[begins : len(after.encode()) - ends].decode())
