"""The variants of `kda_gpu.py` apply to the present kernels and compile, and a wrong one has no time.

Leaves out: re-runs of variants, which need a GPU. The script judges them there.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import instep_optimized.kernels.gdn_windows as windows_folder
from perf import kda_gpu
from support.running.covering import WHOLE


def test_edits_of_variants_apply_to_the_present_kernel() -> None:
    text = Path(windows_folder.__path__[0], "token_by_token_gluon.py").read_text()
    for name, variant in kda_gpu.RERUNS.items():
        edited = text
        for old, new in variant.edits:
            assert edited.count(old) == 1, f"{name}: {old}"
            edited = edited.replace(old, new)
        ast.parse(edited)
        assert (edited == text) is (not variant.edits)


@WHOLE
@pytest.mark.skipif(torch.cuda.is_available(), reason="the script takes minutes on a GPU")
def test_wrong_variant_has_a_finding_and_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = {"now": {}, "16 channels": {"chunk64.SLICE": 16}, "no slice": {"chunk64.SLICE": None},
               "nothing is carried": {"chunk64.launch": lambda *_, **__: None}}
    monkeypatch.setattr(kda_gpu, "PROMPTS", prompts)
    out = tmp_path / "found.json"
    assert kda_gpu.main(["--out", str(out), "--samples", "1"]) == 1
    found = json.loads(out.read_text())
    assert list(found) == ["rerun 8", "prompt"] and found["rerun 8"]["now"]["us"] > 0
    assert {name for name, one in found["prompt"].items() if "us" in one} == {"now", "16 channels"}
    assert all(found["prompt"][name].keys() == {"finding"} for name in ("nothing is carried", "no slice"))


@WHOLE
@pytest.mark.slow
def test_edited_kernels_compile_without_a_spill() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = ":".join(sys.path)
    command = [sys.executable, kda_gpu.__file__, "--compile", "stays"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    _, line = map(json.loads, done.stdout.splitlines())
    assert line["kernel"] == "staged_window" and "STACK:0 " in line["usage"]
