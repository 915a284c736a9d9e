"""`peers.live`: a released SGLang packed for a GPU machine. Leaves out: running it there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from instep.audit.write import digest
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.config import ModelConfig
from peers.live import bundle, serve
from support.recorded import TINY

WHEELS = {
    "sglang-0.5.12-cp312-x.whl": {
        "sglang/__init__.py": "", "sglang/srt/models/qwen3_5.py": "", "sglang/srt/models/mixtral.py": "",
        "sglang/multimodal_gen/a.py": "", "sglang/srt/grpc/_core.so": "", "sglang/srt/layers/b.py": "",
    },
    "sglang_kernel-0.4.3-x.whl": {
        "sgl_kernel/__init__.py": "", "sgl_kernel/sm90/common_ops.abi3.so": "9",
        "sgl_kernel/sm100/common_ops.abi3.so": "", "sgl_kernel/flash_ops.abi3.so": "",
    },
    "transformers-5.12.1-x.whl": {
        "transformers/dependency_versions_table.py": 'deps = {\n    "tokenizers": "tokenizers>=0.22.0,<=0.23.0",\n}\n',
    },
    **{f"{name.partition('==')[0].replace('-', '_')}-{name.partition('==')[2] or 1}-x.whl": {f"{name}.py": ""}
       for name in bundle.SITE},
}  # fmt: skip


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    """A bundle of made-up wheels, unpacked."""
    tmp_path = tmp_path_factory.mktemp("wheels")
    for name, files in WHEELS.items():
        with zipfile.ZipFile(tmp_path / name, "w") as wheel:
            for path, text in files.items():
                wheel.writestr(path, text)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bundle, "download", lambda folder, *wheels: None)
        patched.setattr(bundle, "library", lambda name, folder: None)
        patched.setattr(bundle, "PRESET", 0)
        made = bundle.pack("0.5.12", tmp_path / "bundle", tmp_path)
    with tarfile.open(made / "bundle.tar.xz") as archive:
        assert all(one.name.startswith(".") for one in archive)
    return serve.unpacked(made, made / "files")


def test_a_bundle_has_what_the_model_needs(packed):
    files = {str(file.relative_to(packed)) for file in packed.rglob("*") if file.is_file()}
    assert {"engine/sglang/srt/models/qwen3_5.py", "engine/sglang/srt/layers/b.py", "stubs/sitecustomize.py",
            "kernels/sgl_kernel/sm90/common_ops.abi3.so", "model/config.json"} <= files  # fmt: skip
    unused = "mixtral", "multimodal_gen", "sm100", "flash_ops", "_core.so"
    assert not any(word in file for file in files for word in unused)
    assert '"tokenizers>=0.22.0",' in (packed / "site" / "transformers" / "dependency_versions_table.py").read_text()


def test_the_wrapped_model_is_the_same_model(packed):
    wrapped = json.loads((packed / "model" / "config.json").read_text())
    assert wrapped["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    assert digest(packed / "model") == digest(TINY) and Checkpoint.open(TINY).config == ModelConfig.from_dict(wrapped)


def test_step_counts_are_configured_as_the_release_reads_them(packed):
    def file() -> dict:
        return json.loads(Path(serve.arguments(packed, "adaptive", 1)["speculative_adaptive_config"]).read_text())

    assert file()["candidate_steps"] == [1, 3]
    (packed / "release").write_text("0.5.13")
    assert set(file()) == {"1", "8"}
    fixed = serve.arguments(packed, "fixed", 1)
    assert Path(fixed["speculative_draft_model_path"]) != Path(fixed["model_path"])
    assert "speculative_algorithm" not in serve.arguments(packed, "none", 1)
    assert len(serve.prompts()) == 6 and all(10 <= len(one) <= 400 for one in serve.prompts())


def test_stand_ins_exist_for_the_engine_alone(packed):
    (packed / "engine" / "sglang" / "asks.py").write_text(
        "from flashinfer.jit import Module\nclass Own(Module): pass\n"
        "try:\n    Own()\nexcept RuntimeError as error:\n    print(error)\n")
    program = "import importlib.util; print(importlib.util.find_spec('flashinfer')); import sglang.asks"
    path = os.pathsep.join(str(packed / part) for part in ("stubs", "engine"))
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, capture_output=True,
                          text=True)  # fmt: skip
    assert done.stdout == "None\nOwn of a package that was not packed was called\n", done.stderr
