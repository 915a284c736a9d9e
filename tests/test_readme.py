"""The README says what the files under `fixtures/` say.

Leaves out: running its two commands; CI does.
"""

from __future__ import annotations

import pytest

from support.readme import README, SECTIONS, rendered, section


def test_every_table_of_the_readme_is_the_files_own() -> None:
    text = README.read_text()
    assert rendered(text) == text, "the files have changed: PYTHONPATH=reference:tests python -m support.readme"


@pytest.mark.parametrize("name", SECTIONS)
def test_no_table_is_empty(name: str) -> None:
    assert section(name).count("\n") > 3
