"""`instep demo` plants one fault in a copy, shows the message and writes the page; the source stays as it is.

Leaves out: the faults themselves (`test_faults.py`).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from instep_proof.commands import demo
from instep_proof.faults.catalogue import by_id
from instep_proof.faults.plant import PACKAGES, digests, source
from support.running.command import Runner, complaint
from support.running.covering import WHOLE


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_demo_plants_in_a_copy_and_shows_message_and_page(
    instep: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.chdir(tmp_path)
    before = {package: digests(source(package).parent)[package] for package in PACKAGES}
    fault = by_id()["row-for-slot"]
    ran = instep("demo", fault.id, "--html", "page.html", "--open")
    assert ran.code == 0, ran
    assert fault.what in ran.out and "  + " in ran.out and fault.edits[0].file in ran.out
    assert f"  event {fault.event} " in ran.out and fault.says in ran.out and "instep replay " in ran.out
    assert opened == [(tmp_path / "page.html").as_uri()] and "DIVERGED" in (tmp_path / "page.html").read_text()
    assert before == {package: digests(source(package).parent)[package] for package in PACKAGES}


@WHOLE
@pytest.mark.usefixtures("warm")
def test_printed_command_shows_the_fault_in_a_kept_copy(
    instep: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --keep it prints that the command agrees, because the copy is gone."""
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    copy, page = tmp_path / "a copy", tmp_path / "page.html"
    ran = instep("demo", "row-for-slot", "--html", page, "--keep", copy)
    (line,) = [line for line in ran.out.splitlines() if "PYTHONPATH=" in line]
    done = subprocess.run(line, shell=True, check=False, capture_output=True, text=True)
    assert ran.code == 0 and done.returncode == 1 and "DIVERGED" in done.stdout, done
    assert '<section class="made"><pre>instep replay ' in page.read_text()
    assert "not empty" in complaint(instep("demo", "--keep", copy))
    assert "That command agrees here" in instep("demo", "row-for-slot", "--html", page).out


def test_unknown_fault_is_refused_and_a_missed_one_fails(
    instep: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "instep faults --list" in complaint(instep("demo", "no-such-fault"))
    assert demo.FAULT in by_id() and by_id()[demo.FAULT].relation is None
    monkeypatch.setattr("instep_proof.faults.plant.planted", lambda folder, *edits: folder)
    monkeypatch.setattr("instep_proof.faults.plant.run", lambda *words, **how: type("Done", (), {
        "returncode": 0, "stdout": "small agrees", "stderr": ""}))
    assert instep("demo").code == 3
