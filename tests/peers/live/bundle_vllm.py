"""`python -m peers.live.bundle_vllm`: pack a released vLLM for a GPU machine without a network, and record it there.

vLLM 0.22 pins torch 2.11, which the machine has. Of its compiled extensions, which take 200 MiB, only the one with a
stable interface is packed, and modules of Python have the names of others. The small model runs on torch's and Triton's
kernels: eager, with the attention backend TRITON_ATTN and no custom ops. CUDA graphs need an extension.
Leaves out: the audit, which needs no GPU; torch, triton, transformers and the other packages that the machine has.
"""

import argparse
import json
import lzma
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load, save_file

from . import extract
from .bundle import LIMIT, MODEL, PACKED, download, unpack, wheel_of
from .cases import prompts

RELEASES = ("0.22.0", "0.22.1")
TOKENS, REQUESTS = 64, 6
SITE = (
    "pydantic==2.14.4", "pydantic_core==2.50.5", "typing-inspection", "annotated-types", "fastapi==0.128.0",
    "starlette==0.50.0", "uvicorn", "pyzmq", "msgspec", "pybase64", "openai==2.6.1", "jiter", "distro", "sniffio",
    "httpx2", "gguf", "cbor2", "openai-harmony", "cachetools", "py-cpuinfo", "llguidance", "xgrammar",
    "apache-tvm-ffi", "opentelemetry-api", "opentelemetry-sdk", "opentelemetry-semantic-conventions",
    "partial-json-parser", "cloudpickle", "sentencepiece", "tiktoken", "prometheus_client", "uvloop", "setproctitle",
    "regex", "compressed-tensors", "loguru",
)  # fmt: skip
UNUSED = (
    "vllm/third_party/deep_gemm/", "vllm/third_party/flashmla/", "vllm/third_party/triton_kernels/",
    "vllm/vllm_flash_attn/", "vllm/benchmarks/",
)  # fmt: skip
STABLE = "vllm/_C_stable_libtorch.abi3.so"
EMPTY = '"""The compiled extension was left out."""\n'
FLASH = '''"""Names of flash attention, whose compiled extension was left out."""


def is_fa_version_supported(*given, **named):
    return False


def fa_version_unsupported_reason(*given, **named):
    return "its extension was left out"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*given, **named):
        raise RuntimeError(f"{name}: its extension was left out")

    return absent
'''
PASSES = '''"""Passes over compiled graphs, which need an extension."""


class PostGradPassManager:
    pass
'''
# Modules that the CUDA platform and the drafter import.
EXTENSIONS = {"_C": EMPTY, "_moe_C": EMPTY, "vllm_flash_attn/__init__": FLASH,
              "compilation/passes/pass_manager": PASSES}  # fmt: skip
NATIVE = {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]}
QUIET = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}  # fmt: skip


def of_vllm(name: str) -> bool:
    """The Python of vLLM and one extension, without what a small hybrid model never calls."""
    return name == STABLE or (name.endswith((".py", "METADATA", "entry_points.txt")) and not name.startswith(UNUSED))


def pack(release: str, out: Path, wheels: Path) -> Path:
    """Pack a release -> the folder `out`, with an archive of less than LIMIT bytes."""
    download(wheels, f"vllm=={release}", *SITE)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        unpack(wheel_of(wheels, f"vllm=={release}"), root / "engine", of_vllm)
        for name, text in EXTENSIONS.items():
            file = root / "engine" / "vllm" / f"{name}.py"
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        for package in SITE:
            unpack(wheel_of(wheels, package), root / "site")
        write_model(root / "model")
        with lzma.open(out / "bundle.tar.xz", "w", format=lzma.FORMAT_XZ, filters=PACKED) as packed, \
                tarfile.open(fileobj=packed, mode="w") as archive:  # fmt: skip
            archive.add(root, ".")
    size = (out / "bundle.tar.xz").stat().st_size
    print(f"{out}: {size / 2**20:.1f} MiB")
    if size > LIMIT:
        raise SystemExit(f"{size} bytes; at most {LIMIT} can be carried")
    return out


def write_model(folder: Path) -> None:
    """Write the small model as 0.22 loads it: nested, as it has no text model, and with keys as wide as values."""
    from instep.cli.fixtures import Engine, config_for, with_wider_keys  # here, as in `bundle.py`

    text = json.loads((MODEL / "config.json").read_text())
    wide = load(with_wider_keys((MODEL / "model.safetensors").read_bytes(), text))
    nested = {name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
              for name, tensor in wide.items()}  # fmt: skip
    folder.mkdir()
    save_file(nested, folder / "model.safetensors")
    as_text = json.loads(config_for(Engine.VLLM_CPU, text))
    (folder / "config.json").write_bytes(config_for(Engine.SGLANG, as_text))


def record(bundle: Path, out: Path, drafts: int) -> int:
    """Unpack a bundle, and run its engine under `instep attach`; the recording is `out/recording`."""
    files, top = out / "files", MODEL.parents[1]
    if not (files / "model").exists():
        files.mkdir(parents=True)
        with tarfile.open(bundle / "bundle.tar.xz") as archive:
            extract(archive, files)
    path = [files / "engine", files / "site", *(top / root for root in ("harness", "reference", "optimized", "tests"))]
    environment = {**os.environ, **QUIET, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run([
        sys.executable, "-m", "instep", "attach", "vllm", "--folder", str(out / "recording"), "--state-layers", "all",
        "--every", "1", "--", sys.executable, "-m", "peers.live.bundle_vllm", str(files), "--engine",
        "--drafts", str(drafts)], env=environment).returncode  # fmt: skip


def generate(files: Path, drafts: int) -> None:
    """Run the engine in this process. drafts: of the MTP layer; 0: no speculation."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    speculative = {"speculative_config": {"method": "mtp", "num_speculative_tokens": drafts,
                                              "attention_backend": "TRITON_ATTN"}} if drafts else {}
    engine = LLM(
        str(files / "model"), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=2048,
        max_num_seqs=8, gpu_memory_utilization=0.3, enable_prefix_caching=False, attention_backend="TRITON_ATTN",
        gdn_prefill_backend="triton", compilation_config={"custom_ops": ["none"]}, ir_op_priority=NATIVE,
        limit_mm_per_prompt={"image": 0, "video": 0}, **speculative,
    )  # fmt: skip
    given = prompts()[:REQUESTS]
    how = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    for one in engine.generate([{"prompt_token_ids": prompt} for prompt in given], how):
        print(bytes(one.outputs[0].token_ids), flush=True)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="peers.live.bundle_vllm", description="Pack a released vLLM, or record it.")
    parser.add_argument("bundle", type=Path, help="the folder of the bundle; it is new unless --record")
    parser.add_argument("--release", choices=RELEASES, default=RELEASES[0])
    parser.add_argument("--wheels", type=Path, help="a folder of wheels; what is missing is downloaded there, and kept")
    parser.add_argument("--record", type=Path, metavar="OUT", help="on the GPU machine: run it, and record into OUT")
    parser.add_argument("--drafts", type=int, default=3, help="drafts of the MTP layer; 0: no speculation")
    parser.add_argument("--engine", action="store_true", help="run the engine itself: for the process that is recorded")
    options = parser.parse_args(given)
    if options.engine:
        generate(options.bundle, options.drafts)
    elif options.record is not None:
        return record(options.bundle, options.record, options.drafts)
    else:
        with tempfile.TemporaryDirectory() as made:
            pack(options.release, options.bundle, options.wheels or Path(made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
