"""The set-up of the repository: pinned versions, the steps of CI, and the division of the tests among commands."""

import os
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from support.running import processes
from support.running.covering import WHOLE

TOP = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
TRACES = ("--instep-traces=fixtures/traces", "--instep-ops=ledger", "--instep-ops=plain")
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
def test_every_test_runs_in_one_command_and_ci_runs_all_of_them() -> None:
    def collected(selection: str) -> tuple[set[str], str]:
        command = [sys.executable, "-m", "pytest", "-q", "--collect-only", *shlex.split(selection),
                   "tests/harness/test_storage.py", *TRACES]  # fmt: skip
        done = processes.run(command, timeout=120, cwd=TOP, env=os.environ | processes.ENVIRONMENT)
        assert done.returncode == 0, done
        lines = done.stdout.splitlines()
        return {line for line in lines if "::" in line}, lines[-1]

    text = (TOP / "Makefile").read_text()
    several = dict(re.findall(r"^(test|whole|everything): .*?\$\(TESTS\) (.*?) \$\(EVERYTHING\)$", text, re.M | re.S))
    (test, last), (whole, _), (everything, _) = (collected(several[name]) for name in ("test", "whole", "everything"))
    assert test and whole and test | whole == everything
    assert {line.partition("::")[0] for line in test & whole} == {"fixtures/traces/faults/shared.jsonl"}
    assert last == f"`make whole` runs {len(whole - test)} more tests."
