"""docs/architecture.md names files that exist, and classes and functions that are in the files named with them.

The same of the table of files in harness/README.md, and its example runs. Leaves out: whether the sentences are right.
"""

import ast
import re
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[1]
PAGE = (TOP / "docs" / "architecture.md").read_text()
HARNESS = (TOP / "harness" / "README.md").read_text()
# `harness` is for files of instep_proof and instep_speed, which are named with their package.
PACKAGES = ("harness/instep", "optimized/instep_optimized", "reference/instep_reference", "harness")
FILE = re.compile(r"[\w./]+\.py")
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?")
OPENS = re.compile(r"^(?:- |\d+\. |\| |$)", re.MULTILINE)  # a bullet, a row of a table, an empty line


def parts() -> list[tuple[str, str]]:
    """Every bullet, row and paragraph of the page, with the package of its section ("": any of them)."""
    found = []
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE):
        heading = section.partition("\n")[0]
        package = next((name for name in PACKAGES if f"({name.split('/')[0]})" in heading), "")
        opened = [at.start() for at in OPENS.finditer(section)]
        found += [(package, section[begin:end]) for begin, end in zip(opened, [*opened[1:], None], strict=True)]
    return found


def code(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


def files(package: str, text: str) -> dict[str, Path | None]:
    """The files that a part names, by their words; None: there is no such file."""
    roots = (package,) if package else PACKAGES
    return {
        word: next((TOP / root / word for root in roots if (TOP / root / word).is_file()), None)
        for word in code(text) if FILE.fullmatch(word)
    }  # fmt: skip


def defined(path: Path) -> set[str]:
    """Names that a file defines: at its top, fields and methods of its classes, with their class and without."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        mine = _names(node)
        found |= mine
        if isinstance(node, ast.ClassDef):
            inner = set().union(*(_names(each) for each in node.body))
            found |= inner | {f"{node.name}.{each}" for each in inner}
    return found


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


NAMED = [
    (package, word, text) for package, text in parts() for word in code(text)
    if NAME.fullmatch(word) and not FILE.fullmatch(word)
]  # fmt: skip


def test_the_page_names_files_and_code() -> None:
    assert sum(len(files(package, text)) for package, text in parts()) > 40
    assert len(NAMED) > 40


def test_every_file_exists() -> None:
    missing = [word for package, text in parts() for word, path in files(package, text).items() if path is None]
    assert not missing


@pytest.mark.parametrize(("package", "word", "text"), NAMED, ids=[word for _, word, _ in NAMED])
def test_every_name_is_in_a_file_that_is_named_with_it(package: str, word: str, text: str) -> None:
    beside = {word: path for word, path in files(package, text).items() if path is not None}
    assert any(word in defined(path) for path in beside.values()), f"{word} is in none of {sorted(beside)}"


def test_every_folder_exists() -> None:
    folders = [word for word in code(PAGE) if re.fullmatch(r"[\w/]+/[\w/]*", word)]
    assert len(folders) > 15
    assert not [word for word in folders if not any((TOP / root / word).is_dir() for root in ("", *PACKAGES))]


def test_every_file_of_the_harness_readme_exists() -> None:
    rows = [line for line in HARNESS.splitlines() if line.startswith("| `")]
    assert len(rows) > 10
    missing = []
    for row in rows:
        words, homes = code(row), (TOP / "harness" / "instep", TOP / "harness")
        roots = (*homes, *(home / words[0] for home in homes))
        paths = [word for word in words if FILE.fullmatch(word) or word.endswith("/")]
        missing += [word for word in paths if not any((at / word).exists() for at in roots)]
    assert not missing


@pytest.mark.slow
def test_the_example_of_the_harness_readme_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TOP)
    example = re.search(r"```python\n(.*?)```", HARNESS, re.DOTALL)
    assert example is not None and "assert " in example[1]
    exec(compile(example[1], "harness/README.md", "exec"), {})
