"""The set-up of the repository: pinned versions, the steps of CI, and the division of the tests among commands."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from support.running.covering import WHOLE

TOP = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
PROJECT = tomllib.loads((TOP / "pyproject.toml").read_text())


def test_the_workflow_runs_what_ci_runs() -> None:
    jobs = yaml.safe_load((TOP / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    assert {"bash .ci/run"} == {step["run"] for step in jobs["everything"]["steps"] if "run" in step}
    assert {*PYTHONS} == {
        jobs["everything"]["steps"][1]["with"]["python-version"], *jobs["check"]["strategy"]["matrix"]["python-version"]
    }  # fmt: skip
    script = (TOP / ".ci" / "run").read_text()
    run = set(re.findall(r"^make (?:-\S+ )*([^|#\n]+)", script, re.MULTILINE))
    targets = {word for words in run for word in words.split()}
    assert {"lint", "types", "docs", "replay", "everything"} <= targets and "make newest-tested; } ||" in script


@pytest.mark.parametrize("python", PYTHONS)
def test_constraints_pin_one_allowed_version_of_every_dependency(python: str) -> None:
    lines = (TOP / "constraints" / f"python{python}.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    wanted = [*PROJECT["project"]["dependencies"], *PROJECT["dependency-groups"]["dev"]]
    for requirement in map(Requirement, [*wanted, *PROJECT["dependency-groups"]["docs"]]):
        assert requirement.specifier.contains(pinned[requirement.name]), f"make constraints: {requirement}"
    assert not any("+" in version or " " in version for version in pinned.values()), "a public version, without a hash"


@WHOLE
def test_every_row_runs_in_one_command_and_the_last_line_counts_the_rest() -> None:
    def collected(*words: str) -> tuple[set[str], str]:
        command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "tests/harness/test_storage.py", *words]
        lines = subprocess.run(command, cwd=TOP, capture_output=True, text=True, check=True).stdout.splitlines()
        return {line for line in lines if "::" in line}, lines[-1]

    (every, _), (whole, _), (test, last) = collected("--whole"), collected("--whole", "-m", "whole"), collected()
    assert test and whole and test | whole == every and not test & whole
    assert last == f"`make whole` runs {len(whole)} more tests."
