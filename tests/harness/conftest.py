"""The fixture `instep`: run a command of the tool within the test's own process.

Leaves out: installation; the entry point is called as the installed script calls it.
"""

from __future__ import annotations

import pytest

from instep.cli import main
from support.command import Ran, Runner


@pytest.fixture
def instep(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runner:
    """`instep("replay", path, "--ops", "plain")` -> exit code and both outputs."""

    def run(*words: object) -> Ran:
        monkeypatch.setattr("sys.argv", ["instep", *map(str, words)])
        monkeypatch.setenv("COLUMNS", "120")
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return Ran(int(ended.value.code or 0), said.out, said.err)

    return run
