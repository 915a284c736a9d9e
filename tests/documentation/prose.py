"""Find sentences that need a second reading: in docstrings, comments, messages, Markdown and test names.

    PYTHONPATH=tests .venv/bin/python -m documentation.prose [PATH ...]

prints every finding under the paths, and the share of sentences with a finding per folder. A finding is a hint: the
rule is that a stranger understands a sentence at first reading. A line that must keep a word because it quotes
somebody ends in `# prose: keep (SOURCE)`, or in Markdown in `<!-- prose: keep (SOURCE) -->`.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
FOLDERS = ("docs", "harness", "optimized", "reference", "tests")
FRONTED = re.compile(r"(Who|Whoever|What|Whatever|Whichever|Of|Where|Beside|Behind)\b")
WORDS = re.compile(
    r"\b(stands?|stood|told|tells|telling|said|says|saying|behind|beside|besides|anew|otherwise than|hangs? on|"
    r"comes? to|nobody'?s?|whoever|mended?|mends|by chance|is asked|are asked|was asked|asked for|is given up|"
    r"at one go|thereby|of its own|what for|the most that|the least that|as much as is|is left out|are left out|"
    r"so many|parts? with|goes? on|went on)\b",
    re.IGNORECASE,
)
FENCED = re.compile(r"```.*?```|<!-- generated.*?<!-- end -->", re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
BLOCK_END = re.compile(r"\n\s*\n|\n\s*[-*|#>]\s")
SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+")
# Python's tokenizer takes four seconds for this repository, this expression a tenth of one. It finds the same comments.
STRING_OR_COMMENT = re.compile(
    r'''"{3}(?:\\.|[^\\])*?"{3}|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|#[^\n]*''', re.DOTALL
)
KEEP_WITH_SOURCE = re.compile(r"prose: keep \([^()]+\)")
FEWEST_WORDS = 3  # of a sentence
FEWEST_IN_STRING = 5  # of a string that is a message


@dataclass(frozen=True)
class Sentence:
    """A sentence, with its first and its last line in the file."""

    first: int
    last: int
    text: str

    @property
    def marks(self) -> list[str]:
        """The words for which a reader may need a second reading."""
        found = [match[0].lower() for match in WORDS.finditer(self.text)]
        if (match := FRONTED.match(self.text)) and not self.text.endswith("?"):
            found.insert(0, f"begins with {match[0]}")
        return found


@dataclass(frozen=True)
class Finding:
    path: str
    line: int
    marks: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {', '.join(self.marks)}: {self.text[:160]}"


def read_files(top: Path = TOP) -> Iterator[Path]:
    """Every file whose prose is checked. A `LOG.md` is a diary of measurements, which is not rewritten."""
    yield from sorted(top.glob("*.md"))
    for folder in FOLDERS:
        found = (path for path in (top / folder).rglob("*") if path.suffix in (".py", ".md"))
        yield from sorted(path for path in found if path.name != "LOG.md")


def folder_of(path: str) -> str:
    """The row of the table to which a file belongs: two levels deep, three levels inside a package."""
    parts = path.split("/")
    return "/".join(parts[: min(len(parts) - 1 or 1, 3 if parts[0] in ("harness", "optimized", "reference") else 2)])


def split_sentences(text: str, line: int) -> Iterator[Sentence]:
    """The sentences of a text whose first line has this number in its file."""
    text = FENCED.sub(lambda match: "\n" * match[0].count("\n"), text)
    text = CODE.sub("CODE", text)
    for block in _split(BLOCK_END, text, 0, len(text)):
        for start, end in _split(SENTENCE_END, text, *block):
            words = text[start:end].split()
            if len(words) >= FEWEST_WORDS:
                first = line + text.count("\n", 0, end - len(text[start:end].lstrip()))
                yield Sentence(first, line + text.count("\n", 0, end), " ".join(words))


def _split(pattern: re.Pattern[str], text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    for match in pattern.finditer(text, start, end):
        yield start, match.start()
        start = match.end()
    yield start, end


def python_sentences(source: str) -> Iterator[Sentence]:
    """Docstrings, test names, messages and comments."""
    docstrings = set()
    nodes = list(ast.walk(ast.parse(source)))
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False):
                docstrings.add(node.body[0].value)  # type: ignore[attr-defined]
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                name = node.name.removeprefix("test_").replace("_", " ").capitalize()
                yield Sentence(node.lineno, node.lineno, name)
    for node in nodes:
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        if node in docstrings:
            yield from split_sentences(node.value, node.lineno)
        elif len(node.value.split()) >= FEWEST_IN_STRING:
            last = node.end_lineno or node.lineno
            yield from (Sentence(node.lineno, last, each.text) for each in split_sentences(node.value, 0))
    for match in STRING_OR_COMMENT.finditer(source):
        if match[0].startswith("#"):
            yield from split_sentences(match[0].lstrip("# "), source.count("\n", 0, match.start()) + 1)


def sentences(path: Path) -> list[Sentence]:
    """All sentences of a file, without those on a line that quotes somebody."""
    source = path.read_text(encoding="utf-8")
    found = python_sentences(source) if path.suffix == ".py" else split_sentences(source, 1)
    kept = {number for number, line in enumerate(source.splitlines(), 1) if KEEP_WITH_SOURCE.search(line)}
    return [each for each in found if kept.isdisjoint(range(each.first, each.last + 1))]


@dataclass(frozen=True)
class Count:
    """How many sentences each folder has, and the findings among them."""

    total: Counter[str]
    findings: list[Finding]

    def found(self, folder: str) -> list[Finding]:
        return [each for each in self.findings if folder_of(each.path) == folder]

    def share(self, folder: str) -> float:
        return len(self.found(folder)) / self.total[folder]


def count(paths: Iterable[Path], top: Path = TOP) -> Count:
    total: Counter[str] = Counter()
    findings = []
    for path in paths:
        name = path.relative_to(top).as_posix()
        found = sentences(path)
        total[folder_of(name)] += len(found)
        findings += [Finding(name, each.first, tuple(each.marks), each.text) for each in found if each.marks]
    return Count(+total, findings)


def main() -> None:
    below = [Path(word).resolve() for word in sys.argv[1:]] or [TOP]
    counted = count(path for path in read_files() if any(path.is_relative_to(each) for each in below))
    print(*counted.findings, sep="\n")
    for folder in sorted(counted.total, key=counted.share, reverse=True):
        print(f"{len(counted.found(folder)):6d} of {counted.total[folder]:6d}  {counted.share(folder):6.1%}  {folder}")
    total = counted.total.total()
    print(f"{len(counted.findings)} of {total} sentences ({len(counted.findings) / max(1, total):.1%})")


if __name__ == "__main__":
    main()
