"""The site of the documentation: its sources, and whether every link of what was built leads somewhere on this disk.

`python -m documentation.site copy` puts the sources into `build/pages`, each at its place in the repository, so that
links hold. `python -m documentation.site check` reads `build/site`. Between them `zensical build --strict` finds
missing pages and headings; it looks at no other file, and at nothing that a theme loads. Leaves out: links of the
Markdown sources (`tests/test_readme.py`).
"""

import ast
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from shutil import copy2, rmtree
from urllib.parse import unquote

TOP = Path(__file__).resolve().parents[2]
PAGES, SITE = TOP / "build" / "pages", TOP / "build" / "site"
FOLDERS = ("docs", "fixtures", "harness", "optimized", "reference")  # that have pages
ITEM = re.compile(r"[-*] |\d+\. ")
LOADS = ("script", "img", "iframe", "source")  # elements that fetch, in addition to stylesheets


def sources() -> list[Path]:
    """Every file that the site has, seen from the top: all Markdown, and what pages show and lead to."""
    pages = [*TOP.glob("*.md"), *(page for folder in FOLDERS for page in (TOP / folder).rglob("*.md"))]
    beside = [file for file in (TOP / "docs").rglob("*.*") if TOP / "docs" / "site" not in file.parents]
    return sorted({file.relative_to(TOP) for file in (*pages, *beside) if "__pycache__" not in file.parts})


def copy() -> None:
    rmtree(PAGES, ignore_errors=True)
    for source in sources():
        target = PAGES / source
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".md":
            target.write_text(spaced((TOP / source).read_text()))
        else:
            copy2(TOP / source, target)


def spaced(text: str) -> str:
    """A list that follows a paragraph at once begins after a blank line: code hosts need none, Python-Markdown does."""
    lines, fenced, listed = list[str](), False, False
    for line in text.splitlines():
        if not fenced and ITEM.match(line) and not listed and lines and lines[-1]:
            lines.append("")
        fenced ^= line.lstrip().startswith("```")
        listed = bool(ITEM.match(line)) or (listed and line.startswith(" "))
        lines.append(line)
    return "\n".join(lines) + "\n"


class Page(HTMLParser):
    """links: what it leads to or loads; loads: what a browser fetches by itself; names: ids that can be led to."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links, self.loads, self.names = list[str](), list[str](), set[str]()
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.names |= {given[name] for name in ("id", "name") if name in given}
        links = [given[name] for name in ("href", "src") if given.get(name)]
        self.links += links
        if tag in LOADS or (tag == "link" and given.get("rel") != "canonical"):
            self.loads += links


def dead(site: Path) -> list[str]:
    """Links to files or headings that are not there, and what a page would fetch from a network."""
    pages, wrong = {file: Page(file) for file in sorted(site.rglob("*.html"))}, list[str]()
    for file, page in pages.items():
        here = str(file.relative_to(site))
        wrong += [f"{here}: fetches {link}" for link in page.loads if re.match(r"(https?:)?//", link)]
        for link in page.links:
            path, _, name = link.partition("#")
            if re.match(r"[a-z]+:|//", link) or file.name == "404.html":  # that page is served anywhere
                continue
            target = (file.parent / unquote(path)).resolve() if path else file
            if not target.is_file() or (name and target in pages and unquote(name) not in pages[target].names):
                wrong.append(f"{here}: {link}")
    return wrong if pages else [f"no page in {site}"]


def unnamed(site: Path) -> list[str]:
    """Public names of the kit that its page lacks: a name without a docstring, or not found, is omitted silently."""
    kit, there = TOP / "harness" / "instep" / "kit" / "__init__.py", Page(site / "docs" / "api" / "kit.html").names
    public = next(node.value for node in ast.parse(kit.read_text()).body if isinstance(node, ast.Assign))
    return [f"no instep.kit.{name}" for name in ast.literal_eval(public) if f"instep.kit.{name}" not in there]


if __name__ == "__main__":
    if sys.argv[1:] == ["copy"]:
        copy()
    elif wrong := [*dead(SITE), *unnamed(SITE)]:
        sys.exit("\n".join(["links that lead nowhere, and names without a place:", *dict.fromkeys(wrong)]))
