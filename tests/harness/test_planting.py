"""Faults are pieces of syntax: found and planted alike however the source is written.

Leaves out: what the faults do (`test_faults.py`).
"""

import ast
import io
import tokenize
from collections.abc import Callable
from functools import cache, lru_cache

import pytest

from instep_proof.faults import plant
from instep_proof.faults.catalogue import FAMILIES, by_id
from instep_proof.faults.catalogue.fault import Edit, Wrap
from instep_proof.faults.syntax_edit import replaced, same
from instep_reference.contract.errors import BadInput
from support.running.covering import few
from support.wrong.harmless import HARMLESS

EVERY = {one.id: one.edits for one in (*by_id().values(), *HARMLESS)}


@cache
def source(file: str) -> str:
    package, _, rest = file.partition("/")
    return (plant.source(package) / rest).read_text()


@cache
def tree(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def documented(file: str) -> str:
    """All of it on the fewest lines, without comments, and with a docstring in every function and class."""
    tree = ast.parse(source(file))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is None:
            node.body.insert(0, ast.Expr(ast.Constant("A docstring.")))
    return ast.unparse(ast.fix_missing_locations(tree))


@cache
def broken_up(file: str) -> str:
    """A new line, with a comment, after every opening bracket and every comma in brackets."""
    lines, breaks, depth, string = source(file).splitlines(keepends=True), [], 0, 0
    for token in tokenize.generate_tokens(io.StringIO(source(file)).readline):
        kind = tokenize.tok_name[token.type]
        string += (kind == "FSTRING_START") - (kind == "FSTRING_END")
        if kind == "OP" and not string:
            depth += (token.string in "([{") - (token.string in ")]}")
            if depth and token.string in "([{,":
                breaks.append(token.end)
    for line, column in reversed(breaks):
        text = lines[line - 1]
        lines[line - 1] = f"{text[:column]}  # why\n {text[column:]}"
    return "".join(lines)


def planted(edits: tuple[Edit | Wrap, ...], written: Callable[[str], str]) -> dict[str, str]:
    """File -> its text with the edits, which are planted one after another."""
    texts: dict[str, str] = {}
    for edit in edits:
        texts[edit.file] = plant.edited(texts.get(edit.file, written(edit.file)), edit)
    return texts


FORMS = (documented, broken_up)


@lru_cache(maxsize=1)  # both forms of one fault are tested in turn
def planted_here(name: str) -> dict[str, ast.Module]:
    here = {file: ast.parse(text) for file, text in planted(EVERY[name], source).items()}
    assert here, "a fault has edits"
    for file, changed in here.items():
        assert not same(changed, tree(source(file))), f"{file}: the edit changes nothing"
    return here


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, "harmless"])
def test_every_fault_is_planted_in_the_source_of_today(family: str) -> None:
    for fault in FAMILIES.get(family, HARMLESS):
        planted_here(fault.id)


@few(16)
@pytest.mark.slow
@pytest.mark.parametrize("written", FORMS)
@pytest.mark.parametrize("name", EVERY)
def test_a_fault_is_planted_alike_however_the_source_is_written(name: str, written: Callable[[str], str]) -> None:
    here, there = planted_here(name), planted(EVERY[name], written)
    assert all(same(ast.parse(there[file]), changed) for file, changed in here.items())


@pytest.mark.parametrize("written", FORMS)
def test_a_source_that_is_written_otherwise_is_the_same_program(written: Callable[[str], str]) -> None:
    for file in {edit.file for edits in EVERY.values() for edit in edits}:
        assert written(file) != source(file) and same(tree(written(file)), tree(source(file))), file


TEXT = '''"""A file."""
import math


class Pool:
    """Of units."""

    def take(self, unit, *, copy=False):
        """One of them."""
        size = ("ä" + str(unit)) * 2; self.last = unit  # both
        if copy:
            return self.kept(unit, size=size, to=(unit, -1))
        return self.kept(
            unit,  # as it is
            size=size + "x",
        )

    @property
    def empty(self):
        return not self.units
'''


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("str(unit)", "str(-unit)", '        size = ("ä" + str(-unit)) * 2; self.last = unit  # both'),
        ("'ä' + str(unit)", "'b'", "        size = ('b') * 2; self.last = unit  # both"),
        ("self.last=unit", "self.last = None", '        size = ("ä" + str(unit)) * 2; self.last = None  # both'),
        ("unit, size=size,", "unit, size=0,", "            return self.kept(unit, size=0, to=(unit, -1))"),
        ("unit, size=size,", "unit", "            return self.kept(unit, to=(unit, -1))"),
        ("to=(unit, -1)", "", None),
        ("size + 'x'", "size if copy else ''", "            size=size if copy else '',"),
        ("not self.units", "True\n", "        return True"),
        ("    if copy:\n        return self.kept(unit, size=size, to=(unit, -1))\n", "while copy:\n    pass\n",
         "        while copy:"),
        ("return self.kept(unit, size=size + 'x')", "kept = '''\nas it\n  is'''\nreturn kept", "  is'''"),
        ("@property\ndef empty(self): return not self.units", "empty = None", "    empty = None"),
        ("class Pool:\n    def take(self, unit, *, copy=False): pass", "", None),
    ],
)  # fmt: skip
def test_a_piece_is_replaced_and_the_rest_stays(old: str, new: str, line: str | None) -> None:
    if line is None:
        with pytest.raises(BadInput):
            replaced(TEXT, old, new, "pool.py")
        return
    found = replaced(TEXT, old, new, "pool.py").splitlines()
    assert line in found
    removed = [each for each in TEXT.splitlines() if each not in found]
    assert removed and len(removed) <= 4, removed


def test_a_function_is_found_whether_it_has_a_docstring_or_not() -> None:
    old = "def take(unit):\n    return unit\n"
    for text in (old, "def take(unit):\n  '''One of them.'''\n  return (unit)\n"):
        assert same(ast.parse(replaced(text, old, "def take(unit):\n    return 0\n", "x")),
                    ast.parse("def take(unit):\n    return 0"))  # fmt: skip
    with pytest.raises(BadInput, match="stands there 0 times"):
        replaced("def take(unit):\n    return 'One of them.'\n", old, "take = 0", "x")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("unit", "0", r"'unit' stands there 5 times, in lines 10, 10, 12, 12, 14"),
        ("nobody", "0", "'nobody' stands there 0 times.*expected exactly once.*move the fault's text with it"),
        ("if copy:", "if not copy:", "'if copy:' is not whole, expected whole statements, one expression"),
        ("self.kept(unit,", "0", "is not whole"),
        ("not self.units", "if True", "the new text 'if True' is not whole, expected an expression"),
        ("size = ('ä' + str(unit)) * 2\nself.next = unit\n", "pass",
         "stands there 0 times: no statement of it is 'self.next = unit'"),
        ("return not self.units", "", "cannot take ''"),
        ("self.last = unit", "while True:\n    pass", "line 10 cannot take 'while True:'.*expected a piece that"),
    ],
)  # fmt: skip
def test_unplantable_edit_is_refused_with_a_reason(old: str, new: str, says: str) -> None:
    with pytest.raises(BadInput, match=rf"planting in pool\.py.*{says}"):
        replaced(TEXT, old, new, "pool.py")


def test_a_file_that_is_no_python_is_refused() -> None:
    with pytest.raises(BadInput, match=r"planting in pool\.py: found a file that is no Python"):
        replaced("def", "x", "y", "pool.py")
