"""The first steps of a user, in fresh processes outside the checkout: a Triton kernel, under pytest and the plugin.

Leaves out: what the kit and the plugin find (`test_kit.py`, `test_plugin.py`).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support.installed import TOP, install

pytest.importorskip("triton")
Pytest = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return install(tmp_path_factory.mktemp("installed"))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository of a user with a Triton kernel in `mine.py`."""
    shutil.copy(TOP / "tests" / "support" / "triton_kernel.py", tmp_path / "mine.py")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider -p no:benchmark\n")
    return tmp_path


@pytest.fixture
def run(project: Path, shell: dict[str, str]) -> Pytest:
    def run_pytest(*words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-q", *map(str, words)]
        return subprocess.run(command, cwd=project, env=shell, capture_output=True, text=True, check=False, timeout=240)

    return run_pytest


def kernel_test(project: Path) -> None:
    """`docs/kit/test_gdn_kernels.py` with the kernel of `mine.py` as a value, on the shorter of its traces."""
    text = (TOP / "docs" / "kit" / "test_gdn_kernels.py").read_text()
    for old, new in (
        ("from instep.adapters.sglang import DEVICE\nfrom instep.adapters.sglang_commit import KERNELS\n",
         "from mine import OPS\n\nDEVICE, KERNELS = 'cpu', {'mine': 'rerun'}\n"),
        ('f"instep.adapters.{kernel}"', "OPS"),
        ('"fixed": "rounds"}', "}"), ("device=DEVICE)", "device=DEVICE, until=8)"),
    ):  # fmt: skip
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (project / "test_gdn_kernels.py").write_text(text)


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kit leaves Triton native")
def test_triton_kernel_runs_under_pytest_without_a_setting(project: Path, run: Pytest) -> None:
    kernel_test(project)
    done = run("test_gdn_kernels.py")
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.interpreted
def test_triton_kernel_runs_under_the_plugin_without_a_setting(project: Path, run: Pytest) -> None:
    # The module of this test uses Triton and not instep; pytest imports it before the plugin imports `mine`.
    (project / "test_own.py").write_text("import triton.language\n\ndef test_own():\n    pass\n")
    done = run("test_own.py", f"--instep-traces={TOP / 'fixtures/traces/faults/pair.jsonl'}", "--instep-ops=mine:OPS")
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kit leaves Triton native")
def test_triton_imported_too_early_says_what_to_set(project: Path, run: Pytest) -> None:
    kernel_test(project)
    (project / "conftest.py").write_text("import triton.language\n")
    done = run("test_gdn_kernels.py")
    assert done.returncode == 1 and "start Python with TRITON_INTERPRET=1" in done.stdout, done.stdout + done.stderr
