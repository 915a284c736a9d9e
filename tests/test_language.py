"""The prose of the project is plain English: almost no sentence needs a second reading.

The rules are in CONTRIBUTING.md, and `documentation.prose` counts the sentences that break them.
"""

from pathlib import Path

import pytest

from documentation.prose import Sentence, count, read_files, sentences

LIMIT = 0.02  # of sentences with a finding, in each folder


def test_prose_is_plain_english_in_every_folder() -> None:
    counted = count(read_files())
    over = {folder: counted.found(folder) for folder in counted.total if not counted.share(folder) <= LIMIT}
    message = "\n".join(
        f"{folder}: {counted.share(folder):.1%} of sentences, the limit is {LIMIT:.1%}\n"
        + "\n".join(map(str, found))
        for folder, found in over.items()
    )
    assert counted.total.total() > 20_000
    if over:
        pytest.fail(message, pytrace=False)


@pytest.mark.parametrize(("text", "marks"), [
    ("What a kernel writes is compared.", ["begins with What"]),  # prose: keep (example)
    ("What does a verdict mean?", []),
    ("The row stands beside the one that is told.", ["stands", "beside", "told"]),  # prose: keep (example)
    ("The kernel writes `what stands beside` it.", []),
    ("Two words.", []),
])  # fmt: skip
def test_a_sentence_is_found_by_its_words(text: str, marks: list[str], tmp_path: Path) -> None:
    (page := tmp_path / "page.md").write_text(f"# Title\n\nOne plain sentence first.\n{text}\n")
    assert [mark for each in sentences(page) for mark in each.marks] == marks


def test_python_gives_docstrings_names_messages_and_comments(tmp_path: Path) -> None:
    (file := tmp_path / "file.py").write_text(
        '"""Name the thing.\n\nThen explain it once."""\n\ndef test_one_two_three():\n'
        '    """Do three things well."""\n    raise ValueError("a # in a message of six words")  # a comment of words\n'
    )  # fmt: skip
    assert sentences(file) == [
        Sentence(5, 5, "One two three"), Sentence(1, 1, "Name the thing."), Sentence(3, 3, "Then explain it once."),
        Sentence(6, 6, "Do three things well."), Sentence(7, 7, "a # in a message of six words"),
        Sentence(7, 7, "a comment of words"),
    ]  # fmt: skip


@pytest.mark.parametrize(("mark", "kept"), [("prose: keep (Triton's error)", True), ("prose: keep", False)])
def test_a_quotation_is_kept_when_it_names_its_source(mark: str, kept: bool, tmp_path: Path) -> None:
    line = f'SEEN = "what it said about it all"  # {mark}'  # prose: keep (example)
    (file := tmp_path / "file.py").write_text(f'"""One."""\n{line}\n')
    assert (not any(each.marks for each in sentences(file))) is kept
