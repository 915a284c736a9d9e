"""README and the pages of results show what the files under `fixtures/` contain; every link leads somewhere.

Leaves out: running the README's two commands (CI does), and what other pages say of the code (`test_architecture.py`,
`harness/test_reading.py`).
"""

import re
from pathlib import Path

import pytest
from typer.main import get_command

from documentation.blocks import blocks_of
from documentation.site import sources
from documentation.tables import PAGES, SECTIONS, TOP, TYPES, pictures, rendered, sections
from instep.cli import COMMANDS, app
from instep.options import OPTIONS
from instep_reference.contract.drafters import DRAFTERS

WRITTEN = [TOP / source for source in sources() if source.suffix == ".md"]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
TYPED = r"instep (\w+)((?:[^\n`|&\\]|\\\n)*)"  # a command, within a sentence or on a line of a block


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_table_of_a_page_is_the_files_own(page: Path) -> None:
    text = page.read_text()
    assert rendered(text) == text, "the files have changed: PYTHONPATH=reference:tests python -m documentation.tables"


@pytest.mark.parametrize("name", ["strategies.svg", "rounds.svg"])
def test_every_picture_is_drawn_from_the_files_and_is_on_the_page(name: str) -> None:
    file = TOP / "docs" / name
    assert file.read_text() == pictures()[file], "the files have changed: python -m documentation.tables"
    assert f"]({name})" in (TOP / "docs" / "speed.md").read_text()


def test_the_readme_counts_the_cells_in_which_a_peer_is_faster_as_the_table_does() -> None:
    found = re.search(r"These are (\d+ of \d+ cells)", dict(sections())["behind"])
    assert found and f"A peer is faster in {found[1]}" in (TOP / "README.md").read_text()


def test_the_table_of_models_has_every_model_type() -> None:
    assert {*TYPES} == {model_type for model_type, _ in DRAFTERS}


def test_every_table_is_on_exactly_one_page() -> None:
    assert sorted(name for name, _ in sections()) == sorted(SECTIONS)


@pytest.mark.parametrize("name", SECTIONS)
def test_no_table_is_empty(name: str) -> None:
    assert dict(sections())[name].count("\n") > (0 if name == "score" else 3)


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(TOP)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    dead = []
    for link in LINK.findall(page.read_text()):
        path, _, heading = link.partition("#")
        if "://" in link:
            continue
        target = page if not path else (page.parent / path).resolve()
        if not target.exists() or (heading and heading not in anchors(target)):
            dead.append(link)
    assert not dead


def test_the_glossary_is_sorted_and_every_word_can_be_linked_to() -> None:
    page = (TOP / "docs" / "glossary.md").read_text()
    rows = re.findall(r'^\| (?:<a id="([\w-]+)"></a>)?(.*?) \|', page, re.MULTILINE)[1:]
    words = [word.lower() for _, word in rows]
    assert len(words) > 50 and words == sorted(words) and all(name for name, _ in rows)
    assert len({name for name, _ in rows}) == len(rows)


def test_the_pages_name_every_command_and_every_option_of_a_setting() -> None:
    commands, page = ((TOP / "docs" / f"{name}.md").read_text() for name in ("commands", "options"))
    assert [name for name, *_ in COMMANDS if f"instep {name}" not in commands] == []
    assert [name for name in OPTIONS if f"| `--{name.replace('_', '-')}`" not in page] == []


def test_the_page_of_commands_lists_the_setting_options_of_each() -> None:
    every, found = {f"--{name.replace('_', '-')}" for name in OPTIONS}, dict[str, set[str]]()
    table = (TOP / "docs" / "options.md").read_text().partition("| command | takes of them |")[2].partition("\n\n")[0]
    for names, says in re.findall(r"^\| (`.*?) \| (.*?) \|$", table, re.M):
        named = {*re.findall(r"`(--[\w-]+)`", says.partition(".")[0])}
        found |= {name: every - named if says.startswith("all") else named for name in re.findall(r"`(\w+)`", names)}
    known = {name: every & {word for each in command.params for word in each.opts}
             for name, command in get_command(app).commands.items()}  # type: ignore[attr-defined]  # fmt: skip
    assert found == known


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(TOP)))
def test_every_command_that_a_page_shows_has_the_options_that_it_shows(page: Path) -> None:
    known = {name: {word for each in command.params for word in (*each.opts, *each.secondary_opts)}
             for name, command in get_command(app).commands.items()}  # type: ignore[attr-defined]  # fmt: skip
    wrong = [
        f"instep {name}{words}" for name, words in commands(page)
        if name not in known or not set(re.findall(r"(?<!\S)--[\w-]+",
                                                    words.partition(" -- ")[0])) <= known[name] | {"--help"}
    ]  # fmt: skip
    assert not wrong


def commands(page: Path) -> list[tuple[str, str]]:
    """Every instep command that a page shows: its name and its other words."""
    outside = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    blocks = "".join(block.text for block in blocks_of(page))
    return [*re.findall(f"`{TYPED}", outside), *re.findall(rf"^(?:\w+=\S+ )?{TYPED}", blocks, re.MULTILINE)]


def anchors(page: Path) -> set[str]:
    """The targets of links in a page: its headings as a link spells them, and named places."""
    headings = re.findall(r"^#+ +(.*)$", page.read_text(), re.MULTILINE)
    named = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return named | set(re.findall(r'<a id="([\w-]+)"></a>', page.read_text()))
