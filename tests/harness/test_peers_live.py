"""`peers.live`: released SGLangs packed for a GPU machine, and cases run in made-up engines. Leaves out: a GPU."""

import json
import os
import re
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

from instep.audit.write import digest
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.config import ModelConfig
from peers.live import ARCHIVE, bundle, cases, extract, run
from support.inputs.recordings import TINY
from support.running.covering import WHOLE

pytestmark = pytest.mark.slow

# It answers with the number of the token; it dies with trees, and hangs with n-grams, as does a process that it starts.
ENGINE = '''
import asyncio, subprocess, sys, time

class Engine:
    def __init__(self, **given):
        self.loop, self.given = asyncio.new_event_loop(), given
        if given.get("speculative_eagle_topk", 1) > 1:
            raise RuntimeError("no trees")
        if given.get("speculative_algorithm") == "NGRAM":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            print("child", child.pid, flush=True)
            time.sleep(60)

    async def async_generate(self, input_ids, sampling_params, rid, stream=False):
        count = sampling_params["max_new_tokens"]
        def said(last, tokens):
            return {"output_ids": tokens, "meta_info": {"completion_tokens": last, "cached_tokens": 3}}
        async def one_by_one():
            for token in range(count):
                await asyncio.sleep(0)
                yield said(token + 1, [token])
        return one_by_one() if stream else said(count, list(range(count)))

    def shutdown(self):
        pass
'''
WHEELS = {
    "sglang-0.5.12-cp312-x.whl": {
        "sglang/__init__.py": ENGINE, "sglang/srt/models/qwen3_5.py": "", "sglang/srt/models/mixtral.py": "",
        "sglang/multimodal_gen/a.py": "", "sglang/srt/grpc/_core.so": "", "sglang/srt/layers/b.py": "",
    },
    "sglang-0.5.16-cp312-x.whl": {
        "sglang/__init__.py": ENGINE, "sglang/kernels/c.cpp": "", "sglang/srt/models/deepseek_common/d.py": "",
    },
    **{f"sglang_kernel-{version}-x.whl": {
        "sgl_kernel/__init__.py": "", "sgl_kernel/sm90/common_ops.abi3.so": "9",
        "sgl_kernel/sm100/common_ops.abi3.so": "", "sgl_kernel/flash_ops.abi3.so": "",
    } for version in ("0.4.3", "0.4.5")},
    "transformers-5.12.1-x.whl": {
        "transformers/dependency_versions_table.py": 'deps = {\n    "tokenizers": "tokenizers>=0.22.0,<=0.23.0",\n}\n',
    },
    **{f"{name.partition('==')[0].replace('-', '_')}-{name.partition('==')[2] or 1}-x.whl": {f"{name}.py": ""}
       for name in (*bundle.SITE, *bundle.RELEASES["0.5.16"].site)},
}  # fmt: skip


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of made-up wheels, unpacked."""
    tmp_path = tmp_path_factory.mktemp("wheels")
    for name, files in WHEELS.items():
        with zipfile.ZipFile(tmp_path / name, "w") as wheel:
            for path, text in files.items():
                wheel.writestr(path, text)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bundle, "download", lambda folder, *wheels: None)
        patched.setattr(bundle, "library", lambda name, folder: None)
        patched.setattr(bundle, "PACKED", [bundle.PACKED[0] | {"preset": 0, "dict_size": 1 << 20}])
        made = bundle.pack(["0.5.12", "0.5.16"], tmp_path / "bundle", tmp_path)
    with tarfile.open(made / ARCHIVE) as archive:
        assert all(one.name.startswith(".") for one in archive)
    return run.unpacked(made)


def test_a_bundle_has_what_the_model_needs(packed: Path) -> None:
    files = {str(file.relative_to(packed)) for file in packed.rglob("*") if file.is_file()}
    assert {"engine/0.5.12/sglang/srt/models/qwen3_5.py", "engine/0.5.12/sglang/srt/layers/b.py",
            "engine/0.5.16/sglang/kernels/c.cpp", "engine/0.5.16/sglang/srt/models/deepseek_common/d.py",
            "kernels/0.4.3/sgl_kernel/sm90/common_ops.abi3.so", "kernels/0.4.5/sgl_kernel/sm90/common_ops.abi3.so",
            "stubs/sitecustomize.py", "model/config.json", "draft/config.json", "site/msgspec.py",
            "engine/0.5.16/apache-tvm-ffi==0.1.11.py", "site/apache-tvm-ffi==0.1.9.py"} <= files  # fmt: skip
    unused = "mixtral", "multimodal_gen", "sm100", "flash_ops", "_core.so"
    assert not any(word in file for file in files for word in unused)
    assert '"tokenizers>=0.22.0",' in (packed / "site" / "transformers" / "dependency_versions_table.py").read_text()


def test_the_wrapped_model_is_the_same_model(packed: Path) -> None:
    wrapped = json.loads((packed / "model" / "config.json").read_text())
    assert wrapped["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    assert digest(packed / "model") == digest(TINY) and Checkpoint.open(TINY).config == ModelConfig.from_dict(wrapped)


def test_stand_ins_exist_for_the_engine_alone(packed: Path) -> None:
    (packed / "engine" / "0.5.16" / "sglang" / "asks.py").write_text(
        "from flashinfer.jit import Module\nclass Own(Module): pass\n"
        "try:\n    Own()\nexcept RuntimeError as error:\n    print(error)\n")
    program = "import importlib.util; print(importlib.util.find_spec('flashinfer')); import sglang.asks"
    path = os.pathsep.join(str(packed / part) for part in ("stubs", "engine/0.5.16"))
    given = {**os.environ, **run.environment(packed, "0.5.16"), "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", program], env=given, capture_output=True, text=True)
    assert done.stdout == "None\nOwn of a package that was not packed was called\n", done.stderr


def test_every_case_has_a_name_and_a_plain_reference() -> None:
    names = [case.name for case in cases.CASES]
    assert len(names) == len(set(names)) and len(names) >= 20 and len(cases.prompts()) == 70
    plain = {(one.prompt, one.again): one.tokens for wave in cases.EVERYTHING for one in wave}
    for case in cases.CASES:
        assert case.release in bundle.RELEASES and case.name.endswith(case.release[-2:])
        assert f"plain-{case.release[-2:]}" in names
        for one in (one for wave in case.waves for one in wave):
            assert plain[one.prompt, one.again] >= one.tokens, f"{case.name}: {one}"
    with pytest.raises(SystemExit, match="no case fixed-11"):
        cases.by_name("fixed-12,fixed-11")


def test_arguments_have_the_names_of_the_release(tmp_path: Path) -> None:
    def given(name: str) -> dict:
        return cases.arguments(cases.by_name(name)[0], Path("files"), tmp_path, 7)

    old, new = given("radix-13"), given("radix-14")
    assert old["mamba_scheduler_strategy"] == new["mamba_radix_cache_strategy"] == "extra_buffer"
    assert old["cuda_graph_bs"] == new["cuda_graph_bs_decode"] and "cuda_graph_bs" not in new
    assert given("ring-16")["enable_gdn_replayssm_spec"] and given("rise-17")["enable_linear_replayssm_spec"]
    assert old["speculative_draft_model_path"] != old["model_path"]
    assert "speculative_algorithm" not in given("plain-13") and "speculative_eagle_topk" not in given("ngram-14")

    def file(name: str) -> dict:
        return json.loads(Path(given(name)["speculative_adaptive_config"]).read_text())

    assert file("switch-12")["candidate_steps"] == [1, 3] and set(file("switch-13")) == {"1"}
    assert "speculative_adaptive_config" not in given("default-13")  # the release's own table


@WHOLE
def test_cases_run_side_by_side_and_none_outlives_its_limit(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "SECONDS", 3)
    monkeypatch.setattr(run, "AT_LEAST", 1)
    begun, chosen = time.monotonic(), "fixed-16,tree-16,ngram-16,grow-16,radix-16"
    monkeypatch.chdir(packed.parents[1])
    code = run.main([packed.parent.name, str(tmp_path / "out"), "--only", chosen, "--at-once", "5",
                     "--packed", str(tmp_path / "packed")])  # fmt: skip
    assert code == 1 and time.monotonic() - begun < 15
    found = {name: json.loads((tmp_path / "out" / name / run.OUTCOME).read_text()) for name in chosen.split(",")}
    assert found["fixed-16"]["outcome"] == "ended" and found["fixed-16"]["answers"] == 6
    assert found["tree-16"]["outcome"] == "died: exit code 1" and found["tree-16"]["error"] == "RuntimeError: no trees"
    assert found["ngram-16"]["outcome"] == "stopped: time limit"
    child = int((tmp_path / "out" / "ngram-16" / run.LOG).read_text().split()[1])
    stat = Path(f"/proc/{child}/stat")
    assert not stat.exists() or stat.read_text().split()[2] == "Z"  # killed with its group
    lines = [json.loads(line) for line in (tmp_path / "out" / "grow-16" / run.ANSWERS).read_text().splitlines()]
    assert [len(one["tokens"]) for one in lines] == [one.tokens for one in cases.GROWING]
    lines = [json.loads(line) for line in (tmp_path / "out" / "radix-16" / run.ANSWERS).read_text().splitlines()]
    first, second = lines[0], lines[4]
    assert second["prompt"] == first["prompt"] + first["tokens"][:40] + cases.SUFFIX and second["cached"] == 3
    (packed_file,) = (tmp_path / "packed").iterdir()
    with tarfile.open(packed_file) as archive:
        assert {"grow-16/answers.jsonl", "tree-16/log.txt", "ngram-16/outcome.json"} <= set(archive.getnames())


def test_a_case_is_not_started_without_time(packed: Path, tmp_path: Path) -> None:
    (case,) = cases.by_name("fixed-16")
    found = run.run(case, packed, tmp_path, 1, 10.0, set())
    assert found["outcome"].startswith("not started") and found["seconds"] < 2
    with pytest.raises(SystemExit, match=r"0\.5\.12, 0\.5\.16, and not 0\.5\.13"):
        run.environment(packed, "0.5.13")


@pytest.mark.parametrize(("sizes", "total", "found"), [
    ([1, 2, 3], 10, 3), ([4, 4, 4], 6, 2), ([1, 9, 9], 11, 5), ([], 5, 0),
])  # fmt: skip
def test_the_largest_recordings_are_cut_to_one_size(sizes: list[int], total: int, found: int) -> None:
    assert run.level(sizes, total) == found and sum(min(size, found) for size in sizes) <= total


def test_files_that_come_back_are_few_and_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "OF_FILE", 400 << 10)
    monkeypatch.setattr(run, "OF_CASE", 300 << 10)
    for number in range(3):
        tensors = tmp_path / "out" / f"case{number}" / run.RECORDING / "tensors"
        tensors.mkdir(parents=True)
        (tensors.parents[1] / run.OUTCOME).write_text("{}")
        (tensors.parent / "recording.json").write_text('{"attached": {"written": 4, "dropped": 9}}')
        for event in range(4):
            (tensors / f"{event:06d}.safetensors").write_bytes(bytes(100 << 10))
    made = run.pack(tmp_path / "out", tmp_path / "packed")
    assert len(made) == 3 and all(file.stat().st_size <= run.OF_FILE for file in made)
    with tarfile.open(made[0]) as archive:
        kept = [name.rpartition("/")[2] for name in archive.getnames() if name.endswith(".safetensors")]
    assert sorted(kept) == ["000000.safetensors", "000001.safetensors"]  # the last events are left out
    stated = tmp_path / "out" / "case0" / run.RECORDING / "recording.json"
    assert json.loads(stated.read_text())["attached"] == {"written": 2, "dropped": 11}


@pytest.mark.parametrize(("name", "kind"), [
    ("../out", tarfile.REGTYPE), ("link", tarfile.SYMTYPE), ("second", tarfile.LNKTYPE)])
def test_no_archive_writes_out_of_its_folder(tmp_path: Path, name: str, kind: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, "/etc"
    with tarfile.open(tmp_path / "bundle.tar", "w") as archive:
        archive.addfile(member)
    with tarfile.open(tmp_path / "bundle.tar") as archive, pytest.raises(SystemExit, match=re.escape(name)):
        extract(archive, tmp_path / "files")
    assert [one.name for one in tmp_path.iterdir()] == ["bundle.tar"]
