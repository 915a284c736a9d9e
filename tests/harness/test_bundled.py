"""The shipped fixtures: commands and the plugin have something to run from any folder, without a clone.

Leaves out: building a wheel. The test reads its contents from `pyproject.toml`.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest
import torch

from instep import bundled
from instep.threads import SMALL, threads_for
from support.running.command import Runner, complaint

TOP = Path(__file__).resolve().parents[2]


def test_a_wheel_carries_what_commands_ask_for() -> None:
    wheel = tomllib.loads((TOP / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {f"fixtures/{name}": f"instep/fixtures/{name}" for name in bundled.CARRIED}
    assert all((bundled.fixtures() / name).exists() for name in bundled.CARRIED)


def test_an_installed_package_uses_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "instep"
    (package / "fixtures").mkdir(parents=True)
    monkeypatch.setattr(bundled, "__file__", str(package / "carried.py"))
    assert bundled.trace() == package / "fixtures" / "traces" / "adaptive.jsonl"


@pytest.mark.slow
def test_replay_without_a_trace_replays_the_main_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instep: Runner
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = instep("replay", "--ops", "ledger", "--until", "3")
    assert ran.code == 0, ran.err
    assert "4 of 115 events" in ran.out and "adaptive" in ran.out


def test_fixtures_are_written_to_a_new_folder_only(tmp_path: Path, instep: Runner) -> None:
    folder = tmp_path / "here"
    ran = instep("fixtures", str(folder))
    assert ran.code == 0, ran.err
    written = {file.relative_to(folder) for file in folder.rglob("*") if file.is_file()}
    some = ("mine.py", "pytest.ini", "tiny/model.safetensors", "traces/adaptive.jsonl")
    assert {Path(name) for name in some} <= written
    assert (folder / "tiny/model.safetensors").read_bytes() == (TOP / "fixtures/tiny/model.safetensors").read_bytes()
    assert "an empty one" in complaint(instep("fixtures", str(folder)))
    assert {file.relative_to(folder) for file in folder.rglob("*") if file.is_file()} == written
    assert "DIR" in complaint(instep("fixtures", str(folder / "mine.py" / "below")))
    assert "DIR" in complaint(instep("fixtures", "x" * 300)), "too long a name to be looked for"
    assert f"cd '{tmp_path / 'two words'}' &&" in " ".join(instep("fixtures", str(tmp_path / "two words")).out.split())


def test_the_example_is_the_one_of_the_page() -> None:
    code = re.search(r"```python\n(.*?)```", (TOP / "docs" / "adapters.md").read_text(), re.S)
    assert code is not None
    assert (TOP / "fixtures" / "example" / "mine.py").read_text().endswith(code[1])


def test_small_models_get_one_thread_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        with threads_for(SMALL - 1):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with threads_for(SMALL):
            assert torch.get_num_threads() == 2
        monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "2")
        with threads_for(1):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
