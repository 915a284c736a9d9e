"""The site has every page, and its check finds what a browser would miss.

Leaves out: building it (`make docs`, which CI runs), and the links of the Markdown sources (`test_readme.py`).
"""

import re
import tomllib
from pathlib import Path

import pytest

from documentation.site import TOP, dead, sources, spaced

CONFIG = tomllib.loads((TOP / "zensical.toml").read_text())["project"]


def test_the_navigation_has_every_page_once() -> None:
    listed = re.findall(r"'([\w./-]+\.md)'", str(CONFIG["nav"]))
    assert sorted(listed) == [str(source) for source in sources() if source.suffix == ".md"]


def test_code_blocks_wrap_so_that_no_message_is_cut() -> None:
    assert CONFIG["extra_css"] == ["docs/site.css"] and Path("docs/site.css") in sources()
    rules = dict(re.findall(r"^(.+?) \{ (.*) \}$", (TOP / "docs" / "site.css").read_text(), re.MULTILINE))
    assert rules[".md-typeset pre > code"] == "white-space: pre-wrap; overflow-wrap: anywhere;"


@pytest.mark.parametrize(("html", "says"), [
    ('<a href="b.html#there">', ""), ('<a href="#here"><p id="here">', ""), ('<img src="in/one.svg">', ""),
    ('<a href="https://example.org/x">', ""), ('<a href="a%62.html">', "a%62.html"), ('<a href="%62.html">', ""),
    ('<a href="c.html">', "a.html: c.html"), ('<a href="b.html#nowhere">', "a.html: b.html#nowhere"),
    ('<a href="in">', "a.html: in"), ('<a href="in/two.py">', "a.html: in/two.py"), ('<a href="#no">', "a.html: #no"),
    ('<img src="two.svg">', "a.html: two.svg"), ('<script src="https://cdn.example/x.js">', "fetches https://cdn"),
    ('<link rel="stylesheet" href="//fonts.example/x.css">', "fetches //fonts"),
])  # fmt: skip
def test_a_link_that_leads_nowhere_and_a_fetch_are_found(html: str, says: str, tmp_path: Path) -> None:
    assert dead(tmp_path) == [f"no page in {tmp_path}"]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "one.svg").touch()
    (tmp_path / "b.html").write_text('<h2 id="there">')
    (tmp_path / "a.html").write_text(html)
    found = dead(tmp_path)
    assert len(found) == bool(says) and says in "".join(found)


@pytest.mark.parametrize(("text", "due"), [
    ("so:\n- a\n  b\n- c\n", "so:\n\n- a\n  b\n- c\n"), ("so:\n\n- a\n- b\n", "so:\n\n- a\n- b\n"),
    ("so:\n1. a\n2. b\nand\n", "so:\n\n1. a\n2. b\nand\n"), ("```\nso\n- a\n```\n", "```\nso\n- a\n```\n"),
])  # fmt: skip
def test_a_list_begins_after_a_blank_line_and_code_stays(text: str, due: str) -> None:
    assert spaced(text) == due
